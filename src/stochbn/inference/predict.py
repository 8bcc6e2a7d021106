"""Model × draws × inputs → prediction: (1/S) Σ_s p(y | x, μ_s, σ_s), eq. 3 with r(μ) r(σ) for p(μ, σ | x)."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import Draws
from stochbn.distributions.seeds import member_seed, random_seed
from stochbn.distributions.tuning import Tuning
from stochbn.inference.adaptive import MAX_DRAWS, predict_adaptively
from stochbn.inference.engine.network import Network
from stochbn.inference.engine.sampling import Source
from stochbn.inference.prediction import Average, Link, Prediction, join
from stochbn.statistics.calls import Call, call_on_inputs, unwrap, without_labels
from stochbn.statistics.checks import check_whole
from stochbn.statistics.mini_batches import check_loader, length
from stochbn.statistics.progress import progress_bar
from stochbn.statistics.restoring import KeepingModes
from stochbn.statistics.twin import make_snapshot

BLOCK_VALUES = 2**18  # of outputs that are averaged at once, which stay in the cache (1 MB)
Stats = Source | Tuning  # where predictions take draws from, if any

_BATCH = (Tensor, tuple, Mapping)  # what is one batch; anything else is iterated over


def predict(
    model: nn.Module | Sequence[nn.Module],
    stats: Stats | Sequence[Stats],
    inputs: Any,
    *,
    num_samples: int | Literal["auto"] = 50,
    tolerance: float = 0.1,
    seed: int | None = 0,
    link: Link = "softmax",
    dropout: bool = False,
    call: Call | None = None,
    chunk_size: int | None = None,
    compile: bool = False,  # noqa: A002
    keep_samples: bool = True,
    progress: bool = False,
) -> Prediction:
    """Averages predictions over drawn networks. No model is changed, but by its own forward pass.

    A draw is a network, a function of the seed and its index: results depend on neither the batch size nor the order
    of the inputs, to rounding.

    | | `stats=None` | `stats=fit(…)` |
    | --- | --- | --- |
    | one model | the plain network | SBN |
    | one model, `dropout=True` | MC dropout | Dropout + SBN |
    | a sequence of models | Deep Ensembles | Deep Ensembles + SBN |

    Args:
        model: A network in any mode, or several of them, which weigh the same however many draws each has.
        stats: What `fit` or `tune` returned, draws from it, or None for no SBN; for several models a sequence of these.
            Its tuned spread, temperature and noise, and whether inputs are counted into their mini-batches, are
            followed. A `Tuning` of plain networks is no SBN at its temperature.
        inputs: A tensor; a tuple of positional or a mapping of keyword arguments; or a DataLoader or other iterable
            of batches (called as in `fit`: labels may be there and are passed over). The first tensor of a batch with a
            leading size other than 1 counts its inputs.
        num_samples: S, the number of draws of each model. Without SBN and dropout one pass is all there is; given
            `Draws` bring their own number. With "auto" each input takes as many as it needs, from 8 to 1,024, and
            `counts` says how many; samples are not kept.
        tolerance: With "auto", an input stops when, at a confidence of 95 % each, its entropy is this close (in nats)
            to that of infinitely many draws, and its class is theirs (`inference.adaptive` says more). With link
            "identity", when its mean is this close.
        seed: Makes the draws. Equal seeds give equal networks. None takes a seed from torch's generator.
        link: What turns outputs into what is averaged: "softmax" over axis 1, "sigmoid", or "identity".
        dropout: Keep dropout layers active, with one mask a draw.
        call: How a model is called on a batch, `call(model, batch)`, returning its output tensor.
        chunk_size: How many draws are computed at once. By default as many as suit the batch.
        compile: Compile the passes, which takes from seconds to a minute when batches of a new size are first met and
            pays over many of them. The code is kept with the model and reads its weights at each call. Rows must not
            depend on each other; define `call` once, not in a loop, as code is kept for each.
        keep_samples: Keep every draw's prediction. Without, memory does not grow with S.
        progress: Show a progress bar.

    Returns:
        A `Prediction`. It carries gradients with respect to inputs that require them (and to the parameters that do).

    Examples:
        >>> import stochbn, torch
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
    networks = _networks(
        model,
        stats,
        call or call_on_inputs,
        num_samples=num_samples,
        tolerance=tolerance,
        seed=seed,
        link=link,
        dropout=dropout,
        chunk_size=chunk_size,
        compiles=compile,
        num_batches=1 if isinstance(inputs, _BATCH) else length(inputs),
    )
    return _predict(
        networks,
        inputs,
        tolerance=tolerance if num_samples == "auto" else None,
        link=link,
        takes_items=call is not None,
        chunk_size=chunk_size,
        keep_samples=keep_samples,
        noise=_find_noise(_pair(model, stats)[1]),
        progress=progress,
    )


