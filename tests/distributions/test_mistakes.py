"""The likeliest mistakes are noticed, and what is none is not."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stochbn
from oracles import calibrate, small_cnn

CLASSES, SIZE = 6, 64


@pytest.fixture
def data() -> TensorDataset:
    """Images whose brightness and contrast depend on the class, as in any data worth classifying."""
    labels = torch.arange(CLASSES).repeat_interleave(SIZE)
    images = torch.rand(len(labels), 1, 8, 8) * (1 + labels.view(-1, 1, 1, 1)) + 0.5 * labels.view(-1, 1, 1, 1)
    return TensorDataset(images, labels)


@pytest.fixture
def trained(data: TensorDataset) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, 16, shuffle=True, generator=generator)
    return calibrate(small_cnn(), [x for _ in range(3) for x, _ in loader])


@pytest.mark.parametrize("layers", [None, "last"])
def test_sorted_data_are_noticed(trained: nn.Module, data: TensorDataset, layers: str | None) -> None:
    with pytest.warns(UserWarning, match=r"does not seem to be shuffled: in layer .* times as much .* shuffle=True"):
        stochbn.fit(trained, DataLoader(data, 16), layers=layers, progress=False)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("batch_size", [2, 16, 64])
def test_shuffled_data_are_not(trained: nn.Module, data: TensorDataset, seed: int, batch_size: int) -> None:
    loader = DataLoader(data, batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="The model has seen")
        stochbn.fit(trained, loader, progress=False)


def test_parts_of_an_input_are_alike_and_no_mistake(data: TensorDataset) -> None:
    """Rows of one input resemble each other whatever the order of the inputs."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = small_cnn()

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)

    images = data.tensors[0][torch.randperm(len(data))]
    clips = images.unsqueeze(1) + 0.01 * torch.rand(len(images), 8, 1, 8, 8)
    batches = list(clips.split(16))
    stochbn.fit(calibrate(Frames(), batches), batches, progress=False)


def test_too_many_mini_batches_for_the_models_counters(trained: nn.Module, data: TensorDataset) -> None:
    """72 were seen, three epochs of 24; mini-batches of 4 would have been 96 in an epoch."""
    loader = DataLoader(data, 16, shuffle=True)
    with pytest.warns(UserWarning, match=r"has seen 72 mini-batches .* has 96 of M = 4\. .*pass batch_size="):
        stochbn.fit(trained, loader, batch_size=4, progress=False)
    stochbn.fit(trained, loader, batch_size=4, num_batches=80, progress=False)  # says itself that it is a part
    stochbn.fit(trained, loader, batch_size=8, progress=False)


def test_other_data_than_in_training_are_noticed(trained: nn.Module, data: TensorDataset) -> None:
    images = 255 * data.tensors[0][torch.randperm(len(data))]
    with pytest.warns(UserWarning, match="does not look like the training data"):
        stochbn.fit(trained, list(images.split(16)), progress=False)
