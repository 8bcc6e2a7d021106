"""What a reader must know beside the numbers: the title, how they came about, what is missing. Pure functions."""

from collections.abc import Sequence
from typing import Any

from stochbn.experiments.files import File
from stochbn.experiments.methods import METHODS
from stochbn.experiments.report.paper import Claim
from stochbn.experiments.report.scores import Chosen, Results, Scored, Scores
from stochbn.experiments.training.recipes import EXPERIMENTS

_NAMES = {
    "lenet5": "LeNet-5",
    "vgg11": "VGG-11",
    "resnet18": "ResNet-18",
    "mnist": "MNIST",
    "notmnist": "notMNIST",
    "cifar5": "CIFAR5",
    "digits": "Digits",
}
_DIAGNOSTICS = (
    *("network", "command", "commit", "versions", "bound", "by_samples", "by_batch_size", "num_curve"),
    *("statistics", "gallery"),
)


def describe_title(results: Results) -> str:
    """Returns the networks and the data, as a title."""
    header = results.header
    network = _NAMES.get(header["experiment"], header["experiment"])
    data, other = (_NAMES.get(header[key], header[key]) for key in ("data", "out_of_domain"))
    known = network if data == network else f"{network}, {data}"
    if not results.has_out_of_domain:
        return known
    return f"{known} against {'its hidden classes' if other == data else other}"


def describe_findings(results: Results, scores: Scores, claims: Sequence[Claim]) -> list[str]:
    """Returns what was found, in sentences: what SBN does to one network, what predicts best, which claims hold."""
    found = []
    if "plain" in scores and "sbn" in scores:
        shown = {"nll": "NLL goes from {:.4f} to {:.4f}", "error_percent": "error from {:.2f} % to {:.2f} %"}
        shown["auroc_entropy"] = "AUROC against out-of-domain inputs from {:.3f} to {:.3f}"
        parts = [
            text.format(*(scores[method][key].value for method in ("plain", "sbn")))
            for key, text in shown.items()
            if key in scores["plain"]
        ]
        found.append(f"With SBN one network's {', its '.join(parts[:-1])}, and its {parts[-1]}.")
    recommended = next((key for key in ("last-tuned", "last") if key in scores), None)
    if recommended and "auroc_entropy" in scores[recommended]:
        found.append(_describe_recommended(recommended, scores))
    best = min(scores, key=lambda key: scores[key]["nll"].value)
    found.append(f"The lowest NLL, {scores[best]['nll'].value:.4f}, is that of {results.methods[best].label}.")
    if checked := [claim for claim in claims if claim.holds is not None]:
        num_held = sum(claim.holds is True for claim in checked)
        found[-1] += f" {num_held} of {len(checked)} claims that could be checked hold here."
    return found


def _describe_recommended(key: str, scores: Scores) -> str:
    """Says what draws in the last layer do for one network, and where something simpler does as well."""
    nll, auroc = (f"{scores[key][name].value:{form}}" for name, form in (("nll", ".4f"), ("auroc_entropy", ".3f")))
    sentence = (
        f"Draws in its last layer alone, which the guide recommends, have an NLL of {nll} and an AUROC of {auroc}."
    )
    tempered = scores.get("plain+temperature")
    if tempered is not None:
        simple, other = tempered["nll"].value, tempered["auroc_entropy"].value
        sentence += f" A temperature alone has {simple:.4f} and {other:.3f}"
        sentence += ": by the NLL, the simpler method does here." if simple <= scores[key]["nll"].value else "."
    return (
        f"{sentence} When draws do not help: if only the NLL matters, a temperature may do, and a network that is not "
        "too sure of itself gains little."
    )


def describe_provenance(files: Sequence[File], results: Results) -> dict[str, Any]:
    """Returns what made the numbers: commands, commits, versions, seeds, counts."""
    headers = [file.header for file in files]
    first = next(iter(results.methods.values())).outputs[0]
    seeds: dict[str, list[int]] = {}
    for header in headers:
        seeds.setdefault(header["recipe"], []).append(header["seed"])
    return {
        "command": sorted({header["command"] for header in headers}),
        "commit": sorted({header["commit"] for header in headers}),
        "versions": sorted({", ".join(f"{k} {v}" for k, v in header["versions"].items()) for header in headers}),
        "seeds": seeds,
        "epochs": {header["recipe"]: header["epochs"] for header in headers},
        "batch_size": {header["recipe"]: header["batch_size"] for header in headers},
        "num_samples": results.header["num_samples"],
        "draw_seed": results.header["draw_seed"],
        "num_test": len(results.labels),
        "num_out_of_domain": len(first["out-of-domain"].probs) if results.has_out_of_domain else 0,
        "train_hours": round(sum(header["train_seconds"] for header in headers) / 3600, 2),
    }


