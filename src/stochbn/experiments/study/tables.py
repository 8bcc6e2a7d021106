"""The numbers of the study → tables in Markdown. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.methods import METHODS
from stochbn.experiments.report.scores import METRICS, mean_scores
from stochbn.experiments.report.tables import differences_table, score_text, to_markdown
from stochbn.experiments.study.results import Quality, Results, Row
from stochbn.pages.page import Grid

# Some scores, with their column, a factor, and digits.
_SOME = (
    ("nll", "NLL", 1, 4),
    ("ece", "ECE, %", 100, 2),
    ("entropy_out_of_domain", "Median entropy, out-of-domain", 1, 3),
    ("auroc_entropy", "AUROC, entropy", 1, 4),
)


def describe(results: Results) -> str:
    """Returns all tables in Markdown, and notes on them."""
    labels = {one.key: one.label for method in METHODS.values() for one in (method, method.tempered())}
    tables = (
        quality_table(results),
        detection_table(results),
        differences_table(results.differences, labels),
        draws_table(results),
        limits_table(results),
        first_networks_table(results),
        corruptions_table(results),
        distances_table(results),
        cost_table(results),
    )
    return "\n\n".join([*map(to_markdown, tables), *describe_notes(results)]) + "\n"


def quality_table(results: Results) -> Grid:
    """Lays out error, NLL, calibration, temperature and spread of every method, without and with the temperature."""
    header = ["Method", "Networks", "Error, %", "NLL", "with temperature", "ECE, %", "by chance", "with temperature"]
    rows = []
    for key, row in results.methods.items():
        together = " together" if METHODS[key].members else ""
        cells = [METHODS[key].label, f"{len(row.seeds)}{together}", _text(row.plain, "error_percent", 2)]
        cells += [_text(quality, "nll", 4) for quality in (row.plain, row.tempered)]
        for quality in (row.plain, row.tempered):
            chance = f"{100 * quality.chance.mean:.2f}, {100 * quality.chance.high:.2f}"
            cells += [_text(quality, "ece", 2, factor=100), chance]
        rows.append([*cells, _text(row.plain, "brier", 4), f"{np.mean(row.temperatures):.2f}", _spread_text(row)])
    return Grid([*header, "by chance", "Brier", "T", "spread"], rows)


def detection_table(results: Results) -> Grid:
    """Lays out how well each method's uncertainty detects out-of-domain inputs."""
    metrics = [metric for metric in METRICS if "out-of-domain" in metric.parts]
    rows = []
    for key, row in results.methods.items():
        cells = [_text(row.plain, metric.key, metric.digits) for metric in metrics]
        rows.append([METHODS[key].label, *cells, _text(row.tempered, "auroc_entropy", 4)])
    return Grid(["Method", *(metric.label for metric in metrics), "AUROC, entropy, with temperature"], rows)


def draws_table(results: Results) -> Grid:
    """Lays out the scores of the first draws of some methods."""
    rows = [
        [METHODS[key].label, f"{first.num_samples}", *_some_text([first.scores])]
        for key, found in results.first_draws.items()
        for first in found
    ]
    return Grid(["The first draws", "", *(label for _, label, _, _ in _SOME)], rows)


def limits_table(results: Results) -> Grid:
    """Lays out what choosing a spread and a temperature on test data would have given."""
    columns = {
        "networks": "{.num_networks}",
        "NLL, best spread": "{.nll:.4f}",
        "best temperature": "{.nll_temperature_only:.4f}",
        "best of both": "{.nll_temperature:.4f}",
        "AUROC, best spread": "{.auroc:.4f}",
    }
    return _lay_out("Chosen on test data, as a limit", columns, results.limits)


def first_networks_table(results: Results) -> Grid:
    """Lays out some scores of the first networks alone, so that methods drawn for those only can be compared."""
    count, rows = results.sizes.num_compared, []
    for key, row in results.methods.items():
        if METHODS[key].members is None:
            seeds = ", ".join(map(str, row.seeds[:count]))
            rows.append([f"{METHODS[key].label}, seeds {seeds}", *_some_text(row.plain.each[:count])])
    return Grid(["On the first networks alone", *(label for _, label, _, _ in _SOME)], rows)


def corruptions_table(results: Results) -> Grid:
    """Lays out NLL and ECE by the strength of corruption, the mean over its kinds."""
    rows = []
    for key, row in results.methods.items():
        for method, quality in ((METHODS[key], row.plain), (METHODS[key].tempered(), row.tempered)):
            if quality.corruptions:
                rows.append([method.label, *(_corruption_text(quality, strength) for strength in STRENGTHS)])
    return Grid(["NLL; ECE, %, by strength", *map(str, STRENGTHS)], rows)


