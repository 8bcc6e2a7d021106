import pytest

from stochbn.experiments.files import File
from stochbn.experiments.report.collect import collect
from stochbn.experiments.report.notes import (
    describe_findings,
    describe_notes,
    describe_provenance,
    describe_title,
    summarise,
)
from stochbn.experiments.report.paper import Claim
from stochbn.experiments.report.report import read_files
from stochbn.experiments.report.scores import score


def notes_of(folder, *, has_paper=True):
    return "\n".join(describe_notes(collect(read_files(folder)[0]), has_paper=has_paper))


def test_what_was_chosen_is_listed(cifar5):
    text = notes_of(cifar5)
    found = collect(read_files(cifar5)[0]).methods["last-tuned"]
    spreads = ", ".join(f"{spread:.2f}" for spread in found.chosen.values)
    assert f"Last layer, tuned: spreads chosen on validation data, {spreads}. The end of what was tried" in text
    assert 0.5 in found.chosen.values  # the smallest
    assert "One network + temperature: temperatures chosen on validation data, " in text
    assert "Deep Ensembles + temperature (3 of 6 networks): temperatures chosen" in text
    assert "Tuned SBN" not in text
    assert text.count("The end of what was tried") == 2


def test_the_lead_says_what_was_found(results):
    scores = score(results)
    claims = [Claim("a", True, ""), Claim("b", False, ""), Claim("c", None, "")]
    first, second = describe_findings(results, scores, claims)
    before, after = (scores[key]["nll"].value for key in ("plain", "sbn"))
    assert first.startswith(f"With SBN one network's NLL goes from {before:.4f} to {after:.4f}, its error from ")
    assert "and its AUROC against out-of-domain inputs from " in first
    best = min(scores, key=lambda key: scores[key]["nll"].value)
    assert f"is that of {results.methods[best].label}." in second
    assert second.endswith(" 1 of 2 claims that could be checked hold here.")


def test_the_lead_compares_what_is_recommended_with_a_temperature(cifar5):
    results = collect(read_files(cifar5)[0])
    scores = score(results)
    _, lead, _ = describe_findings(results, scores, [])
    ours, simple = (scores[key]["nll"].value for key in ("last-tuned", "plain+temperature"))
    assert f"have an NLL of {ours:.4f} and an AUROC of {scores['last-tuned']['auroc_entropy'].value:.3f}." in lead
    assert f"A temperature alone has {simple:.4f} and " in lead
    assert ("by the NLL, the simpler method does here" in lead) == (simple <= ours)
    assert "gains little" in lead


def test_what_is_missing_is_listed(lenet5, make_files, tmp_path):
    text = notes_of(lenet5)
    assert "Not finished: One network has 3 of the 6 networks of this experiment." in text
    assert "Not finished: Dropout has 2 of the 3 networks of this experiment." in text
    complete = make_files(tmp_path, size=20, num_plain=4, num_dropout=2, experiment="digits")
    assert "Not finished" not in notes_of(complete)


def test_one_network_has_no_ensemble(make_files, tmp_path):
    folder = make_files(tmp_path, num_plain=1, num_dropout=0, size=40, experiment="resnet18")
    text = notes_of(folder)
    assert "Deep Ensembles need at least two networks" in text
    assert "has 1 of the 6 networks" in text
    assert "Dropout has" not in text  # the paper has none


def test_the_deviation_of_an_ensemble_is_explained(lenet5):
    assert "over the 3 ensembles of 2 that leave one network out" in notes_of(lenet5)


def test_options_of_training_are_listed(make_files, tmp_path):
    folder = make_files(tmp_path, size=40, options="--optimizer sgd")
    assert "trained with --optimizer sgd in place of the experiment's own" in notes_of(folder)


def test_without_out_of_domain_data(make_files, tmp_path):
    folder = make_files(tmp_path, size=40, parts=("test",))
    assert "no out-of-domain predictions" in notes_of(folder)
    assert describe_title(collect(read_files(folder)[0])) == "LeNet-5, MNIST"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({}, "LeNet-5, MNIST against notMNIST"),
        (
            {"experiment": "vgg11", "data": "cifar5", "out_of_domain": "cifar5"},
            "VGG-11, CIFAR5 against its hidden classes",
        ),
        ({"experiment": "mine", "data": "photos", "out_of_domain": "drawings"}, "mine, photos against drawings"),
    ],
)
def test_title(make_files, tmp_path, header, expected):
    results = collect(read_files(make_files(tmp_path, size=20, num_dropout=0, **header))[0])
    assert describe_title(results) == expected


def test_provenance_is_that_of_the_files(lenet5):
    files, _ = read_files(lenet5)
    found = describe_provenance(files, collect(files))
    assert found["seeds"] == {"lenet5": [0, 1, 2], "lenet5-dropout": [0, 1]}
    assert (found["commit"], found["num_test"], found["num_out_of_domain"]) == (["abc123"], 400, 400)
    assert found["train_hours"] == pytest.approx(5 * 90 / 3600, abs=6e-3)  # to two digits


def test_distances_are_summarised_over_channels_that_vary(diagnostics):
    assert summarise(None) == {}
    found = summarise(diagnostics)["statistics"]["ks"]["fc.norm"]["mean"]
    distances = diagnostics.tensors["statistics/fc.norm/ks"][0][:19]
    assert (found["median"], found["max"], found["num_channels"]) == (distances.median(), distances.max(), 19)
    some = summarise(File({"by_batch_size": [1], "kind": "diagnostics"}, {}))
    assert some == {"by_batch_size": [1]}  # the appendices may be missing
