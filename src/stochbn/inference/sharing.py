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
# Calls for the state of torch, not for a result: made in every pass.
_STATE = {torch._C._set_grad_enabled}
# Ways to write into a tensor behind its version counter's back.
_UNTRACKED = {Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.untyped_storage, Tensor.data_ptr}  # type: ignore[attr-defined]


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
        # Function, what of its arguments can be compared, leaves of its result, their structure (None: one tensor).
        self._calls: list[tuple[Any, list[Any], list[Any], Any]] = []
        self._spoilt = False
        self._kept: dict[int, _Kept] = {}
        self._complete = False
        self._position: int | None = None  # in a replay; None in the pass that is recorded
        for tensor in inputs:
            self._slot(tensor).keep(tensor)

    @property
    def reusable(self) -> bool:
        """Whether there is something to replay: a pass that wrote into what it shares has spoilt it for the others."""
        return self._complete and not self._spoilt and not any(kept.changed for kept in self._kept.values())

    def rewind(self) -> None:
        """Makes the coming pass a replay."""
        self._position = 0

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function, or returns what it returned in the recorded pass."""
        if function in _STATE:
            return function(*args, **kwargs)
        if function in _UNTRACKED:
            self._spoilt = True
        if self._position is not None:
            return self._replay(function, args, kwargs)
        if self._complete:
            self.stop(args, kwargs)
            return function(*args, **kwargs)
        given = [self._mark(value) for value in (*args, *kwargs.values())]
        result = function(*args, **kwargs)
        leaves, structure = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
        if all(isinstance(leaf, _CONSTANTS) or (isinstance(leaf, Tensor) and not is_drawn(leaf)) for leaf in leaves):
            slots = [self._slot(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._calls.append((function, given, slots, structure))
        else:
            self.stop(args, kwargs)
        return result

    def stop(self, *values: Any) -> None:
        """Ends the shared part, if it has not ended: these values are read by what depends on the draw."""
        self._complete = True
        if self._position is None:
            self._keep(values)
        elif self._position < len(self._calls):
            raise DivergedError(f"{self._calls[self._position][0]} was not called in another pass over the same batch")

    def _replay(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._position is not None
        if self._position == len(self._calls):
            return function(*args, **kwargs)
        recorded, given, slots, structure = self._calls[self._position]
        now = (*args, *kwargs.values())
        if recorded != function or len(given) != len(now) or not all(map(self._same, given, now)):
            raise DivergedError(f"{recorded} in one pass was {function}, or had other arguments, in another")
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

    def _mark(self, value: Any) -> Any:
        """Notes of an argument what a replay can compare."""
        if isinstance(value, Tensor):
            slot = self._kept.get(id(value))
            return slot if slot is not None and slot.holds(value) else Tensor
        return value if isinstance(value, _CONSTANTS) else ...

    @staticmethod
    def _same(mark: Any, value: Any) -> bool:
        if isinstance(mark, _Kept):
            return mark.get() is value
        if mark is Tensor:
            return isinstance(value, Tensor) and not is_drawn(value)
        return mark is ... or (type(mark) is type(value) and mark == value)

    def _slot(self, tensor: Tensor) -> _Kept:
        slot = self._kept.get(id(tensor))
        if slot is None or not slot.holds(tensor):
            slot = self._kept[id(tensor)] = _Kept(tensor)
        return slot


def is_drawn(tensor: Tensor) -> bool:
    """Returns whether a tensor under `vmap` differs from draw to draw."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))
