"""Options that several commands share, each declared once."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from stochbn.cli.console import console
from stochbn.experiments.training.recipes import EXPERIMENTS, SGD_LEARNING_RATE


def _use_threads(threads: int | None) -> int | None:
    if threads is not None:
        torch.set_num_threads(threads)
    return threads


def _use_json(json: bool) -> bool:
    console.quiet = json
    return json


def _parse_samples(text: Any) -> int | str:
    """Reads a number of draws, or "auto".

    Examples:
        >>> _parse_samples("auto"), _parse_samples("8")
        ('auto', 8)
    """
    if text == "auto":
        return "auto"
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"Expected a whole number of at least 1, or auto, got {text!r}.")
    return int(text)


# Of any command. They act while the line is parsed: a command that takes them has nothing left to do.
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, callback=_use_threads, help="Threads that torch uses; by default one per core."),
]
Json = Annotated[
    bool, typer.Option("--json", callback=_use_json, help="Print one JSON object, and nothing else, to stdout.")
]
Samples = Annotated[int, typer.Option(metavar="N", min=1, help="Networks drawn for each prediction.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile predictions; needs a C++ compiler.")]
ProtocolSamples = Annotated[
    int | None,
    typer.Option(
        "--samples", metavar="N", min=1, help="Networks drawn for each prediction.", show_default="50; 20 for CIFAR5"
    ),
]

# Of the experiments. `--folder` has published files, `--data` is for those of a user.
Folder = Annotated[
    Path | None, typer.Option(help="Folder with copies of the published data, tried before any download.")
]
ExperimentName = Annotated[str, typer.Argument(metavar="EXPERIMENT", help=f"One of {', '.join(EXPERIMENTS)}.")]
Results = Annotated[Path | None, typer.Option("--out", help="Folder to write to.", show_default="results/EXPERIMENT")]

# Of a network of one's own.
Factory = Annotated[str, typer.Argument(metavar="FACTORY", help="What builds the network: package.module:factory.")]
Weights = Annotated[Path, typer.Option(help="Its weights: a state dict, Lightning's checkpoint, or safetensors.")]
ManyWeights = Annotated[
    list[Path],
    typer.Option("--checkpoint", help="Weights, as for fit. Repeat it for an ensemble of such networks."),
]
Data = Annotated[str, typer.Option(help="Inputs: .npz, .npy or .safetensors, or package.module:factory.")]
StatsOut = Annotated[Path, typer.Option(help="File to write, such as net.sbn.safetensors.")]
Stats = Annotated[
    list[Path] | None,
    typer.Option(help="What fit or tune wrote, one for each checkpoint; without it there is no SBN."),
]
SamplesOrAuto = Annotated[
    Any,
    typer.Option(
        "--samples",
        metavar="N|auto",
        parser=_parse_samples,
        help="Networks drawn for each prediction; auto takes as many as each input needs, up to 1,024.",
    ),
]
LinkName = Annotated[
    str, typer.Option("--link", help="softmax for classes, sigmoid for labels, identity for regression.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Determines the draws.")]
Dropout = Annotated[bool, typer.Option("--dropout", help="Keep dropout layers active; the same in every command.")]
InputsAtOnce = Annotated[
    int, typer.Option("--batch-size", metavar="N", min=1, help="Inputs at a time; changes no result.")
]
Device = Annotated[str, typer.Option(help="Where the network runs, such as cuda.")]


def _change(kind: type, description: str, **limits: Any) -> Any:
    panel, metavar = "In place of what the recipe says; such networks are kept apart", "NAME" if kind is str else "N"
    return Annotated[kind | None, typer.Option(help=description, metavar=metavar, rich_help_panel=panel, **limits)]


CHANGES = {
    "epochs": _change(int, "Passes over the training data.", min=1),
    "batch_size": _change(int, "Images in a step of the optimizer.", min=2),
    "ghost_size": _change(int, "M, the images normalised together; divides the batch size.", min=2),
    "optimizer": _change(str, "adam with a linear decay, or sgd with one cycle."),
    "learning_rate": _change(float, f"The highest one; {SGD_LEARNING_RATE} if sgd takes Adam's place.", min=0),
    "class_seed": _change(int, "Draws the five known classes of CIFAR5; by default 0 to 4.", min=0),
}


def changes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that change a recipe; those in use reach it as one dict, `changes`.

    Typer reads options off a function's signature and annotations, so the returned function has both merged.
    """

    @wraps(command)
    def merged(**values: Any) -> None:
        changes = {name: value for name in CHANGES if (value := values.pop(name)) is not None}
        command(**values, changes=changes)

    own = inspect.signature(command)
    parameters = [parameter for name, parameter in own.parameters.items() if name != "changes"]
    for name, annotation in CHANGES.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    merged.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    merged.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return merged
