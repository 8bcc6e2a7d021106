"""A draw: values for a model's BatchNorm buffers, which make it one of many networks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch
from torch import Tensor, nn

from stochbn.statistics.checks import listing
from stochbn.statistics.layers import all_batch_norms, buffer_names


@dataclass(frozen=True, eq=False)
class Draws:
    """S sampled networks: for each BatchNorm buffer its S values. `draws[i]` is one network's, `draws[i:j]` some.

    Attributes:
        buffers: `{buffer name: (S, C)}`, such as `"bn1.running_mean"`.
        excluded: BatchNorm layers that keep their own running statistics on purpose.
        eps: `{layer name: ε}` that the variances are meant for, where known.
        shares: `{layer name: (S,)}` what part of the mini-batch that normalises it each input is itself, such as 1 / M,
            for the layers where `predict` is to count it in.
        temperature: What `predict` divides the outputs by, before the softmax or the sigmoid.

    Examples:
        >>> import torch
        >>> draws = Draws({"running_mean": torch.zeros(5, 3), "running_var": torch.ones(5, 3)})
        >>> len(draws), len(draws[1:3])
        (5, 2)
        >>> torch.func.functional_call(nn.BatchNorm1d(3).eval(), draws[0], torch.ones(1, 3)).shape
        torch.Size([1, 3])
    """

    buffers: Mapping[str, Tensor]
    excluded: tuple[str, ...] = ()
    eps: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        sizes = {name: tuple(values.shape) for name, values in self.buffers.items()}
        if not sizes or any(len(size) != 2 for size in sizes.values()) or len({s for s, _ in sizes.values()}) > 1:
            raise ValueError(f"Expected one (S, C) tensor a buffer with the same S, got {sizes}.")
        faulty = {name: tuple(values.shape) for name, values in self.shares.items() if values.shape != (len(self),)}
        if faulty:
            raise ValueError(f"Expected shares of shape ({len(self)},), one number a draw, got {faulty}.")

    def __len__(self) -> int:
        return next(iter(self.buffers.values())).shape[0]

    @overload
    def __getitem__(self, index: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> "Draws": ...
    def __getitem__(self, index: int | slice) -> "dict[str, Tensor] | Draws":
        part = {name: values[index] for name, values in self.buffers.items()}
        if not isinstance(index, slice):
            return part
        return replace(self, buffers=part, shares={name: values[index] for name, values in self.shares.items()})

    def match(self, model: nn.Module) -> "Draws":
        """Returns the draws on the model's devices and in its precisions; raises if they are another model's."""
        layers = all_batch_norms(model)
        own = {
            key: buffer
            for name, layer in layers.items()
            for key, buffer in zip(buffer_names(name), (layer.running_mean, layer.running_var), strict=True)
            if buffer is not None
        }
        allowed = {key for name in self.excluded for key in buffer_names(name)}
        faults = {
            "missing": sorted(own.keys() - self.buffers.keys() - allowed),
            "unexpected": sorted({*self.buffers, *(buffer_names(name)[0] for name in self.shares)} - own.keys()),
            "of another size": [
                f"{key} ({values.shape[1]} channels, the model has {own[key].numel()})"
                for key, values in self.buffers.items()
                if key in own and values.shape[1] != own[key].numel()
            ],
            "of another ε": [name for name, eps in self.eps.items() if name in layers and layers[name].eps != eps],
        }
        if any(faults.values()):
            found = "; ".join(f"{kind}: {listing(keys)}" for kind, keys in faults.items() if keys)
            raise ValueError(
                f"Expected statistics fitted on this {type(model).__name__}, got another model's ({found}). "
                "Fit them again with stochbn.fit(model, train_loader)."
            )
        buffers = {key: values.to(own[key]) for key, values in self.buffers.items()}
        shares = {name: _widen_to(own[buffer_names(name)[0]], values) for name, values in self.shares.items()}
        return replace(self, buffers=buffers, shares=shares)


def _widen_to(buffer: Tensor, values: Tensor) -> Tensor:
    """Moves values to a buffer's device, in its precision or float32 if that is better."""
    return values.to(buffer.device, torch.promote_types(buffer.dtype, torch.float32))


def join_draws(parts: Sequence[Draws]) -> Draws:
    """Puts draws for one model after each other; all that is no draw is the first's."""
    buffers, shares = (
        {name: torch.cat([mapping[name] for mapping in mappings]) for name in mappings[0]}
        for mappings in ([part.buffers for part in parts], [part.shares for part in parts])
    )
    return replace(parts[0], buffers=buffers, shares=shares)
