"""The commands of the paper's experiments: each reads its options and calls one function.

What a command needs is imported when it runs, as the commands for one's own models need less.
"""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from stochbn.cli import job
from stochbn.cli.console import console, say
from stochbn.cli.options import (
    Compile,
    ExperimentName,
    Folder,
    ProtocolSamples,
    Results,
    Samples,
    Threads,
    changes_recipe,
)
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES, Experiment

T = TypeVar("T")


def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("demo"),
    threads: Threads = 1,  # its networks are tiny: more threads would only wait for each other
) -> None:
    """Shows the whole method on small embedded data, in two minutes.

    Trains six small networks on scikit-learn's digits, fits SBN to each, and compares all methods on unseen digits and
    on letters, which no network knows. The networks are kept, so a second run is short.

    Needs: nothing; no data are downloaded.

    Next: open the page that it names; then try `stochbn fit` on a network of your own.

    Example: `stochbn demo --out demo`
    """
    _reproduce(EXPERIMENTS["digits"], out, samples=None, folder=None, jobs=2)


def data(
    names: Annotated[list[str] | None, typer.Argument(help="Data sets to get if they are missing.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Get all that are missing.")] = False,
    folder: Folder = None,
) -> None:
    """Lists which data sets are here, and gets those that you name.

    Every file is verified by SHA-256, wherever it came from, and kept in `STOCHBN_DATA` or else your cache folder.

    Needs: a network connection; without one, download the files elsewhere and name their folder with `--folder`.

    Next: `stochbn reproduce`, which gets what it needs by itself too.

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
    table = Table("data set", "here", "size", "where")
    for name, publication in published.items():
        size, where = (f"{sizes[name]} MB", f"{publication.name}/") if publication else ("-", "in installed packages")
        table.add_row(name, "yes" if ready[name] else "no", size, where)
    console.print(table)
    say(f"Folder: {cache_dir()}" + ("" if all(ready.values()) else "\nGet what is missing with: stochbn data --all"))


@changes_recipe
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help=f"One of {', '.join(RECIPES)}.")],
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the network, or of the first of --seeds.")] = 0,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="How many networks, with successive seeds.")] = 1,
    dropout: Annotated[
        float | None, typer.Option(metavar="RATE", help="Dropout rate, for a recipe with dropout.")
    ] = None,
    folder: Folder = None,
    threads: Threads = None,
    *,
    changes: dict[str, Any],
) -> None:
    """Trains the networks of a recipe, or resumes where a run stopped.

    A checkpoint follows each epoch, so Ctrl-C, or worse, costs at most one epoch. The same seed gives the same network,
    and a finished network is left alone.

    Needs: the recipe's data set, which is downloaded if it is missing.

    Next: `stochbn evaluate`, once the networks of an experiment are trained; `reproduce` does all of that.

    Example: `stochbn train digits --seeds 3`
    """
    chosen = _choose(RECIPES, recipe, "recipe").vary(**changes, dropout=dropout)
    from stochbn.experiments.training.train import train

    for number in range(seed, seed + seeds):
        console.rule(f"{chosen.name}, seed {number}")
        say(str(train(chosen, number, folder=folder, console=console, peers=job.peers("train"))))


@changes_recipe
def evaluate(
    experiment: ExperimentName,
    out: Results = None,
    samples: ProtocolSamples = None,
    folder: Folder = None,
    threads: Threads = None,
    *,
    changes: dict[str, Any],
) -> None:
    """Predicts with an experiment's trained networks, by all methods.

    Each network's predictions go into one small file; what is already there is not computed again.

    Needs: networks from `stochbn train`; those that were trained with options of their own are named by the same ones.

    Next: `stochbn report`, which needs only these files.

    Example: `stochbn evaluate digits --out results/digits`
    """
    chosen = _choose(EXPERIMENTS, experiment, "experiment").vary(**changes)
    from stochbn.experiments.evaluation.evaluate import evaluate

    console.rule(f"Evaluate {chosen.name}{chosen.options}")
    evaluate(chosen, out or Path("results", chosen.recipe.name), num_samples=samples, data=folder, console=console)


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="Folder that evaluate wrote to.")],
) -> None:
    """Makes tables, figures and a page from prediction files.

    Nothing is trained or predicted, so this works on files from elsewhere too. The page is self-contained.

    Needs: a folder that `stochbn evaluate` wrote to.

    Next: open the page that it names.

    Example: `stochbn report results/digits`
    """
    from stochbn.experiments.report.report import write_report

    console.rule("Report")
    say(f"Open {write_report(results, console=console)}")


@changes_recipe
def reproduce(
    experiment: ExperimentName,
    out: Results = None,
    samples: ProtocolSamples = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Networks at a time; several have one thread each.")] = 1,
    folder: Folder = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS]", help="Make the networks on a Ray cluster, or on one started here."),
    ] = None,
    threads: Threads = None,
    *,
    changes: dict[str, Any],
) -> None:
    """Runs an experiment from data to page: train, evaluate, report.

    It begins with the plan: which networks are done, which are left, and how long they will take. Each step takes up
    what is already there, so a run may be stopped, or killed, and started again.

    Needs: the data, which are downloaded if they are missing, and time on a few cores: hours for `lenet5`, days for
    `vgg11` and `resnet18`; `digits` is the small one of `stochbn demo`.

    Next: open the page that it names; `stochbn study` goes on with the same networks.

    Example: `stochbn reproduce vgg11 --jobs 2`
    """
    _reproduce(_choose(EXPERIMENTS, experiment, "experiment").vary(**changes), out, samples, folder, jobs, ray)


def study(
    experiment: ExperimentName,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="results/beyond/EXPERIMENT")
    ] = None,
    samples: Samples = 50,
    compile: Compile = False,  # noqa: A002
    folder: Folder = None,
    threads: Threads = None,
) -> None:
    """Measures how far one network gets beyond the paper.

    Its rivals are ensembles and dropout. Tuned spreads, joint families, inputs counted into their mini-batch,
    temperatures: each is chosen on validation data and scored on test, out-of-domain and corrupted images. What has
    been drawn is kept, so a run may be stopped and started again; `lenet5` takes an hour or two on a few cores.

    Needs: the networks of `stochbn reproduce`.

    Next: read the study.md that it writes.

    Example: `stochbn study lenet5 --compile`
    """
    chosen = _choose(EXPERIMENTS, experiment, "experiment")
    from stochbn.experiments.study.study import run_study

    console.rule(f"Study {experiment}")
    results = out or Path("results", "beyond", experiment)
    path = run_study(chosen, results, num_samples=samples, data=folder, compiles=compile, console=console)
    say(f"Wrote {path}")


def _reproduce(
    experiment: Experiment,
    out: Path | None,
    samples: int | None,
    folder: Path | None,
    jobs: int,
    ray: str | None = None,
) -> None:
    from stochbn.experiments.evaluation import queue

    results = out or Path("results", experiment.recipe.name)
    console.rule(f"Reproduce {experiment.name}{experiment.options}")
    options: dict[str, Any] = {"num_samples": samples, "data": folder, "console": console}
    if ray is None:
        queue.reproduce(experiment, results, jobs=jobs, **options)
    else:
        from stochbn.cli.ray import connected, count_cores, make_networks

        with connected(ray, logs=True):
            queue.reproduce(experiment, results, jobs=count_cores(), make_all=make_networks, **options)
    report(results)


def _choose(known: dict[str, T], name: str, kind: str) -> T:
    if name not in known:
        raise ValueError(f"Expected {kind} to be one of {', '.join(known)}, got {name!r}.")
    return known[name]
