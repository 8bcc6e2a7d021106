"""The commands for a network of your own that write files for the others: `fit`, `tune` and `export`."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

import stochbn
from stochbn.cli import job
from stochbn.cli.console import say, tell
from stochbn.cli.loading import load_data, load_model, load_models, load_stats
from stochbn.cli.options import (
    Data,
    Device,
    Dropout,
    Factory,
    InputsAtOnce,
    Json,
    LinkName,
    ManyWeights,
    Samples,
    Seed,
    Stats,
    StatsOut,
    Threads,
    Weights,
)
from stochbn.cli.outputs import check_out, make_folder
from stochbn.inference.export import OUTPUTS, name_inputs
from stochbn.statistics.calls import without_labels
from stochbn.statistics.items import rows, tensors_in

EXAMPLE_INPUTS = 8  # that an exported file is compared with `predict` on


def fit(
    factory: Factory,
    checkpoint: Weights,
    data: Data,
    out: StatsOut,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="That of training. A DataLoader has its own.")
    ] = None,
    num_batches: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Use only that many mini-batches.")
    ] = None,
    standard_error: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Stop once every centre is this certain, such as 0.01.")
    ] = None,
    layers: Annotated[
        list[str] | None, typer.Option(help="BatchNorm layers to draw: last, or as 'layer4.*'; repeatable.")
    ] = None,
    family: Annotated[str, typer.Option(help="factorized, as in the paper, lowrank, or empirical.")] = "factorized",
    rank: Annotated[int | None, typer.Option(metavar="N", min=1, help="Factors of lowrank; 10 by default.")] = None,
    num_kept: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Mini-batches of empirical; 256 by default.")
    ] = None,
    conditioned: Annotated[bool, typer.Option("--conditioned", help="Count inputs into their mini-batch.")] = False,
    dropout: Dropout = False,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Fits the distribution of your network's batch statistics.

    That takes one pass over the training data, and changes nothing in the network. FACTORY names what builds the
    network, without arguments; the current directory is importable. Data are preprocessed as in training: an array `x`
    in a file, or a factory of a Dataset, a DataLoader or a tensor.

    Needs: the network's code, its weights, training data, and the mini-batch size of training.

    Next: `stochbn tune` if you have held-out labels, or else `stochbn predict`.

    Example: `stochbn fit nets:build --checkpoint net.pt --data train.npz --batch-size 32 --out net.sbn.safetensors`
    """
    check_out(out, checkpoint, data)
    model = load_model(factory, checkpoint, device)
    loader = job.shard(load_data(data, model, batch_size, shuffle=True))
    options: dict[str, Any] = {"batch_size": batch_size, "num_batches": num_batches, "standard_error": standard_error}
    options |= {"layers": "last" if layers == ["last"] else layers or None, "family": family, "rank": rank}
    options |= {"num_kept": num_kept, "conditioned": conditioned, "dropout": dropout}
    stats = job.library().fit(model, loader, progress=sys.stderr.isatty(), **options)
    if job.is_first():
        make_folder(out)
        stats.save(out)
    say(f"Fitted {stats}.\nWrote {out}")
    tuning = _format_command("tune", factory, checkpoint=[checkpoint], stats=[out])
    say(f"Next, if you have held-out labels: {tuning} --data VALIDATION --out TUNED")
    tell(
        {
            "command": "fit",
            "out": out,
            "family": type(stats).__name__.lower(),
            "layers": {name: layer.num_features for name, layer in stats.layers.items()},
            "batch_size": stats.batch_size,
            "num_batches": stats.num_batches,
        }
    )


