"""What the draws of a network share: all that a forward pass computes before the first drawn number enters it.

The passes over one batch differ in their draws alone. So the first is recorded call by call until a result depends on
the draw, and the others are handed those results. Of these only what the rest of the pass reads is kept; in place of
everything else stands a tensor without data, so that a wrong guess is an error, never a wrong number.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# Results that are the same however often they are read. Anything else, such as an iterator, ends the recording.
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


class DivergedError(RuntimeError):
    """A pass that did not begin as the recorded one did."""


class _Kept:
    """One tensor of the recording: alive while the first pass needs it, kept if what follows reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._alive = weakref.ref(tensor)
        self._empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.tensor: Tensor | None = None
        self._version = 0

    def holds(self, tensor: Tensor) -> bool:
        return self._alive() is tensor  # an id alone may have passed on to another

    def keep(self, tensor: Tensor) -> None:
        if self.tensor is None and self.holds(tensor):
            self.tensor = tensor
            self._version = tensor._version

    def get(self) -> Tensor:
        return self._empty if self.tensor is None else self.tensor

    @property
    def changed(self) -> bool:
        return self.tensor is not None and self.tensor._version != self._version


class Recording:
    """The shared part of the passes over one batch.

    Args:
        inputs: The tensors that every pass is given.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        self._calls: list[
            tuple[Any, list[Any], Any]
        ] = []  # function, leaves of its result, their structure (None: one tensor)
        self._kept: dict[int, _Kept] = {}
        self._complete = False
        self._position: int | None = None  # in a replay; None in the pass that is recorded
        for tensor in inputs:
            self._slot(tensor).keep(tensor)

    @property
    def reusable(self) -> bool:
        """Whether there is something to replay: a pass that wrote into what it shares has spoilt it for the others."""
        return self._complete and not any(kept.changed for kept in self._kept.values())

    def rewind(self) -> None:
        """Makes the coming pass a replay."""
        self._position = 0

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function, or returns what it returned in the recorded pass."""
        if self._position is not None:
            return self._replay(function, args, kwargs)
        if self._complete:
            self.stop(args, kwargs)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        leaves, structure = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
        if all(isinstance(leaf, _CONSTANTS) or (isinstance(leaf, Tensor) and not is_drawn(leaf)) for leaf in leaves):
            slots = [self._slot(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._calls.append((function, slots, structure))
        else:
            self.stop(args, kwargs)
        return result

    def stop(self, *values: Any) -> None:
        """Ends the shared part, if it has not ended: these values are read by what depends on the draw."""
        self._complete = True
        if self._position is None:
            self._keep(values)

    def _replay(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._position is not None
        if self._position == len(self._calls):
            return function(*args, **kwargs)
        recorded, slots, structure = self._calls[self._position]
        if recorded != function:
            raise DivergedError(f"{recorded} in one pass was {function} in another over the same batch")
        self._position += 1
        leaves = [slot.get() if isinstance(slot, _Kept) else slot for slot in slots]
        return leaves[0] if structure is None else tree_unflatten(leaves, structure)

    def _keep(self, values: Any) -> None:
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, Tensor):
                kept = self._kept.get(id(value))
                if kept is not None:
                    kept.keep(value)
            elif isinstance(value, (tuple, list, dict)):
                self._keep(value)

    def _slot(self, tensor: Tensor) -> _Kept:
        slot = self._kept.get(id(tensor))
        if slot is None or not slot.holds(tensor):
            slot = self._kept[id(tensor)] = _Kept(tensor)
        return slot


def is_drawn(tensor: Tensor) -> bool:
    """Tells whether a tensor under `vmap` differs from draw to draw."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))
