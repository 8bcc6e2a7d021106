"""The command that predicts: inputs in files → a row for each, and a summary of the most uncertain."""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.utils.data import RandomSampler
from tqdm import tqdm

import stochbn
from stochbn.assessment.measure import find_labels
from stochbn.cli import job
from stochbn.cli.console import console, printable, say, tell
from stochbn.cli.loading import load_data, load_models, load_stats
from stochbn.cli.names import check_classes, find_ids, ids_in, read_classes
from stochbn.cli.options import (
    Compile,
    Data,
    Device,
    Dropout,
    Factory,
    InputsAtOnce,
    Json,
    LinkName,
    ManyWeights,
    SamplesOrAuto,
    Seed,
    Stats,
    Threads,
)
from stochbn.cli.outputs import check_out, check_suffix, make_columns, write_columns
from stochbn.statistics.parts import Part

NUM_SHOWN = 5  # of the most uncertain inputs


def predict(
    factory: Factory,
    checkpoint: ManyWeights,
    data: Data,
    out: Annotated[Path, typer.Option(help="File to write: .csv, .npz or .parquet; with --ray a folder.")],
    stats: Stats = None,
    samples: SamplesOrAuto = 50,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="With --samples auto, how exact entropies are, in nats.")
    ] = 0.1,
    link: LinkName = "softmax",
    seed: Seed = 0,
    classes: Annotated[Path | None, typer.Option(help="Names of the classes: a text file, one a line.")] = None,
    batch_size: InputsAtOnce = 128,
    dropout: Dropout = False,
    compile: Compile = False,  # noqa: A002
    device: Device = "cpu",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Predict on a Ray cluster, or on one started here: --data is Parquet, or a folder of it or of images.",
        ),
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Predicts, and says how unsure each prediction is.

    The prediction is that of many networks drawn around yours. A row for each input: class, confidence, entropy with
    its aleatoric and epistemic part, and the probabilities. With labels (`y` in the file, or the second of what the
    data set yields) error, NLL and ECE are printed too. Inputs are called by `ids` in the file, the third of what the
    data set yields, or its file names; classes by `classes` in the file or of the data set, or by `--classes`.

    Needs: what `stochbn fit` or `stochbn tune` wrote, and inputs preprocessed as in training.

    Next: sort the rows by entropy, and look at the most uncertain before you trust the rest. `stochbn export` if you
    want to predict elsewhere.

    Example: `stochbn predict nets:build --checkpoint net.pt --stats net.sbn.safetensors --data x.npz --out pred.csv`
    """
    if ray is not None:
        if job.is_launched():
            raise ValueError(
                "Expected either --ray or torchrun, got both. Leave torchrun out: Ray starts processes itself."
            )
        if len(checkpoint) > 1 or len(stats or ()) > 1 or compile or classes or samples == "auto":
            raise ValueError(
                "Expected one --checkpoint, at most one --stats and a number of --samples with --ray, without "
                "--compile or --classes."
            )
        given: dict[str, Any] = {"num_samples": samples, "seed": seed, "link": link, "dropout": dropout}
        given |= {
            "factory": factory,
            "checkpoint": checkpoint[0],
            "stats": stats[0] if stats else None,
            "device": device,
        }
        _predict_on_ray(ray, Path(data), out, batch_size=batch_size, **given)
        return
    check_suffix(out)
    check_out(out, checkpoint, data, stats, classes)
    sources = load_stats(stats, checkpoint)
    models = load_models(factory, checkpoint, device)
    loader = load_data(data, models[0], batch_size)
    if isinstance(loader.sampler, RandomSampler):
        warnings.warn("The DataLoader shuffles: rows follow its order, not that of the data.", stacklevel=2)
    names = read_classes(classes, loader)
    options: dict[str, Any] = {"num_samples": samples, "tolerance": tolerance, "seed": seed, "link": link}
    options |= {"dropout": dropout, "compile": compile}
    options |= {"gather": 0} if job.is_joined() else {}
    seen = _Seen()
    batches = seen.collect(job.shard(loader))
    prediction = job.library().predict(models, sources, batches, keep_samples=False, **options)
    seen = seen.gather()
    if prediction is None:  # the first process has it
        return
    check_classes(names, prediction.mean.shape[1] if prediction.mean.dim() > 1 else 1)
    ids = seen.ids or find_ids(loader)
    if ids and len(ids) != len(prediction):
        raise ValueError(f"Expected an id for each of {len(prediction)} inputs, got {len(ids)}.")
    targets = torch.cat(seen.labels) if seen.labels else None
    scores = _score(prediction, targets)  # before anything is written: labels may be none of the classes
    columns = make_columns(prediction)
    write_columns(out, columns | ({} if targets is None else {"label": targets}), ids, names)
    say(f"Wrote {out}")
    _summarise(out, prediction, scores, ids, names)


def _predict_on_ray(address: str, data: Path, out: Path, **options: Any) -> None:
    from stochbn.cli.ray import predict_files

    count = predict_files(address, data, out, **options)
    say(f"Wrote {out}, {count} rows")
    tell({"command": "predict", "out": out, "num_inputs": count})


@dataclass
class _Seen:
    """What comes with the inputs, besides the inputs."""

    labels: list[Tensor] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def collect(self, loader: Iterable[Any]) -> Iterable[Any]:
        """Returns the batches of a loader, or of a part of it, to be read once; keeps what comes with them."""
        batches = self._keep(loader)
        return loader.replace(batches) if isinstance(loader, Part) else batches

    def gather(self) -> "_Seen":
        """Returns what all processes of a job have seen, in the order of the data."""
        parts = job.peers("predict").gather(self)
        return _Seen([label for part in parts for label in part.labels], [one for part in parts for one in part.ids])

    def _keep(self, loader: Iterable[Any]) -> Iterator[Any]:
        for item in tqdm(loader, desc="predict", unit="batch", leave=False, disable=None if job.is_first() else True):
            if (labels := find_labels(item, None)) is not None:
                self.labels.append(labels)
            self.ids += ids_in(item)
            yield item


def _score(prediction: stochbn.Prediction, labels: Tensor | None) -> dict[str, float]:
    if labels is None or prediction.link != "softmax":
        return {}
    scores = {"error": stochbn.error, "NLL": stochbn.nll, "ECE": stochbn.ece}
    return {name: float(score(prediction.probs.cpu(), labels)) for name, score in scores.items()}


def _summarise(
    out: Path,
    prediction: stochbn.Prediction,
    scores: dict[str, float],
    ids: list[str] | None,
    names: list[str] | None,
) -> None:
    """Prints means and scores, and the most uncertain inputs."""
    columns = {name: values.cpu() for name, values in make_columns(prediction).items() if name != "probs"}
    shown = {name: v if v.dim() == 1 else v.double().flatten(1).mean(1) for name, v in columns.items()}  # (N,)
    measure = "std" if prediction.link == "identity" else "entropy"
    means = {name: float(shown[name].mean()) for name in (measure, "aleatoric", "epistemic") if name in shown}
    draws = f"{prediction.num_samples} draws"
    if "draws" in shown:
        draws = f"{shown['draws'].double().mean():.0f} draws on average"
    parts = [*(f"mean {name} {value:.4f}" for name, value in means.items())]
    parts += [f"{name} {value:.4f}" for name, value in scores.items()]
    say(f"{len(prediction)} inputs, {draws}: {', '.join(parts)}")
    table = Table("id" if ids else "index", *shown, title="The most uncertain")
    uncertain: list[dict[str, Any]] = []
    for index in shown[measure].argsort(descending=True)[:NUM_SHOWN].tolist():
        values: dict[str, Any] = {name: each[index].item() for name, each in shown.items()}
        if names and columns.get("predicted", Tensor()).dim() == 1 and "predicted" in values:
            values["predicted"] = names[values["predicted"]]
        cells = (value if isinstance(value, str) else f"{value:.4g}" for value in values.values())
        table.add_row(*(escape(printable(cell)) for cell in (ids[index] if ids else str(index), *cells)))
        uncertain.append({"index": index, **({"id": ids[index]} if ids else {}), **values})
    console.print(table)
    tell(
        {
            "command": "predict",
            "out": out,
            "num_inputs": len(prediction),
            "num_samples": prediction.num_samples,
            "link": prediction.link,
            "means": means,
            "scores": {name.lower(): value for name, value in scores.items()},
            "most_uncertain": uncertain,
        }
    )