def tune(
    factory: Factory,
    checkpoint: ManyWeights,
    stats: Annotated[list[Path], typer.Option(help="What fit wrote, one for each checkpoint.")],
    data: Annotated[str, typer.Option(help="Held-out inputs x with labels y, in the same forms as for fit.")],
    out: Annotated[list[Path], typer.Option(help="File to write, one for each checkpoint.")],
    choose: Annotated[str, typer.Option(help="spread, temperature at the fitted spread, or both.")] = "both",
    link: LinkName = "softmax",
    num_groups: Annotated[
        int, typer.Option(metavar="N", min=1, help="Groups of layers with a spread of their own.")
    ] = 1,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Networks drawn for each spread that is tried; 8, or 64 of the last layer alone."
        ),
    ] = None,
    batch_size: InputsAtOnce = 128,
    dropout: Dropout = False,
    device: Device = "cpu",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Chooses how wide the draws are, and a temperature, by the NLL on held-out data.

    What was fitted stands unless another choice is better by more than one standard error. The plain network is scored
    too: the verdict says which is better. The file that it writes takes the place of the one from `fit`: `predict`
    finds the spread, the temperature and, for regression, the noise in it.

    Needs: what `stochbn fit` wrote, and labelled data seen neither in training nor in the test.

    Next: `stochbn predict --stats` with the new file.

    Example: `stochbn tune nets:build --checkpoint net.pt --stats net.sbn.safetensors --data val.npz --out tuned.sbn.safetensors`
    """  # noqa: E501
    check_out(out, checkpoint, data, stats)
    if len(out) != len(checkpoint):
        raise ValueError(f"Expected an --out for each --checkpoint, got {len(out)} for {len(checkpoint)}.")
    fitted = load_stats(stats, checkpoint)
    assert fitted is not None
    models = load_models(factory, checkpoint, device)
    loader = load_data(data, models[0], batch_size)
    options: dict[str, Any] = {"choose": choose, "num_groups": num_groups, "num_samples": samples, "dropout": dropout}
    options |= {"link": link}
    tuned = job.library().tune(models, fitted, loader, progress=sys.stderr.isatty(), **options)
    for path, member in zip(out, tuned, strict=True):
        if job.is_first():
            make_folder(path)
            member.save(path)
    tuning = tuned[0].tuning  # they share it
    assert tuning is not None
    say(str(tuning))
    chosen = tuning.spread.values() if isinstance(tuning.spread, Mapping) else [tuning.spread]
    spreads = ", ".join(f"{spread:.3g}" for spread in chosen if spread is not None)
    level = f"temperature {tuning.temperature:.3g}" if tuning.noise is None else f"noise {tuning.noise:.3g}"
    say(f"Chose spread {spreads}, {level}.\nWrote {', '.join(map(str, out))}")
    if len(out) == 1:
        assessing = _format_command("assess", factory, checkpoint=checkpoint, stats=out)
        assessing += " --validation VALIDATION --test TEST --out assessment"
        say(f"Next, to see what it may be trusted with: {assessing}")
    predicting = _format_command("predict", factory, checkpoint=checkpoint, stats=out)
    say(f"Next, to use it: {predicting} --data TEST --out pred.csv")
    tell({"command": "tune", "out": out, **asdict(tuning)})


def export(
    factory: Factory,
    checkpoint: ManyWeights,
    data: Data,
    out: Annotated[Path, typer.Option(help="File to write: .onnx, or .pt2 for torch.")],
    stats: Stats = None,
    samples: Samples = 50,
    link: LinkName = "softmax",
    seed: Seed = 0,
    dropout: Dropout = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Writes one file that predicts with its uncertainty, without this package.

    The network, its draws and the tuning are in it. It takes batches of any size, and returns probabilities and
    entropies (mean and std for regression). A `.onnx` file runs in ONNX Runtime, without torch. A `.pt2` file is
    machine code for this kind of processor, and needs torch. Of the data the first few inputs are used: they have the
    shape that the file is for, and what it returns for them is compared with `predict`.

    Needs: what `stochbn fit` or `stochbn tune` wrote, a few inputs preprocessed as in training, and for .onnx
    `pip install 'stochbn[export]'`.

    Next: run the file on the machine that is to predict; docs/serving.md has the few lines of Python.

    Example: `stochbn export nets:build --checkpoint net.pt --stats net.sbn.safetensors --data x.npz --out net.onnx`
    """
    if out.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"Expected --out to end in .onnx or .pt2, got {out}.")
    check_out(out, checkpoint, data, stats)
    sources = load_stats(stats, checkpoint)
    models = load_models(factory, checkpoint, "cpu")
    batch = next(iter(load_data(data, models[0], EXAMPLE_INPUTS)), None)
    if batch is None:
        raise ValueError(f"Expected at least one input to try the file on, got none in {data}.")
    example = rows(without_labels(batch), 0, EXAMPLE_INPUTS)
    links: dict[str, Any] = {"link": link}
    make_folder(out)
    difference = stochbn.export(models, sources, example, out, num_samples=samples, seed=seed, dropout=dropout, **links)
    say(f"Wrote {out}, {_format_size(out.stat().st_size)}")
    plain = stochbn.predict(models[0], None, example, keep_samples=False, **links)  # has the same shapes
    taken = dict(zip(name_inputs(example), tensors_in(example), strict=True))
    returned = {name: getattr(plain, name) for name in OUTPUTS[plain.link]}
    formatted = [[_format_tensor(n, t, len(plain)) for n, t in tensors.items()] for tensors in (taken, returned)]
    say(f"Takes {', '.join(formatted[0])}\nReturns {', '.join(formatted[1])}")
    say(f"Differs from predict by {difference:.1g} at most, on {len(plain)} inputs")
    tell(
        {
            "command": "export",
            "out": out,
            "num_bytes": out.stat().st_size,
            "takes": formatted[0],
            "returns": formatted[1],
            "difference": difference,
            "num_inputs": len(plain),
        }
    )


def _format_command(command: str, factory: str, **options: Sequence[Path]) -> str:
    """Writes the beginning of a command line, to be copied.

    Examples:
        >>> _format_command("tune", "nets:build", checkpoint=[Path("my net.pt")])
        "stochbn tune nets:build --checkpoint 'my net.pt'"
    """
    words = [word for name, paths in options.items() for path in paths for word in (f"--{name}", str(path))]
    return shlex.join(["stochbn", command, factory, *words])


def _format_tensor(name: str, tensor: Tensor, num_inputs: int) -> str:
    """Describes an argument or a result of a file.

    Examples:
        >>> _format_tensor("probs", Tensor(8, 3), 8)
        'probs: float32 (N, 3)'
    """
    sizes = list(map(str, tensor.shape))
    if tensor.dim() and len(tensor) == num_inputs:
        sizes[0] = "N"
    return f"{name}: {str(tensor.dtype).removeprefix('torch.')} ({', '.join(sizes)})"


def _format_size(size: int) -> str:
    """Writes a number of bytes.

    Examples:
        >>> _format_size(18_400), _format_size(2_340_000)
        ('18 kB', '2.3 MB')
    """
    return f"{size / 1e3:.0f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"