def distances_table(results: Results) -> Grid:
    """Lays out how far each method is from exact inference."""
    columns = {
        "total variation, test": "{.total_variation_test:.4f}",
        "total variation, out-of-domain": "{.total_variation_out_of_domain:.4f}",
        "entropy correlation": "{.entropy_correlation:.3f}",
        "NLL": "{.nll:.4f}",
        "AUROC, entropy": "{.auroc_entropy:.3f}",
    }
    return _lay_out("Against exact inference", columns, results.distances)


def cost_table(results: Results) -> Grid:
    """Lays out what each method costs."""
    rows = []
    for key, row in results.methods.items():
        sizes = f"{row.cost.weights_bytes / 1e6:.2f}", f"{row.cost.statistics_bytes / 1e3:.0f}"
        rows.append([METHODS[key].label, f"{row.cost.passes}", f"{row.cost.train_hours:.2f}", *sizes])
    return Grid(["Method", "Forward passes", "Training, h", "Weights, MB", "Statistics, kB"], rows)


def describe_notes(results: Results) -> list[str]:
    """Returns what a reader of the tables must know."""
    num, sizes = results.num_inputs, results.sizes
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    notes = [
        f"Made by `{results.command}`, commit {results.commit}, from draws at {' and '.join(results.drawn_at)}, "
        f"{versions}; S = {sizes.num_samples} draws of each network, seed {results.draw_seed}.",
        f"n: {num['test']} test, {num['out-of-domain']} out-of-domain, {num['validation']} validation images; "
        f"{num['noise 1']} test images for each corruption and strength.",
        "Networks: the mean over networks scored one by one, ± the standard deviation over them; for an ensemble, over "
        "those that leave one member out. Spreads and temperatures are chosen on validation data, for each network.",
        "ECE by chance: of labels drawn from the predicted probabilities, that is, if they are right; the mean, and "
        "what is exceeded in one case of twenty. It is higher where more inputs are unsure.",
        "Corruptions: the mean over rotation, noise and blur.",
        f"Against exact inference: {sizes.num_exact} test and as many out-of-domain inputs for each of its networks. "
        "Distances in its own row are what chance makes between two halves of its mini-batches.",
        "Differences: paired bootstrap over test and out-of-domain images, and over networks where a method is scored "
        f"on each, given the one ensemble; {sizes.num_resamples} resamples. An interval without 0 is in bold; among so "
        "many, one or two may be so by chance.",
        "Chosen on test data: what the best spread and temperature of each network, found by the test labels "
        f"themselves, would have given, with {sizes.num_samples} draws (of the last layer all). No method; a limit to "
        "what choosing them on other data can reach.",
    ]
    if "last" in results.methods:
        notes.append(
            f"Last layer: the statistics of {results.methods['last'].cost.passes} real mini-batches in the last "
            "BatchNorm layer alone, each drawn once, inputs counted in. The other layers keep to their running "
            "statistics."
        )
    return notes


def _lay_out(title: str, columns: Mapping[str, str], found: Mapping[str, Any]) -> Grid:
    """Lays out what was found for each method: a title above their labels, and by column an attribute's format."""
    rows = [[METHODS[key].label, *(cell.format(one) for cell in columns.values())] for key, one in found.items()]
    return Grid([title, *columns], rows)


def _some_text(each: Sequence[Mapping[str, float]]) -> list[str]:
    """Writes some scores, the mean over networks."""
    means = mean_scores(each)
    return [f"{factor * means[key]:.{digits}f}" for key, _, factor, digits in _SOME]


def _corruption_text(quality: Quality, strength: int) -> str:
    means = mean_scores([quality.corruptions[f"{kind} {strength}"] for kind in CORRUPTIONS])
    return f"{means['nll']:.3f}; {100 * means['ece']:.1f}"


def _text(quality: Quality, key: str, digits: int, factor: float = 1) -> str:
    found = quality.scores.get(key)
    return score_text(found and found.times(factor), digits)


def _spread_text(row: Row) -> str:
    """Returns the mean of the spreads that were chosen; 1 for the fitted one."""
    spreads = [choice.spread for choice in row.choices]
    if not spreads:
        return "1" if row.cost.statistics_bytes else "—"
    return f"{np.mean(spreads):.2f}"
