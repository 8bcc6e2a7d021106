"""Batch → statistics: every BatchNorm layer's mean and log(variance + ε), with nothing about the model changed.

The model stays in eval mode. While `BatchNormalization` is active, it answers torch's `batch_norm` in torch's place:
for the layers it was given, the input is normalised by its own batch, μ(B) and σ²(B) of eq. 1, and the two are noted. A
layer is known by its `running_mean`, so whatever its class does before and after the normalisation is done as in
training. No hook is set, no buffer is replaced, and running statistics are never written.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from stochbn.statistics.batches import listing, widen

Layers = Iterable[str] | Callable[[str, nn.Module], bool] | None


def buffer_names(layer: str) -> tuple[str, str]:
    """Names a layer's two buffers in the state dict; the layer's name is empty when it is the model itself."""
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


def all_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Finds the BatchNorm layers by name, in the order of the model; at least one."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        raise ValueError(
            f"Expected a model with batch normalization, got {type(model).__name__} without any BatchNorm layer. "
            "Dropout and Deep Ensembles need none: call predict(model, None, …)."
        )
    return found


def find_layers(model: nn.Module, layers: Layers = None) -> dict[str, _BatchNorm]:
    """Finds the BatchNorm layers to treat, by name, in the order of the model.

    Args:
        model: Any module, or a BatchNorm layer itself (whose name is then empty).
        layers: Names or shell patterns (`"layer4.*"`), a predicate of name and module, or None for all.
    """
    found = all_batch_norms(model)
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
                f"The model has {listing(found)}."
            )
        chosen = {n: layer for n, layer in found.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    if not chosen:
        raise ValueError(
            f"Expected layers= to leave at least one BatchNorm layer, got none of {len(found)}. "
            f"The model has {listing(found)}."
        )
    for name, layer in chosen.items():
        if layer.running_mean is None or layer.running_var is None:
            raise ValueError(
                f"Expected running statistics in every BatchNorm layer, got {name!r} with track_running_stats=False. "
                "Leave such layers out: layers=lambda name, layer: layer.running_mean is not None."
            )
        if isinstance(layer.running_mean, nn.UninitializedBuffer):
            raise ValueError(
                f"Expected initialised layers, got the lazy {name!r}. Run the model once on an example first."
            )
    return chosen


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
    x = widen(x)
    variance, mean = torch.var_mean(x, dim=[1, *range(3, x.dim())], correction=0)
    return mean, variance


def observation(mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Stacks what is fitted, the mean and log(σ² + ε): (G, C) twice → (G, 2, C)."""
    return torch.stack([mean, (variance + eps).log()], dim=1)


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises as training does, with the mean and the biased variance of the batch, in float32 or better. Pure.

    Args:
        x: (G·M, C, *) input of a BatchNorm layer.
        weight: γ, (C,), or None for 1.
        bias: β, (C,), or None for 0.
        eps: ε.
        groups: G, mini-batches that lie one after the other in `x` and are normalised apart.

    Returns:
        The output, shaped as `x`, and what is fitted: the mean and log(σ² + ε), (G, C) each.

    Example:
        >>> x = torch.tensor([[1.0], [3.0], [10.0], [10.0]])
        >>> output, mean, log_variance = normalise(x, None, None, eps=1.0, groups=2)
        >>> mean.flatten(), log_variance.exp().round(decimals=4).flatten()
        (tensor([ 2., 10.]), tensor([2., 1.]))
    """
    wide = widen(x)
    weight, bias = (None if p is None else p.to(wide.dtype) for p in (weight, bias))
    # Training's own kernel, which computes the statistics and applies them at once.
    parts = [torch.native_batch_norm(part, weight, bias, None, None, True, 0.0, eps) for part in wide.chunk(groups)]
    output, mean, inverse = parts[0] if groups == 1 else (torch.cat(values) for values in zip(*parts, strict=True))
    mean, inverse = mean.view(groups, -1), inverse.view(groups, -1)
    return output.to(x.dtype), mean, inverse.log() * -2


class BatchNormCall(NamedTuple):
    """The arguments of torch's `batch_norm`, however they were passed; `F.batch_norm(*call)` makes the call."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class BatchNormalization(TorchFunctionMode):
    """Context in which the given layers of a model in eval mode normalise by their batch.

    Layers without running statistics do so in any case. Set `groups` before a forward pass to the number of
    mini-batches in it: each is normalised apart (ghost batches). What the given layers saw, `take` returns. Set
    `reordered` where the weights are channels-last in place of the model's own.
    """

    def __init__(self, layers: dict[str, _BatchNorm], record: bool = True) -> None:
        super().__init__()
        self._names = {id(layer.running_mean): name for name, layer in layers.items() if layer.running_mean is not None}
        self.record = record
        self.reordered = False
        self.groups = 1
        self._seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """Forgets what was seen in a pass that raises."""
        before = {name: list(calls) for name, calls in self._seen.items()}
        try:
            yield
        except Exception:
            self._seen = before
            raise

    def take(self) -> dict[str, Tensor]:
        """Returns what each layer saw since the last time, the mean and log(σ² + ε): (calls · G, 2, C)."""
        seen, self._seen = self._seen, {}
        return {
            name: torch.stack([torch.cat(values) for values in zip(*calls, strict=True)], dim=1)
            for name, calls in seen.items()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._normalise(BatchNormCall(*args, **(kwargs or {})))
        if self.reordered and func in LAYOUT_DEPENDENT:
            raise NotImplementedError(f"{func.__name__} depends on how a tensor lies in memory")
        return func(*args, **(kwargs or {}))

    def _normalise(self, call: BatchNormCall) -> Tensor:
        x = call.input
        name = self._names.get(id(call.running_mean))
        if name is None and not (call.training or call.running_mean is None):
            return F.batch_norm(*call)
        where = "without running statistics" if name is None else repr(name)
        if x.shape[0] % self.groups:
            raise ValueError(
                f"Expected layer {where} to get a multiple of {self.groups} examples, one mini-batch each, got "
                f"{x.shape[0]}: the model regroups its batch. Pass a loader of the batch size itself."
            )
        if x.numel() // x.shape[1] == self.groups:
            raise ValueError(
                f"Expected more than 1 value a channel and mini-batch in layer {where}, got input of shape "
                f"{list(x.shape)}. Pass a loader of larger batches or a larger batch_size=."
            )
        output, mean, log_variance = normalise(x, call.weight, call.bias, call.eps, self.groups)
        if self.record and name is not None:
            self._seen.setdefault(name, []).append((mean, log_variance))
        return output


# What depends on how a tensor lies in memory, and would be wrong channels-last without an error.
LAYOUT_DEPENDENT = {
    torch.as_strided,
    torch.ops.aten.as_strided,
    torch.ops.aten.as_strided.default,
    Tensor.as_strided,
    Tensor.as_strided_,
    Tensor.resize_,
    Tensor.resize_as_,
    Tensor.set_,
    Tensor.stride,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.untyped_storage,
    Tensor.data_ptr,
}


def channels_last_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of 2-d convolutions by name, laid out channels-last, in which the CPU computes fastest.

    They are the model's own where they lie so already. Swapped in, they make all activations channels-last.
    """
    return {
        f"{name}.weight" if name else "weight": module.weight.detach().to(memory_format=torch.channels_last)
        for name, module in model.named_modules()
        if type(module) is nn.Conv2d and "weight" in module._parameters and module.weight.device.type == "cpu"
    }


@contextmanager
def evaluating(model: nn.Module, *, dropout: bool = False) -> Iterator[None]:
    """Puts every module in eval mode, dropout layers in training mode if asked, and each back as it was."""
    changed = []
    try:
        for module in model.modules():
            wanted = dropout and isinstance(module, _DropoutNd)
            if module.training != wanted:
                changed.append((module, module.training))
                module.training = wanted
        with keeping_tensors(model):
            yield
    finally:
        for module, mode in changed:
            module.training = mode


@contextmanager
def keeping_tensors(model: nn.Module) -> Iterator[None]:
    """Restores buffers and tensor attributes that the model's own forward pass binds anew, such as a running average.

    What it binds under `vmap` would be a tensor that is dead outside.
    """
    places = [place for module in model.modules() for place in (module._buffers, module.__dict__)]
    before = [dict(place) for place in places]
    try:
        yield
    finally:
        for place, kept in zip(places, before, strict=True):
            if len(place) == len(kept) and all(map(operator.is_, place.values(), kept.values())):
                continue
            bound = [key for key, value in place.items() if isinstance(value, Tensor) and kept.get(key) is not value]
            lost = [key for key, value in kept.items() if isinstance(value, Tensor) and place.get(key) is not value]
            for key in (*bound, *lost):
                if key in kept:
                    place[key] = kept[key]
                else:
                    del place[key]


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


def unwrap(model: Any) -> nn.Module:
    """Checks that it is an eager module; of one behind `torch.compile`, returns what was compiled.

    Compiled code would ignore swapped buffers.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"Expected a model (an eager torch.nn.Module), got {type(model).__name__}. Check the order of the "
            "arguments; of a scripted model, pass the module it was scripted from."
        )
    return model
