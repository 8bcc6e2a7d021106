"""Model × draws × inputs → prediction: (1/S) Σ_s p(y | x, μ_s, σ_s), eq. 3 with r(μ) r(σ) for p(μ, σ | x)."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from tqdm.auto import tqdm

from stochbn.averaging import Average, Link, Prediction, join
from stochbn.batches import (
    Call,
    call_on_inputs,
    call_on_item,
    check_loader,
    check_whole,
    copy_to,
    device_of,
    length,
    num_examples,
    tensors_in,
)
from stochbn.distributions import Draws, StatisticsDistribution
from stochbn.dropout import DropoutMasks, dropout_masks
from stochbn.seeding import member_seed, random_seed
from stochbn.statistics import dropout_layers, evaluating, keeping_tensors, preserving_rng, unwrap

Source = StatisticsDistribution | Draws | None

# Draws are stacked until a pass holds this many examples, so that memory depends on the batch, not on S.
STACKED_EXAMPLES = 64
# Draws are made ahead, in blocks of at most so many numbers (32 MB in float64), so that those too are bounded.
BLOCK_NUMBERS = 2**22


def predict(
    model: nn.Module | Sequence[nn.Module],
    stats: Source | Sequence[Source],
    inputs: Any,
    *,
    num_samples: int = 50,
    seed: int | None = 0,
    link: Link = "softmax",
    dropout: bool = False,
    call: Call | None = None,
    chunk_size: int | None = None,
    keep_samples: bool = True,
    progress: bool = False,
) -> Prediction:
    """Averages predictions over drawn networks. No model is changed.

    A draw is a network, a function of the seed and its index: results depend on neither the batch size nor the order
    of the inputs, to rounding.

    | | `stats=None` | `stats=fit(…)` |
    | --- | --- | --- |
    | one model | the plain network | SBN |
    | one model, `dropout=True` | MC dropout | Dropout + SBN |
    | a sequence of models | Deep Ensembles | Deep Ensembles + SBN |

    Args:
        model: A network in any mode, or several of them, which weigh the same however many draws each has.
        stats: What `fit` returned, draws from it, or None for no SBN; for several models a sequence of these.
        inputs: A tensor; a tuple of positional or a mapping of keyword arguments; or a DataLoader or other iterable
            of batches (called as in `fit`: labels may be there and are passed over).
        num_samples: S, the number of draws of each model. Without SBN and dropout one pass is all there is; given
            `Draws` bring their own number.
        seed: Makes the draws. Equal seeds give equal networks. None takes a seed from torch's generator.
        link: What turns outputs into what is averaged: "softmax" over axis 1, "sigmoid", or "identity".
        dropout: Keep dropout layers active, with one mask a draw.
        call: How a model is called on a batch, `call(model, batch)`, returning its output tensor.
        chunk_size: How many draws are computed at once. By default as many as suit the batch.
        keep_samples: Keep every draw's prediction. Without, memory does not grow with S.
        progress: Show a progress bar.

    Returns:
        A `Prediction`. It carries gradients with respect to inputs that require them (and to the parameters that do).

    Example:
        >>> import stochbn
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [torch.randn(16, 2) for _ in range(20)]
        >>> for x in loader:
        ...     _ = model(x)
        >>> stats = stochbn.fit(model, loader, progress=False)
        >>> pred = predict(model, stats, torch.randn(5, 2))
        >>> pred
        Prediction(5×3, link='softmax', num_samples=50)
        >>> pred.samples.shape, pred.entropy.shape
        (torch.Size([50, 5, 3]), torch.Size([5]))
    """
    check_options(num_samples=num_samples, chunk_size=chunk_size, link=link)
    seed = random_seed() if seed is None else check_whole("seed", seed, -(2**63))
    call = call or (call_on_inputs if isinstance(inputs, (Tensor, tuple, Mapping)) else call_on_item)
    networks = _networks(model, stats, call, num_samples=num_samples, seed=seed, dropout=dropout)
    batches = inputs if is_loader(inputs) else [inputs]
    rounds = (length(batches) or 0) * sum(network.num_draws for network in networks) or None
    results = []
    with (
        preserving_rng(networks[0].device),
        tqdm(total=rounds, desc="predict", unit="draw", disable=not progress, leave=False) as bar,
    ):
        for item in batches:
            average = Average(link, keep_samples)
            for network in networks:
                with network.active():
                    for outputs in network.run(item, chunk_size):
                        average.add(outputs, weight=1 / network.num_draws)
                        bar.update(len(outputs))
            results.append(average.prediction())
    return join(results)


def is_loader(inputs: Any) -> bool:
    """Tells batches to iterate over from one batch: tensors, tuples and mappings are one."""
    if isinstance(inputs, (Tensor, tuple, Mapping)):
        return False
    check_loader(inputs)
    return True


def check_options(*, num_samples: int, chunk_size: int | None, link: str) -> None:
    check_whole("num_samples", num_samples, 1)
    if chunk_size is not None:
        check_whole("chunk_size", chunk_size, 1)
    if link not in get_args(Link):
        raise ValueError(f"Expected link to be one of {', '.join(map(repr, get_args(Link)))}, got {link!r}.")


def _networks(
    model: nn.Module | Sequence[nn.Module],
    stats: Source | Sequence[Source],
    call: Call,
    *,
    num_samples: int,
    seed: int,
    dropout: bool,
) -> "list[_Network]":
    models = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else [model]
    if not models:
        raise ValueError("Expected a model or a sequence of models, got an empty sequence.")
    sources: list[Any] = list(stats) if isinstance(stats, (list, tuple)) else [stats]
    if stats is None:
        sources = [None] * len(models)
    for source in sources:
        if not (source is None or isinstance(source, (StatisticsDistribution, Draws))):
            raise TypeError(
                f"Expected a fitted distribution, Draws or None, got {type(source).__name__}. "
                "Pass what stochbn.fit(model, train_loader) or stochbn.load(path) returned."
            )
    if len(sources) != len(models):
        raise ValueError(
            f"Expected one distribution a model, got {len(sources)} for {len(models)} models. "
            "Fit each model on its own: [stochbn.fit(model, loader) for model in models]."
        )
    return [
        _Network(unwrap(m), call, source, num_samples=num_samples, seed=member_seed(seed, index), dropout=dropout)
        for index, (m, source) in enumerate(zip(models, sources, strict=True))
    ]


class Called(nn.Module):
    """Makes `call(model, item)` a forward pass, so that buffers can be swapped for it with `functional_call`."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, item: Any) -> Tensor:
        output = self.call(self.model, item)
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor) or not (output.is_floating_point() and output.dim()):
            got = (
                f"{output.dtype} of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            )
            raise TypeError(
                f"Expected the model to return a floating-point tensor with a row an input, got {got}. "
                "Pick it out with call=, for example call=lambda model, x: model(x)['out']."
            )
        return output


class _Network:
    """One model and its draws."""

    def __init__(
        self, model: nn.Module, call: Call, source: Source, *, num_samples: int, seed: int, dropout: bool
    ) -> None:
        self.model = model
        self.called = Called(model, call)
        self.source = source
        self.seed = seed
        self.dropout = dropout
        self.masks: DropoutMasks | None = None
        self.device = device_of(model)
        self.vectorised = True
        if dropout:
            dropout_layers(model)
        self.block: tuple[range, dict[str, Tensor]] = (range(0), {})  # the draws at hand, and their buffers
        if isinstance(source, Draws):
            self.num_draws = len(source)
            self._load(range(self.num_draws))
        else:
            self.num_draws = num_samples if dropout or source is not None else 1
        if isinstance(source, StatisticsDistribution):
            self._load(range(1))
            if source.dropout != dropout:
                warnings.warn(
                    f"The statistics were fitted with dropout={source.dropout} and are used with dropout={dropout}; "
                    "fit them with the same.",
                    stacklevel=4,
                )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Has the model in eval mode and with this network's dropout masks. One model may serve several networks."""
        with evaluating(self.model):
            if self.dropout:
                with dropout_masks(self.model, self.seed) as self.masks:
                    yield
            else:
                yield

    def run(self, item: Any, chunk_size: int | None) -> Iterator[Tensor]:
        """Yields outputs (s, N, …) of successive draws."""
        size = chunk_size or max(1, STACKED_EXAMPLES // max(1, num_examples(item)))
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(item))
        for start in range(0, self.num_draws, size):
            stop = min(start + size, self.num_draws)
            with torch.set_grad_enabled(wants_gradient):
                outputs = self._pass(start, stop, item)
            yield outputs

    def _pass(self, start: int, stop: int, item: Any) -> Tensor:
        buffers = self._buffers(start, stop)
        indices = torch.arange(start, stop, device=self.device)
        problem: Exception | None = None
        if self.vectorised and stop - start > 1:
            try:
                fresh = copy_to(item, self.device)
                with keeping_tensors(self.model):
                    return vmap(lambda b, i: self._forward(b, i, fresh), randomness="different")(buffers, indices)
            except Exception as error:  # whatever it is, the loop below runs the model as its author meant it
                problem = error
        looped = torch.stack(
            [
                self._forward({name: v[i] for name, v in buffers.items()}, indices[i], copy_to(item, self.device))
                for i in range(stop - start)
            ]
        )
        if problem is not None:
            self.vectorised = False
            reason = str(problem).strip().split("\n")[0]
            warnings.warn(
                f"{type(self.model).__name__} cannot be vectorised over draws, so they are computed one by one "
                f"({type(problem).__name__}: {reason}). chunk_size=1 says that this is meant.",
                stacklevel=4,
            )
        return looped

    def _forward(self, buffers: dict[str, Tensor], index: Tensor, item: Any) -> Tensor:
        if self.masks is not None:
            self.masks.select(index)
        # Without tie_weights=False a layer that two parents share would get its drawn buffers back as its own.
        output: Tensor = functional_call(self.called, buffers, (item,), tie_weights=False)
        return output

    def _buffers(self, start: int, stop: int) -> dict[str, Tensor]:
        if self.source is None:
            return {}
        draws, buffers = self.block
        if not (start in draws and stop - 1 in draws):
            numbers = sum(values[0].numel() for values in buffers.values())
            ahead = max(stop - start, BLOCK_NUMBERS // numbers)
            self._load(range(start, min(start + ahead, self.num_draws)))
            draws, buffers = self.block
        return {name: values[start - draws[0] : stop - draws[0]] for name, values in buffers.items()}

    def _load(self, draws: range) -> None:
        if isinstance(self.source, StatisticsDistribution):
            made = self.source.sample(len(draws), seed=self.seed, first=draws[0])
        else:
            assert self.source is not None
            made = self.source
        self.block = (draws, {f"model.{name}": values for name, values in made.match(self.model).buffers.items()})
