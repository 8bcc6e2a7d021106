import io

import pytest
from rich.console import Console

from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.differences import Difference, Interval
from stochbn.experiments.report.report import read_files
from stochbn.experiments.report.scores import score
from stochbn.experiments.report.tables import (
    Grid,
    differences_table,
    print_grid,
    rounded,
    table_1,
    table_2,
    to_markdown,
    training_table,
)


def test_markdown_keeps_its_columns():
    text = to_markdown(Grid(["a", "b"], [["p(y | x)", "1"]]))
    assert text.splitlines()[-1] == r"| p(y \| x) | 1 |"


def test_the_best_of_each_row_is_bold(results):
    scores = score(results)
    grid = table_2(results, scores)
    assert grid.header[3] == "Deep Ensembles (3 of 6 networks)"
    row = next(i for i, cells in enumerate(grid.rows) if cells[0] == "NLL")
    values = [round(found["nll"].value, 4) for found in scores.values()]
    assert {column for at, column in grid.bold if at == row} == {
        i for i, value in enumerate(values, 1) if value == min(values)
    }


def test_one_seed_has_no_deviation(make_files, tmp_path):
    results = collect(read_files(make_files(tmp_path, num_plain=1, num_dropout=0, size=80))[0])
    ours = table_1(results, score(results), {})
    assert not any("±" in cell for row in ours.rows for cell in row)
    assert [row[:2] for row in ours.rows] == [["One network", "1 of 6"], ["SBN", "1 of 6"]]


def test_networks_of_an_ensemble_are_together(results):
    grid = table_1(results, score(results), {})
    assert [row[:2] for row in grid.rows[1:3]] == [["SBN", "3 of 6"], ["Deep Ensembles", "3 of 6 together"]]


def test_intervals_without_zero_are_bold():
    found = Difference("last", "ensemble", {"nll": Interval(-0.5, -0.6, -0.4), "ece": Interval(0.01, -0.01, 0.03)})
    grid = differences_table([found], {"last": "Last layer", "ensemble": "Deep Ensembles"})
    assert grid.header[1:] == ["NLL", "ECE, %"]
    assert grid.rows == [
        ["Last layer − Deep Ensembles", "-0.5000 (-0.6000 to -0.4000)", "+1.00 (-1.00 to +3.00)"],
    ]
    assert grid.bold == {(0, 1)}
    assert differences_table([], {}).rows == []


def test_training_loss_beside_that_on_held_out_data(cifar5, lenet5):
    files, _ = read_files(cifar5)
    results = collect(files)
    grid = training_table(files, results)
    nll = score(results)
    assert [row[0] for row in grid.rows] == [
        *(f"vgg11 seed {i}" for i in range(3)),
        *(f"vgg11-dropout seed {i}" for i in range(2)),
    ]
    assert grid.rows[0][1:3] == ["0.0400", "0.0200"]
    assert sum(float(row[3]) for row in grid.rows[:3]) / 3 == pytest.approx(nll["plain"]["nll"].value, abs=1e-4)
    assert sum(float(row[3]) for row in grid.rows[3:]) / 2 == pytest.approx(nll["dropout"]["nll"].value, abs=1e-4)
    files, _ = read_files(lenet5)
    assert training_table(files, collect(files)).rows == []  # earlier files do not have it


def test_floats_are_rounded_wherever_they_are():
    found = rounded({"a": [0.12345678, (1, 2.00000001)], "b": "0.12345678"})
    assert found == {"a": [0.123457, [1, 2.0]], "b": "0.12345678"}


def test_a_table_on_the_terminal():
    console = Console(file=io.StringIO(), width=80)
    print_grid(console, Grid(["Title", "a"], [["row", "1"]]))
    assert [line.split() for line in console.file.getvalue().splitlines() if line.strip(" ─")] == [
        *(["Title"], ["a"], ["row", "1"])
    ]
