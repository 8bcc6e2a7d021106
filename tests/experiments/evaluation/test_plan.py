import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stochbn.experiments.evaluation.evaluate import _identify
from stochbn.experiments.evaluation.plan import plan, show, summarise
from stochbn.experiments.evaluation.protocols import choose_protocol
from stochbn.experiments.files import File, prediction_path
from stochbn.experiments.training.checkpoints import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    locked,
    write_checkpoint,
)
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES, Recipe


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOCHBN_DATA", str(tmp_path / "cache"))


def put(recipe: Recipe, seed: int, seconds: list[float]) -> Checkpoint:
    history = [{"seconds": value} for value in seconds]
    checkpoint = Checkpoint(recipe, seed, history, {"weight": torch.tensor([float(seed)])}, {})
    write_checkpoint(checkpoint_path(recipe, seed), checkpoint)
    return checkpoint


def put_predictions(checkpoint: Checkpoint, folder: Path, seconds: float, num_samples: int | None = None) -> None:
    recipe, seed = checkpoint.recipe, checkpoint.seed
    header = _identify(checkpoint, recipe, seed, choose_protocol(recipe).vary(num_samples))
    methods = {"plain": {"seconds": seconds / 4}, "sbn": {"seconds": seconds * 3 / 4}}
    File(header | {"methods": methods}, {"x": torch.zeros(1)}).write(prediction_path(folder, recipe.name, seed))


def test_states_and_the_time_left(tmp_path: Path) -> None:
    usual = EXPERIMENTS["vgg11"]
    recipe, dropout = (replace(one, epochs=16) for one in (usual.recipe, usual.dropout_recipe))
    experiment = replace(usual, recipe=recipe, dropout_recipe=dropout, num_seeds=4)
    before = plan(experiment, tmp_path)
    assert [run.name for run in before] == [
        *(f"vgg11 seed {seed}" for seed in range(4)),
        *("vgg11-dropout seed 0", "vgg11-dropout seed 1"),
    ]
    assert {(run.state, run.epochs, run.seconds_left) for run in before} == {("left", 0, None)}
    assert summarise(before, 2) == "0 of 6 networks done, 0 running, 6 left; how long is known after an epoch."

    put_predictions(put(recipe, 0, [400.0] * 16), tmp_path, 2400.0)
    put(recipe, 1, [400.0] * 4)
    put(recipe, 2, [400.0] * 16)  # trained, not evaluated
    with locked(checkpoint_path(recipe, 1), "it"):
        runs = plan(experiment, tmp_path)
    assert [(run.state, run.epochs) for run in runs] == [
        *(("done", 16), ("running", 4), ("left", 16), ("left", 0), ("left", 0), ("left", 0)),
    ]
    # An evaluation takes 2400 s as the first did, but of networks with dropout none is known.
    assert [run.seconds_left for run in runs] == [0, 12 * 400 + 2400, 2400, 16 * 400 + 2400, 16 * 400, 16 * 400]
    total = 7200 + 2400 + 8800 + 6400 + 6400
    assert summarise(runs, 2) == "1 of 6 networks done, 1 running, 4 left; about 4 h 20 min to go."
    assert round(total / 2 / 60) == 4 * 60 + 20
    output = io.StringIO()
    show(runs, 2, Console(file=output, width=100))
    assert [line.split("│")[1:-1] for line in output.getvalue().splitlines()[4:5]] == [
        [" vgg11         ", " 1    ", " 4 of 16  ", " running ", " 2 h 00 min "]
    ]
    assert output.getvalue().endswith("to go.\n")


def test_predictions_of_another_protocol_or_network_are_made_again(tmp_path: Path) -> None:
    experiment = replace(EXPERIMENTS["digits"], num_seeds=1, dropout_recipe=None)
    epochs = experiment.recipe.epochs
    put_predictions(put(experiment.recipe, 0, [1.0] * epochs), tmp_path, 60.0)
    assert plan(experiment, tmp_path)[0].state == "done"
    assert plan(experiment, tmp_path, num_samples=5)[0].state == "left"
    put(experiment.recipe, 0, [1.0] * (epochs - 1))
    assert plan(experiment, tmp_path)[0].state == "left"
    path = checkpoint_path(experiment.recipe, 0)
    write_checkpoint(path, Checkpoint(experiment.recipe, 0, [{"seconds": 1.0}] * epochs, {"weight": torch.ones(1)}, {}))
    assert plan(experiment, tmp_path)[0].state == "left"


def test_predictions_do_where_the_checkpoint_is_lost(tmp_path: Path) -> None:
    experiment = replace(EXPERIMENTS["digits"], num_seeds=1, dropout_recipe=None)
    put_predictions(put(experiment.recipe, 0, [1.0] * experiment.recipe.epochs), tmp_path, 60.0)
    checkpoint_path(experiment.recipe, 0).unlink()
    assert plan(experiment, tmp_path)[0].state == "done"
    other = replace(experiment, recipe=replace(experiment.recipe, learning_rate=0.1))
    assert plan(other, tmp_path)[0].state == "left"


def test_small_images_take_less_time(tmp_path: Path) -> None:
    recipe = replace(RECIPES["digits"], epochs=4, image_sizes=(14, 28))
    put(recipe, 0, [10.0, 10.0])
    experiment = replace(EXPERIMENTS["digits"], recipe=recipe, num_seeds=1, dropout_recipe=None)
    assert plan(experiment, tmp_path)[0].seconds_left == 80.0


def test_a_checkpoint_of_another_recipe_is_named(tmp_path: Path) -> None:
    put(RECIPES["digits"], 1, [1.0])
    changed = replace(EXPERIMENTS["digits"], recipe=replace(RECIPES["digits"], batch_size=32))
    with pytest.raises(CheckpointError, match=r"of digits as it is now, got batch_size 16 instead of 32"):
        plan(changed, tmp_path)
