"""Networks that the tests share, and the oracles: naive ways to the same numbers."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

import stochbn
from stochbn.distributions.base import Layer
from stochbn.statistics.moments import Moments
from stochbn.testing import hooked_statistics, naive_outputs


class NormAct(nn.BatchNorm2d):
    """A subclass that adds an activation to the normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def calibrate(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Sets running statistics to the averages over the batches, as a trained model's are."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


def naive(
    model: nn.Module, draws: stochbn.Draws, x: Tensor, change: Callable[[nn.Module], None] = lambda network: None
) -> Tensor:
    """The oracle: probabilities of one deep copy of the model a draw. (S, N, K)"""
    return naive_outputs(model, draws, x, change=change).softmax(2)


def small_cnn(dropout: float = 0.0, classes: int = 3) -> nn.Module:
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Conv2d(4, 6, 3),
        NormAct(6),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 10, bias=False),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(10, classes),
    ]
    return nn.Sequential(*[layer for layer in layers if dropout or not isinstance(layer, nn.Dropout)])


def observed(model: nn.Module, batches: list[Tensor]) -> Tensor:
    """The oracle: each mini-batch's statistics in a pass of its own, (B, 2, ΣC)."""
    return torch.from_numpy(np.concatenate(list(hooked_statistics(model, batches).values()), axis=2))


def flat(draws: stochbn.Draws, stats: stochbn.Distribution) -> np.ndarray:
    """Draws as (S, 2, ΣC): means and log(σ² + ε)."""
    means = torch.cat([values for name, values in draws.buffers.items() if name.endswith("mean")], dim=1)
    logs = [
        (values + layer.eps).log()
        for (name, values), layer in zip(
            [item for item in draws.buffers.items() if item[0].endswith("var")], stats.layers.values(), strict=True
        )
    ]
    return torch.stack([means, torch.cat(logs, dim=1)], dim=1).numpy()


def known(mean: float = 2.0, std: float = 0.5, channels: int = 1, eps: float = 1e-5) -> stochbn.Factorized:
    """A distribution with the given moments, of both the mean and the log variance."""
    centre, deviation = (torch.full((2, channels), v, dtype=torch.float64) for v in (mean, 10 * std**2))
    moments = Moments(11.0, 11.0, centre, deviation)
    return stochbn.Factorized({"bn": Layer(eps, moments)}, batch_size=16, num_batches=11)


def of_channels(channels: int) -> stochbn.Factorized:
    moments = Moments.of(torch.randn(20, 2, channels, dtype=torch.float64))
    return stochbn.Factorized({"bn": Layer(1e-5, moments)}, batch_size=16, num_batches=20)


def centred(model: nn.Module) -> stochbn.Factorized:
    """A distribution around the model's own running statistics."""
    layers = {}
    for name, norm in model.named_modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            centre = torch.stack([norm.running_mean.double(), (norm.running_var.double() + norm.eps).log()])
            layers[name] = Layer(norm.eps, Moments(10.0, 10.0, centre, torch.ones_like(centre)))
    return stochbn.Factorized(layers, batch_size=16, num_batches=10)
