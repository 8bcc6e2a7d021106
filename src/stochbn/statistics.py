"""Batch → statistics: every BatchNorm layer's mean and log(variance + ε), with nothing about the model changed.

The model stays in eval mode throughout. A hook in front of each BatchNorm layer standardises the layer's input
by the input's own batch, μ(B) and σ²(B) of eq. 1, while the layer's buffers are stood in for by mean 0 and
variance 1 − ε. So the layer computes what it computes in training, whatever its class adds to the normalisation,
and never comes near its running statistics.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

Layers = Iterable[str] | Callable[[str, nn.Module], bool] | None


def buffer_names(layer: str) -> tuple[str, str]:
    """Names a layer's two buffers in the state dict; the layer's name is empty when it is the model itself."""
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


def all_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def find_layers(model: nn.Module, layers: Layers = None) -> dict[str, _BatchNorm]:
    """Finds the BatchNorm layers to treat, by name, in the order of the model.

    Args:
        model: Any module, or a BatchNorm layer itself (whose name is then empty).
        layers: Names or shell patterns (`"layer4.*"`), a predicate of name and module, or None for all.
    """
    found = all_batch_norms(model)
    if not found:
        raise ValueError(
            f"Expected a model with batch normalization, got {type(model).__name__} without any BatchNorm layer. "
            "Dropout and Deep Ensembles need none: call predict(model, None, …)."
        )
    if layers is None:
        chosen = found
    elif callable(layers):
        chosen = {name: layer for name, layer in found.items() if layers(name, layer)}
    else:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in found)]
        if idle:
            raise ValueError(
                f"Expected layers= to name BatchNorm layers, got {idle}, which match none. "
                f"The model has {_listing(found)}."
            )
        chosen = {n: layer for n, layer in found.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    if not chosen:
        raise ValueError(
            f"Expected layers= to leave at least one BatchNorm layer, got none of {len(found)}. "
            f"The model has {_listing(found)}."
        )
    for name, layer in chosen.items():
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(
                f"Expected running statistics in every BatchNorm layer, got {name!r} with track_running_stats=False. "
                "Build it with track_running_stats=True, or leave it out: "
                "layers=lambda name, layer: layer.running_mean is not None."
            )
        if isinstance(layer.running_mean, nn.UninitializedBuffer):
            raise ValueError(
                f"Expected initialised layers, got the lazy {name!r}. Run the model once on an example first."
            )
    return chosen


def _listing(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def batch_moments(x: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Computes the mean and the biased variance that training normalises with, in float32 or better. Pure.

    Args:
        x: (G·M, C, *) input of a BatchNorm layer.
        groups: G, mini-batches that lie one after the other in `x`.

    Returns:
        Mean and variance, (G, C) each.

    Example:
        >>> x = torch.tensor([[1.0], [3.0], [10.0], [10.0]])
        >>> mean, variance = batch_moments(x, groups=2)
        >>> mean.flatten(), variance.flatten()
        (tensor([ 2., 10.]), tensor([1., 0.]))
    """
    x = x.unflatten(0, (groups, -1))  # (G, M, C, *)
    x = x if x.dtype == torch.float64 else x.float()
    variance, mean = torch.var_mean(x, dim=[1, *range(3, x.dim())], correction=0)
    return mean, variance


def observation(mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Stacks what is fitted, the mean and log(σ² + ε): (G, C) twice → (G, 2, C)."""
    return torch.stack([mean, (variance + eps).log()], dim=1)


class BatchNormalization:
    """Context in which the given layers normalise by their batch, and what they saw is kept in `observed`.

    Set `groups` before a forward pass to the number of mini-batches in it: each is normalised apart (ghost
    batches). On exit, also by an exception, hooks are gone and the very same buffers are back.
    """

    def __init__(self, layers: dict[str, _BatchNorm], record: bool = True) -> None:
        self.layers = layers
        self.record = record
        self.groups = 1
        self.observed: dict[str, list[Tensor]] = {}

    def __enter__(self) -> "BatchNormalization":
        self._buffers = [
            (layer._buffers, key, layer._buffers[key])
            for layer in self.layers.values()
            for key in ("running_mean", "running_var")
        ]
        self._hooks = []
        try:
            for name, layer in self.layers.items():
                assert layer.running_mean is not None
                layer._buffers["running_mean"] = torch.zeros_like(layer.running_mean)
                layer._buffers["running_var"] = torch.full_like(layer.running_mean, 1 - layer.eps)
                self._hooks.append(layer.register_forward_pre_hook(self._standardise(name), with_kwargs=True))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for buffers, key, tensor in self._buffers:
            buffers[key] = tensor

    def _standardise(self, name: str) -> Callable[..., Any]:
        def hook(layer: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x: Tensor = args[0] if args else kwargs["input"]
            if x.shape[0] % self.groups:
                raise ValueError(
                    f"Expected layer {name!r} to get a multiple of {self.groups} examples, one mini-batch each, got "
                    f"{x.shape[0]}: the model regroups its batch. Pass a loader of the batch size itself."
                )
            mean, variance = batch_moments(x, self.groups)  # (G, C)
            if x.numel() // x.shape[1] == self.groups:
                raise ValueError(
                    f"Expected more than 1 value a channel and mini-batch in layer {name!r}, got input of shape "
                    f"{list(x.shape)}. Pass a loader of larger batches or a larger batch_size=."
                )
            if self.record:
                self.observed.setdefault(name, []).append(observation(mean, variance, layer.eps))
            shape = (self.groups, 1, x.shape[1]) + (1,) * (x.dim() - 2)
            scale = (variance + layer.eps).rsqrt().view(shape)
            y = (x.unflatten(0, (self.groups, -1)) - mean.view(shape)) * scale  # (G, M, C, *)
            return (y.flatten(0, 1).to(x.dtype), *args[1:]), {k: v for k, v in kwargs.items() if k != "input"}

        return hook


@contextmanager
def evaluating(model: nn.Module, *, dropout: bool = False) -> Iterator[None]:
    """Puts every module in eval mode, dropout layers in training mode if asked, and each back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = dropout and isinstance(module, _DropoutNd)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def dropout_layers(model: nn.Module) -> dict[str, _DropoutNd]:
    """Finds the dropout layers by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, _DropoutNd)}
    if not found:
        raise ValueError(
            f"Expected a model with Dropout layers for dropout=True, got {type(model).__name__} with none. "
            "Leave dropout off, or give the model nn.Dropout modules: functional dropout cannot be switched."
        )
    return found


@contextmanager
def preserving_rng(device: torch.device) -> Iterator[None]:
    """Restores the state of torch's generators, the CPU's and the device's, on exit."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the module behind `torch.compile`, whose compiled code would ignore hooks and swapped buffers."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
