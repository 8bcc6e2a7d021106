"""A batch → statistics: what every BatchNorm layer normalises by, with nothing about the model changed.

The model stays in eval mode. While `Answering` is active, a function of ours answers torch's `batch_norm`. A layer is
known by its `running_mean`, so whatever its class does before and after the normalisation is done as in training. No
hook is set, no buffer is replaced, and running statistics are never written.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


def widen(x: Tensor) -> Tensor:
    """Returns a tensor in float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def batch_statistics(x: Tensor, eps: float, num_batches: int = 1) -> Tensor:
    """Computes what is fitted: the mean and log(σ² + ε) of each channel, in float32 or better. Pure.

    σ² is the biased variance, which is the one that training normalises with.

    Args:
        x: (G·M, C, *) input of a BatchNorm layer.
        eps: ε.
        num_batches: G, mini-batches that lie one after the other in `x`.

    Returns:
        (G, 2, C).

    Examples:
        >>> x = torch.tensor([[1.0], [3.0], [10.0], [10.0]])
        >>> batch_statistics(x, eps=1.0, num_batches=2)[:, 0].flatten()
        tensor([ 2., 10.])
    """
    x = widen(x.unflatten(0, (num_batches, -1)))  # (G, M, C, *)
    variance, mean = torch.var_mean(x, dim=[1, *range(3, x.dim())], correction=0)
    return torch.stack([mean, (variance + eps).log()], dim=1)


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, num_batches: int = 1
) -> tuple[Tensor, Tensor]:
    """Normalises as training does, by the statistics of each mini-batch, in float32 or better. Pure.

    Args:
        x: (G·M, C, *) input of a BatchNorm layer.
        weight: γ, (C,), or None for 1.
        bias: β, (C,), or None for 0.
        eps: ε.
        num_batches: G, mini-batches that lie one after the other in `x` and are normalised apart.

    Returns:
        The output, shaped as `x`, and what `batch_statistics` gives, (G, 2, C).

    Examples:
        >>> x = torch.tensor([[1.0], [3.0], [10.0], [10.0]])
        >>> output, statistics = normalise(x, None, None, eps=1.0, num_batches=2)
        >>> torch.allclose(statistics, batch_statistics(x, 1.0, 2))
        True
    """
    wide = widen(x)
    weight, bias = (None if p is None else p.to(wide.dtype) for p in (weight, bias))
    # Training's own kernel computes the statistics and applies them at once: less memory traffic than two steps.
    chunks = wide.chunk(num_batches)
    parts = [torch.native_batch_norm(chunk, weight, bias, None, None, True, 0.0, eps) for chunk in chunks]
    output, mean, inverse = parts[0] if num_batches == 1 else (torch.cat(values) for values in zip(*parts, strict=True))
    return output.to(x.dtype), torch.stack([mean, inverse.log() * -2]).view(2, num_batches, -1).transpose(0, 1)


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


class Answering(TorchFunctionMode):
    """Context in which a function answers torch's `batch_norm`; every other call goes to torch.

    It is the one place where the package stands between a model and `batch_norm` to learn what its layers see.

    Args:
        answer: Takes the arguments of the call and returns its output.

    Examples:
        >>> with Answering(lambda call: call.input + 1):
        ...     torch.nn.BatchNorm1d(2)(torch.zeros(1, 2))
        tensor([[1., 1.]])
    """

    def __init__(self, answer: Callable[[BatchNormCall], Tensor]) -> None:
        super().__init__()
        self.answer: Callable[[BatchNormCall], Tensor] | None = answer

    def __exit__(self, *error: Any) -> None:
        self.answer = None  # should Ctrl-C leave the context active, it does nothing from here on
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm and self.answer is not None:
            return self.answer(BatchNormCall(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def call_answered(answer: Callable[[BatchNormCall], Tensor], function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function while another answers torch's `batch_norm`, and not a moment longer, whatever interrupts it."""
    mode = Answering(answer)
    try:
        with mode:
            return function(*arguments)
    finally:
        mode.answer = None  # no call of Python's, which Ctrl-C could end before it began


class Observed:
    """What some layers saw, forward pass after forward pass, in the order of the calls.

    Args:
        layers: By name, with running statistics; others cannot be recognised and are passed over.
    """

    def __init__(self, layers: Mapping[str, _BatchNorm]) -> None:
        self._names = {id(layer.running_mean): name for name, layer in layers.items() if layer.running_mean is not None}
        self._seen: dict[str, list[Tensor]] = {}

    def name(self, call: BatchNormCall) -> str | None:
        """Returns which of the layers makes a call."""
        return self._names.get(id(call.running_mean))

    def add(self, name: str, statistics: Tensor) -> None:
        """Takes the mean and log(σ² + ε) of a call's G mini-batches, (G, 2, C)."""
        self._seen.setdefault(name, []).append(statistics)

    def take(self) -> dict[str, Tensor]:
        """Returns what each layer saw since the last time: (calls · G, 2, C)."""
        seen, self._seen = self._seen, {}
        return {name: torch.cat(calls) for name, calls in seen.items()}


class BatchNormalization:
    """Answers for layers of a model in eval mode: they normalise by their batch, and what they saw is noted.

    Layers without running statistics normalise by their batch in any case. Set `num_batches` before a forward pass to
    the number of mini-batches in it: each is normalised apart (ghost batches).

    Args:
        layers: By name.
        record: Whether to note what they saw.

    Examples:
        >>> layer = torch.nn.BatchNorm1d(1).eval()
        >>> normalization = BatchNormalization({"": layer})
        >>> with Answering(normalization.answer):
        ...     layer(torch.tensor([[1.0], [3.0]])).round(decimals=3)
        tensor([[-1.],
                [ 1.]], grad_fn=<...>)
        >>> normalization.observed.take()[""][0, 0]
        tensor([2.])
    """

    def __init__(self, layers: Mapping[str, _BatchNorm], record: bool = True) -> None:
        self.observed = Observed(layers)
        self.num_batches = 1
        self.num_inputs = 0  # of the pass, where differences between inputs are to be noted
        self.within: dict[str, list[Tensor]] = {}  # these, by layer: (G, C) variances of inputs' own means
        self._record = record

    def answer(self, call: BatchNormCall) -> Tensor:
        """Normalises by the batch, or by running statistics where the layer is none of the given ones."""
        x = call.input
        name = self.observed.name(call)
        if name is None and not (call.training or call.running_mean is None):
            return F.batch_norm(*call)
        where = "without running statistics" if name is None else repr(name)
        if x.shape[0] % self.num_batches:
            raise ValueError(
                f"Expected layer {where} to get a multiple of {self.num_batches} examples, one mini-batch each, got "
                f"{x.shape[0]}: the model regroups its batch. Pass a loader of the batch size itself."
            )
        if x.numel() // x.shape[1] == self.num_batches:
            raise ValueError(
                f"Expected more than 1 value a channel and mini-batch in layer {where}, got input of shape "
                f"{list(x.shape)}. Pass a loader of larger batches or a larger batch_size=."
            )
        output, statistics = normalise(x, call.weight, call.bias, call.eps, self.num_batches)
        if self._record and name is not None:
            self.observed.add(name, statistics)
            if self.num_inputs and x.shape[0] % self.num_inputs == 0:
                means = widen(x).unflatten(0, (self.num_inputs, -1)).transpose(1, 2).flatten(2).mean(2)  # (G · M, C)
                self.within.setdefault(name, []).append(means.unflatten(0, (self.num_batches, -1)).var(1))
        return output
