"""Draws of every method → every number of the study. Nothing here runs a network."""

from stochbn.experiments.files import PARTS, File, provenance
from stochbn.experiments.methods import Method
from stochbn.experiments.report.differences import compare
from stochbn.experiments.report.scores import METRICS, Output, Scored, mean_scores, measure, score_method
from stochbn.experiments.study.draws import Study, Task
from stochbn.experiments.study.evidence import ece_by_chance, measure_distances, measure_draws, measure_limits
from stochbn.experiments.study.results import Quality, Results, Row
from stochbn.experiments.study.scores import Draws, Entry, list_entries

_BY_DRAWS = ("sbn", "last-tuned", "last-both")  # whose first draws are scored
# Pairs whose differences are given with intervals.
COMPARISONS = (
    ("last-both", "ensemble"),
    ("last-both", "plain+temperature"),
    ("last-both", "last-tuned"),
    ("last-tuned", "ensemble"),
    ("last-tuned", "plain+temperature"),
    ("last-tuned", "real-tuned"),
    ("last+temperature", "ensemble"),
    ("real-tuned", "ensemble"),
    ("ensemble+last", "ensemble"),
    ("ensemble+last", "ensemble+temperature"),
    ("ensemble+last", "last-tuned"),
    ("ensemble+last+temperature", "ensemble"),
)


def measure_study(study: Study, files: dict[Task, File]) -> Results:
    """Returns every number of the study."""
    sizes, labels = study.sizes, study.splits["test"].labels
    entries = list_entries(files)
    rows: dict[str, Row] = {}
    scored: dict[str, Scored] = {}
    for entry in entries:
        rows[entry.method.key], found = _measure_entry(study, entry)
        scored |= {one.method.key: one for one in found}
        study.console.print(f"scored {entry.method.label}", highlight=False)
    pairs = [pair for pair in COMPARISONS if all(key in scored for key in pair)]
    units = {entry.method.key: entry.units for entry in entries}
    return Results(
        experiment=study.experiment.name,
        **provenance(study.command),
        drawn_at=tuple(sorted({file.header["commit"] for file in files.values()})),
        sizes=sizes,
        num_inputs={name: len(split) for name, split in (study.splits | study.corrupted).items()},
        metrics={metric.key: metric.meaning for metric in METRICS},
        methods=rows,
        differences=tuple(compare(scored, labels, pairs, sizes.num_resamples)),
        first_draws={key: measure_draws(units[key], labels) for key in _BY_DRAWS if key in units},
        limits=measure_limits(files, labels, sizes.num_compared),
        distances=measure_distances(files, labels),
        weights_sha256={
            f"{task.recipe.name} seed {task.seed}": file.header["weights_sha256"] for task, file in files.items()
        },
    )


def _measure_entry(study: Study, entry: Entry) -> tuple[Row, tuple[Scored, Scored]]:
    """Scores a method as it is and with a temperature, which validation data choose for each network or ensemble."""
    validation = study.splits["validation"].labels
    as_it_is = dict.fromkeys({*entry.units, *entry.replicas}, 1.0)
    has_one = entry.method.drawing.tempered  # in its draws, chosen with the spread
    chosen = as_it_is if has_one else {unit: unit.choose_temperature(validation) for unit in as_it_is}
    plain, tempered = _average(entry, entry.method, as_it_is), _average(entry, entry.method.tempered(), chosen)
    row = Row(
        seeds=entry.seeds,
        std_over=entry.std_over,
        plain=_score(study, entry, plain, as_it_is),
        tempered=_score(study, entry, tempered, chosen),
        temperatures=tuple(unit.tuned_temperature if has_one else chosen[unit] for unit in entry.units),
        choices=entry.choices,
        cost=entry.cost,
    )
    return row, (plain, tempered)


def _average(entry: Entry, method: Method, temperatures: dict[Draws, float]) -> Scored:
    outputs: dict[Draws, dict[str, Output]] = {
        unit: {part: unit.average(part, temperature) for part in PARTS} for unit, temperature in temperatures.items()
    }
    own = tuple(outputs[unit] for unit in entry.units)
    varied = own if entry.replicas is entry.units else tuple(outputs[unit] for unit in entry.replicas)
    return Scored(method, entry.seeds, own, varied, entry.std_over)


def _score(study: Study, entry: Entry, scored: Scored, temperatures: dict[Draws, float]) -> Quality:
    labels, corruptions = study.splits["test"].labels, {}
    for part, split in study.corrupted.items():
        if part in entry.units[0].files[0].tensors:
            each = [measure({"test": unit.average(part, temperatures[unit])}, split.labels) for unit in entry.units]
            corruptions[part] = {key: mean_scores(each)[key] for key in ("nll", "ece", "error_percent")}
    return Quality(
        scores=score_method(scored, labels),
        each=tuple(measure(output, labels) for output in scored.outputs),
        chance=ece_by_chance([output["test"].probs for output in scored.outputs]),
        corruptions=corruptions,
    )
