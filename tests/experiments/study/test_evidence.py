import numpy as np
import pytest
import torch

from stochbn.experiments.files import File
from stochbn.experiments.study.draws import Study, Task
from stochbn.experiments.study.evidence import ece_by_chance
from stochbn.experiments.study.results import Chance, Results


def test_the_ece_of_chance() -> None:
    """In one bin of N equal confidences p it is E |k / N − p| of a binomial k: √(2 p (1 − p) / π N), nearly."""
    probs = torch.full((4000, 2), 0.1, dtype=torch.float64)
    probs[:, 0] = 0.9
    expected = (2 * 0.9 * 0.1 / (np.pi * 4000)) ** 0.5
    # The relative standard deviation of |Normal| is √(π / 2 − 1) = 0.76.
    found = ece_by_chance([probs], 400)
    assert found.mean == pytest.approx(expected, rel=4 * 0.76 / 400**0.5)
    # The 95th percentile of |Normal| is at 1.96 standard deviations; that of 400 is off by about 5 % of it.
    assert found.high == pytest.approx(1.96 * (0.9 * 0.1 / 4000) ** 0.5, rel=0.2)
    assert ece_by_chance([torch.eye(3, dtype=torch.float64)]) == Chance(0, 0)


def test_the_first_draws(study: Study, files: dict[Task, File], results: Results) -> None:
    labels = study.splits["test"].labels.numpy()
    for key, counts in {"sbn": [4], "last-tuned": [4, 8], "last-both": [4, 8]}.items():
        members = [file.tensors["test"] for task, file in files.items() if task.method.key == key]
        kept = len(members[0])
        rows = results.first_draws[key]
        assert [row.num_samples for row in rows] == [*counts, kept]
        assert rows[-1].scores["nll"] == pytest.approx(results.methods[key].plain.scores["nll"].value)
        first = [np.exp(member[:4].double().numpy()).mean(0) for member in members]
        losses = [-np.log(probs[np.arange(len(labels)), labels]).mean() for probs in first]
        assert rows[0].scores["nll"] == pytest.approx(np.mean(losses), rel=1e-3)


def test_no_choice_is_better_than_the_limit(results: Results) -> None:
    assert results.limits.keys() == {"plain", "last"}
    for key, limit in results.limits.items():
        row = results.methods[key]
        count = limit.num_networks
        own, tempered = ([one["nll"] for one in found.each[:count]] for found in (row.plain, row.tempered))
        assert count == 2
        assert limit.nll_temperature <= min(limit.nll, limit.nll_temperature_only)
        assert limit.nll <= np.mean(own) + 1e-6
        assert limit.nll_temperature_only <= np.mean(tempered) + 1e-4  # of a parabola through tried ones
        assert limit.auroc >= np.mean([one["auroc_entropy"] for one in row.plain.each[:count]]) - 1e-6


def test_distances_to_exact_inference(files: dict[Task, File], results: Results) -> None:
    """By NumPy, from the draws."""
    by_key = {(task.method.key, task.seed): file.tensors for task, file in files.items()}
    variations, chance, correlations = [], [], []
    for seed in range(2):
        exact, other = by_key["exact", seed], by_key["empirical", seed]
        ours, halves = {}, {}
        for part in ("test", "out-of-domain"):
            draws = np.exp(exact[part].double().numpy())
            assert draws.shape == (12, 15, 10)
            halves[part] = draws[:6].mean(0), draws[6:].mean(0)
            ours[part] = np.exp(other[part].double().numpy()).mean(0)[exact[f"{part}/index"]]
        variations += [np.abs(ours["test"] - half).sum(1).mean() / 2 for half in halves["test"]]
        chance.append(np.abs(halves["test"][0] - halves["test"][1]).sum(1).mean() / 2)
        entropies = [
            np.concatenate([-(p * np.log(p)).sum(1) for p in found])
            for found in (ours.values(), *zip(*halves.values(), strict=True))
        ]
        correlations += [np.corrcoef(entropies[0], one)[0, 1] for one in entropies[1:]]
    found = results.distances
    assert found["empirical"].num_networks == 2
    assert found["empirical"].total_variation_test == pytest.approx(np.mean(variations), rel=1e-3)
    assert found["exact"].nll != found["empirical"].nll
    assert found["empirical"].entropy_correlation == pytest.approx(np.mean(correlations), rel=1e-3)
    assert found["exact"].total_variation_test == pytest.approx(np.mean(chance), rel=1e-3)
    assert {"plain", "sbn", "tuned", "last-tuned", "channels-apart"} < found.keys()
    assert not {"last", "dropout", "ensemble+sbn", "sbn@1.41"} & found.keys()
