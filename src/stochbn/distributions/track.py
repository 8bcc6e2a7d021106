"""Training → distribution: the paper's exponential smoothing, on any model, while it trains."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from stochbn.distributions.base import Factorized
from stochbn.distributions.fit import Collected
from stochbn.statistics.batches import num_examples
from stochbn.statistics.normalization import BatchNormCall, batch_moments, find_layers, observation, unwrap


class Tracker:
    """What `track` yields: the statistics of the training batches seen so far."""

    def __init__(self, model: nn.Module, momentum: float) -> None:
        self._model = model
        self._layers = find_layers(model)
        self._momentum = momentum
        self._collected = Collected(momentum)
        self._observed: dict[str, list[Tensor]] = {}
        self._other_size = 0

    def distribution(self) -> Factorized:
        """Returns the distribution as of now, during training or after it."""
        if self._collected.num_batches < 2:
            raise ValueError(
                f"Expected at least 2 training batches of one size inside track, got {self._collected.num_batches}. "
                "Train the model itself within the context: in train mode, not compiled, in batches of 2 or more."
            )
        dropout = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in self._model.modules())
        return self._collected.distribution(self._model, self._layers, dropout=dropout)

    def _finish(self, arguments: Any) -> None:
        observed, self._observed = self._observed, {}
        size = num_examples(arguments) if observed else 0
        if size < 2:
            return
        if self._collected.batch_size and size != self._collected.batch_size:
            if size != self._other_size:  # an epoch's incomplete last batch, unless a second one follows
                self._other_size = size
                return
            self._collected = Collected(self._momentum)
        self._other_size = 0
        self._collected.batch_size = size
        self._collected.add({name: torch.cat(calls) for name, calls in observed.items()}, [1])


class _Watch(TorchFunctionMode):
    """Notes the input of each `batch_norm` that a layer in train mode calls, and lets it pass."""

    def __init__(self, observed: list[Tensor], eps: float) -> None:
        super().__init__()
        self.observed = observed
        self.eps = eps

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            with torch.no_grad():
                mean, variance = batch_moments(BatchNormCall(*args, **(kwargs or {})).input.detach())
                self.observed.append(observation(mean, variance, self.eps))
        return func(*args, **(kwargs or {}))


@contextmanager
def track(model: nn.Module, momentum: float = 0.1) -> Iterator[Tracker]:
    """Follows the batch statistics by exponential smoothing *while the model trains*, as the paper does.

    With momentum α, the batch seen k steps ago weighs α (1 − α)^k, divided by the sum of the weights so far: there is
    no start-up bias. Only forward passes in train mode count, and training itself is left as it is, except that a
    batch with NaN or Inf in its statistics raises. A batch of another size (the last of an epoch) is passed over; when
    the size changes for good, the smoothing starts anew.

    Args:
        model: The network that is trained inside the context, by calling it.
        momentum: α, in (0, 1); as BatchNorm's own. 0.01 averages over more batches, of older weights.

    Yields:
        A tracker, whose `distribution()` gives the fit at any time.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> with track(model) as tracker:
        ...     for _ in range(20):
        ...         _ = model(torch.randn(16, 2))  # and the optimiser's step
        >>> tracker.distribution()
        Factorized(1 layers, 3 channels, batch_size=16, num_batches=20)
    """
    if not 0 < momentum < 1:
        raise ValueError(f"Expected momentum between 0 and 1, got {momentum}. BatchNorm's own is 0.1.")
    if unwrap(model) is not model:
        raise ValueError(
            "Expected a model that is not compiled, got one behind torch.compile, whose code cannot be watched. "
            "Fit after training instead: stochbn.fit(model, train_loader)."
        )
    tracker = Tracker(model, momentum)
    hooks: list[RemovableHandle] = []
    try:
        # A forward pass that raised leaves observations behind, so the next starts afresh. Registered first, as the
        # model may be a BatchNorm layer itself.
        hooks.append(model.register_forward_pre_hook(lambda *_: tracker._observed.clear()))
        for name, layer in tracker._layers.items():
            hooks.extend(_watch(tracker, name, layer))
        hooks.append(
            model.register_forward_hook(lambda _, args, kwargs, __: tracker._finish((args, kwargs)), with_kwargs=True)
        )
        yield tracker
    finally:
        for hook in hooks:
            hook.remove()


def _watch(tracker: Tracker, name: str, layer: _BatchNorm) -> list[RemovableHandle]:
    active = ExitStack()

    def enter(layer: _BatchNorm, _: Any) -> None:
        if layer.training:
            active.enter_context(_Watch(tracker._observed.setdefault(name, []), layer.eps))

    def leave(*_: Any) -> None:
        active.close()

    return [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]
