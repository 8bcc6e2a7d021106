"""The commands of the paper's experiments: each reads its options and calls one function.

What a command needs is imported when it runs.
"""

from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.table import Table

from stochbn.cli.console import console, say
from stochbn.cli.options import (
    ClassSeed,
    Data,
    DropoutRate,
    Epochs,
    Experiment,
    Optimizer,
    Out,
    Rate,
    Samples,
    Threads,
    TrainSize,
)
from stochbn.experiments.training import recipes
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES

T = TypeVar("T")


def demo(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("demo")) -> None:
    """Shows the whole method on small embedded data: nothing is downloaded.

    Trains small networks on scikit-learn's digits, fits SBN to each, and compares all methods on unseen digits and on
    letters, which no network knows. Ends with the page to open. Trained networks are kept: a second run is short.

    Example: `stochbn demo --out demo`
    """
    reproduce("digits", out, threads=1)


def data(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets to get if they are missing.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Get all that are missing.")] = False,
    folder: Data = None,
) -> None:
    """Lists the data sets and whether they are there; with names, gets those that are missing.

    Files are checked by SHA-256 wherever they come from, and kept in `STOCHBN_DATA` or else your cache folder. Without
    network, download the files elsewhere and name their folder.

    Example: `stochbn data mnist notmnist --folder downloads`
    """
    from stochbn.experiments.data.publications import PUBLICATIONS
    from stochbn.experiments.data.sources import cache_dir, check_writable, fetch
    from stochbn.experiments.data.splits import list_data

    if folder and not (names or everything):
        raise ValueError("Expected names of data sets or --all with --folder, got neither.")
    ready = list_data()
    published = {name: PUBLICATIONS.get("cifar10" if name == "cifar5" else name) for name in ready}
    sizes = {name: sum(blob.num_bytes for blob in p.blobs) // 10**6 for name, p in published.items() if p}
    wanted = {name: _choose(published, name, "data set") for name in (ready if everything else names or ())}
    for name, publication in wanted.items():
        if publication and not ready[name]:
            say(f"Getting {name}, {sizes[name]} MB …")
            check_writable(cache_dir())
            fetch(publication, folder=folder)
            ready = list_data()
    table = Table("data set", "there", "size", "where")
    for name, publication in published.items():
        size, where = (f"{sizes[name]} MB", f"{publication.name}/") if publication else ("-", "in installed packages")
        table.add_row(name, "yes" if ready[name] else "no", size, where)
    console.print(table)
    say(f"Folder: {cache_dir()}" + ("" if all(ready.values()) else "\nGet what is missing with: stochbn data --all"))


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of {', '.join(RECIPES)}.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the network, or of the first of --seeds.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many networks, with successive seeds.")] = 1,
    epochs: Epochs = None,
    batch_size: TrainSize = None,
    optimizer: Optimizer = None,
    learning_rate: Rate = None,
    dropout: DropoutRate = None,
    class_seed: ClassSeed = None,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Trains the networks of a recipe, or goes on where an earlier run stopped.

    A checkpoint follows each epoch, so Ctrl-C, or worse, costs at most one. The same seed gives the same network. A
    network that is finished is left alone. What differs from the recipe is kept apart, such as RECIPE-3epochs-sgd.

    Example: `stochbn train digits --seeds 3`
    """
    chosen = _choose(RECIPES, recipe, "recipe").vary(
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        learning_rate=learning_rate,
        dropout=dropout,
        class_seed=class_seed,
    )
    from stochbn.experiments.training.train import train

    torch.set_num_threads(threads or torch.get_num_threads())
    for number in range(seed, seed + seeds):
        console.rule(f"{chosen.name}, seed {number}")
        say(str(train(chosen, number, folder=data, console=console)))


def evaluate(
    experiment: Experiment,
    out: Out = None,
    samples: Samples = 50,
    epochs: Epochs = None,
    batch_size: TrainSize = None,
    optimizer: Optimizer = None,
    learning_rate: Rate = None,
    class_seed: ClassSeed = None,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Predicts with every trained network of an experiment, by all methods, into small files.

    Those files are all that `report` needs. What is already there is not computed again. Networks that were trained
    with options of their own are named by the same options.

    Example: `stochbn evaluate digits --out results/digits`
    """
    chosen = _choose(EXPERIMENTS, experiment, "experiment").vary(
        epochs=epochs, batch_size=batch_size, optimizer=optimizer, learning_rate=learning_rate, class_seed=class_seed
    )
    torch.set_num_threads(threads or torch.get_num_threads())
    _evaluate(chosen, out, samples, data)


def report(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where `evaluate` wrote.")]) -> None:
    """Makes tables, figures and one self-contained page from prediction files.

    Nothing is trained or predicted, so this works on files from elsewhere too.

    Example: `stochbn report results/digits`
    """
    from stochbn.experiments.report.report import write_report

    console.rule("Report")
    say(f"Open {write_report(folder, console=console)}")


def reproduce(
    experiment: Experiment,
    out: Out = None,
    samples: Samples = 50,
    epochs: Epochs = None,
    batch_size: TrainSize = None,
    optimizer: Optimizer = None,
    learning_rate: Rate = None,
    class_seed: ClassSeed = None,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Runs an experiment of the paper from data to page: trains, evaluates and reports.

    Each step takes up what is already there, so a run may be stopped and started again. `lenet5` takes hours on a few
    cores, the others days; `digits` is the small one of `stochbn demo`. What differs from the experiment, such as its
    known classes, is kept apart.

    Example: `stochbn reproduce lenet5 --threads 2`
    """
    chosen = _choose(EXPERIMENTS, experiment, "experiment").vary(
        epochs=epochs, batch_size=batch_size, optimizer=optimizer, learning_rate=learning_rate, class_seed=class_seed
    )
    from stochbn.experiments.training.train import train

    runs = chosen.runs()
    torch.set_num_threads(threads or torch.get_num_threads())
    for number, (recipe, seed) in enumerate(runs, start=1):
        console.rule(f"Train {number} of {len(runs)}: {recipe.name}, seed {seed}")
        train(recipe, seed, folder=data, console=console)
    report(_evaluate(chosen, out, samples, data))


def study(
    experiment: Experiment,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="results/beyond/EXPERIMENT")
    ] = None,
    samples: Samples = 50,
    compile: Annotated[bool, typer.Option("--compile", help="Compile predictions; needs a C++ compiler.")] = False,  # noqa: A002
    only: Annotated[
        list[str] | None, typer.Option(help="A variant to draw; the others stay as an earlier study found them.")
    ] = None,
    data: Data = None,
    threads: Threads = None,
) -> None:
    """Measures how far one trained network gets with more than the paper's statistics, against ensembles and dropout.

    Tuned spreads, joint families, inputs counted into their mini-batch, temperatures: each is chosen on validation
    data and scored on test, out-of-domain and corrupted images. Needs the networks of `reproduce`. What has been drawn
    is kept, so a run may be stopped and started again; `lenet5` takes an hour or two on a few cores.

    With --only, once for each, some methods are measured anew and join what the folder's study.json has.

    Example: `stochbn study lenet5 --compile`
    """
    chosen = _choose(EXPERIMENTS, experiment, "experiment")
    from stochbn.experiments.study.report import read_study, write_study
    from stochbn.experiments.study.results import carry_over, measure_study
    from stochbn.experiments.study.scores import read_draws
    from stochbn.experiments.study.study import Study

    torch.set_num_threads(threads or torch.get_num_threads())
    console.rule(f"Study {experiment}")
    folder = out or Path("results", "beyond", experiment)
    earlier = read_study(folder) if only else None
    plan = Study(chosen, num_samples=samples, data=data, compiles=compile, only=only or (), console=console)
    plan.draw()
    results = measure_study(plan, read_draws(plan))
    if earlier:
        results = carry_over(results, earlier)
    say(f"Wrote {write_study(results, folder, console)}")


def _evaluate(experiment: recipes.Experiment, out: Path | None, samples: int, data: Path | None) -> Path:
    from stochbn.experiments.evaluation.evaluate import evaluate

    folder = out or Path("results", experiment.recipe.name)
    console.rule(f"Evaluate {experiment.name}{experiment.options}")
    evaluate(experiment, folder, num_samples=samples, data=data, console=console)
    return folder


def _choose(known: dict[str, T], name: str, kind: str) -> T:
    if name not in known:
        raise ValueError(f"Expected {kind} to be one of {', '.join(known)}, got {name!r}.")
    return known[name]
