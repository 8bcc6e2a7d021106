"""The benchmark runs and its arithmetic is right. Nothing here looks at how long anything takes."""

import json
import math
import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import stochbn
from benchmarks import (
    ablation,
    contenders,
    draws,
    last_layer,
    limits,
    measure,
    memory,
    scale,
    stages,
    targets,
    tuning,
)
from benchmarks.__main__ import main
from benchmarks.contenders import (
    ENSEMBLE,
    EXPORTED,
    LAST_LAYER,
    OURS,
    PAPER_LOOP,
    PLAIN,
    PREPARED,
    PREPARED_COMPILED,
    STORED,
    Run,
)
from benchmarks.stages import Settings
from benchmarks.subjects import Subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject("lenet5")


def runs_of(subject: Subject, x: Tensor, num_draws: int) -> dict[str, Run]:
    chosen = [c for c in contenders.CONTENDERS if not c.compiles and c is not contenders.LAPLACE]
    return {c.name: run for c in chosen if (run := c.prepare(subject, x, num_draws)) is not None}


@pytest.mark.slow
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure_apart", memory.measure_here)  # the next test has the process
    monkeypatch.setattr(stages, "interleave", partial(measure.interleave, shortest=0.0))
    with pytest.raises(SystemExit) as done:
        main(["--quick", "--networks", "lenet5", "--rows", "1", "--samples", "2", "--output", str(tmp_path)])
    assert not done.value.code
    printed = capsys.readouterr().out
    assert "LeNet-5: time / time of S plain passes" in printed
    assert all(title in printed for title in ("Growth", "Peak memory", "Targets", "GEMM rate"))
    text = (tmp_path / "bench.json").read_text()
    results = json.loads(text)
    assert not re.search(r'"/|\\\\', text)  # no absolute path
    assert results["command"] == "python -m benchmarks --quick"
    assert {"commit", "date", "versions", "machine", "settings", "gemm_flops", "targets"} <= results.keys()
    assert results["machine"]["threads"] == torch.get_num_threads()
    assert results["versions"]["torch"] == torch.__version__
    [cell] = results["cells"]
    assert (cell["network"], cell["rows"], cell["samples"]) == ("lenet5", 1, 2)
    for name in (PLAIN.name, OURS.name, PAPER_LOOP.name, STORED.name, ENSEMBLE.name):
        found = cell["contenders"][name]
        assert len(found["times"]) == 2
        assert found["ratio"]["q1"] <= found["ratio"]["median"] <= found["ratio"]["q3"]
    assert cell["contenders"][PLAIN.name]["ratio"]["median"] == 1
    assert cell["missing"][PREPARED_COMPILED.name] == "left out"
    assert [len(results[key]) for key in ("fit", "growth", "memory")] == [1, 1, 1]
    assert all(found["peak"] >= found["before"] > 0 for found in results["memory"][0]["measured"])
    assert (tmp_path / "bench.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "bench.svg").read_text()


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    found = memory.measure_apart("lenet5", num_rows=2, num_samples=2)
    assert found["peak"] >= found["before"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--networks", "lenet6"], "Expected networks among lenet5"),
        (["--rows", "1;2"], "Expected --rows as whole numbers"),
        (["--samples", "1"], "whole numbers of at least 2"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_default_covers_what_it_should() -> None:
    settings = Settings()
    assert settings.rows == (1, 16, 128)
    assert settings.samples == (10, 50)
    assert settings.repeats >= 7
    assert settings.memory_samples == (10, 100, 1000)


def test_summary_is_median_and_quartiles() -> None:
    assert measure.summarise([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}
    assert measure.summarise([2.0]) == {"median": 2.0, "q1": 2.0, "q3": 2.0}


def test_ratios_are_of_one_round() -> None:
    # The machine is ten times as slow in the second round, which the ratios do not see.
    assert measure.ratios([2.0, 20.0, 3.0], [4.0, 40.0, 4.0]) == [0.5, 0.5, 0.75]
    with pytest.raises(ValueError, match="zip"):
        measure.ratios([1.0], [1.0, 2.0])


def test_every_round_runs_everything_once() -> None:
    order: list[str] = []
    times = measure.interleave({n: lambda n=n: order.append(n) for n in "abc"}, repeats=5, shortest=0.0)  # type: ignore[misc]
    assert order[:3] == ["a", "b", "c"]  # the warm-up
    rounds = [tuple(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert len(rounds) == 5
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(found) for name, found in times.items()} == {"a": 5, "b": 5, "c": 5}


@pytest.mark.parametrize(
    ("num_draws", "cost", "expected"),
    [(50, 0.001, 50), (50, 0.04, 50), (50, 0.1, 20), (50, 0.25, 8), (50, 0.6, 3), (50, 5.0, 2), (2, 5.0, 2)],
)
def test_draws_fit_the_budget(num_draws: int, cost: float, expected: int) -> None:
    assert measure.affordable(num_draws, cost, budget=2.0) == expected


def test_contenders_agree_with_the_reference(subject: Subject) -> None:
    x = subject.images(3)
    runs = runs_of(subject, x, 4)
    differences = contenders.check(subject, x, 4, runs)
    assert differences.keys() == {c.name for c in (OURS, PREPARED, EXPORTED, STORED, ENSEMBLE, PAPER_LOOP)}
    shapes = {name: tuple(run().shape) for name, run in runs.items()}
    assert shapes.pop(PLAIN.name) == (3, 10)
    assert shapes.pop(ENSEMBLE.name) == (6, 3, 10)
    assert shapes.pop(EXPORTED.name) == shapes.pop(LAST_LAYER.name) == (1, 3, 10)  # the mean
    assert set(shapes.values()) == {(4, 3, 10)}


def test_check_is_not_empty(subject: Subject) -> None:
    x = subject.images(3)
    draws = contenders.samples(subject.model, subject.stats, x, num_samples=8)
    assert draws.log().std(0).mean() > 100 * 1e-4  # draws differ by far more than the tolerance
    with pytest.raises(RuntimeError, match=r"Expected 'predict' to agree .* LeNet-5, N = 3"):
        contenders.check(subject, x, 8, {OURS.name: lambda: draws.roll(1, 0)})


def test_papers_loop_draws_from_the_fit(subject: Subject) -> None:
    x = subject.images(2)
    drawn = contenders.paper_loop(subject, x, 400)()
    ours = contenders.samples(subject.model, subject.stats, x, num_samples=400)
    error = ((drawn.var(0) + ours.var(0)) / 400).sqrt()
    assert ((drawn.mean(0) - ours.mean(0)).abs() < 5 * error).all()
    torch.testing.assert_close(drawn.std(0), ours.std(0), rtol=0.25, atol=0)  # 4 standard errors


def test_flops_of_lenet5(subject: Subject) -> None:
    first = 2 * 20 * 24 * 24 * 25
    rest = 2 * (50 * 8 * 8 * 25 * 20 + 800 * 500 + 500 * 10)
    assert limits.count_flops(subject.model, subject.images(2)) == (2 * (first + rest), 2 * first)
    assert limits.needed_flops(100, 30, 10) == 30 + 10 * 70


def cell_with(ratio: float, seconds: float) -> dict[str, object]:
    found = {"seconds": {"median": seconds}, "ratio": {"median": ratio}}
    flops = {"pass": 100, "shared": 20, "needed": 20 + 50 * 80}
    return {"network": "vgg11", "rows": 1, "samples": 50, "flops": flops, "contenders": {OURS.name: found}}


def test_targets_are_judged() -> None:
    cells = [cell_with(0.25, 2.0)]
    targets.add_fractions(cells, rate=4020.0)
    fit = {"network": "lenet5", "fit_to_passes": {"median": 1.15}, "ghost_to_fit": {"median": 0.71}}
    case = {"network": "lenet5", "rows": 16, "measured": [{"samples": 10}, {"samples": 1000}], "last_to_first": 1.05}
    verdicts = targets.judge({"cells": cells, "fit": [fit], "memory": [case]})
    assert [(v["measured"], v["met"]) for v in verdicts] == [
        (0.25, False),
        (0.5, True),
        (1.15, True),
        (0.71, False),
        (1.05, True),
    ]
    assert "at_least" in verdicts[1]
    assert math.isclose(verdicts[0]["at_most"], 0.24)


def test_only_ours_at_50_draws_have_a_target() -> None:
    assert targets.ratio_target("lenet5", 1, 50, OURS.name) == 0.15
    assert targets.ratio_target("lenet5", 1, 50, PREPARED_COMPILED.name) == 0.15
    assert targets.ratio_target("lenet5", 1, 10, OURS.name) is None
    assert targets.ratio_target("lenet5", 1, 50, PLAIN.name) is None
    assert targets.ratio_target("resnet50", 1, 50, OURS.name) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, within the compiler
def test_what_is_timed_in_the_last_layer(subject: Subject) -> None:
    """The draws are of the last layer, and an ensemble of copies is the network."""
    stats = subject.last_layer
    assert list(stats.layers) == ["fc.norm"]
    assert stats.conditioned
    runs = last_layer.contenders(subject, 3)
    ours = ["predict", "Predictor", "Predictor, compiled", "ONNX Runtime"]
    assert list(runs) == ["one plain pass", "six networks", *ours]
    assert runs["one plain pass"]() is None
    (x,) = runs["six networks"].args
    torch.testing.assert_close(runs["six networks"]().probs, stochbn.predict(subject.model, None, x).probs)
    expected = stochbn.predict(subject.model, stats, x, num_samples=last_layer.NUM_MINI_BATCHES)
    for name in ours[:3]:
        torch.testing.assert_close(runs[name]().probs, expected.probs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(runs["ONNX Runtime"]()[0]), expected.probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", draws.SCHEMES)
def test_draws_take_their_noise_from_the_scheme(subject: Subject, name: str) -> None:
    scheme, _ = draws.SCHEMES[name]
    found = draws.sample(subject.stats, scheme, 64, seed=3).buffers["fc.norm.running_mean"]
    usual = subject.stats.sample(64, seed=3).buffers["fc.norm.running_mean"]
    assert torch.equal(found, usual) == (name == "antithetic")
    fitted = subject.stats.layers["fc.norm"].r_mu
    standardised = (found - fitted.loc) / fitted.scale  # (S, C)
    assert standardised.mean().abs() < 5 / math.sqrt(standardised.numel())
    torch.testing.assert_close(standardised.std().item(), 1.0, rtol=0.05, atol=0)


@pytest.mark.parametrize("only_last", [False, True])
def test_what_is_switched_off_changes_no_result(subject: Subject, only_last: bool) -> None:
    runs = ablation.contenders(subject, 16, only_last=only_last)
    assert runs.keys() == ablation.PATCHES.keys()
    expected = runs.pop(ablation.WHOLE)().probs
    for run in runs.values():
        torch.testing.assert_close(run().probs, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
@pytest.mark.filterwarnings("ignore:Held-out data with")
@pytest.mark.filterwarnings("ignore:The model has seen")  # after one epoch
def test_tuning_is_measured_for_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "RECIPE", tuning.RECIPE.vary(epochs=1))
    rows = list(tuning.measure(tuning.learn_digits("easy", 0)))
    assert [row["rule"] for row in rows] == 2 * ["plain", "fitted", "lowest", "tune"]
    assert all(row["epistemic"] > 0 for row in rows if row["rule"] != "plain")
    assert rows[0]["difference_to_plain"] == 0
    assert all(row["verdict"] for row in rows if row["rule"] == "tune")
    faulty = {"rule": "tune", "nll": 1.0, "epistemic": 0.0, "collapsed": True, "worse": True, "says": ["plain"]}
    faulty |= {"worse_where_tuned": True, "auroc": 0.5}
    summary = tuning.summarise([faulty, faulty | {"says": ["narrower"]}])["tune"]
    assert (summary["collapsed"], summary["collapsed_in_silence"], summary["worse_in_silence"]) == (2, 1, 1)
    assert summary["worse_where_tuned_in_silence"] == 1


def test_one_process_and_two_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(scale.__file__).parents[1]), *filter(None, sys.path)]))
    work = scale.Work(width=0.1, num_batches=4, batch_size=8, mini_batch_size=4, num_samples=2, repeats=1)
    rows = scale.measure(work)
    assert [(row["task"], row["processes"]) for row in rows] == [(t, n) for t in scale.TASKS for n in (1, 2)]
    for row in rows:
        assert row["efficiency"] == pytest.approx(row["speed_up"]["median"] / row["processes"])
        assert (row["bytes_sent"] > 0) == (row["processes"] == 2)
    kept, moments = rows[3]["bytes_sent"], rows[1]["bytes_sent"]
    assert kept > moments  # the mini-batches that are kept, beside the moments
