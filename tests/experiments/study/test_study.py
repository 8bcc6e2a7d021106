"""The study on tiny networks: nothing is chosen on test data, and its numbers are the library's."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import ndimage

import stochbn
from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from stochbn.experiments.data.sources import DataError
from stochbn.experiments.data.splits import Split, load_split
from stochbn.experiments.evaluation.inference import fit, input_batches
from stochbn.experiments.files import File
from stochbn.experiments.report.scores import Method, Output
from stochbn.experiments.study import study as module
from stochbn.experiments.study.evidence import compare, ece_by_chance
from stochbn.experiments.study.report import read_study, write_study
from stochbn.experiments.study.results import COMPARISONS, TEMPERED, carry_over, measure_study
from stochbn.experiments.study.scores import ENSEMBLES, Draws, read_draws
from stochbn.experiments.study.study import EXHAUSTIVE, LAST, VARIANTS, Study, take_apart
from stochbn.experiments.training.checkpoints import checkpoint_path, load_network
from stochbn.experiments.training.recipes import RECIPES, Experiment
from stochbn.experiments.training.train import train

PLAIN = replace(RECIPES["digits"], name="tiny", epochs=2, width=0.1)
DROPOUT = replace(PLAIN, name="tiny-dropout", dropout=0.2)
TINY = Experiment("tiny", PLAIN, 3, DROPOUT, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains the tiny networks and runs the study on them once."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        little(patch, folder)
        for recipe, seed in TINY.runs():
            train(recipe, seed, console=quiet())
        study = Study(TINY, num_samples=6, console=quiet())
        study.draw()
        write_study(measure_study(study, read_draws(study), num_resamples=20), folder, quiet())
    return folder


def little(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("STOCHBN_DATA", str(folder / "cache"))
    patch.setattr(module, "NUM_EXACT", 20)
    patch.setattr(module, "NUM_CORRUPTED", 30)


def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture
def study(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    little(monkeypatch, folder)
    return Study(TINY, num_samples=6, console=quiet())


@pytest.fixture
def results(folder: Path) -> dict[str, object]:
    return json.loads((folder / "study.json").read_text())


def test_nothing_is_chosen_on_test_data(study: Study, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other test, out-of-domain and corrupted data, every spread and temperature is the same to the last bit."""
    before = {job: File.read(job.path) for job in study.jobs}

    def other(data: str, part: str, **options: object) -> Split:
        split = load_split(data, part, **options)
        if part in ("test", "out-of-domain"):
            generator = torch.Generator().manual_seed(7)
            noise = torch.randint(256, split.images.shape, dtype=torch.uint8, generator=generator)
            return replace(split, images=noise, labels=split.labels.flip(0))
        return split

    monkeypatch.setattr(module, "load_split", other)
    changed = Study(TINY, num_samples=6, console=quiet())
    labels = changed.splits["validation"].labels
    tuned = 0
    for job, file in before.items():
        if job.variant.family == "exact":
            continue
        if job.variant.spread is not None:
            assert job.variant.tuned is None  # a limit to what can be chosen, not a choice
            continue
        stats = changed.source(job)
        assert (stats and stats.tuning and json.loads(json.dumps(asdict(stats.tuning)))) == file.header.get("tuning")
        tuned += job.variant.tuned is not None
        network = changed.network(job.recipe, job.seed)
        samples = changed._samples(network, stats, changed.splits["validation"], job)
        ours, theirs = (Draws((one,)).choose_temperature(labels) for one in (File({}, {"validation": samples}), file))
        assert ours == theirs
    assert tuned > 10


def test_what_is_drawn_is_what_the_library_predicts(study: Study) -> None:
    by_name = {job.variant.name: job for job in study.jobs if job.seed == 0}
    for name in ("SBN, conditioned, tuned", "Low rank", "Empirical, layers apart", "Dropout + SBN, tuned"):
        job = by_name[name]
        file = File.read(job.path)
        pred = stochbn.predict(
            study.network(job.recipe, 0),
            study.source(job),
            input_batches(study.splits["test"]),
            num_samples=6,
            dropout=job.variant.dropout,
        )
        output = Draws((file,)).average("test")
        torch.testing.assert_close(output.probs.float(), pred.probs, rtol=5e-3, atol=1e-3)
        torch.testing.assert_close(output.expected_entropy.float(), pred.aleatoric, rtol=5e-3, atol=2e-3)
        assert output.probs.shape == (397, 10)


