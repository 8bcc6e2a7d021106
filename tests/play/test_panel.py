"""What the page shows is what the library says of the image."""

import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import stochbn
from stochbn.experiments.data.splits import load_split, to_inputs
from stochbn.play import panel as module
from stochbn.play.panel import NUM_NETWORKS, load_panel
from stochbn.play.strokes import draw_image, parse_strokes


def test_an_answer_is_the_library_s(panel):
    for image in (panel.digits.images[:1], panel.letters.images[3:4]):
        answer, prediction = panel.answer(image), panel.predictor(to_inputs(image))
        assert prediction.num_samples == NUM_NETWORKS
        assert answer["probs"] == pytest.approx(prediction.probs[0].tolist())
        assert answer["predicted"] == int(prediction.classes)
        votes = [int((prediction.samples[:, 0].argmax(1) == k).sum()) for k in range(10)]
        assert answer["votes"] == votes
        assert sum(votes) == NUM_NETWORKS
        assert answer["entropy"] == pytest.approx(float(prediction.entropy))
        assert answer["disagreement"] == pytest.approx(float(prediction.epistemic / prediction.entropy))
        assert answer["abstains"] is (float(prediction.entropy) >= panel.rule.threshold)
        assert all(low <= high for low, high in zip(answer["low"], answer["high"], strict=True))
        assert answer["image"] == image.flatten().tolist()


def test_the_networks_differ(panel):
    """Each has a mini-batch of its own: no two of the 256 say exactly the same of an unknown letter."""
    samples = panel.predictor(to_inputs(panel.letters.images[:1])).samples[:, 0]
    assert len(samples.unique(dim=0)) == NUM_NETWORKS


def test_the_rule_is_that_of_digits_out_of_training(panel):
    parts = [load_split("digits", part) for part in ("validation", "test")]
    prediction = panel.predictor(to_inputs(torch.cat([part.images for part in parts])))
    assert panel.rule == stochbn.abstain(prediction, torch.cat([part.labels for part in parts]))
    assert panel.describe()["num_held_out"] == 597
    assert panel.describe()["threshold"] == panel.rule.threshold
    for threshold in (math.inf, -math.inf):  # for which JSON has no number
        assert replace(panel, rule=replace(panel.rule, threshold=threshold)).describe()["threshold"] is None


def test_drawn_digits_are_read_and_letters_doubted(panel, drawn):
    entropies = {}
    for name, strokes in drawn.items():
        answer = panel.answer(draw_image(parse_strokes(strokes)))
        entropies[name] = answer["entropy"]
        if name.isdigit():
            assert answer["predicted"] == int(name)
    assert min(entropies["A"], entropies["K"]) > max(entropies[name] for name in "0345")
    assert panel.answer(draw_image(parse_strokes(drawn["3"])))["abstains"] is False
    assert panel.answer(draw_image(parse_strokes(drawn["A"])))["abstains"] is True


def test_examples_say_what_they_show(panel):
    for number in (0, 5, 397, 10**9):
        label = int(panel.digits.labels[number % 397])
        assert panel.example("digit", number)["shown"] == str(label)
    assert [panel.example("letter", number)["shown"] for number in range(3)] == ["A", "B", "C"]


def test_a_network_that_is_there_is_not_trained_again(panel, monkeypatch, tmp_path):
    asked = []

    def train(recipe, seed, *, console):
        asked.append((recipe.name, seed))
        raise InterruptedError

    monkeypatch.setattr(module, "train", train)  # which leaves finished networks alone, as its own tests show
    with pytest.raises(InterruptedError):
        load_panel(Console(file=io.StringIO()))
    assert asked == [("digits", 0)]
