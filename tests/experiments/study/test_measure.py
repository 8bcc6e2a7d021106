import numpy as np
import pytest
import torch

import stochbn
from stochbn.experiments.files import File
from stochbn.experiments.methods import METHODS
from stochbn.experiments.study.draws import MAIN, Study, Task
from stochbn.experiments.study.measure import COMPARISONS
from stochbn.experiments.study.results import Results
from stochbn.experiments.study.scores import list_entries

STRENGTHS = [f"{kind} {strength}" for kind in ("rotation", "noise", "blur") for strength in range(1, 6)]


@pytest.mark.usefixtures("study")  # whose cache tells what the networks cost
def test_every_method_is_scored(files: dict[Task, File], results: Results) -> None:
    keys = [entry.method.key for entry in list_entries(files)]
    assert list(results.methods) == keys
    for key, row in results.methods.items():
        for quality in (row.plain, row.tempered):
            assert {"nll", "ece", "auroc_entropy"} < quality.scores.keys()
            assert len(quality.each) == (1 if METHODS[key].members else len(row.seeds))
        assert len(row.temperatures) == len(row.plain.each)
        everywhere = key in MAIN or METHODS[key].members in MAIN
        assert list(row.plain.corruptions) == list(row.tempered.corruptions) == (STRENGTHS if everywhere else [])


def test_scores_are_those_of_the_draws(study: Study, files: dict[Task, File], results: Results) -> None:
    members = [file for task, file in files.items() if task.method.key == "sbn"]
    labels = study.splits["test"].labels
    each = [stochbn.nll(file.tensors["test"].double().exp().mean(0), labels).item() for file in members]
    found = results.methods["sbn"].plain.scores["nll"]
    assert (found.value, found.std) == pytest.approx((np.mean(each), np.std(each, ddof=1)), rel=1e-3)
    for ensemble, member in (("ensemble+sbn", "sbn"), ("ensemble+last", "last")):
        drawn = [file.tensors["test"] for task, file in files.items() if task.method.key == member]
        whole = torch.cat(drawn).double().exp().mean(0)
        ours = results.methods[ensemble].plain.scores["nll"].value
        assert ours == pytest.approx(stochbn.nll(whole, labels).item(), rel=1e-3)
    assert results.num_inputs["test"] == len(labels) == 80
    assert results.num_inputs["out-of-domain"] == 60
    assert results.num_inputs["noise 3"] == 5


def test_corrupted_images_are_scored_by_their_own_labels(
    study: Study, files: dict[Task, File], results: Results
) -> None:
    members = [file.tensors["blur 4"] for task, file in files.items() if task.method.key == "tuned"]
    labels = study.corrupted["blur 4"].labels
    each = [stochbn.nll(member.double().exp().mean(0), labels).item() for member in members]
    assert results.methods["tuned"].plain.corruptions["blur 4"]["nll"] == pytest.approx(np.mean(each), rel=1e-3)


def test_a_tempered_method_has_the_temperatures_that_were_chosen(
    study: Study, files: dict[Task, File], results: Results
) -> None:
    members = [file.tensors["test"] for task, file in files.items() if task.method.key == "last"]
    row = results.methods["last"]
    assert any(temperature != 1 for temperature in row.temperatures)
    for member, temperature, one in zip(members, row.temperatures, row.tempered.each, strict=True):
        probs = (member.double() / temperature).softmax(2).mean(0)
        assert one["nll"] == pytest.approx(stochbn.nll(probs, study.splits["test"].labels).item(), rel=1e-3)


def test_differences_are_of_the_tables(results: Results) -> None:
    scores = {key: row.plain.scores for key, row in results.methods.items()}
    scores |= {METHODS[key].tempered().key: row.tempered.scores for key, row in results.methods.items()}
    assert [(found.first, found.second) for found in results.differences] == list(COMPARISONS)
    for found in results.differences:
        for key, interval in found.scores.items():
            ours, theirs = (scores[method][key].value for method in (found.first, found.second))
            assert interval.difference == pytest.approx(ours - theirs, abs=1e-9)
            assert interval.low <= interval.high


def test_what_made_it_is_recorded(study: Study, results: Results) -> None:
    assert results.command == "stochbn study tiny --samples 6"
    assert results.sizes == study.sizes
    assert len(results.weights_sha256) == len(set(results.weights_sha256.values())) == 4
    assert results.drawn_at == (results.commit,)
