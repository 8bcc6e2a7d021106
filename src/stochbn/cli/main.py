"""The `stochbn` command: the paper's experiments from data to page, and SBN for a network of your own.

Each command only reads its options and calls one function. What they need is imported when they run.
"""

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch

from stochbn import __version__
from stochbn.experiments.training import recipes
from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES, SGD_LEARNING_RATE

INSTALL = "Install with pip install 'stochbn[experiments]'."
EXTRA = {"PIL", "jinja2", "matplotlib", "numpy", "pooch", "rich", "scipy", "sklearn", "typer"}

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    print(f"Error: {missing}. {INSTALL}", file=sys.stderr)
    raise SystemExit(2) from missing

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
console = Console()

T = TypeVar("T")
Data = Annotated[Path | None, typer.Option(help="Folder with the published data files, asked before any download.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch uses; by default one a core.")]
Samples = Annotated[int, typer.Option(min=1, help="Networks drawn for each prediction.")]
Experiment = Annotated[str, typer.Argument(metavar="EXPERIMENT", help=f"One of {', '.join(EXPERIMENTS)}.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")]
TrainSize = Annotated[int | None, typer.Option("--batch-size", min=2, help="Instead of the recipe's.")]
Optimizer = Annotated[str | None, typer.Option(help="adam with a linear decay, or sgd with one cycle.")]
Rate = Annotated[
    float | None, typer.Option("--learning-rate", min=0, help=f"The highest; {SGD_LEARNING_RATE} for sgd.")
]
ClassSeed = Annotated[
    int | None, typer.Option(min=0, help="Draws the five known classes of CIFAR5; by default 0 to 4.")
]
DropoutRate = Annotated[float | None, typer.Option(help="Dropout rate, of a recipe that has dropout.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="results/EXPERIMENT")]
Factory = Annotated[str, typer.Argument(metavar="FACTORY", help="Network as package.module:factory.")]
Weights = Annotated[Path, typer.Option(help="Its weights: a state dict from torch.save, or safetensors.")]
Inputs = Annotated[str, typer.Option(help="Inputs: .npz, .npy or .safetensors, or package.module:factory.")]
BatchSize = Annotated[int | None, typer.Option(min=2, help="That of training. A DataLoader has its own.")]
NumBatches = Annotated[int | None, typer.Option(min=2, help="Use only that many mini-batches.")]
Layers = Annotated[list[str] | None, typer.Option(help="BatchNorm layers to treat, as 'layer4.*'; repeatable.")]
Dropout = Annotated[bool, typer.Option("--dropout", help="Keep dropout layers active, in fit and predict alike.")]
Link = Annotated[str, typer.Option(help="softmax for classes, sigmoid for labels, identity for regression.")]
Device = Annotated[str, typer.Option(help="Where the network runs, such as cuda.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0, or 2 after an error and 130 after Ctrl-C, either with one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # anywhere in the line, as one adds it to the end after an error
    given = [argument for argument in given if argument != "--debug"] or ["--help"]
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)
            code = typer.main.get_command(app).main(given, prog_name="stochbn", standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        if debug:
            raise
        print(f"Error: {_explain(error)}", file=sys.stderr)
        code = 2
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    if code == 130:
        resumes = given[0] in ("demo", "train", "evaluate", "reproduce", "study")
        print("Interrupted; run the same command to resume." if resumes else "Interrupted.", file=sys.stderr)
    elif not code and not {"data", "--help", "--version"} & set(given):
        _say(f"Done in {minutes} min {seconds} s.")
    sys.exit(code or 0)


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


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("demo")) -> None:
    """Shows the whole method on small embedded data: nothing is downloaded.

    Trains small networks on scikit-learn's digits, fits SBN to each, and compares all methods on unseen digits and on
    letters, which no network knows. Ends with the page to open. Trained networks are kept: a second run is short.

    Example: `stochbn demo --out demo`
    """
    reproduce("digits", out, threads=1)


@app.command()
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
            _say(f"Getting {name}, {sizes[name]} MB …")
            check_writable(cache_dir())
            fetch(publication, folder=folder)
            ready = list_data()
    table = Table("data set", "there", "size", "where")
    for name, publication in published.items():
        size, where = (f"{sizes[name]} MB", f"{publication.name}/") if publication else ("-", "in installed packages")
        table.add_row(name, "yes" if ready[name] else "no", size, where)
    console.print(table)
    _say(f"Folder: {cache_dir()}" + ("" if all(ready.values()) else "\nGet what is missing with: stochbn data --all"))


@app.command()
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
        _say(str(train(chosen, number, folder=data, console=console)))


@app.command()
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


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where `evaluate` wrote.")]) -> None:
    """Makes tables, figures and one self-contained page from prediction files.

    Nothing is trained or predicted, so this works on files from elsewhere too.

    Example: `stochbn report results/digits`
    """
    from stochbn.experiments.report.report import write_report

    console.rule("Report")
    _say(f"Open {write_report(folder, console=console)}")


@app.command()
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


@app.command()
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
    _say(f"Wrote {write_study(results, folder, console)}")


@app.command()
def fit(
    factory: Factory,
    checkpoint: Weights,
    data: Inputs,
    out: Annotated[Path, typer.Option(help="File to write, such as net.sbn.safetensors.")],
    batch_size: BatchSize = None,
    num_batches: NumBatches = None,
    layers: Layers = None,
    dropout: Dropout = False,
    family: Annotated[str, typer.Option(help="factorized, as in the paper, lowrank, or empirical.")] = "factorized",
    size: Annotated[int | None, typer.Option(min=1, help="Factors of lowrank, mini-batches of empirical.")] = None,
    conditioned: Annotated[bool, typer.Option("--conditioned", help="Count inputs into their mini-batch.")] = False,
    device: Device = "cpu",
) -> None:
    """Fits the distribution of your network's batch statistics, in one pass over its training data.

    FACTORY names what builds the network without arguments; the current directory is importable. Data are
    preprocessed as in training: an array `x` in a file, or a factory of a Dataset, a DataLoader or a tensor.

    Example: `stochbn fit nets:build --checkpoint model.pt --data train.npz --batch-size 32 --out net.sbn.safetensors`
    """
    from stochbn.cli.models import fit_data, load_model, prepare_out

    prepare_out(out, checkpoint, data)
    model = load_model(factory, checkpoint, device, console)
    options: dict[str, Any] = {"num_batches": num_batches, "layers": layers or None, "dropout": dropout}
    options |= {"family": family, "size": size, "conditioned": conditioned}
    fit_data(model, data, out, console, batch_size=batch_size, **options)


@app.command()
def tune(
    factory: Factory,
    checkpoint: Weights,
    stats: Annotated[Path, typer.Option(help="What `fit` wrote.")],
    data: Annotated[str, typer.Option(help="Held-out inputs x and labels y; as in `fit`.")],
    out: Annotated[Path, typer.Option(help="File to write, such as net.sbn.safetensors.")],
    spread: Annotated[bool, typer.Option(help="Choose the spread, or leave the fitted one.")] = True,
    temperature: Annotated[bool, typer.Option("--temperature", help="Choose a temperature too.")] = False,
    groups: Annotated[int, typer.Option(min=1, help="Groups of layers with a spread of their own.")] = 1,
    samples: Annotated[int, typer.Option(min=2, help="Networks drawn for each spread that is tried.")] = 8,
    dropout: Dropout = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs at a time; changes no result.")] = 128,
    device: Device = "cpu",
) -> None:
    """Chooses how wide the draws are, by the NLL on labelled data that neither training nor the test has seen.

    The file that it writes is used like that of `fit`: `predict --stats` takes the spread and the temperature from it.

    Example: `stochbn tune nets:build --checkpoint model.pt --stats fit.sbn --data val.npz --out net.sbn.safetensors`
    """
    from stochbn.cli.models import load_model, prepare_out, tune_data

    prepare_out(out, checkpoint, data, stats)
    model = load_model(factory, checkpoint, device, console)
    options: dict[str, Any] = {"spread": spread, "temperature": temperature, "groups": groups}
    options |= {"num_samples": samples, "dropout": dropout}
    tune_data(model, stats, data, out, console, batch_size=batch_size, **options)


@app.command()
def predict(
    factory: Factory,
    checkpoint: Weights,
    data: Inputs,
    out: Annotated[Path, typer.Option(help="File to write: .csv, or .npz.")],
    stats: Annotated[Path | None, typer.Option(help="What `fit` wrote; without it there is no SBN.")] = None,
    samples: Samples = 50,
    link: Link = "softmax",
    dropout: Dropout = False,
    seed: Annotated[int, typer.Option(help="Makes the draws.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs at a time; changes no result.")] = 128,
    device: Device = "cpu",
) -> None:
    """Predicts with networks drawn around yours, and tells how unsure each prediction is.

    A row for each input: class, confidence, entropy, of that aleatoric and epistemic, and the probabilities. With
    labels (`y` in the file, or the second of what the data set yields) error, NLL and ECE are printed too.

    Example: `stochbn predict nets:build --checkpoint model.pt --stats net.sbn.safetensors --data x.npz --out pred.csv`
    """
    from stochbn.cli.models import load_model, predict_data, prepare_out

    prepare_out(out, checkpoint, data, stats)
    model = load_model(factory, checkpoint, device, console)
    options: dict[str, Any] = {"num_samples": samples, "seed": seed, "link": link, "dropout": dropout}
    predict_data(model, stats, data, out, console, batch_size=batch_size, **options)


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


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _explain(error: Exception) -> str:
    """Puts an error on one line. Only one that nobody foresaw is given with its type."""
    # The command-line parser's errors are known by this method; their class has moved between versions of typer.
    text = " ".join(str(getattr(error, "format_message", lambda: error)()).split())
    text, _, of_the_library = text.partition(" Pass call= ")  # advice that has no option here
    if of_the_library:
        text += " Let the factory return a model that takes such batches."
    text, _, of_the_library = text.partition(" Pass target=")
    if of_the_library:
        text += " Give the data labels: y in the file, or the second of what the data set yields."
    if isinstance(error, ImportError) and error.name in EXTRA:
        return f"{text}. {INSTALL}"
    foreseen = isinstance(error, (ValueError, TypeError, OSError, ImportError)) or hasattr(error, "format_message")
    ours = type(error).__module__.startswith("stochbn.")
    return text if foreseen or ours else f"{type(error).__name__}: {text} (--debug shows the traceback)"


if __name__ == "__main__":
    main()
