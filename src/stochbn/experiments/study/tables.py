"""The numbers of the study → tables in Markdown. Pure functions."""

import numpy as np

from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS
from stochbn.experiments.methods import METHODS
from stochbn.experiments.report.scores import METRICS
from stochbn.experiments.report.tables import Grid, differences_table, score_text, to_markdown
from stochbn.experiments.study.results import Quality, Results, Row

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
            cells += [
                _text(quality, "ece", 2, factor=100),
                f"{100 * quality.chance.mean:.2f}, {100 * quality.chance.high:.2f}",
            ]
        rows.append([*cells, _text(row.plain, "brier", 4), f"{np.mean(row.temperatures):.2f}", _spread_text(row)])
    return Grid([*header, "by chance", "Brier", "T", "spread"], rows)


def detection_table(results: Results) -> Grid:
    """Lays out how well each method's uncertainty detects out-of-domain inputs."""
    columns = [metric for metric in METRICS if "out-of-domain" in metric.parts]
    rows = [
        [
            METHODS[key].label,
            *(_text(row.plain, metric.key, metric.digits) for metric in columns),
            _text(row.tempered, "auroc_entropy", 4),
        ]
        for key, row in results.methods.items()
    ]
    return Grid(["Method", *(metric.label for metric in columns), "AUROC, entropy, with temperature"], rows)


def draws_table(results: Results) -> Grid:
    """Lays out the scores of the first draws of some methods."""
    rows = [
        [
            METHODS[key].label,
            f"{first.num_samples}",
            *(f"{factor * first.scores[score]:.{digits}f}" for score, _, factor, digits in _SOME),
        ]
        for key, found in results.first_draws.items()
        for first in found
    ]
    return Grid(["The first draws", "", *(label for _, label, _, _ in _SOME)], rows)


def limits_table(results: Results) -> Grid:
    """Lays out what choosing a spread and a temperature on test data would have given."""
    header = ["Chosen on test data, as a limit", "networks", "NLL, best spread", "best temperature", "best of both"]
    rows = [
        [
            METHODS[key].label,
            f"{limit.num_networks}",
            *(f"{nll:.4f}" for nll in (limit.nll, limit.nll_temperature_only, limit.nll_temperature)),
            f"{limit.auroc:.4f}",
        ]
        for key, limit in results.limits.items()
    ]
    return Grid([*header, "AUROC, best spread"], rows)


def first_networks_table(results: Results) -> Grid:
    """Lays out some scores of the first networks alone, so that methods drawn for those only can be compared."""
    rows = []
    for key, row in results.methods.items():
        if METHODS[key].members is None:
            count = results.sizes.num_compared
            seeds, each = row.seeds[:count], row.plain.each[:count]
            means = (factor * np.mean([one[score] for one in each]) for score, _, factor, _ in _SOME)
            cells = [f"{mean:.{digits}f}" for mean, (_, _, _, digits) in zip(means, _SOME, strict=True)]
            rows.append([f"{METHODS[key].label}, seeds {', '.join(map(str, seeds))}", *cells])
    return Grid(["On the first networks alone", *(label for _, label, _, _ in _SOME)], rows)


def corruptions_table(results: Results) -> Grid:
    """Lays out NLL and ECE by the strength of corruption, the mean over its kinds."""
    rows = []
    for key, row in results.methods.items():
        for label, found in (
            (METHODS[key].label, row.plain.corruptions),
            (METHODS[key].tempered().label, row.tempered.corruptions),
        ):
            if found:
                cells = []
                for strength in STRENGTHS:
                    each = [found[f"{kind} {strength}"] for kind in CORRUPTIONS]
                    nll, ece = (np.mean([one[score] for one in each]) for score in ("nll", "ece"))
                    cells.append(f"{nll:.3f}; {100 * ece:.1f}")
                rows.append([label, *cells])
    return Grid(["NLL; ECE, %, by strength", *map(str, STRENGTHS)], rows)


def distances_table(results: Results) -> Grid:
    """Lays out how far each method is from exact inference."""
    header = ["Against exact inference", "total variation, test", "total variation, out-of-domain"]
    rows = [
        [
            METHODS[key].label,
            f"{found.total_variation_test:.4f}",
            f"{found.total_variation_out_of_domain:.4f}",
            f"{found.entropy_correlation:.3f}",
            f"{found.nll:.4f}",
            f"{found.auroc_entropy:.3f}",
        ]
        for key, found in results.distances.items()
    ]
    return Grid([*header, "entropy correlation", "NLL", "AUROC, entropy"], rows)


def cost_table(results: Results) -> Grid:
    """Lays out what each method costs."""
    rows = [
        [
            METHODS[key].label,
            f"{row.cost.passes}",
            f"{row.cost.train_hours:.2f}",
            f"{row.cost.weights_bytes / 1e6:.2f}",
            f"{row.cost.statistics_bytes / 1e3:.0f}",
        ]
        for key, row in results.methods.items()
    ]
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


def _text(quality: Quality, key: str, digits: int, factor: float = 1) -> str:
    found = quality.scores.get(key)
    if found is None:
        return "—"
    return score_text(found.times(factor), digits)


def _spread_text(row: Row) -> str:
    """Returns the mean of the spreads that were chosen, by layer if each has its own; 1 for the fitted one."""
    spreads = [choice.spread for choice in row.choices]
    if not spreads:
        return "1" if row.cost.statistics_bytes else "—"
    by_layer = [list(spread.values()) if isinstance(spread, dict) else [spread] for spread in spreads]
    return ", ".join(f"{mean:.2f}" for mean in np.mean(by_layer, axis=0))
