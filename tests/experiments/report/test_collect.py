import shutil

import numpy as np
import pytest
import torch

from stochbn.experiments.data.sources import DataError
from stochbn.experiments.files import PARTS, File, prediction_path
from stochbn.experiments.methods import METHODS, SPREADS
from stochbn.experiments.report.choose import choose_temperature, temper
from stochbn.experiments.report.collect import collect, has_dropout, select_exact
from stochbn.experiments.report.notes import describe_notes
from stochbn.experiments.report.report import read_files, write_report
from stochbn.experiments.report.scores import Chosen, score

KEYS = ["plain", "sbn", "ensemble", "ensemble+sbn", "dropout", "dropout+sbn"]


def probabilities(file, method, part):
    probs = file.tensors[f"{method}/{part}/log_probs"].double().exp()
    return probs / probs.sum(1, keepdim=True)


def test_methods_in_the_papers_order(results):
    assert list(results.methods) == KEYS
    assert [len(scored.outputs) for scored in results.methods.values()] == [3, 3, 1, 1, 2, 2]
    assert [len(scored.replicas) for scored in results.methods.values()] == [3, 3, 3, 3, 2, 2]
    assert [scored.count for scored in results.methods.values()] == [*["3 of 6"] * 4, *["2 of 3"] * 2]
    assert results.methods["ensemble+sbn"].std_over == "the 3 ensembles of 2"


def test_mutual_information_of_an_ensemble_is_its_members_disagreement(lenet5, results):
    files = [File.read(prediction_path(lenet5, "lenet5", seed)) for seed in range(3)]
    members = np.stack([probabilities(file, "plain", "test").numpy() for file in files])

    def entropies(probs):
        return -(probs * np.log(probs)).sum(1)

    expected = entropies(members.mean(0)) - np.mean([entropies(member) for member in members], axis=0)
    information = results.methods["ensemble"].outputs[0]["test"].information
    np.testing.assert_allclose(information, expected, atol=2e-3)  # half precision in the file


def test_exact_inference_is_compared_on_its_own_inputs(results, diagnostics):
    exact = select_exact(results, diagnostics)
    assert list(exact.methods) == ["plain", "sbn", "exact"]
    assert len(exact.labels) == 50
    found = score(exact)
    assert found["exact"] == found["sbn"]  # this file's exact predictions are copies of SBN's


# Validation data choose


def test_rows_of_cifar5(cifar5):
    found = collect(read_files(cifar5)[0]).methods
    rows = ["plain", "plain+temperature", "sbn", "stage", "stage-tuned", "last", "last-tuned"]
    ensembles = ["ensemble", "ensemble+temperature", "ensemble+sbn", "ensemble-tempered", "ensemble+last"]
    assert list(found) == [*rows, *ensembles, "ensemble+last-tuned", "dropout", "dropout+sbn"]
    assert all(set(output) == set(PARTS) for scored in found.values() for output in scored.outputs)
    assert {key: len(scored.chosen.values) for key, scored in found.items() if scored.chosen} == {
        "plain+temperature": 3,
        "stage-tuned": 3,
        "last-tuned": 3,
        "ensemble+temperature": 1,
    }
    assert {key for key, scored in found.items() if scored.outputs[0]["test"].information is None} == {
        *("plain", "plain+temperature", "ensemble+temperature")
    }


def test_chosen_rows_are_what_the_files_hold(cifar5):
    """The spread and the temperature by hand, from the files."""
    files = [File.read(prediction_path(cifar5, "vgg11", seed)) for seed in range(3)]
    labels = files[0].tensors["labels/validation"].long()
    found = collect(read_files(cifar5)[0]).methods
    for i, file in enumerate(files):
        plain = probabilities(file, "plain", "validation")
        temperature = choose_temperature(plain, labels)
        assert found["plain+temperature"].chosen.values[i] == temperature
        tempered = temper(probabilities(file, "plain", "test"), temperature)
        assert torch.allclose(found["plain+temperature"].outputs[i]["test"].probs, tempered)
        fitted = found["last"].outputs[i]["out-of-domain"].probs
        assert torch.equal(fitted, probabilities(file, "last@1.00", "out-of-domain"))
        key = METHODS["last"].at(found["last-tuned"].chosen.values[i]).key
        assert torch.equal(found["last-tuned"].outputs[i]["test"].probs, probabilities(file, key, "test"))
    assert set(found["last-tuned"].chosen.values) <= set(SPREADS)
    mean = torch.stack([probabilities(file, "plain", "validation") for file in files]).mean(0)
    assert found["ensemble+temperature"].chosen == Chosen((choose_temperature(mean, labels),), False)
    whole = torch.stack([output["test"].probs for output in found["last-tuned"].outputs]).mean(0)
    assert torch.allclose(found["ensemble+last-tuned"].outputs[0]["test"].probs, whole)


def test_nothing_is_chosen_on_test_data(cifar5, tmp_path):
    """With noise in place of test and out-of-domain predictions, and other test labels, every choice is the same."""
    torch.manual_seed(3)
    other = tmp_path / "vgg11"
    shutil.copytree(cifar5 / "predictions", other / "predictions")
    noise = torch.randint(10, (400,), dtype=torch.uint8)
    for path in (other / "predictions").iterdir():
        file = File.read(path)
        replaced = {
            name: torch.randn(tensor.shape).log_softmax(1).half()
            for name, tensor in file.tensors.items()
            if name.endswith("log_probs") and "/validation/" not in name
        }
        assert len(replaced) >= 4
        File(file.header, file.tensors | replaced | {"labels": noise}).write(path)
    before, after = (collect(read_files(folder)[0]).methods for folder in (cifar5, other))
    assert {key: scored.chosen for key, scored in before.items()} == {
        key: scored.chosen for key, scored in after.items()
    }
    assert not torch.equal(before["last"].outputs[0]["test"].probs, after["last"].outputs[0]["test"].probs)


