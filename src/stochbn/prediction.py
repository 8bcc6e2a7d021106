"""Model × draws × inputs → prediction: (1/S) Σ_s p(y | x, μ_s, σ_s), eq. 3 with r(μ) r(σ) for p(μ, σ | x)."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    device_of,
    map_tensors,
    num_examples,
    tensors_in,
    to_device,
)
from stochbn.distributions import Draws, StatisticsDistribution
from stochbn.dropout import DropoutMasks, dropout_masks
from stochbn.statistics import evaluating, unwrap

Source = StatisticsDistribution | Draws | None

# Draws are stacked until a pass holds this many examples. Memory then depends on the batch, not on S, and larger
# stacks are no faster.
STACKED_EXAMPLES = 64


def predict(
    model: nn.Module | Sequence[nn.Module],
    stats: Source | Sequence[Source],
    inputs: Any,
    *,
    num_samples: int = 50,
    seed: int = 0,
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
        model: A network in any mode, or several of them, which are averaged with equal weights.
        stats: What `fit` returned, draws from it, or None for no SBN; for several models a sequence of these.
        inputs: A tensor; a tuple of positional or a mapping of keyword arguments; or a DataLoader or other iterable
            of batches (called as in `fit`: labels may be there and are passed over).
        num_samples: S, the number of draws of each model. Without SBN and dropout one pass is all there is; given
            `Draws` bring their own number.
        seed: Makes the draws. Equal seeds give equal networks.
        link: What turns outputs into what is averaged: "softmax" over axis 1, "sigmoid", or "identity".
        dropout: Keep dropout layers active, with one mask a draw.
        call: How a model is called on a batch, `call(model, batch)`, returning its output tensor.
        chunk_size: How many draws are computed at once. By default as many as suit the batch.
        keep_samples: Keep every draw's prediction. Without, memory does not grow with S.
        progress: Show a progress bar.

    Returns:
        A `Prediction`. It carries gradients with respect to inputs that require them.

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
    batched = is_loader(inputs)
    call = call or (call_on_item if batched else call_on_inputs)
    networks = _networks(model, stats, call, num_samples=num_samples, seed=seed, dropout=dropout)
    total = sum(network.num_draws for network in networks)
    batches = inputs if batched else [inputs]
    rounds = len(batches) * total if hasattr(batches, "__len__") else None
    results = []
    with tqdm(total=rounds, desc="predict", unit="draw", disable=not progress, leave=False) as bar:
        for item in batches:
            average = Average(link, keep_samples)
            for network in networks:
                with network.active():
                    for outputs in network.run(item, chunk_size):
                        average.add(outputs)
                        bar.update(len(outputs))
            results.append(average.prediction())
    return join(results)


def is_loader(inputs: Any) -> bool:
    """Tells batches to iterate over from one batch: tensors, tuples and mappings are one."""
    return not isinstance(inputs, (Tensor, tuple, Mapping)) and isinstance(inputs, Iterable)


def check_options(*, num_samples: int, chunk_size: int | None, link: str) -> None:
    if num_samples < 1:
        raise ValueError(f"Expected num_samples of at least 1, got {num_samples}. Pass 50, as the paper does.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"Expected chunk_size of at least 1, got {chunk_size}. Leave it out to have one chosen.")
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
    several = isinstance(model, nn.ModuleList) or not isinstance(model, nn.Module)
    models: list[nn.Module] = list(model) if several else [model]  # type: ignore[arg-type, list-item]
    single = stats is None or isinstance(stats, (StatisticsDistribution, Draws))
    sources: list[Source] = [stats] if single else list(stats)  # type: ignore[arg-type, list-item]
    if stats is None:
        sources = [None] * len(models)
    if not models or not all(isinstance(m, nn.Module) for m in models):
        raise TypeError(f"Expected a model or a sequence of models, got {model!r}. Pass torch modules.")
    if len(sources) != len(models):
        raise ValueError(
            f"Expected one distribution a model, got {len(sources)} for {len(models)} models. "
            "Fit each model on its own: [stochbn.fit(model, loader) for model in models]."
        )
    networks = []
    for index, (member, source) in enumerate(zip(models, sources, strict=True)):
        member = unwrap(member)
        # Member 0 has the seed itself, so that an ensemble of one is that model.
        own_seed = seed + index
        if source is None:
            draws = None
        elif isinstance(source, StatisticsDistribution):
            draws = source.sample(num_samples, seed=own_seed).match(member)
        elif isinstance(source, Draws):
            draws = source.match(member)
        else:
            raise TypeError(
                f"Expected a fitted distribution, Draws or None, got {type(source).__name__}. "
                "Pass what stochbn.fit(model, train_loader) returned."
            )
        count = len(draws) if draws else num_samples if dropout else 1
        networks.append(_Network(member, call, draws, count, own_seed if dropout else None))
    return networks


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
        self, model: nn.Module, call: Call, draws: Draws | None, num_draws: int, dropout_seed: int | None
    ) -> None:
        self.model = model
        self.called = Called(model, call)
        self.buffers = {f"model.{name}": values for name, values in draws.buffers.items()} if draws else {}
        self.num_draws = num_draws
        self.dropout_seed = dropout_seed
        self.masks: DropoutMasks | None = None
        self.device = device_of(model)
        self.vectorised = True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Has the model in eval mode and with this network's dropout masks. One model may serve several networks."""
        with evaluating(self.model):
            if self.dropout_seed is None:
                yield
            else:
                with dropout_masks(self.model, self.dropout_seed) as self.masks:
                    yield

    def run(self, item: Any, chunk_size: int | None) -> Iterator[Tensor]:
        """Yields outputs (s, N, …) of successive draws."""
        item = to_device(item, self.device)
        size = chunk_size or max(1, STACKED_EXAMPLES // max(1, num_examples(item)))
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(item))
        for start in range(0, self.num_draws, size):
            stop = min(start + size, self.num_draws)
            with torch.set_grad_enabled(wants_gradient):
                outputs = self._pass(start, stop, item)
            yield outputs

    def _pass(self, start: int, stop: int, item: Any) -> Tensor:
        buffers = {name: values[start:stop] for name, values in self.buffers.items()}
        indices = torch.arange(start, stop, device=self.device)
        problem: Exception | None = None
        if self.vectorised and stop - start > 1:
            try:
                fresh = _copy(item)
                return vmap(lambda b, i: self._forward(b, i, fresh), randomness="different")(buffers, indices)
            except Exception as error:  # whatever it is, the loop below runs the model as its author meant it
                problem = error
        looped = torch.stack(
            [
                self._forward({name: values[i] for name, values in buffers.items()}, indices[i], _copy(item))
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
        output: Tensor = functional_call(self.called, buffers, (item,))
        return output


def _copy(item: Any) -> Any:
    """Copies the tensors of an item: a model may write into its input, and the next draw needs the original."""
    return map_tensors(torch.clone, item)
