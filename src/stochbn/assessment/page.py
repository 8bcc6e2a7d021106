"""An assessment → its page, with figures and pictures in it, and `assessment.json` beside it."""

import io
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.image import imsave

    from stochbn import plots
    from stochbn.pages.figures import NARROW, STYLE, add_legend, render
    from stochbn.pages.page import Grid, embed, render_page
except ModuleNotFoundError as error:  # pragma: no cover - a test runs this in a process of its own
    raise ModuleNotFoundError(
        f"Expected Matplotlib and Jinja for the page, got no {error.name or 'Matplotlib'}. Install with pip install "
        "'stochbn[plots]'."
    ) from error

from stochbn.assessment.measure import MAX_PLACES, Picture
from stochbn.assessment.results import Assessment
from stochbn.assessment.scores import METRICS, Estimate
from stochbn.distributions.base import Distribution

GREY, BLUE, GREEN = "#777777", "#0072b2", "#009e73"
NUM_LAYERS = 10  # in the table of drift, those that drift most
PAGE, NUMBERS, RULE, CHOSEN = "index.html", "assessment.json", "abstain.json", "chosen.sbn.safetensors"


def write(found: Assessment, folder: Path) -> Path:
    """Writes the page and what belongs to it into a folder, all or nothing; returns the path of the page."""
    numbers = json.dumps(found.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    content = {PAGE: render_assessment(found), NUMBERS: f"{numbers}\n"}
    check_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".assessment-", dir=folder if folder.exists() else folder.parent))
    try:
        for name, text in content.items():
            (made / name).write_text(text, "utf-8")
        if found.rule is not None:
            found.rule.save(made / RULE)
        if isinstance(found.source, Distribution):
            found.source.save(made / CHOSEN)
        made.chmod(0o777 & ~_umask())
        if not folder.exists():
            made.rename(folder)
        else:
            for name in (RULE, CHOSEN, NUMBERS, PAGE):  # the page last, as it speaks of the others
                if (made / name).exists():
                    os.replace(made / name, folder / name)
                else:
                    (folder / name).unlink(missing_ok=True)  # of an earlier assessment
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder / PAGE


