"""Options that commands share are the same in each of them."""

import inspect
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from stochbn.cli.commands import PANELS
from stochbn.cli.options import (
    CHANGES,
    Compile,
    Dropout,
    Folder,
    Json,
    LinkName,
    ManyWeights,
    ProtocolSamples,
    Samples,
    Seed,
    Stats,
    Threads,
    changes_recipe,
)
from stochbn.experiments.training.recipes import Recipe

SIGNATURES = {command.__name__: inspect.signature(command) for commands in PANELS.values() for command in commands}
EXPERIMENTS = ["train", "evaluate", "reproduce", "study"]
MODELS = ["fit", "tune", "predict", "export"]


@pytest.mark.parametrize(
    ("option", "declared", "commands"),
    [
        ("threads", Threads, ["demo", "play", *EXPERIMENTS, *MODELS]),
        ("folder", Folder, ["data", *EXPERIMENTS]),
        ("samples", Samples, ["study", "export"]),
        ("compile", Compile, ["study", "predict"]),
        ("json", Json, MODELS),
        ("checkpoint", ManyWeights, ["tune", "predict", "export"]),
        ("stats", Stats, ["predict", "export"]),
        ("link", LinkName, ["predict", "export"]),
        ("seed", Seed, ["predict", "export"]),
        ("dropout", Dropout, MODELS),
        ("samples", ProtocolSamples, ["evaluate", "reproduce"]),
        *((name, declared, ["train", "evaluate", "reproduce"]) for name, declared in CHANGES.items()),
    ],
)
def test_shared_options_are_declared_once(option, declared, commands):
    for command in commands:
        assert SIGNATURES[command].parameters[option].annotation == declared


def test_published_files_and_those_of_a_user_have_names_of_their_own():
    takers = {option: {c for c in SIGNATURES if option in SIGNATURES[c].parameters} for option in ("folder", "data")}
    assert takers == {"folder": {"data", *EXPERIMENTS}, "data": set(MODELS)}


def test_changes_of_a_recipe_reach_a_command_as_one_dict():
    calls = []

    @changes_recipe
    def command(name: str, size: int = 1, *, changes: dict[str, object]) -> None:
        """Changes things."""
        calls.append((name, size, changes))

    app = typer.Typer()
    app.command()(command)
    for line in (["a"], ["b", "--size", "3", "--batch-size", "8", "--optimizer", "sgd"]):
        assert not CliRunner().invoke(app, line).exit_code
    assert calls == [("a", 1, {}), ("b", 3, {"batch_size": 8, "optimizer": "sgd"})]
    assert "Changes things." in CliRunner().invoke(app, ["--help"]).output
    assert CHANGES.keys() <= {field.name for field in fields(Recipe)}
