"""The list of commands, in the order of `stochbn --help`."""

from collections.abc import Callable
from typing import Annotated

import typer

from stochbn import __version__
from stochbn.cli import experiments, models
from stochbn.cli.assess import assess
from stochbn.cli.console import console
from stochbn.cli.play import play
from stochbn.cli.predict import predict

PANELS: dict[str, list[Callable[..., None]]] = {
    "See it work": [experiments.demo, play],
    "A network of your own": [models.fit, models.tune, assess, predict, models.export],
    "The paper's experiments": [
        *(experiments.reproduce, experiments.data, experiments.train, experiments.evaluate, experiments.report),
        experiments.study,
    ],
}

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


@app.callback(invoke_without_command=True)
def describe(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. Goes anywhere.")] = False,
) -> None:
    """Predictive uncertainty for batch-normalised networks, without retraining them.

    `demo` shows the method in about two minutes, and `play` lets you draw for its network. For a network of your own,
    `fit` comes first, `tune` is worth it if you have held-out labels, and `assess` writes a page on what the network
    may be trusted with. `predict` says how unsure each prediction is; `export` writes a file that does so elsewhere.
    `reproduce` runs an experiment of the paper, of which `data`, `train`, `evaluate` and `report` are the steps;
    `study` goes beyond the paper.

    Example: `stochbn demo`
    """
    if version:
        print(f"stochbn {__version__}")
        raise typer.Exit


def run(arguments: list[str]) -> None:
    """Runs one command; raises what it raises, and KeyboardInterrupt after Ctrl-C."""
    console.quiet = False  # which --json sets
    # Typer has no options whose value may be left out, as the address of --ray may.
    following = [*arguments[1:], "--"]
    arguments = [
        f"{word}=" if word == "--ray" and after.startswith("-") else word
        for word, after in zip(arguments, following, strict=True)
    ]
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="stochbn", standalone_mode=False)
    except typer.Abort:
        code = 130
    if code == 130:  # what typer turns Ctrl-C into; older versions raise Abort
        raise KeyboardInterrupt
