import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import stochbn
from assessment.conftest import COUNTS, KINDS, assess_kind, classes, draw_class
from stochbn.assessment.assess import LABELS, find_detected
from stochbn.assessment.page import render_assessment

KEYS = ["plain", "tempered", "sbn", "sbn-tuned", "last", "last-tuned"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_network_is_assessed(assessed, kind):
    found = assessed(kind)
    assert list(found.methods) == [key.replace("tempered", "noisy") if kind == "regression" else key for key in KEYS]
    if kind != "segmentation":
        assert found.num_inputs == COUNTS
    assert found.chosen in found.methods
    assert set(found.drift) == {"train", "test", "out-of-domain"}
    assert (found.rule is not None) == (kind == "classes")
    assert bool(found.pictures) == (kind in ("classes", "segmentation"))
    expected = {"rmse", "nll", "coverage_percent", "auroc"} if kind == "regression" else None
    scores = found.methods["last-tuned"].scores
    assert set(scores) == (expected or {"error_percent", "nll", "brier", "ece_percent", "auroc"})
    for method in found.methods.values():
        assert all(one.low <= one.value <= one.high for name, one in method.scores.items() if name != "ece_percent")
        assert method.cost > 0


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_numbers_are_those_of_the_library():
    torch.manual_seed(3)
    model, loaders = classes()
    x, y = (torch.cat(parts) for parts in zip(*loaders["test_loader"], strict=True))
    before = copy.deepcopy(model.state_dict())
    found = stochbn.assess(model, **loaders, risk=0.4, num_samples=6, seed=5, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    options = {"layers": "last", "family": "empirical", "conditioned": True, "progress": False}
    stats = stochbn.tune(
        model, stochbn.fit(model, loaders["train_loader"], **options), loaders["val_loader"], progress=False
    )
    pred = stochbn.predict(model, stats, x, num_samples=6, seed=5)
    scores = found.methods["last-tuned"].scores
    assert scores["nll"].value == pytest.approx(stochbn.nll(pred.probs, y).item(), abs=1e-5)
    assert scores["ece_percent"].value == pytest.approx(100 * stochbn.ece(pred.probs, y).item(), abs=1e-3)
    assert found.drift["train"]["1"] == pytest.approx(
        stochbn.fit(model, loaders["train_loader"], progress=False).drift(model)["1"]
    )
    expected = stochbn.abstain(found.predictions["test"][found.chosen], y, 0.4)
    assert found.rule == expected


def test_validation_data_choose_the_simplest_of_the_best(assessed):
    """The labels are drawn from the plain network, so nothing can be better."""
    found = assessed("labels")
    assert found.chosen in ("plain", "tempered")
    assert any("draws do not improve it" in one or "Chosen on validation data" in one for one in found.verdict)


def test_the_last_layer_is_simpler_than_all():
    order = list(LABELS)
    assert order.index("plain") < order.index("tempered") < order.index("last-tuned") < order.index("sbn")


def test_few_mistakes_choose_the_plain_network():
    """Labels are the network's own but for some; a temperature of nearly 0 would be chosen by chance."""
    torch.manual_seed(1)
    model, loaders = classes()
    with torch.no_grad():
        truth = [(x, model(x).argmax(1)) for x, _ in loaders["val_loader"]]
    for wrong in (9, 10):
        first = (truth[0][1] + (torch.arange(16) < wrong)) % 3
        data = {**loaders, "val_loader": [(truth[0][0], first), *truth[1:]]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = stochbn.assess(model, **data, risk=0.4, num_samples=4, progress=False)
        assert found.num_mistakes == wrong
        assert (found.verdict[1].startswith("The plain network stands")) == (wrong < 10)
        names = "Plain + temperature; SBN, tuned; Last layer, tuned: Held-out data with 9 mistakes"
        assert any(one.startswith(names) for one in found.warned) == (wrong < 10)
    assert "choose a method" not in render_assessment(found)
    assert "too few mistakes to choose a method" in render_assessment(replace(found, chosen="plain", num_mistakes=9))


def test_without_validation_data_nothing_is_chosen():
    found = assess_kind("classes", without=("val_loader", "ood_loader"))
    assert (list(found.methods), found.chosen) == (["plain", "sbn", "last"], "last")
    assert "Without validation data nothing could be chosen" in found.verdict[-1]
    assert not found.tunings
    assert "auroc" not in found.methods["plain"].scores
    regression = assess_kind("regression", without=("val_loader",))
    assert set(regression.methods["sbn"].scores) == {"rmse", "auroc"}
    assert "no noise level" in regression.verdict[-1]


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")
def test_given_statistics_take_the_place_of_training_data():
    torch.manual_seed(3)
    model, loaders = classes()
    train = loaders.pop("train_loader")
    stats = stochbn.fit(model, train, progress=False)
    found = stochbn.assess(model, **loaders, stats=stats, risk=0.4, num_samples=6, progress=False)
    assert list(found.methods) == ["plain", "tempered", "given", "given-tuned"]
    tuned = stochbn.tune(model, stats, loaders.pop("val_loader"), progress=False)
    again = stochbn.assess(model, **loaders, stats=tuned, risk=0.4, num_samples=6, progress=False)
    assert (list(again.methods), again.chosen) == (["plain", "given", "given-tuned"], "given-tuned")
    assert again.verdict[-1] == (
        "The given tuning was taken as it is: without validation data nothing was compared with it."
    )
    assert again.methods["given-tuned"].scores["nll"] == found.methods["given-tuned"].scores["nll"]


@pytest.mark.parametrize(("kind", "link"), [("labels", "sigmoid"), ("regression", "identity")])
def test_outputs_without_an_axis_of_their_own(kind, link):
    """A network that returns (N,) is assessed as the same one that returns (N, 1)."""
    torch.manual_seed(1)
    model, loaders = KINDS[kind][0]()
    wide = nn.Sequential(*model[:-1], nn.Linear(12, 1))
    loaders = {
        name: [(one[0], one[1][:, :1]) if isinstance(one, tuple) else one for one in loader]
        for name, loader in loaders.items()
    }
    options = {"link": link, "num_samples": 4, "progress": False}
    expected = stochbn.assess(wide, **loaders, **options)
    flat = {
        name: [(one[0], one[1][:, 0]) if isinstance(one, tuple) else one for one in loader]
        for name, loader in loaders.items()
    }
    found = stochbn.assess(nn.Sequential(*wide, nn.Flatten(0)), **flat, **options)
    for key, method in found.methods.items():
        for name, one in method.scores.items():
            assert one.value == pytest.approx(expected.methods[key].scores[name].value, rel=1e-4), (key, name)
    render_assessment(found)


@pytest.mark.parametrize("pair", [("train", "val"), ("train", "test"), ("val", "test")])
def test_the_same_data_twice_are_refused(pair):
    model, loaders = classes()
    first, second = (f"{name}_loader" for name in pair)
    with pytest.raises(ValueError, match=r"Expected \w+ and \w+ data that share no input, got the same for both"):
        stochbn.assess(model, **{**loaders, second: loaders[first]}, progress=False)


def test_a_resnet_of_transformers():
    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    )
    model = ResNetForImageClassification(config)
    inputs = [torch.randn(16, 3, 16, 16) for _ in range(9)]
    model.train()
    for x in inputs:
        model(pixel_values=x)
    model.eval()
    with torch.no_grad():
        labelled = [{"pixel_values": x, "labels": draw_class(10 * model(pixel_values=x).logits)} for x in inputs]
    found = stochbn.assess(
        model,
        labelled[:5],
        train_loader=labelled[5:9],
        ood_loader=[{"pixel_values": x} for x in inputs[:2]],
        call=lambda net, batch: net(pixel_values=batch["pixel_values"]).logits,
        target=lambda batch: batch["labels"],
        risk=0.9,
        num_samples=4,
        progress=False,
    )
    assert found.title == "ResNetForImageClassification"
    assert found.num_inputs["test"] == 80
    assert len(found.pictures["test"][0]) == 6


def test_one_in_twenty_known_inputs_would_be_flagged():
    model = nn.Identity()
    known, other = (stochbn.predict(model, None, scale * torch.randn(400, 3)) for scale in (9, 0.1))
    assert find_detected(known, other).value == 100
    assert find_detected(known, known).value == pytest.approx(5, abs=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_loader": None}, "Expected training data to fit to, or statistics from stochbn.fit, got neither"),
        ({"risk": 0.0}, "Expected a risk between 0 and 1, got 0.0"),
        ({"class_names": ["a"]}, "Expected a name for each of 3 classes, got 1 names"),
        ({"link": "tanh"}, "Expected link to be one of"),
        ({"test_loader": []}, "Expected at least one batch of test data, got an empty loader"),
        ({"test_loader": [torch.randn(8, 1, 8, 8)]}, "Expected labels in the test data"),
        ({"val_loader": [(torch.randn(8, 1, 8, 8), torch.full((8,), 7))]}, "class indices in"),
        ({"ood_loader": [torch.randn(8, 3, 9, 9)]}, "Expected a batch that Sequential can take"),
    ],
)
def test_what_cannot_be_assessed_is_refused_before_anything_is_fitted(monkeypatch, change, message):
    model, loaders = classes()
    monkeypatch.setattr("stochbn.assessment.assess.fit", lambda *_, **__: pytest.fail("fitted"))
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        stochbn.assess(model, **{**loaders, "progress": False, **change})