def test_every_method_is_scored(results: dict[str, object], folder: Path) -> None:
    names = {
        variant.name
        for variant in VARIANTS
        if variant.family != "exact" and variant.tuned != "ensemble" and variant.spread is None
    }
    names |= set(ENSEMBLES)
    assert set(results["methods"]) == names | {name + TEMPERED for name in names}
    assert set(results["cost"]) == names
    text = (folder / "study.md").read_text()
    assert all(name in text for name in names)
    for name in ("methods", "corruptions", "tuning", "draws"):
        assert (folder / "figures" / f"{name}.png").stat().st_size > 10_000
    everywhere = {v.name for v in VARIANTS if v.everywhere and v.tuned != "ensemble"} | set(ENSEMBLES)
    assert {name.removesuffix(TEMPERED) for name in results["corruptions"]} == everywhere


def test_scores_are_those_of_the_draws(study: Study, results: dict[str, object]) -> None:
    members = [File.read(job.path) for job in study.jobs if job.variant.name == "SBN"]
    test, labels = study.splits["test"], study.splits["test"].labels
    each = [stochbn.nll(file.tensors["test"].double().exp().mean(0), labels).item() for file in members]
    found = results["methods"]["SBN"]["scores"]["nll"]
    assert (found["value"], found["std"]) == pytest.approx((np.mean(each), np.std(each, ddof=1)), rel=1e-3)
    whole = torch.cat([file.tensors["test"] for file in members]).double().exp().mean(0)
    assert results["methods"]["Deep Ensembles + SBN"]["scores"]["nll"]["value"] == pytest.approx(
        stochbn.nll(whole, labels).item(), rel=1e-3
    )
    assert results["cost"]["Deep Ensembles + SBN"]["passes"] == 18
    assert results["num_inputs"]["test"] == len(test) == 397


def test_all_draws_are_all_that_were_kept(study: Study, results: dict[str, object]) -> None:
    job = next(job for job in study.jobs if job.variant.name == EXHAUSTIVE)
    file, labels = File.read(job.path), study.splits["test"].labels
    kept = len(study.source(job).observations)
    assert len(file.tensors["test"]) == len(file.tensors["validation"]) == kept > 6
    assert results["cost"][EXHAUSTIVE]["passes"] == kept
    for name in (EXHAUSTIVE, f"{LAST}, tuned"):
        rows = results["draws"][name]
        assert [row["num_samples"] for row in rows] == [4, 8, 16, 32, 64, kept]
        assert rows[-1]["nll"] == pytest.approx(results["methods"][name]["scores"]["nll"]["value"])
    some = next(job for job in study.jobs if job.variant.name == EXHAUSTIVE.removesuffix(", all draws"))
    assert torch.equal(File.read(some.path).tensors["test"], file.tensors["test"][:6])
    again = study._samples(
        study.network(some.recipe, 0), study.source(some), study.splits["test"], some
    )  # and would have been drawn so
    torch.testing.assert_close(again, file.tensors["test"][:6], rtol=2e-3, atol=2e-3)
    first = [
        stochbn.nll(File.read(job.path).tensors["test"][:4].double().exp().mean(0), labels).item()
        for job in study.jobs
        if job.variant.name == EXHAUSTIVE
    ]
    assert results["draws"][EXHAUSTIVE][0]["nll"] == pytest.approx(np.mean(first), rel=1e-3)


def test_the_last_layer_alone(study: Study, results: dict[str, object]) -> None:
    job = next(job for job in study.jobs if job.variant.name == LAST)
    stats, network = study.source(job), study.network(job.recipe, 0)
    names = [name for name, module in network.named_modules() if isinstance(module, torch.nn.BatchNorm1d)]
    assert list(stats.layers) == names[-1:]
    assert len(stats.excluded) == 2
    assert stats.conditioned
    assert stats.tuning is None
    tuned = study.source(next(job for job in study.jobs if job.variant.name == f"{LAST}, tuned"))
    assert list(tuned.layers) == names[-1:]
    assert tuned.tuning is not None
    members = [File.read(job.path).tensors["test"] for job in study.jobs if job.variant.name == LAST]
    whole = torch.cat(members).double().exp().mean(0)
    labels = study.splits["test"].labels
    assert results["methods"]["Deep Ensembles + last layer"]["scores"]["nll"]["value"] == pytest.approx(
        stochbn.nll(whole, labels).item(), rel=1e-3
    )


