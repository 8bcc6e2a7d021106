"""Ways to S predictions of one batch, each a function that prepares a run.

A run takes nothing and returns probabilities (S, N, K), one row a network. It does no more: `stochbn.predict` also
computes means, deviations and entropies in its time, the others do not. Loops run in inference mode, torch's fastest.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import stochbn
from benchmarks.subjects import BATCH_SIZE, NUM_MINI_BATCHES, Subject
from stochbn.distributions.base import Layer
from stochbn.statistics.layers import all_batch_norms

Run = Callable[[], Tensor]

LEFT_OUT = "left out"  # by the settings, not by a fault


@dataclass(frozen=True)
class Contender:
    """One way to predict.

    Attributes:
        name: As it is printed.
        prepare: Makes the run for a network, a batch and S; None if the network has no such form.
        passes: What a draw costs in plain passes, for runs that may be timed on fewer draws than S; None for runs
            whose cost does not grow with S, which are always timed whole.
        most_rows: The largest N to measure.
        compiles: Needs `torch.compile`.
        large: Measured for networks of ImageNet's size too.
    """

    name: str
    prepare: Callable[[Subject, Tensor, int], Run | None]
    passes: int | None = 1
    most_rows: int | None = None
    compiles: bool = False
    large: bool = False


def plain(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """S forward passes of the deterministic network in eval mode, and nothing else: returns the last one's logits."""
    return _repeat(subject.model, x, num_draws)