class Predictor:
    """A model, or several, prepared to predict: validated, drawn, copied and laid out once, to be called often.

    It is a snapshot: training the model further does not change it. The first call with inputs of a new shape captures
    the forward pass, which takes a second or so; `warm_up` does that ahead. Later calls cost the arithmetic. Threads
    may share one. It can be pickled and copied; what was captured is then captured again.

    Args:
        model: As in `predict`, and so are all the others.
        stats: As there.
        num_samples: As there.
        tolerance: As there.
        seed: As there.
        link: As there.
        dropout: As there.
        call: As there.
        chunk_size: As there.
        compile: As there.
        keep_samples: As there.

    Examples:
        >>> import stochbn, torch
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [torch.randn(16, 2) for _ in range(20)]
        >>> for x in loader:
        ...     _ = model(x)
        >>> predictor = Predictor(model, stochbn.fit(model, loader, progress=False), num_samples=256)
        >>> predictor(torch.randn(5, 2))
        Prediction(5×3, link='softmax', num_samples=256)
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        stats: Stats | Sequence[Stats],
        *,
        num_samples: int | Literal["auto"] = 50,
        tolerance: float = 0.1,
        seed: int | None = 0,
        link: Link = "softmax",
        dropout: bool = False,
        call: Call | None = None,
        chunk_size: int | None = None,
        compile: bool = False,  # noqa: A002
        keep_samples: bool = True,
    ) -> None:
        models, sources = _pair(model, stats)
        self._networks = _networks(
            [make_snapshot(unwrap(one)) for one in models],
            sources,
            call or call_on_inputs,
            num_samples=num_samples,
            tolerance=tolerance,
            seed=seed,
            link=link,
            dropout=dropout,
            chunk_size=chunk_size,
            compiles=compile,
            num_batches=None,
        )
        self._options: dict[str, Any] = {
            "tolerance": tolerance if num_samples == "auto" else None,
            "link": link,
            "takes_items": call is not None,
            "chunk_size": chunk_size,
            "keep_samples": keep_samples,
            "noise": _find_noise(sources),
        }

    def __call__(self, inputs: Any, *, progress: bool = False) -> Prediction:
        """Predicts as `predict` does, for a batch or for a loader."""
        return _predict(self._networks, inputs, **self._options, progress=progress)

    def warm_up(self, inputs: Any) -> "Predictor":
        """Does what a first call with such inputs would have to do, and returns the predictor."""
        self(inputs)
        return self

    def to(self, device: torch.device | str) -> "Predictor":
        """Returns a predictor on another device. Changes nothing."""
        moved = copy.copy(self)
        moved._networks = [network.to(torch.device(device)) for network in self._networks]
        return moved

    def __repr__(self) -> str:
        networks = self._networks
        names = ", ".join(type(network.model).__name__ for network in networks)
        return f"Predictor({names}, num_samples={sum(network.num_draws for network in networks)})"


def _predict(
    networks: list[Network],
    inputs: Any,
    *,
    tolerance: float | None,
    link: Link,
    takes_items: bool,
    chunk_size: int | None,
    keep_samples: bool,
    noise: float | None,
    progress: bool,
) -> Prediction:
    """Predicts batch after batch; with a tolerance, adaptively."""
    has_batches = is_loader(inputs)
    batches = inputs if has_batches else [inputs]
    rounds = (length(batches) or 0) * sum(network.num_draws for network in networks)
    results = []
    total = None if tolerance is not None else rounds or None
    with KeepingModes(), progress_bar("predict", "draw", total, shown=progress) as bar:
        for item in batches:
            if has_batches and not takes_items:
                item = without_labels(item)
            if tolerance is not None:
                results.append(
                    predict_adaptively(
                        networks, item, link, tolerance=tolerance, chunk_size=chunk_size, update=bar.update
                    )
                )
                continue
            average = Average(link, keep_samples)
            for network in networks:
                for outputs in _in_blocks(network.run(item, chunk_size)):
                    average.add(outputs, 1 / network.num_draws, network.temperature)
                    bar.update(len(outputs))
            results.append(average.prediction())
    return replace(join(results), noise=noise if link == "identity" else None)


def _in_blocks(chunks: Iterable[Tensor]) -> Iterator[Tensor]:
    """Puts outputs (s, N, …) of successive draws together: many small ones take longer to average than to make."""
    block: list[Tensor] = []
    for outputs in chunks:
        block.append(outputs)
        if sum(part.numel() for part in block) >= BLOCK_VALUES:
            yield torch.cat(block)
            block.clear()
    if block:
        yield torch.cat(block)


def is_loader(inputs: Any) -> bool:
    """Returns whether inputs are batches to iterate over; tensors, tuples and mappings are one batch."""
    if isinstance(inputs, _BATCH):
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
    stats: Stats | Sequence[Stats],
    call: Call,
    *,
    num_samples: int | Literal["auto"],
    tolerance: float,
    seed: int | None,
    link: Link,
    dropout: bool,
    chunk_size: int | None,
    compiles: bool,
    num_batches: int | None,
) -> list[Network]:
    """Checks all options, and returns each model with its draws."""
    adaptive = num_samples == "auto"
    draws = MAX_DRAWS if num_samples == "auto" else num_samples
    if isinstance(draws, str):
        raise TypeError(f'Expected num_samples to be a whole number or "auto", got {num_samples!r}. Pass one of these.')
    check_options(num_samples=draws, chunk_size=chunk_size, link=link)
    if not tolerance > 0:
        raise ValueError(
            f"Expected a tolerance above 0, got {tolerance}. Pass 0.1, say; the entropy of ten classes goes up to 2.3."
        )
    if adaptive and compiles:
        raise ValueError(
            'Expected compile=True with a fixed num_samples, got "auto", where batches shrink. Choose one.'
        )
    seed = random_seed() if seed is None else check_whole("seed", seed, -(2**63))
    models, sources = _pair(model, stats)
    networks = [
        Network(
            unwrap(one),
            call,
            None if isinstance(source, Tuning) else source,
            num_samples=draws,
            seed=member_seed(seed, index),
            dropout=dropout,
            compiles=compiles,
            num_batches=num_batches,
        )
        for index, (one, source) in enumerate(zip(models, sources, strict=True))
    ]
    for network, source in zip(networks, sources, strict=True):
        if isinstance(source, Tuning):
            network.temperature = source.temperature
    if adaptive and all(network.num_draws == 1 for network in networks):
        raise ValueError(
            'Expected draws to take for num_samples="auto", got a plain network. Pass statistics, or dropout=True.'
        )
    return networks


def _pair(
    model: nn.Module | Sequence[nn.Module], stats: Stats | Sequence[Stats]
) -> tuple[list[nn.Module], list[Stats]]:
    """Lists models and the sources of their draws."""
    models: list[Any] = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else [model]
    if not models:
        raise ValueError("Expected a model or a sequence of models, got an empty sequence.")
    sources: list[Any] = list(stats) if isinstance(stats, (list, tuple)) else [stats]
    if stats is None or isinstance(stats, Tuning):
        sources = [stats] * len(models)
    for source in sources:
        if isinstance(source, Tuning) and source.spread is not None:
            raise ValueError(
                f"Expected the tuning of a plain network, got one with spread {source.spread}. Pass the distribution "
                "that it belongs to, or what stochbn.tune(model, None, val_loader) returned."
            )
        if not (source is None or isinstance(source, (Distribution, Draws, Tuning))):
            raise TypeError(
                f"Expected a fitted distribution, Draws, a Tuning or None, got {type(source).__name__}. "
                "Pass what stochbn.fit(model, train_loader) or stochbn.load(path) returned."
            )
    if len(sources) != len(models):
        raise ValueError(
            f"Expected one distribution a model, got {len(sources)} for {len(models)} models. "
            "Fit each model on its own: [stochbn.fit(model, loader) for model in models]."
        )
    return models, sources


def _find_noise(sources: Sequence[Stats]) -> float | None:
    """Returns the noise of regression, of several members the root of their mean variance; None if one has none."""
    tunings = [source.tuning if isinstance(source, Distribution) else source for source in sources]
    levels = [tuning.noise for tuning in tunings if isinstance(tuning, Tuning) and tuning.noise is not None]
    if len(levels) < len(sources):
        return None
    return math.sqrt(sum(level**2 for level in levels) / len(levels))