def test_no_choice_is_better_than_the_limit(results: dict[str, object]) -> None:
    found, methods = results["limits"], results["methods"]
    assert found.keys() == {"One network", "SBN", "Empirical, conditioned", LAST}
    for name, limit in found.items():
        own = [one["nll"] for one in methods[name]["each"]]
        tempered = [one["nll"] for one in methods[name + TEMPERED]["each"]]
        assert limit["nll_temperature"] <= min(limit["nll"], limit["nll_temperature_only"])
        assert limit["nll"] <= np.mean(own) + 1e-6
        assert limit["nll_temperature_only"] <= np.mean(tempered) + 1e-4  # of a parabola through tried ones
        assert limit["auroc"] >= np.mean([one["auroc_entropy"] for one in methods[name]["each"]]) - 1e-6


def test_intervals_of_differences() -> None:
    """Of the NLL against the normal approximation; of a method and itself, nothing."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (2000,), generator=generator)

    def method(name: str, sharpness: float, count: int) -> Method:
        outputs = []
        for _ in range(count):
            logits = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
            logits[torch.arange(2000), labels] += sharpness
            outputs.append({"test": Output(logits.softmax(1)), "out-of-domain": Output(logits[:500].sigmoid() / 3)})
        return Method(name, tuple(range(count)), tuple(outputs), tuple(outputs), "")

    methods = {"a": method("a", 2.0, 1), "b": method("b", 1.0, 1), "c": method("c", 2.0, 3)}
    found = compare(methods, labels, [("a", "b"), ("c", "c"), ("c", "a")])
    losses = [-methods[name].outputs[0]["test"].probs[torch.arange(2000), labels].log() for name in "ab"]
    difference = losses[0] - losses[1]
    width = 1.96 * difference.std().item() / 2000**0.5
    nll = found["a − b"]["nll"]
    assert nll["difference"] == pytest.approx(difference.mean().item())
    # A percentile of 500 resamples is off by about 6 % of the width.
    assert nll["low"] == pytest.approx(difference.mean().item() - width, abs=0.2 * width)
    assert nll["high"] == pytest.approx(difference.mean().item() + width, abs=0.2 * width)
    assert all(value == 0 for row in found["c − c"].values() for value in row.values())
    assert found["c − a"]["nll"]["low"] < 0 < found["c − a"]["nll"]["high"]
    few = methods | {"d": method("d", 2.0, 2)}
    with pytest.raises(ValueError, match="methods with the same networks"):
        compare(few, labels, [("c", "d")])
    again = compare(methods, labels, [("a", "b")], num_resamples=20)
    assert again == compare(methods, labels, [("a", "b")], num_resamples=20)


def test_the_ece_of_chance() -> None:
    """In one bin of N equal confidences p it is E |k / N − p| of a binomial k: √(2 p (1 − p) / π N), nearly."""
    probs = torch.full((4000, 2), 0.1, dtype=torch.float64)
    probs[:, 0] = 0.9
    expected = (2 * 0.9 * 0.1 / (np.pi * 4000)) ** 0.5
    # The relative standard deviation of |Normal| is √(π / 2 − 1) = 0.76.
    found = ece_by_chance([probs], 400)
    assert found["mean"] == pytest.approx(expected, rel=4 * 0.76 / 400**0.5)
    # The 95th percentile of |Normal| is at 1.96 standard deviations; that of 400 is off by about 5 % of it.
    assert found["high"] == pytest.approx(1.96 * (0.9 * 0.1 / 4000) ** 0.5, rel=0.2)
    assert ece_by_chance([torch.eye(3, dtype=torch.float64)]) == {"mean": 0, "high": 0}


def test_differences_are_of_the_tables(results: dict[str, object]) -> None:
    methods = results["methods"]
    for first, second in COMPARISONS:
        row = results["comparisons"][f"{first} − {second}"]
        for key, found in row.items():
            ours, theirs = (methods[name]["scores"][key]["value"] for name in (first, second))
            # Both were rounded, to six digits.
            assert found["difference"] == pytest.approx(ours - theirs, abs=5e-6 * (abs(ours) + abs(theirs)), rel=5e-6)
            assert found["low"] <= found["high"]


def test_a_study_of_some_variants_completes_an_earlier_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, results: dict[str, object]
) -> None:
    little(monkeypatch, folder)
    some = Study(TINY, num_samples=6, only=["SBN, tuned", "Exact (eq. 3)"], console=quiet())
    assert {job.variant.name for job in some.jobs} == {"One network", "SBN, tuned", "Exact (eq. 3)"}
    part = json.loads(json.dumps(measure_study(some, read_draws(some))))
    assert set(part["methods"]) < set(results["methods"])
    assert part["command"] == 'stochbn study tiny --samples 6 --only "SBN, tuned" --only "Exact (eq. 3)"'
    whole = carry_over(part, read_study(folder))
    for key in ("methods", "ece_by_chance", "tuning", "cost", "corruptions", "limits", "draws"):
        assert whole[key] == results[key]
        assert list(whole[key]) == list(results[key])
    assert whole["exact"] == part["exact"]  # measured anew, so none of the earlier distances stays
    assert part["exact"].items() <= results["exact"].items()
    assert {"Low rank", "Empirical", "SBN, tuned"} <= part["exact"].keys()
    assert carry_over(part | {"exact": {}}, read_study(folder))["exact"] == results["exact"]
    assert whole["weights_sha256"] == results["weights_sha256"]
    assert len(whole["weights_sha256"]) == 4
    assert set(whole["carried_over"]) == set(results["methods"]) - set(part["methods"])
    assert all(source["commit"] == results["commit"] for source in whole["carried_over"].values())
    later = carry_over(part, whole | {"commit": "later"})
    assert later["carried_over"] == whole["carried_over"]  # from where they were measured
    write_study(whole, folder / "again", quiet())
    assert f"`stochbn study tiny --samples 6`, commit {results['commit']}: SBN;" in (
        (folder / "again" / "study.md").read_text()
    )


def test_nothing_stays_of_what_was_measured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, results: dict[str, object]
) -> None:
    little(monkeypatch, folder)
    some = Study(TINY, num_samples=6, only=["SBN"], console=quiet())
    part = json.loads(json.dumps(measure_study(some, read_draws(some))))
    assert "SBN" not in part["limits"]  # the other spreads are not there
    old = json.loads(json.dumps(results))
    for key in ("exact", "limits"):
        old[key]["SBN"] = "old"
    old["comparisons"] |= {"SBN − Dropout": "old", "Dropout − SBN, tuned": "kept"}
    assert carry_over(part, old)["comparisons"]["SBN − Dropout"] == "old"  # of the scores that it still has
    old["methods"]["SBN"]["each"][1]["ece"] *= 1.01
    whole = carry_over(part, old)
    assert whole["methods"]["SBN"] == part["methods"]["SBN"]
    assert "old" not in [value for key in ("exact", "limits") for value in whole[key].values()]
    assert "SBN − Dropout" not in whole["comparisons"]
    assert whole["comparisons"]["Dropout − SBN, tuned"] == "kept"


def test_an_earlier_study_of_other_networks_is_refused(folder: Path, results: dict[str, object]) -> None:
    other = json.loads(json.dumps(results))
    other["methods"]["One network"]["each"][0]["nll"] *= 1.01
    with pytest.raises(DataError, match=r"same networks and data.*other networks.*--only"):
        carry_over(results, other)
    others = results | {"weights_sha256": results["weights_sha256"] | {"tiny-dropout seed 0": "other"}}
    with pytest.raises(DataError, match="other networks"):
        carry_over(results, others)
    with pytest.raises(DataError, match="other num_exact"):
        carry_over(results, results | {"num_exact": 7})
    with pytest.raises(DataError, match=r"earlier study in .*Leave --only away"):
        read_study(folder / "nowhere")
    with pytest.raises(ValueError, match=r"got SBN tuned\. There are: One network; SBN;"):
        Study(TINY, only=["SBN tuned"], console=quiet())


def test_a_temperature_never_raises_the_validation_nll(study: Study) -> None:
    labels = study.splits["validation"].labels
    for job in study.jobs[:6]:
        draws = Draws((File.read(job.path),))
        chosen = draws.choose_temperature(labels)
        losses = [stochbn.nll(draws.average("validation", t).probs, labels).item() for t in (1.0, chosen)]
        assert losses[1] <= losses[0] + 1e-4


def test_distances_to_exact_inference(study: Study, results: dict[str, object]) -> None:
    """By NumPy, from the draws."""
    files = {(job.variant.name, job.seed): File.read(job.path) for job in study.jobs if not job.variant.dropout}
    variations, chance, correlations = [], [], []
    for seed in range(3):
        exact, other = files["Exact (eq. 3)", seed].tensors, files["Empirical", seed].tensors
        for part in ("test", "out-of-domain"):  # drawn again for these inputs alone
            torch.testing.assert_close(
                exact[f"{part}/Empirical"], other[part][:, exact[f"{part}/index"]], rtol=2e-3, atol=2e-3
            )
        ours, halves = {}, {}
        for part in ("test", "out-of-domain"):
            draws = np.exp(exact[part].double().numpy())
            halves[part] = draws[:6].mean(0), draws[6:].mean(0)
            ours[part] = np.exp(other[part].double().numpy()).mean(0)[exact[f"{part}/index"]]
        variations += [np.abs(ours["test"] - half).sum(1).mean() / 2 for half in halves["test"]]
        chance.append(np.abs(halves["test"][0] - halves["test"][1]).sum(1).mean() / 2)
        entropies = [
            np.concatenate([-(p * np.log(p)).sum(1) for p in found])
            for found in (ours.values(), *zip(*halves.values(), strict=True))
        ]
        correlations += [np.corrcoef(entropies[0], one)[0, 1] for one in entropies[1:]]
    found = results["exact"]
    assert found["Empirical"]["num_networks"] == 3
    assert found["Empirical"]["total_variation_test"] == pytest.approx(np.mean(variations), rel=1e-3)
    assert found["Exact (eq. 3)"]["nll"] != found["Empirical"]["nll"]
    assert found["Empirical"]["entropy_correlation"] == pytest.approx(np.mean(correlations), rel=1e-3)
    assert found["Exact (eq. 3)"]["total_variation_test"] == pytest.approx(np.mean(chance), rel=1e-3)


def test_what_is_drawn_is_not_drawn_again(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_draw", lambda job: pytest.fail("drawn again"))
    study.draw()
    study.num_samples = 7
    with pytest.raises(pytest.fail.Exception, match="drawn again"):
        study.draw()


@pytest.mark.parametrize("apart", ["layers", "channels", "numbers"])
def test_taking_apart_keeps_the_marginals(apart: str, study: Study) -> None:
    network = load_network(checkpoint_path(PLAIN, 0))
    stats = fit(network, study.splits["train"], PLAIN, family="empirical")
    shuffled = take_apart(stats, apart)
    before, after = stats.observations, shuffled.observations
    assert torch.equal(before.sort(0).values, after.sort(0).values)

    def correlation(rows: torch.Tensor, a: tuple[int, int], b: tuple[int, int]) -> float:
        return abs(np.corrcoef(rows[:, a[0], a[1]], rows[:, b[0], b[1]])[0, 1])

    first = stats.sizes[0]
    same = {
        "layers": [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, first), (1, first + 1))],
        "channels": [((0, 0), (1, 0)), ((0, first), (1, first))],
        "numbers": [],
    }[apart]
    for a, b in same:
        assert correlation(after, a, b) == pytest.approx(correlation(before, a, b), abs=1e-6)
    pairs = [((0, i), (0, first + j)) for i in range(first) for j in range(3)]  # between layers
    assert np.mean([correlation(after, a, b) for a, b in pairs]) < 3 / np.sqrt(len(before))


# ---- corruptions


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_images_get_ever_harder(kind: str) -> None:
    images = load_split("digits", "test").images[:20]
    before = images.clone()
    harder = [corrupt(images, kind, strength) for strength in STRENGTHS]
    assert torch.equal(images, before)
    assert all(one.dtype == torch.uint8 and one.shape == images.shape for one in harder)
    change = [(one.float() - images.float()).square().mean().item() for one in harder]
    assert change == sorted(change)
    assert torch.equal(harder[2], corrupt(images, kind, 3))


def test_corruptions_are_what_they_say() -> None:
    images = load_split("digits", "test").images[:2]
    turned = corrupt(images, "rotation", 2)
    for image, result, angle in zip(images, turned, (30, -30), strict=True):
        expected = ndimage.rotate(image[0].numpy() / 255.0, angle, reshape=False, order=1)
        np.testing.assert_allclose(result[0].numpy() / 255, expected.clip(0, 1), atol=0.003)
    flat = torch.full((50, 1, 28, 28), 128, dtype=torch.uint8)
    noisy = corrupt(flat, "noise", 1).float() / 255
    assert noisy.std().item() == pytest.approx(0.12, abs=0.002)
    assert torch.equal(corrupt(flat[:1], "blur", 5), flat[:1])
