"""The list of commands, as `stochbn --help` shows it."""

from typing import Annotated

import typer

from stochbn import __version__
from stochbn.cli import experiments, models

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
COMMANDS = (
    *(experiments.demo, experiments.data, experiments.train, experiments.evaluate, experiments.report),
    *(experiments.reproduce, experiments.study, models.fit, models.tune, models.predict),
)

for command in COMMANDS:
    app.command()(command)


@app.callback(invoke_without_command=True)
def describe(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error show the traceback. Goes anywhere.")] = False,
) -> None:
    """Predictive uncertainty for batch-normalised networks, without retraining them.

    `demo` shows the method in about two minutes; `reproduce` runs an experiment of the paper, of which `data`, `train`,
    `evaluate` and `report` are the steps; `study` goes beyond it; `fit`, `tune` and `predict` are for a network of your
    own.

    Example: `stochbn demo`
    """
    if version:
        print(f"stochbn {__version__}")
        raise typer.Exit