def plain_compiled(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """The same passes through `torch.compile`."""
    return _repeat(subject.compiled, x, num_draws)


def ours(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """`stochbn.predict` as it comes."""
    return lambda: samples(subject.model, subject.stats, x, num_samples=num_draws)


def prepared(subject: Subject, x: Tensor, num_draws: int, *, compiles: bool = False) -> Run:
    """A `stochbn.Predictor`."""
    predictor = stochbn.Predictor(subject.model, subject.stats, num_samples=num_draws, compile=compiles).warm_up(x)

    def run() -> Tensor:
        found = predictor(x).samples
        assert found is not None
        return found

    return run


def exported(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """A file that `stochbn.export` wrote, in ONNX Runtime: the mean of its draws, (1, N, K)."""
    session = subject.session(num_draws)
    return lambda: torch.from_numpy(session.run(["probs"], {"input": x.numpy()})[0])[None]


def last_layer(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """What we recommend: 256 real mini-batches, in the last BatchNorm layer alone, whatever S. The mean, (1, N, K)."""
    predictor = stochbn.Predictor(
        subject.model, subject.last_layer, num_samples=NUM_MINI_BATCHES, keep_samples=False
    ).warm_up(x)
    return lambda: predictor(x).probs[None]


def paper_loop(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """The straightforward loop: layers that draw μ ~ N and σ ~ LogN in Python, in each of S passes."""
    return _loop(swap_layers(subject), x, num_draws)


def stored_statistics(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """Monte Carlo over stored mini-batch statistics: S of them put into the running buffers, one after the other.

    What is stored are the draws of `stochbn`'s seed 0, so that the result must be the same.
    """
    model = deepcopy(subject.model)
    stored = subject.stats.sample(num_draws, seed=0).match(model).buffers
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}

    @torch.inference_mode()
    def run() -> Tensor:
        outputs = []
        for draw in range(num_draws):
            for name, buffer in buffers.items():
                buffer.copy_(stored[name][draw])
            outputs.append(model(x))
        return _probabilities(outputs)

    return run


def exact(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """Eq. 3 with real mini-batches of M = 16: `stochbn.exact_predict`."""
    batches = [subject.batches[draw % len(subject.batches)] for draw in range(num_draws)]

    def run() -> Tensor:
        found = stochbn.exact_predict(subject.model, batches, x, num_samples=num_draws).samples
        assert found is not None
        return found

    return run


def ensemble(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """Deep Ensembles: one pass of each of six networks, whatever S."""

    @torch.inference_mode()
    def run() -> Tensor:
        return _probabilities(member(x) for member in subject.members)

    return run


def mc_dropout(subject: Subject, x: Tensor, num_draws: int) -> Run | None:
    """MC dropout: S passes of the variant with active dropout layers."""
    return None if subject.dropout_model is None else _loop(subject.dropout_model, x, num_draws)


def laplace(subject: Subject, x: Tensor, num_draws: int) -> Run:
    """`laplace-torch` on the last layer: one pass, its Jacobian, S samples of the linearised outputs."""
    posterior = subject.laplace

    def run() -> Tensor:
        found: Tensor = posterior.predictive_samples(x, pred_type="glm", n_samples=num_draws)
        return found

    return run


PLAIN = Contender("plain passes", plain, large=True)
OURS = Contender("predict", ours, large=True)
PREPARED = Contender("Predictor", prepared, large=True)
PREPARED_COMPILED = Contender("Predictor, compiled", partial(prepared, compiles=True), compiles=True, large=True)
EXPORTED = Contender("exported, ONNX Runtime", exported, most_rows=16)
LAST_LAYER = Contender(f"last layer, {NUM_MINI_BATCHES} draws", last_layer, passes=None)
PLAIN_COMPILED = Contender("plain passes, compiled", plain_compiled, compiles=True)
PAPER_LOOP = Contender("paper's loop", paper_loop)
STORED = Contender("stored statistics, loop", stored_statistics)
MC_DROPOUT = Contender("MC dropout, loop", mc_dropout)
ENSEMBLE = Contender("Deep Ensembles, 6 passes", ensemble, passes=None)
EXACT = Contender(f"exact inference, M = {BATCH_SIZE}", exact, passes=BATCH_SIZE, most_rows=16)
LAPLACE = Contender("Laplace, last layer", laplace, passes=None)
OURS_PREPARED = (OURS, PREPARED, PREPARED_COMPILED)  # the same draws three ways
CONTENDERS = (
    *(PLAIN, *OURS_PREPARED, EXPORTED, LAST_LAYER, PLAIN_COMPILED, PAPER_LOOP, STORED),
    *(MC_DROPOUT, ENSEMBLE, EXACT, LAPLACE),
)


class DrawingNorm(nn.Module):
    """A BatchNorm layer that draws new statistics in each forward pass.

    Args:
        norm: The layer that it replaces.
        fitted: Its r(μ) and r(σ).
        spread: Multiplies the standard deviations; 0 gives the centre.
    """

    def __init__(self, norm: _BatchNorm, fitted: Layer, spread: float = 1.0) -> None:
        super().__init__()
        self.norm = norm
        self.mean, self.mean_std = fitted.r_mu.loc.float(), spread * fitted.r_mu.scale.float()
        self.log_sigma, self.log_sigma_std = fitted.r_sigma.loc.float(), spread * fitted.r_sigma.scale.float()

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean + self.mean_std * torch.randn_like(self.mean)
        sigma = torch.exp(self.log_sigma + self.log_sigma_std * torch.randn_like(self.log_sigma))
        # σ has the ε of training in it.
        return F.batch_norm(x, mean, sigma**2, self.norm.weight, self.norm.bias, training=False, eps=0.0)


def swap_layers(subject: Subject, spread: float = 1.0) -> nn.Module:
    """Returns a copy of the network whose BatchNorm layers draw."""
    model = deepcopy(subject.model)
    for name, norm in all_batch_norms(model).items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, DrawingNorm(norm, subject.stats.layers[name], spread))
    return model


def samples(*args: Any, **options: Any) -> Tensor:
    """Returns the samples of `stochbn.predict`, (S, N, K)."""
    found = stochbn.predict(*args, **options).samples
    assert found is not None
    return found


def check(
    subject: Subject, x: Tensor, num_draws: int, runs: Mapping[str, Run], tolerance: float = 1e-4
) -> dict[str, float]:
    """Compares what must be equal, and raises where it is not: only what is correct is timed.

    The reference is the draws computed one by one, `chunk_size=1`. The paper's loop draws its own numbers: it is
    compared at spread 0, where there are none.

    Returns:
        For each contender the largest difference of a log-probability.
    """
    reference = samples(subject.model, subject.stats, x, num_samples=num_draws, chunk_size=1)
    same = [contender.name for contender in (*OURS_PREPARED, STORED) if contender.name in runs]
    pairs = {name: (runs[name](), reference) for name in same}
    if EXPORTED.name in runs:
        pairs[EXPORTED.name] = (runs[EXPORTED.name](), reference.mean(0, keepdim=True))
    if ENSEMBLE.name in runs:
        pairs[ENSEMBLE.name] = (runs[ENSEMBLE.name](), samples(subject.members, None, x))
    if PAPER_LOOP.name in runs:
        centre = subject.stats.sample(1, spread=0.0, seed=0)
        pairs[PAPER_LOOP.name] = (_loop(swap_layers(subject, spread=0.0), x, 1)(), samples(subject.model, centre, x))
    if PLAIN_COMPILED.name in runs:
        compiled, eager = (runs[contender.name]().softmax(1) for contender in (PLAIN_COMPILED, PLAIN))
        pairs[PLAIN_COMPILED.name] = (compiled, eager)
    differences = {name: (found.log() - expected.log()).abs().max().item() for name, (found, expected) in pairs.items()}
    for name, difference in differences.items():
        if not difference <= tolerance:
            raise RuntimeError(
                f"Expected {name!r} to agree with the reference to {tolerance} on {subject.kind.name}, N = {len(x)}, "
                f"got a difference of {difference:.2g}. Correct it before it is timed."
            )
    return differences


def _repeat(model: Callable[[Tensor], Any], x: Tensor, num_passes: int) -> Run:
    @torch.inference_mode()
    def run() -> Tensor:
        for _ in range(num_passes):
            output = model(x)
        logits: Tensor = getattr(output, "logits", output)
        return logits

    return run


def _loop(model: nn.Module, x: Tensor, num_passes: int) -> Run:
    @torch.inference_mode()
    def run() -> Tensor:
        return _probabilities(model(x) for _ in range(num_passes))

    return run


def _probabilities(outputs: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(outputs)).softmax(2)
