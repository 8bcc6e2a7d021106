import pytest
import torch
from torch import nn

import stochbn
from stochbn.assessment import measure


@pytest.fixture
def predictors():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    return {"plain": stochbn.Predictor(model, None), "again": stochbn.Predictor(model, None)}


def test_methods_are_paired_whatever_the_order(predictors):
    data = torch.utils.data.TensorDataset(torch.randn(40, 1, 4, 4), torch.randint(3, (40,)))
    part = measure.run(predictors, torch.utils.data.DataLoader(data, 8, shuffle=True), "test")
    assert torch.equal(part.predictions["plain"].probs, part.predictions["again"].probs)
    assert part.labels.sort().values.equal(data.tensors[1].sort().values)


def test_pictures_are_of_the_most_and_the_least_certain(predictors):
    x = torch.randn(50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(50) % 3
    part = measure.run(predictors, list(zip(x.split(8), labels.split(8), strict=True)), "test", shown="plain")
    pred = part.predictions["plain"]
    order = pred.entropy.argsort().tolist()
    assert [one.index for one in part.most] == order[:6]
    assert [one.index for one in part.least] == order[::-1][:6]
    for one in (*part.most, *part.least):
        assert (one.predicted, one.label) == (str(int(pred.classes[one.index])), str(int(labels[one.index])))
        image = x[one.index].double()
        torch.testing.assert_close(one.pixels, (image - image.min()) / (image.max() - image.min()))


def test_a_class_beyond_a_thousand_is_written_whole():
    predictors = {"plain": stochbn.Predictor(nn.Sequential(nn.Flatten(), nn.Linear(4, 1300)), None)}
    part = measure.run(predictors, [(torch.randn(4, 1, 2, 2), torch.full((4,), 1234))], "test", shown="plain")
    assert {one.label for one in part.most} == {"1234"}


def test_inputs_that_are_no_images_have_no_pictures():
    predictors = {"plain": stochbn.Predictor(nn.Linear(4, 3), None)}
    part = measure.run(predictors, [(torch.randn(8, 4), torch.zeros(8).long())], "test", shown="plain")
    assert part.most == part.least == []


def test_the_same_pixels_are_kept_of_predictions_and_labels():
    predictors = {"plain": stochbn.Predictor(nn.Conv2d(1, 3, 1), None)}
    x = torch.randn(6, 1, 40, 40)
    truth = stochbn.predict(nn.Conv2d(1, 3, 1), None, x).classes
    whole = predictors["plain"](x)
    part = measure.run(predictors, [(x, whole.classes), (x, whole.classes)], "test", shown="plain")
    pred = part.predictions["plain"]
    assert pred.probs.shape == (12, 3, measure.MAX_PLACES)
    assert pred.entropy.shape == part.labels.shape == (12, measure.MAX_PLACES)
    assert torch.equal(pred.classes, part.labels)
    torch.testing.assert_close(part.most[0].map, whole.entropy[part.most[0].index % 6])
    assert truth.shape == whole.classes.shape


def test_the_first_method_need_not_cost_most(predictors):
    seconds = measure.measure_cost(predictors, [(torch.randn(8, 1, 4, 4), torch.zeros(8))])
    assert list(seconds) == ["plain", "again"]
    assert all(0 < value < 1 for value in seconds.values())


def test_labels_are_found_and_checked(predictors):
    x = torch.randn(4, 1, 4, 4)
    pred = predictors["plain"](x)
    assert measure.find_labels({"x": x}, None) is None
    assert measure.find_labels({"y": torch.ones(4)}, lambda item: item["y"]).tolist() == [1] * 4
    with pytest.raises(
        ValueError, match=r"Expected labels in the test data, batches \(x, y\), got Tensor\[4, 1, 4, 4\]"
    ):
        measure.check_labels(pred, None, x, "test")
    with pytest.raises(ValueError, match=r"Expected class indices as labels in the test data, got torch\.float32"):
        measure.check_labels(pred, torch.ones(4), x, "test")
    with pytest.raises(ValueError, match=r"class indices in \[0, 3\), got torch.int64 from 3 to 3"):
        measure.check_labels(pred, torch.full((4,), 3), x, "test")
    labels = stochbn.predict(nn.Identity(), None, torch.randn(4, 3), link="sigmoid")
    with pytest.raises(ValueError, match="Expected labels of 0 and 1 for link='sigmoid' in the test data, got 2 to 2"):
        measure.check_labels(labels, torch.full((4, 3), 2), x, "test")
    with pytest.raises(ValueError, match="Expected at least one batch of test data, got an empty loader"):
        measure.run(predictors, [], "test")
