"""Whatever is changed of a model is noticed, also when it is put back."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stochbn.testing.fingerprint import Fingerprint, Watching, bits_of


def rebind_weight(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def set_back(model: nn.Module) -> None:
    kept = model[1].running_mean.clone()
    model[1].running_mean.zero_()
    model[1].running_mean.copy_(kept)


def write_beside_autograd(model: nn.Module) -> None:
    model[0].weight.data[0, 0] += 1  # no version is counted


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "mode": (lambda model: model[1].train(not model[1].training), "1.training"),
    "hook": (lambda model: model[0].register_forward_hook(lambda *_: None), "0._forward_hooks."),
    "parameter": (rebind_weight, "0._parameters.weight"),
    "module": (lambda model: model.append(nn.ReLU()), "_modules."),
    "attribute": (lambda model: setattr(model[1], "momentum", 0.5), "1.momentum"),
    "new attribute": (lambda model: setattr(model, "seen", 1), "seen"),
    "buffer": (lambda model: model[1].running_mean.add_(1), "1.running_mean"),
    "set back": (set_back, "1.running_mean"),
    "data": (write_beside_autograd, "0.weight"),
}


@pytest.fixture
def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_is_named(kind: str, network: nn.Module) -> None:
    before = Fingerprint(network)
    assert before.changes(network) == []
    change, name = CHANGES[kind]
    change(network)
    assert before.changes(network)[0].startswith(name)


def test_using_a_model_is_no_change(network: nn.Module) -> None:
    network.eval()
    before = Fingerprint(network)
    network(torch.randn(4, 2)).sum().backward()
    network.state_dict()
    assert before.changes(network) == []


def test_a_change_that_is_undone_is_seen_from_within(network: nn.Module) -> None:
    def work(x: Tensor) -> Tensor:
        network.eval()
        y = x + 1
        network.train()
        return y

    with Watching(network, Fingerprint(network)) as watching:
        _ = torch.ones(2) + 1
    assert watching.changed == []
    with Watching(network, before := Fingerprint(network)) as watching:
        work(torch.ones(2))
    assert set(watching.changed) == {"training", "0.training", "1.training"}
    assert before.changes(network) == []


def test_bits_tell_nan_from_nan_only_by_the_bits() -> None:
    assert torch.equal(bits_of(torch.tensor(float("nan"))), bits_of(torch.tensor(float("nan"))))
    assert not torch.equal(bits_of(torch.tensor(0.0)), bits_of(torch.tensor(-0.0)))
    assert len(bits_of(torch.ones(3, 2).bfloat16().t())) == 12
