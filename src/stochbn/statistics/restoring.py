"""What a pass may change of a model or of its thread, put back as it was."""

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stochbn.statistics.normalization import Answering


@contextmanager
def keeping_tensors(model: nn.Module) -> Iterator[None]:
    """Restores buffers and tensor attributes that a forward pass of the model binds again, such as a running average.

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


class KeepingModes:
    """Context that restores the thread's gradient mode, function modes and levels of `vmap`.

    Every one of these has a context of its own. But Ctrl-C may come while such a context is entered or left, and then
    it stays active for ever. This one goes around the others.

    Examples:
        >>> with KeepingModes():
        ...     _ = torch.set_grad_enabled(False)
        >>> torch.is_grad_enabled()
        True
    """

    def __enter__(self) -> None:
        # What an interrupted call of ours left to the garbage collector may have come back since: torch takes a mode
        # off its stack while it is answering, and a generator puts it back.
        while (count := torch._C._len_torch_function_stack()) and _is_over(torch._C._get_function_stack_at(count - 1)):
            torch._C._pop_torch_function_stack()
        self._functorch: Any = torch._C._functorch
        self._gradients = torch.is_grad_enabled()
        self._modes = torch._C._len_torch_function_stack()
        self._depth = self._functorch.get_dynamic_layer_stack_depth()  # of vmap

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        while torch._C._len_torch_function_stack() > self._modes:
            torch._C._pop_torch_function_stack()
        self._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self._depth)
        torch._C._set_grad_enabled(self._gradients)
        if error is not None:
            raise_if_interrupted(error)


def _is_over(mode: Any) -> bool:
    return isinstance(mode, Answering) and mode.answer is None


def raise_if_interrupted(error: BaseException) -> None:
    """Raises `KeyboardInterrupt` where that is what an error came of: torch's contexts may raise another on the way."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt) and cause is not error:
            raise KeyboardInterrupt from error
        cause = cause.__context__


def run_uninterrupted(function: Callable[[], None], device: str, lock: AbstractContextManager[Any]) -> None:
    """Runs a function that Ctrl-C must not end halfway: in a thread of its own, since Python interrupts the main one.

    The main thread can be interrupted while it waits. The function then ends by itself, if it has begun; while it still
    waits for others it never begins, or interrupted calls would queue up.

    Args:
        function: Uses none of the thread's modes but autocast.
        device: Type of the device whose autocast it uses.
        lock: Held while it runs; the thread may take it again.
    """
    if threading.current_thread() is not threading.main_thread():
        function()
        return
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    errors: list[BaseException] = []
    abandoned = threading.Event()

    def run() -> None:
        try:
            with lock, autocast, torch.no_grad():
                if not abandoned.is_set():
                    function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        abandoned.set()
        raise
    if errors:
        raise errors[0]
