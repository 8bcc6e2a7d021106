"""Results by seed stay what they were: stored digests, and files that version 0.1.0 wrote.

The digests were made before the package was arranged in rooms. They hold bit for bit where the arithmetic is the same:
the same torch, and a CPU with AVX2. Elsewhere the stored sums are compared instead.

    python tests/test_stored.py    # writes them again, where a change of results is meant
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, small_cnn

STORED = Path(__file__).parent / "stored"
MACHINE = [torch.__version__, torch.backends.cpu.get_cpu_capability()]


def prepare(dropout: float = 0.0) -> tuple[nn.Module, list[Tensor], Tensor]:
    torch.manual_seed(0)
    batches = [torch.rand(16, 1, 8, 8) for _ in range(12)]
    return calibrate(small_cnn(dropout), batches), batches, torch.rand(7, 1, 8, 8)


def fitted(family: str, **options: object) -> stochbn.Factorized:
    model, batches, _ = prepare()
    return stochbn.fit(model, batches, family=family, progress=False, **options)  # type: ignore[arg-type, return-value]


def of_draws(stats: stochbn.Factorized) -> list[Tensor]:
    return list(stats.sample(5, seed=3, first=1).buffers.values())


def of_prediction(stats: object, dropout: bool = False, **options: object) -> list[Tensor]:
    model, _, x = prepare(0.3 if dropout else 0.0)
    pred = stochbn.predict(model, stats, x, dropout=dropout, **{"num_samples": 6, "seed": 5, **options})  # type: ignore[arg-type]
    found = [pred.probs, pred.std, pred.aleatoric]
    return [*found, pred.counts] if pred.counts is not None else found


def tuned() -> stochbn.Factorized:
    model, batches, _ = prepare()
    labels = torch.arange(16) % 3
    return stochbn.tune(model, fitted("factorized"), [(x, labels) for x in batches], progress=False)


def stored_tuning() -> stochbn.Tuning | None:
    """A spread that was chosen once: what is chosen may change, what is drawn with it may not."""
    return stochbn.load(STORED / "tuned-0.1.0.sbn.safetensors").tuning


def stored_lowrank() -> stochbn.Distribution:
    """Factors that were fitted once: their signs and units have a rule since, what is drawn with them stays."""
    return stochbn.load(STORED / "lowrank-0.1.0.sbn.safetensors")


def ensemble() -> list[Tensor]:
    model, batches, x = prepare()
    torch.manual_seed(1)
    other = calibrate(small_cnn(), batches)
    stats = [stochbn.fit(one, batches, progress=False) for one in (model, other)]
    return [stochbn.predict([model, other], stats, x, num_samples=4).probs]


def exact() -> list[Tensor]:
    model, batches, x = prepare()
    return [stochbn.exact_predict(model, batches, x, num_samples=4).probs]


def tracked() -> list[Tensor]:
    model, batches, _ = prepare()
    model.train()
    with stochbn.track(model) as tracker:
        for batch in batches:
            model(batch)
    return of_draws(tracker.distribution())


def dropped() -> list[Tensor]:
    model, batches, _ = prepare(0.3)
    torch.manual_seed(2)
    stats = stochbn.fit(model, batches, dropout=True, progress=False)
    return of_prediction(stats, dropout=True)


CASES: dict[str, Callable[[], list[Tensor]]] = {
    "factorized draws": lambda: of_draws(fitted("factorized")),
    "lowrank draws": lambda: of_draws(stored_lowrank()),
    "empirical draws": lambda: of_draws(fitted("empirical")),
    "plain": lambda: of_prediction(None),
    "factorized": lambda: of_prediction(fitted("factorized")),
    "one draw at a time": lambda: of_prediction(fitted("factorized"), chunk_size=1),
    "lowrank": lambda: of_prediction(stored_lowrank()),
    "empirical, conditioned": lambda: of_prediction(fitted("empirical", conditioned=True)),
    "last layer": lambda: of_prediction(fitted("empirical", conditioned=True, layers=["7"])),
    "auto": lambda: of_prediction(fitted("factorized"), num_samples="auto"),
    "tuned": lambda: of_prediction(replace(fitted("factorized"), tuning=stored_tuning())),
    "mc dropout": lambda: of_prediction(None, dropout=True),
    "dropout + SBN": dropped,
    "ensemble": ensemble,
    "exact": exact,
    "tracked": tracked,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The NLL is lowest at")  # the labels are noise
def test_results_by_seed_are_the_stored_ones(name: str) -> None:
    stored = json.loads((STORED / "digests.json").read_text())
    digest, sums = describe(CASES[name]())
    if stored["machine"] == MACHINE:
        assert digest == stored["results"][name]["digest"]
    else:
        assert sums == pytest.approx(stored["results"][name]["sums"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("family", ["factorized", "lowrank", "empirical"])
@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_files_of_version_0_1_0_load(family: str) -> None:
    loaded = stochbn.load(STORED / f"{family}-0.1.0.sbn.safetensors")
    now = fitted(family, conditioned=family == "empirical")
    stored = json.loads((STORED / "digests.json").read_text())
    rtol = 1e-5 if stored["machine"] == MACHINE else 1e-4  # others round otherwise, which shows in means near 0
    for ours, theirs in zip(now.layers.values(), loaded.layers.values(), strict=True):
        assert torch.allclose(ours.moments.mean, theirs.moments.mean, rtol=rtol)
        assert torch.allclose(ours.moments.variance, theirs.moments.variance, rtol=rtol)
    if family == "lowrank":  # of the same size, in directions that have signs and units by a rule since
        sizes = [stats.factors.flatten(1).square().sum() for stats in (now, loaded)]
        assert torch.allclose(*sizes, rtol=0.05)
    else:
        for name, values in now.sample(3, seed=0).buffers.items():
            assert torch.allclose(values, loaded.sample(3, seed=0).buffers[name], rtol=rtol)
    assert (loaded.conditioned, loaded.batch_size, loaded.num_batches) == (now.conditioned, 16, 12)


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_a_tuned_file_of_version_0_1_0_loads() -> None:
    loaded = stochbn.load(STORED / "tuned-0.1.0.sbn.safetensors")
    assert loaded.tuning is not None
    now = {(score.spread, score.temperature): score.nll for score in tuned().tuning.scores}
    assert len(loaded.tuning.curve) >= 7
    for spread, temperature, loss in loaded.tuning.curve:
        assert loaded.tuning.scores[0].difference is None
        if (spread, temperature) in now:
            assert now[spread, temperature] == pytest.approx(loss, rel=1e-4)
    assert (1.0, 1.0) in now
    assert "difference" in str(loaded.tuning)


def describe(tensors: list[Tensor]) -> tuple[str, list[float]]:
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.detach().contiguous().numpy().tobytes())
    weights = [torch.arange(1, tensor.numel() + 1).double().sin() for tensor in tensors]
    sums = [float((tensor.detach().double().flatten() * w).sum()) for tensor, w in zip(tensors, weights, strict=True)]
    return sha256.hexdigest(), sums


if __name__ == "__main__":
    described = {name: describe(make()) for name, make in CASES.items()}
    results = {name: {"digest": digest, "sums": sums} for name, (digest, sums) in described.items()}
    (STORED / "digests.json").write_text(json.dumps({"machine": MACHINE, "results": results}, indent=1) + "\n")
