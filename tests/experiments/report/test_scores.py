import math
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics

import stochbn
from stochbn.experiments.files import PARTS, File, prediction_path
from stochbn.experiments.methods import METHODS
from stochbn.experiments.report.scores import Output, Ranking, Scored, detect, measure, score


def probabilities(file, method, part):
    probs = file.tensors[f"{method}/{part}/log_probs"].double().exp().numpy()
    return probs / probs.sum(1, keepdims=True)


def entropies(probs):
    return -(probs * np.log(probs)).sum(1)


def test_scores_of_one_network_are_means_over_seeds(lenet5, results):
    files = [File.read(prediction_path(lenet5, "lenet5", seed)) for seed in range(3)]
    labels = files[0].tensors["labels"].numpy()
    nlls, errors, briers, aurocs, auprs = [], [], [], [], []
    for file in files:
        known, other = (probabilities(file, "sbn", part) for part in PARTS)
        nlls.append(metrics.log_loss(labels, known, labels=range(10)))
        errors.append(100 * np.mean(known.argmax(1) != labels))
        briers.append(((known - np.eye(10)[labels]) ** 2).sum(1).mean())
        truth = np.r_[np.zeros(len(known)), np.ones(len(other))]
        uncertainty = np.r_[entropies(known), entropies(other)]
        aurocs.append(metrics.roc_auc_score(truth, uncertainty))
        auprs.append(metrics.average_precision_score(truth, uncertainty))
    found = score(results)["sbn"]
    columns = {"nll": nlls, "error_percent": errors, "brier": briers, "auroc_entropy": aurocs, "aupr_entropy": auprs}
    for key, values in columns.items():
        assert found[key].value == pytest.approx(np.mean(values)), key
        assert found[key].std == pytest.approx(np.std(values, ddof=1)), key
    assert found["nll"].num_inputs == 400
    assert found["auroc_entropy"].num_inputs == 800


def test_an_ensemble_is_scored_whole_and_varied_without_one(lenet5, results):
    files = [File.read(prediction_path(lenet5, "lenet5", seed)) for seed in range(3)]
    labels = files[0].tensors["labels"].numpy()
    members = np.stack([probabilities(file, "plain", "test") for file in files])
    found = score(results)["ensemble"]["nll"]
    assert found.value == pytest.approx(metrics.log_loss(labels, members.mean(0), labels=range(10)))
    without_one = [np.delete(members, i, axis=0).mean(0) for i in range(3)]
    losses = [metrics.log_loss(labels, probs, labels=range(10)) for probs in without_one]
    assert found.std == pytest.approx(np.std(losses, ddof=1))


def test_one_network_has_no_mutual_information(results):
    found = score(results)
    assert "auroc_information" not in found.pop("plain")
    assert len(found) == 5
    assert all("auroc_information" in row for row in found.values())


def test_calibration_error_against_its_definition(results):
    output = results.methods["sbn"].outputs[0]
    confidence, predicted = output["test"].probs.numpy().max(1), output["test"].probs.numpy().argmax(1)
    correct = predicted == results.labels.numpy()
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert measure(output, results.labels)["ece"] == pytest.approx(expected)


@pytest.mark.parametrize("num", [1, 19, 20, 21, 60, 333])
def test_detection_against_the_roc_curve(num):
    random = np.random.default_rng(num)
    known, other = random.normal(size=50).round(1), random.normal(1, size=num).round(1)  # with ties
    truth, values = np.r_[np.zeros(50), np.ones(num)], np.r_[known, other]
    false, true, _ = metrics.roc_curve(truth, values, drop_intermediate=False)
    found = detect(known, other)
    assert found["fpr95"] == pytest.approx(false[np.argmax(true >= 0.95 - 1e-12)])
    assert found["fpr95"] == stochbn.fpr95(torch.from_numpy(known), torch.from_numpy(other)).item()
    assert found["auroc"] == pytest.approx(metrics.auc(false, true))
    assert found["aupr"] == pytest.approx(metrics.average_precision_score(truth, values))


def test_inputs_that_count_several_times_are_as_if_they_were_there_so_often():
    random = np.random.default_rng(0)
    known, other = random.normal(size=50).round(1), random.normal(1, size=70).round(1)
    counts = random.integers(4, size=120)  # some not at all
    repeated = np.repeat(known, counts[:50]), np.repeat(other, counts[50:])
    assert Ranking(known, other).score(counts) == pytest.approx(detect(*repeated))


def test_a_perfect_detector():
    assert detect(np.zeros(5), np.ones(5)) == {"auroc": 1.0, "aupr": 1.0, "fpr95": 0.0}


def test_certain_predictions_give_finite_scores():
    probs = torch.eye(3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure({part: Output(probs, torch.zeros(3)) for part in PARTS}, torch.tensor([0, 1, 1]))
    assert all(math.isfinite(value) for value in found.values())


def test_an_ensemble_of_fewer_networks_than_planned_says_so():
    scored = Scored(METHODS["ensemble"], (0, 1, 2), (), (), num_wanted=6)
    assert (scored.label, scored.count) == ("Deep Ensembles (3 of 6 networks)", "3 of 6")
    assert scored.short_label == "Deep Ensembles (3 of 6)"
    complete = Scored(METHODS["ensemble"], (0, 1, 2), (), (), num_wanted=3)
    assert (complete.label, complete.count) == ("Deep Ensembles", "3")
    one = Scored(METHODS["sbn"], (0, 1, 2), (), (), num_wanted=6)
    assert (one.label, one.count) == ("SBN", "3 of 6")
