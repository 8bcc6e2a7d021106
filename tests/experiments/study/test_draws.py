"""Nothing is chosen on test data, and what is drawn is what the library predicts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import stochbn
from stochbn.distributions.seeds import member_seed
from stochbn.experiments.data.splits import Split, load_split
from stochbn.experiments.evaluation.inference import fit, input_batches
from stochbn.experiments.files import DRAW_SEED, File
from stochbn.experiments.methods import METHODS, Method
from stochbn.experiments.study import draws
from stochbn.experiments.study.draws import LIMITS, MAIN, SIDE, Study, Task, list_tasks, take_apart
from stochbn.experiments.study.results import Results
from stochbn.experiments.study.scores import Draws
from stochbn.experiments.training.recipes import EXPERIMENTS, Recipe


def find(study: Study, key: str, seed: int = 0) -> Task:
    return next(task for task in study.tasks if (task.method.key, task.seed) == (key, seed))


def test_what_is_drawn() -> None:
    tasks = list_tasks(EXPERIMENTS["lenet5"].runs(), num_compared=3)
    counts: dict[str, int] = {}
    for task in tasks:
        counts[task.method.key] = counts.get(task.method.key, 0) + 1
    assert {key: counts[key] for key in MAIN} == {key: 3 if METHODS[key].drawing.dropout else 6 for key in MAIN}
    assert {counts[key] for key in SIDE} == {3}
    assert {key for key in counts if key not in (*MAIN, *SIDE)} == {
        METHODS[key].at(spread).key for key, spreads in LIMITS.items() for spread in spreads
    }
    assert len({task.path for task in tasks}) == len(tasks)


def test_nothing_is_chosen_on_test_data(study: Study, files: dict[Task, File], monkeypatch: pytest.MonkeyPatch) -> None:
    """With other test, out-of-domain and corrupted data, every spread and temperature is the same to the last bit."""
    load_splits: Callable[..., dict[str, Split]] = draws.load_splits

    def load_others(recipe: Recipe, data: Path | None = None) -> dict[str, Split]:
        splits = load_splits(recipe, data)
        for part in ("test", "out-of-domain"):
            generator = torch.Generator().manual_seed(7)
            noise = torch.randint(256, splits[part].images.shape, dtype=torch.uint8, generator=generator)
            splits[part] = replace(splits[part], images=noise, labels=splits[part].labels.flip(0))
        return splits

    monkeypatch.setattr(draws, "load_splits", load_others)
    changed = Study(study.experiment, study.sizes, console=study.console)
    assert not torch.equal(changed.corrupted["noise 3"].images, study.corrupted["noise 3"].images)
    labels = changed.splits["validation"].labels
    tuned = 0
    for task, file in files.items():
        drawing = task.method.drawing
        if drawing.family == "exact" or task.seed:  # the others are treated alike
            continue
        if drawing.spread is not None:
            assert not drawing.tuned  # a limit to what can be chosen, not a choice
            continue
        stats = changed.source(task)
        assert (stats and stats.tuning and json.loads(json.dumps(stats.tuning.to_dict()))) == file.header.get("tuning")
        tuned += drawing.tuned
        samples = changed.sample(task, stats, changed.splits["validation"])
        ours, theirs = (Draws((one,)).choose_temperature(labels) for one in (File({}, {"validation": samples}), file))
        assert ours == theirs
    assert tuned == 4


@pytest.mark.parametrize("key", ["empirical", "channels-apart", "dropout+sbn", "tuned", "last@1.41"])
def test_what_is_drawn_is_what_the_library_predicts(study: Study, files: dict[Task, File], key: str) -> None:
    task = find(study, key)
    pred = stochbn.predict(
        study.trained(*task.network).network,
        study.source(task),
        input_batches(study.splits["test"]),
        num_samples=len(files[task].tensors["test"]),
        dropout=task.method.drawing.dropout,
    )
    output = Draws((files[task],)).average("test")
    torch.testing.assert_close(output.probs.float(), pred.probs, rtol=5e-3, atol=1e-3)
    torch.testing.assert_close(output.expected_entropy.float(), pred.aleatoric, rtol=5e-3, atol=2e-3)
    assert output.probs.shape == (80, 10)


def test_all_draws_are_all_that_were_kept(study: Study, files: dict[Task, File]) -> None:
    task = find(study, "last-tuned")
    stats, found = study.source(task), files[task].tensors
    kept = len(stats.observations)
    assert len(found["test"]) == len(found["validation"]) == kept > 6
    some = replace(task, method=replace(task.method, drawing=replace(task.method.drawing, exhaustive=False)))
    first = study.sample(some, stats, study.splits["test"])  # draw i is the same however many there are
    torch.testing.assert_close(first, found["test"][:6], rtol=2e-3, atol=2e-3)


def test_the_last_layer_alone(study: Study) -> None:
    task = find(study, "last")
    stats, network = study.source(task), study.trained(*task.network).network
    names = [name for name, module in network.named_modules() if isinstance(module, torch.nn.BatchNorm1d)]
    assert list(stats.layers) == names[-1:]
    assert len(stats.excluded) == 2
    assert stats.conditioned
    assert stats.tuning is None
    tuned = study.source(find(study, "last-tuned"))
    assert list(tuned.layers) == names[-1:]
    assert tuned.tuning is not None


def test_a_temperature_that_was_chosen_with_the_spread_is_in_the_draws(
    study: Study, files: dict[Task, File], results: Results
) -> None:
    task = find(study, "last-both")
    stats, network = study.source(task), study.trained(*task.network).network
    temperature = stats.tuning.temperature
    assert stats.tuning.scores
    assert results.methods["last-both"].temperatures[0] == pytest.approx(temperature)
    tuned = replace(stats, tuning=replace(stats.tuning, temperature=2.0))  # whatever was chosen
    inputs = study.splits["test"]
    drawn = study.sample(task, tuned, inputs)
    found = Draws((File({}, {"test": drawn}),)).average("test").probs
    options = {"num_samples": len(stats.observations), "seed": member_seed(DRAW_SEED, task.seed)}
    expected = stochbn.predict(network, tuned, input_batches(inputs), **options).probs
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=2e-3)


def test_what_is_drawn_is_not_drawn_again(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_draw", lambda task: pytest.fail("drawn again"))
    study.draw()
    monkeypatch.setattr(study, "sizes", replace(study.sizes, num_samples=7))
    with pytest.raises(pytest.fail.Exception, match="drawn again"):
        study.draw()


def test_a_method_that_draws_otherwise_is_drawn_again(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(method: Method) -> Method:
        return replace(method, drawing=replace(method.drawing, conditioned=True)) if method.key == "sbn" else method

    changed = [replace(task, method=change(task.method)) for task in study.tasks]
    drawn: list[Task] = []
    monkeypatch.setattr(study, "tasks", changed)
    monkeypatch.setattr(study, "_draw", lambda task: drawn.append(task) or pytest.fail("drawn again"))
    with pytest.raises(pytest.fail.Exception):
        study.draw()
    assert [task.method.key for task in drawn] == ["sbn"]


def test_taking_apart_keeps_the_marginals(study: Study) -> None:
    trained = study.trained(study.experiment.recipe, 0)
    stats = fit(trained.network, load_split("digits", "train"), study.experiment.recipe, family="empirical")
    shuffled = take_apart(stats)
    before, after = stats.observations, shuffled.observations
    assert torch.equal(before.sort(0).values, after.sort(0).values)

    def correlation(rows: torch.Tensor, a: tuple[int, int], b: tuple[int, int]) -> float:
        return abs(np.corrcoef(rows[:, a[0], a[1]], rows[:, b[0], b[1]])[0, 1])

    first = stats.sizes[0]
    for a, b in [((0, 0), (1, 0)), ((0, first), (1, first))]:  # the mean and the variance of a channel
        assert correlation(after, a, b) == pytest.approx(correlation(before, a, b), abs=1e-6)
    pairs = [((0, i), (0, first + j)) for i in range(first) for j in range(3)]  # between layers
    assert np.mean([correlation(after, a, b) for a, b in pairs]) < 3 / np.sqrt(len(before))
    pairs = [((0, i), (0, j)) for i in range(first) for j in range(i)]  # within one
    assert np.mean([correlation(after, a, b) for a, b in pairs]) < 3 / np.sqrt(len(before))
