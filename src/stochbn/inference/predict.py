"""Model × draws × inputs → prediction: (1/S) Σ_s p(y | x, μ_s, σ_s), eq. 3 with r(μ) r(σ) for p(μ, σ | x)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn
from tqdm.auto import tqdm

from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import Draws
from stochbn.distributions.seeds import member_seed, random_seed
from stochbn.inference.adaptive import MAX_DRAWS, predict_adaptively
from stochbn.inference.engine import Network, Source
from stochbn.inference.prediction import Average, Link, Prediction, join
from stochbn.statistics.calls import Call, call_on_inputs, call_on_item, unwrap
from stochbn.statistics.checks import check_whole
from stochbn.statistics.mini_batches import check_loader, length
from stochbn.statistics.restoring import preserving_rng


def predict(
    model: nn.Module | Sequence[nn.Module],
    stats: Source | Sequence[Source],
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
            Its tuned spread and temperature, and whether inputs are counted into their mini-batches, are followed.
        inputs: A tensor; a tuple of positional or a mapping of keyword arguments; or a DataLoader or other iterable
            of batches (called as in `fit`: labels may be there and are passed over).
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
    adaptive = num_samples == "auto"
    draws = MAX_DRAWS if num_samples == "auto" else num_samples
    if isinstance(draws, str):
        raise TypeError(f'Expected num_samples to be a whole number or "auto", got {num_samples!r}. Pass one of these.')
    check_options(num_samples=draws, chunk_size=chunk_size, link=link)
    if not tolerance > 0:
        raise ValueError(
            f"Expected a tolerance above 0, got {tolerance}. Pass 0.1, say; the entropy of ten classes goes up to 2.3."
        )
    if adaptive and compile:
        raise ValueError(
            'Expected compile=True with a fixed num_samples, got "auto", where batches shrink. Choose one.'
        )
    seed = random_seed() if seed is None else check_whole("seed", seed, -(2**63))
    call = call or (call_on_inputs if isinstance(inputs, (Tensor, tuple, Mapping)) else call_on_item)
    networks = _networks(model, stats, call, num_samples=draws, seed=seed, dropout=dropout, compiles=compile)
    if adaptive and all(network.num_draws == 1 for network in networks):
        raise ValueError(
            'Expected draws to take for num_samples="auto", got a plain network. Pass statistics, or dropout=True.'
        )
    batches = inputs if is_loader(inputs) else [inputs]
    rounds = (length(batches) or 0) * sum(network.num_draws for network in networks)
    results = []
    with (
        preserving_rng(networks[0].device),
        tqdm(
            total=None if adaptive else rounds or None, desc="predict", unit="draw", disable=not progress, leave=False
        ) as bar,
    ):
        for item in batches:
            if adaptive:
                results.append(
                    predict_adaptively(
                        networks, item, link, tolerance=tolerance, chunk_size=chunk_size, update=bar.update
                    )
                )
                continue
            average = Average(link, keep_samples)
            for network in networks:
                with network.active():
                    for outputs in network.run(item, chunk_size):
                        average.add(outputs, 1 / network.num_draws, network.temperature)
                        bar.update(len(outputs))
            results.append(average.prediction())
    return join(results)


def is_loader(inputs: Any) -> bool:
    """Returns whether inputs are batches to iterate over; tensors, tuples and mappings are one batch."""
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
    compiles: bool,
) -> list[Network]:
    models = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else [model]
    if not models:
        raise ValueError("Expected a model or a sequence of models, got an empty sequence.")
    sources: list[Any] = list(stats) if isinstance(stats, (list, tuple)) else [stats]
    if stats is None:
        sources = [None] * len(models)
    for source in sources:
        if not (source is None or isinstance(source, (Distribution, Draws))):
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
        Network(
            unwrap(m),
            call,
            source,
            num_samples=num_samples,
            seed=member_seed(seed, index),
            dropout=dropout,
            compiles=compiles,
        )
        for index, (m, source) in enumerate(zip(models, sources, strict=True))
    ]
