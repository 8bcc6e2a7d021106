"""How an item becomes the arguments of a model."""

import pytest
import torch
from torch import Tensor, nn

from stochbn.statistics.calls import call_on_inputs, call_on_item


class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_default_calls() -> None:
    a, b = torch.tensor([3.0]), torch.tensor([1.0])
    assert call_on_item(nn.Identity(), (a, b)) is a
    assert call_on_item(nn.Identity(), [a, b]) is a
    assert call_on_item(nn.Identity(), a) is a
    assert call_on_item(Two(), {"a": a, "b": b}).item() == 2
    assert call_on_inputs(Two(), (a, b)).item() == 2
    assert call_on_inputs(Two(), {"b": a, "a": b}).item() == -2


def test_runtime_errors_of_the_default_call_name_the_remedy() -> None:
    with pytest.raises(
        RuntimeError, match=r"that Linear can take, got tuple\(Tensor\[2, 7\], Tensor\[2\]\).*shapes.*call="
    ):
        call_on_item(nn.Linear(3, 1), (torch.ones(2, 7), torch.ones(2)))


def test_faults_of_the_model_stay_what_they_are() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.absent(x)

    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(AttributeError, match=r"^'Broken' object has no attribute 'absent'"):
        call_on_item(Broken(), torch.ones(2))
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory"):
        call_on_item(Full(), torch.ones(2))


@pytest.mark.parametrize("item", [(torch.ones(2), torch.ones(2)), {"a": torch.ones(2), "c": torch.ones(2)}, "word"])
def test_call_that_does_not_fit_names_the_remedy(item: object) -> None:
    with pytest.raises(TypeError, match=r"that Two can take, got .* Pass call= .*call=lambda model, batch"):
        call_on_item(Two(), item)


def test_an_input_without_a_batch_and_the_advice() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    x = torch.rand(1, 8, 8)
    with pytest.raises(RuntimeError, match=r"can take, got Tensor\[1, 8, 8\] .*a single one as x.unsqueeze\(0\)"):
        call_on_inputs(model, x)
    assert call_on_inputs(model, x.unsqueeze(0)).shape == (1, 2, 6, 6)


def test_a_value_error_of_the_models_own_is_passed_on() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        call_on_inputs(Refuses(), torch.ones(1))