def check_folder(folder: Path) -> None:
    """Refuses a folder that cannot be written to, or holds folders where files are to be; makes none."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"Expected a folder to write the page to, got the file {folder}. Pass another.")
    for name in (PAGE, NUMBERS, RULE, CHOSEN):
        if (folder / name).is_dir():
            raise ValueError(f"Expected to write the file {folder / name}, got a folder of that name. Pass another.")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".assessment-", dir=there):
            pass
    except OSError as error:
        raise ValueError(f"Expected a folder to write the page to, got {folder} ({error.strerror}).") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def render_assessment(found: Assessment) -> str:
    """Returns the page."""
    images = {name: embed(render(figure)["svg"], "svg+xml") for name, figure in draw_figures(found).items()}
    return render_page(
        "stochbn.assessment",
        "assessment.html.j2",
        found=found,
        label=found.methods[found.chosen].label,
        images=images,
        scores=lay_out_scores(found),
        differences=lay_out_differences(found),
        costs=lay_out_costs(found),
        drift=lay_out_drift(found),
        galleries=lay_out_pictures(found),
        metrics=[METRICS[key] for key in METRICS if any(key in one.scores for one in found.methods.values())],
        max_places=MAX_PLACES,
        inf=math.inf,
        chosen_file=CHOSEN if isinstance(found.source, Distribution) else None,
        is_placed=next(iter(found.predictions["test"].values())).mean.dim() > 2,
    )


@matplotlib.rc_context(STYLE)
def draw_figures(found: Assessment) -> dict[str, Figure]:
    """Draws the plain network and the chosen method, by name of the figure."""
    test, others = found.predictions["test"], found.predictions.get("out-of-domain")
    assert found.labels is not None
    # Where no draws were chosen, the last of what was fitted shows what they would add.
    drawn_one = [key for key, pred in test.items() if pred.num_samples > 1][-1]
    keys = dict.fromkeys(["plain", found.chosen, *([] if test[found.chosen].num_samples > 1 else [drawn_one])])
    grey: dict[str, Any] = {"color": GREY, "linewidth": 1.0}
    looks = dict(zip(keys, (grey, {"color": BLUE}, {"color": GREEN}), strict=False))
    drawn: dict[str, Figure] = {}

    def start(name: str) -> Any:
        drawn[name] = Figure(figsize=(NARROW, 3.6), layout="constrained")
        return drawn[name].subplots()

    for name in ("reliability", "risk", "entropies"):
        axes = None
        for key, look in looks.items():
            pred, label = test[key], found.methods[key].label
            if name == "reliability" and pred.link == "identity" and pred.noise is None:
                continue  # no probabilities to rely on
            if name != "reliability" and pred.link == "identity" and pred.num_samples == 1:
                continue  # one pass has no spread to rank by
            axes = axes or start(name)
            if name == "reliability":
                plots.reliability(axes, pred, found.labels, label=label, **look)
            elif name == "risk":
                rule = found.rule if key == found.chosen else None
                plots.risk_coverage(axes, pred, found.labels, rule=rule, label=label, **look)
            else:
                plots.entropies(axes, pred, None if others is None else others[key], label=f"{label}, known", **look)
        if axes is not None:
            add_legend(drawn[name], axes)
    tuning = found.tunings.get(found.chosen)
    if tuning is not None and len(tuning.curve) > 1:
        axes = start("tuning")
        plots.tuning(axes, tuning, label=found.methods[found.chosen].label, color=BLUE)
        add_legend(drawn["tuning"], axes)
    return drawn


def lay_out_scores(found: Assessment) -> Grid:
    """Lays out every score with its interval, a row for each method; the chosen one is bold."""
    keys = _list_keys(found)
    rows = [
        [method.label, *(_write(method.scores.get(key), METRICS[key].digits) for key in keys)]
        for method in found.methods.values()
    ]
    place = list(found.methods).index(found.chosen)
    bold = frozenset((place, column) for column in range(1, len(keys) + 1))
    return Grid(["", *(METRICS[key].label for key in keys)], rows, bold)


def lay_out_differences(found: Assessment) -> Grid:
    """Lays out differences to the plain network; intervals without 0 are bold."""
    keys = [key for key in _list_keys(found) if any(key in one.differences for one in found.methods.values())]
    rows, bold = [], set()
    for method in list(found.methods.values())[1:]:
        rows.append([method.label, *(_write(method.differences.get(key), METRICS[key].digits, "+") for key in keys)])
        for column, key in enumerate(keys, 1):
            if key in method.differences and method.differences[key].excludes_zero:
                bold.add((len(rows) - 1, column))
    return Grid(["", *(METRICS[key].label for key in keys)], rows, frozenset(bold))


def lay_out_costs(found: Assessment) -> Grid:
    """Lays out what a prediction takes."""
    draws = {key: f"{pred.num_samples}" for key, pred in found.predictions["test"].items()}
    rows = [
        [method.label, draws[key], f"{1000 * method.seconds:.3g}", f"{method.cost:.3g}"]
        for key, method in found.methods.items()
    ]
    return Grid(["", "Draws", "ms for an input", "times plain"], rows)


def lay_out_drift(found: Assessment) -> Grid:
    """Lays out the layers that drift most, by part of the data."""
    names = list(found.drift)
    worst = {
        layer: max((max(found.drift[name][layer]) for name in names if layer in found.drift[name]), default=0.0)
        for layer in found.drift["train"]
    }
    rows = []
    for layer in sorted(worst, key=lambda one: -worst[one])[:NUM_LAYERS]:
        row = [layer or "(the model)"]
        for name in names:
            shift, ratio = found.drift[name].get(layer, (math.nan, math.nan))
            row += [f"{shift:.2f}", f"{math.exp(min(ratio, 50)):.2f}"]
        rows.append(row)
    return Grid(["Layer", *(f"{name}, {what}" for name in names for what in ("mean", "variance"))], rows)


def lay_out_pictures(found: Assessment) -> list[dict[str, Any]]:
    """Returns rows of pictures with a title and, under each, what was predicted."""
    titles = {"test": "Known", "out-of-domain": "Out-of-domain"}
    return [
        {"title": f"{titles[part]}, {which} certain", "pictures": [_show(found, one) for one in pictures]}
        for part, both in found.pictures.items()
        for which, pictures in zip(("most", "least"), both, strict=True)
    ]


def _show(found: Assessment, picture: Picture) -> dict[str, Any]:
    pixels = picture.pixels.permute(1, 2, 0).numpy()  # (H, W, C)
    images = [_encode(pixels if pixels.shape[2] == 3 else pixels[:, :, 0], cmap="gray", vmin=0, vmax=1)]
    if picture.map is not None:
        highest = math.log(found.predictions["test"][found.chosen].probs.shape[1])  # the same for all pictures
        images.append(_encode(picture.map.numpy(), cmap="viridis", vmin=0, vmax=highest))
    what = "std" if found.link == "identity" else "entropy"
    value = picture.uncertainty
    lines = [f"{what} {value:.3g}" if value >= 0.0005 or found.link == "identity" else f"{what} < 0.0005"]
    if picture.predicted:
        names = [_name(found, one) for one in (picture.label, picture.predicted) if one]
        lines.insert(0, " → ".join(names))
    return {"images": images, "lines": lines, "index": picture.index}


def _name(found: Assessment, text: str) -> str:
    """Returns a class, or several, by name where there are names."""
    if found.link == "identity" or not found.class_names or text == "none":
        return text
    return ", ".join(found.class_names[int(one)] for one in text.split())


def _encode(array: Any, **options: Any) -> str:
    buffer = io.BytesIO()
    imsave(buffer, array, format="png", **options)
    return embed(buffer.getvalue(), "png")


def _list_keys(found: Assessment) -> list[str]:
    return [key for key in METRICS if any(key in method.scores for method in found.methods.values())]


def _write(estimate: Estimate | None, digits: int, sign: str = "") -> str:
    """Writes a number and its interval, where it has one.

    Examples:
        >>> _write(Estimate(0.123, 0.1, 0.2), 2)
        '0.12 (0.10 to 0.20)'
    """
    if estimate is None:
        return "—"
    value, low, high = (f"{one:{sign}.{digits}f}" for one in (estimate.value, estimate.low, estimate.high))
    return value if math.isnan(estimate.low) else f"{value} ({low} to {high})"
