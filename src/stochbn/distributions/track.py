"""Training → distribution: the paper's exponential smoothing, on any model, while it trains."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stochbn.distributions.collected import Collected
from stochbn.distributions.factorized import Factorized
from stochbn.statistics.calls import unwrap, without_ddp
from stochbn.statistics.items import num_examples
from stochbn.statistics.layers import find_layers
from stochbn.statistics.normalization import Answering, BatchNormCall, Observed, batch_statistics


class Tracker:
    """What `track` yields: the statistics of the training batches seen so far."""

    def __init__(self, model: nn.Module, momentum: float) -> None:
        self._model = model
        self._layers = find_layers(model)
        self._momentum = momentum
        self._collected = Collected(momentum)
        self._observed = Observed({})
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

    def _begin(self) -> Callable[[BatchNormCall], Tensor]:
        """Starts a forward pass, and returns what listens to its layers; a pass that raised is forgotten."""
        observed = self._observed = Observed(self._layers)  # by the buffers of now: `model.to` makes new ones

        def listen(call: BatchNormCall) -> Tensor:
            name = observed.name(call)
            if name is not None and call.training:
                with torch.no_grad():
                    observed.add(name, batch_statistics(call.input.detach(), call.eps))
            return F.batch_norm(*call)

        return listen

    def _finish(self, arguments: Any) -> None:
        observed = self._observed.take()
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
        self._collected.add(observed, [1])


@contextmanager
def track(model: nn.Module, momentum: float = 0.1) -> Iterator[Tracker]:
    """Follows the batch statistics by exponential smoothing *while the model trains*, as the paper does.

    With momentum α, the batch seen k steps ago weighs α (1 − α)^k, divided by the sum of the weights so far: there is
    no start-up bias. Only forward passes in train mode count, and training itself is left as it is, except that a
    batch with NaN or Inf in its statistics raises. A batch of another size (the last of an epoch) is passed over; when
    the size changes for good, the smoothing starts again.

    Args:
        model: The network that is trained inside the context, by calling it.
        momentum: α, in (0, 1); as BatchNorm's own. 0.01 averages over more batches, of older weights.

    Yields:
        A tracker, whose `distribution()` gives the fit at any time.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> with track(model) as tracker:
        ...     for _ in range(20):
        ...         _ = model(torch.randn(16, 2))  # and the optimiser's step
        >>> tracker.distribution()
        Factorized(1 layers, 3 channels, batch_size=16, num_batches=20)
    """
    if not 0 < momentum < 1:
        raise ValueError(f"Expected momentum between 0 and 1, got {momentum}. BatchNorm's own is 0.1.")
    model = without_ddp(model)  # which calls the model, and so its hooks
    if unwrap(model) is not model:
        raise ValueError(
            "Expected a model that is not compiled, got one behind torch.compile, whose code cannot be watched. "
            "Fit after training instead: stochbn.fit(model, train_loader)."
        )
    tracker = Tracker(model, momentum)
    passes = ExitStack()  # the context of a forward pass that is under way

    def begin(*_: Any) -> None:
        passes.close()  # of a pass that Ctrl-C ended: torch calls no hook then
        passes.enter_context(Answering(tracker._begin()))

    def end(*_: Any) -> None:
        passes.close()

    hooks = [
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end, always_call=True),  # also after an error, or the context would stay
        model.register_forward_hook(lambda _, args, kwargs, __: tracker._finish((args, kwargs)), with_kwargs=True),
    ]
    try:
        yield tracker
    finally:
        passes.close()
        for hook in hooks:
            hook.remove()