def test_the_fitted_spread_alone_gives_no_chosen_row(make_files, tmp_path):
    folder = make_files(tmp_path, num_plain=2, num_dropout=0, size=60, spreads=True)
    for path in (folder / "predictions").iterdir():
        file = File.read(path)
        kept = {name: tensor for name, tensor in file.tensors.items() if "@" not in name or "last@1.00" in name}
        File(file.header, kept).write(path)
    found = collect(read_files(folder)[0]).methods
    assert "last" in found
    assert "ensemble+last" in found
    assert not {"last-tuned", "stage", "ensemble+last-tuned"} & found.keys()


def test_validation_data_with_hardly_a_mistake_choose_nothing(cifar5, tmp_path):
    """Nine mistakes a network: no temperature and no spread, and a tuned row that repeats another is left out."""
    other = tmp_path / "vgg11"
    shutil.copytree(cifar5 / "predictions", other / "predictions")
    for path in (other / "predictions").iterdir():
        file = File.read(path)
        labels = file.tensors["labels/validation"].long()
        sure = torch.full((len(labels), 10), -8.0).scatter(1, labels[:, None], -0.01)
        sure[:9] = sure[:9].roll(1, 1)
        replaced = {name: sure.half() for name in file.tensors if name.endswith("/validation/log_probs")}
        drawn = {name: tensor for name, tensor in (file.tensors | replaced).items() if "sbn/" in name}
        same = {name.replace("sbn/", "tuned/"): tensor.clone() for name, tensor in drawn.items()}
        File(file.header, file.tensors | replaced | same).write(path)
    results = collect(read_files(other)[0])
    assert results.is_undecided
    assert not collect(read_files(cifar5)[0]).is_undecided
    assert (
        not {"plain+temperature", "ensemble+temperature", "last-tuned", "tuned", "dropout+tuned"}
        & results.methods.keys()
    )
    assert {"sbn", "last", "dropout+sbn"} < results.methods.keys()
    assert any("fewer than ten mistakes" in note for note in describe_notes(results, has_paper=False))


def test_without_validation_data_in_all_files_nothing_is_chosen(make_files, tmp_path):
    folder = make_files(tmp_path, num_plain=2, num_dropout=0, size=60, spreads=True)
    path = prediction_path(folder, "lenet5", 1)
    file = File.read(path)
    File(file.header, {name: t for name, t in file.tensors.items() if "validation" not in name}).write(path)
    found = collect(read_files(folder)[0]).methods
    assert list(found) == ["plain", "sbn", "stage", "last", "ensemble", "ensemble+sbn", "ensemble+last"]


# What may be missing or wrong


def test_dropout_alone(make_files, tmp_path):
    files, _ = read_files(make_files(tmp_path, num_plain=0, size=80))
    assert list(collect(files).methods) == ["dropout", "dropout+sbn"]
    assert all(map(has_dropout, files))


def test_one_network_makes_no_ensemble(make_files, tmp_path):
    results = collect(read_files(make_files(tmp_path, num_plain=1, num_dropout=0, size=80))[0])
    assert list(results.methods) == ["plain", "sbn"]
    assert all(found.std is None for row in score(results).values() for found in row.values())


def test_an_ensemble_of_two_has_no_deviation(make_files, tmp_path):
    results = collect(read_files(make_files(tmp_path, num_plain=2, num_dropout=0, size=80))[0])
    assert results.methods["ensemble"].std_over == ""
    assert score(results)["ensemble"]["nll"].std is None


def test_files_of_two_experiments(make_files, tmp_path, quiet):
    make_files(tmp_path, num_plain=1, num_dropout=0, size=20)
    make_files(tmp_path, num_plain=1, num_dropout=0, size=20, experiment="digits")
    with pytest.raises(DataError, match="files of one experiment, got experiment digits and lenet5"):
        write_report(tmp_path, console=quiet)


def test_files_of_two_settings_or_test_sets(make_files, tmp_path, quiet):
    make_files(tmp_path, num_plain=1, num_dropout=0, size=20)
    other = make_files(tmp_path / "other", num_plain=2, num_dropout=0, size=20, num_samples=9)
    source, target = (prediction_path(folder, "lenet5", 1) for folder in (other, tmp_path))
    shutil.copy(source, target)
    with pytest.raises(DataError, match="got num_samples 8 and 9"):
        write_report(tmp_path, console=quiet)
    make_files(other, num_plain=2, num_dropout=0, size=30)
    shutil.copy(source, target)
    with pytest.raises(DataError, match=r"got 20 test inputs in .*seed0\.safetensors and 30 in .*seed1\.safetensors"):
        write_report(tmp_path, console=quiet)


def test_a_damaged_file(make_files, tmp_path, quiet):
    make_files(tmp_path, num_plain=2, num_dropout=0, size=20)
    path = prediction_path(tmp_path, "lenet5", 1)
    file = File.read(path)
    del file.tensors["sbn/test/expected_entropy"]
    file.write(path)
    with pytest.raises(DataError, match=r"got .*lenet5-seed1\.safetensors \(expected a tensor for sbn/test"):
        write_report(tmp_path, console=quiet)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="Evaluate again"):
        write_report(tmp_path, console=quiet)
