import pytest
import torch

import stochbn
from stochbn.experiments.files import File
from stochbn.experiments.methods import METHODS
from stochbn.experiments.study.draws import MAIN, SIDE, Study, Task
from stochbn.experiments.study.scores import Draws, list_entries


def test_averages_are_means_over_draws_and_members() -> None:
    torch.manual_seed(1)
    members = [torch.randn(count, 7, 3).log_softmax(2) for count in (12, 4)]
    draws = Draws(tuple(File({}, {"test": member}) for member in members))
    probs = torch.cat(members).double().exp()
    found = draws.average("test")
    torch.testing.assert_close(found.probs, probs.mean(0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.expected_entropy, stochbn.expected_entropy(probs), rtol=1e-6, atol=1e-6)
    some = torch.cat([member[:3] for member in members]).double()
    expected = (some / 2).softmax(2).mean(0)
    torch.testing.assert_close(draws.average("test", 2.0, 3).probs, expected, rtol=1e-6, atol=1e-7)
    assert Draws((File({}, {"test": members[0][:1]}),)).average("test").expected_entropy is None


def test_a_temperature_never_raises_the_validation_nll(study: Study, files: dict[Task, File]) -> None:
    labels = study.splits["validation"].labels
    for task in study.tasks[:6]:
        draws = Draws((files[task],))
        chosen = draws.choose_temperature(labels)
        losses = [stochbn.nll(draws.average("validation", t).probs, labels).item() for t in (1.0, chosen)]
        assert losses[1] <= losses[0] + 1e-4


def test_methods_and_ensembles_in_the_order_of_the_table(study: Study, files: dict[Task, File]) -> None:
    entries = {entry.method.key: entry for entry in list_entries(files)}
    single = {key for key in (*MAIN, *SIDE) if METHODS[key].group != "ensemble"} - {"exact"}
    ensembles = {"ensemble", "ensemble+sbn", "ensemble+last", "ensemble+last-tuned"}
    assert list(entries) == [key for key in METHODS if key in single | ensembles]
    assert (len(entries["sbn"].units), entries["sbn"].std_over) == (3, "3 seeds")
    assert (len(entries["empirical"].units), entries["empirical"].seeds) == (2, (0, 1))
    ensemble = entries["ensemble+sbn"]
    assert (len(ensemble.units), len(ensemble.units[0].files)) == (1, 3)
    assert [len(replica.files) for replica in ensemble.replicas] == [2, 2, 2]
    assert ensemble.std_over == "3 ensembles that leave one out"
    few = {task: file for task, file in files.items() if task.seed == 0}
    assert not ensembles & {entry.method.key for entry in list_entries(few)}


def test_costs_add_up(study: Study, files: dict[Task, File]) -> None:
    entries = {entry.method.key: entry for entry in list_entries(files)}
    one, many = entries["sbn"].cost, entries["ensemble+sbn"].cost
    assert (one.passes, many.passes, entries["plain"].cost.passes) == (6, 18, 1)
    assert many.weights_bytes == 3 * one.weights_bytes > 0
    assert entries["plain"].cost.statistics_bytes == 0 < one.statistics_bytes
    assert many.train_hours > one.train_hours > 0


def test_choices_are_those_of_the_files(study: Study, files: dict[Task, File]) -> None:
    entries = {entry.method.key: entry for entry in list_entries(files)}
    assert entries["sbn"].choices == ()
    headers = [file.header["tuning"] for task, file in files.items() if task.method.key == "tuned"]
    assert [choice.spread for choice in entries["tuned"].choices] == [header["spread"] for header in headers]
    assert entries["tuned"].choices[0].curve[0] == pytest.approx((headers[0]["curve"][0][0], headers[0]["curve"][0][2]))
