from dataclasses import replace

import numpy as np

from stochbn.experiments.methods import METHODS
from stochbn.experiments.study import tables
from stochbn.experiments.study.results import Results


def test_every_table_is_in_the_text(results: Results) -> None:
    text = tables.describe(results)
    assert all(f"| {METHODS[key].label} |" in text for key in (*results.methods, "exact"))
    assert text.count("\n| --- |") == 9
    assert "Last layer, tuned − Deep Ensembles |" in text
    assert "Last layer, tuned − One network + temperature |" in text
    assert "`stochbn study tiny --samples 6`" in text
    assert "16 real mini-batches in the last BatchNorm layer" in text


def test_every_row_has_all_columns(results: Results) -> None:
    for make in (
        *(tables.quality_table, tables.detection_table, tables.draws_table, tables.limits_table),
        *(tables.first_networks_table, tables.corruptions_table, tables.distances_table, tables.cost_table),
    ):
        grid = make(results)
        assert grid.rows
        assert {len(row) for row in grid.rows} == {len(grid.header)}


def test_quality_has_scores_temperature_and_spread(results: Results) -> None:
    grid = tables.quality_table(results)
    rows = {row[0]: dict(zip(grid.header, row, strict=True)) for row in grid.rows}
    row, found = rows["Tuned SBN"], results.methods["tuned"]
    assert row["Error, %"].startswith(f"{found.plain.scores['error_percent'].value:.2f} ±")
    assert row["T"] == f"{np.mean(found.temperatures):.2f}"
    assert row["spread"] == f"{np.mean([choice.spread for choice in found.choices]):.2f}"
    assert (rows["SBN"]["spread"], rows["One network"]["spread"]) == ("1", "—")
    assert rows["Deep Ensembles + SBN"]["Networks"] == "3 together"
    ece = found.plain.scores["ece"]
    assert grid.rows[list(results.methods).index("tuned")][5] == f"{100 * ece.value:.2f} ± {100 * ece.std:.2f}"


def test_first_networks_are_means_over_them(results: Results) -> None:
    rows = {row[0]: row for row in tables.first_networks_table(results).rows}
    each = results.methods["sbn"].plain.each
    assert rows["SBN, seeds 0, 1"][1] == f"{(each[0]['nll'] + each[1]['nll']) / 2:.4f}"
    assert not any("Ensembles" in label for label in rows)


def test_corruptions_are_means_over_their_kinds(results: Results) -> None:
    rows = {row[0]: row for row in tables.corruptions_table(results).rows}
    found = results.methods["last"].tempered.corruptions
    losses = [found[f"{kind} 2"]["nll"] for kind in ("rotation", "noise", "blur")]
    assert rows["Last layer + temperature"][2].startswith(f"{np.mean(losses):.3f};")


def test_without_the_last_layer_it_is_not_explained(results: Results) -> None:
    methods = {key: row for key, row in results.methods.items() if key != "last"}
    assert not any(note.startswith("Last layer") for note in tables.describe_notes(replace(results, methods=methods)))