def describe_notes(results: Results, *, has_paper: bool) -> list[str]:
    """Returns what a reader of the tables must know."""
    methods = results.methods
    notes = []
    if any(len(scored.outputs) > 1 for scored in methods.values()):
        notes.append(
            "Methods of one network: the mean over networks trained from different seeds, scored one by one, ± the "
            "standard deviation over these seeds."
        )
    if "ensemble" in methods:
        notes.append(_describe_ensemble(methods["ensemble"]))
    else:
        notes.append("Deep Ensembles need at least two networks without dropout; there are fewer.")
    if "tuned" in methods or "dropout+tuned" in methods:
        notes.append("Tuned SBN: its spread was chosen for each network by the NLL on validation data.")
    if results.is_undecided:
        notes.append(
            "Validation data with fewer than ten mistakes choose neither a spread nor a temperature, so methods that "
            "would have one are left out."
        )
    notes += [_describe_choice(scored, scored.chosen) for scored in methods.values() if scored.chosen]
    if has_paper:
        notes.append(
            "“Within ±” compares with the paper's ±, and half a unit of its last digit for rounding. The paper prints "
            "no number for one plain network. Its median entropies are read off its plots, to about 0.02."
        )
    if "options" in results.header:
        notes.append(f"The networks were trained with {results.header['options']} in place of the experiment's own.")
    notes += _describe_missing(results)
    if not results.has_out_of_domain:
        notes.append("The files hold no out-of-domain predictions, so everything that needs them is left out.")
    return notes


def summarise(diagnostics: File | None) -> dict[str, Any]:
    """Returns the numbers of the diagnostics, the distances of a layer's channels as median, maximum and count."""
    if diagnostics is None:
        return {}
    numbers = {key: diagnostics.header[key] for key in _DIAGNOSTICS if key in diagnostics.header}
    if "statistics" in numbers:
        distances = {}
        for layer in numbers["statistics"]["layers"]:
            both = diagnostics.tensors[f"statistics/{layer}/ks"].double()  # (2, C)
            finite = [row[~row.isnan()] for row in both]
            distances[layer] = {
                symbol: {"median": row.quantile(0.5).item(), "max": row.max().item(), "num_channels": len(row)}
                for symbol, row in zip(("mean", "log variance"), finite, strict=True)
                if len(row)
            }
        numbers["statistics"] = {**numbers["statistics"], "ks": distances}
    return numbers


def _describe_ensemble(ensemble: Scored) -> str:
    note = f"Deep Ensembles: the ensemble of all {len(ensemble.seeds)} networks"
    if ensemble.std_over:
        note += (
            f", ± the standard deviation over {ensemble.std_over} that leave one network out. Those share members, "
            "so this ± understates how ensembles trained apart differ"
        )
    return note + "."


def _describe_choice(scored: Scored, chosen: Chosen) -> str:
    what = "spreads" if scored.method.drawing.tuned else "temperatures"
    values = ", ".join(f"{value:.2f}" for value in chosen.values)
    end = " The end of what was tried is among them: a better one may lie beyond." if chosen.has_end else ""
    return f"{scored.label}: {what} chosen on validation data, {values}.{end}"


def _describe_missing(results: Results) -> list[str]:
    """Returns what an experiment still lacks."""
    experiment = EXPERIMENTS.get(results.header["experiment"])
    if experiment is None:
        return []
    notes = []
    for key, wanted in (("plain", experiment.num_seeds), ("dropout", experiment.num_dropout_seeds)):
        label, found = METHODS[key].label, len(results.methods[key].seeds) if key in results.methods else 0
        if found < wanted:
            notes.append(f"Not finished: {label} has {found} of the {wanted} networks of this experiment.")
    return notes
