"""As many draws as an input needs: those whose answer has settled stop, the others go on.

The rule is a pair of confidence statements. With p̄ the mean of the n draws so far and p that of infinitely many, an
input stops when, each at a confidence of 95 %, |H(p̄) − H(p)| ≤ tolerance and p̄ and p put the same class first. It is
looked at after 8, 16, 32, … draws, and at each look a seventh of the 5 % may be spent (Bonferroni): looking often is
paid for. Draws come in antithetic pairs, which are independent of each other; so the pairs are what is averaged. (Real
mini-batches have no mirror image. Each is drawn once before any comes again, which only narrows the error.) To
first order H(p̄) is the mean of −Σ_k p_k log p̄_k over the draws, which gives its standard error; to second order it lies
below H(p) by ½ Σ_k Var(p̄_k) / p_k, which is added to the interval.

The intervals are Student's: they take the means of pairs for nearly Normal. What happens in fewer than one of n draws
is not seen in n of them. Dropout's draws are the more uneven, so with dropout the first look is after 32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stochbn.inference.engine.network import Network
from stochbn.inference.prediction import Average, Link, Prediction, apply_link, check_finite, join
from stochbn.statistics.items import num_examples, take

MAX_DRAWS = 1024
# After n draws, Student's t for n / 2 − 1 degrees of freedom, two-sided, at a seventh of 5 %.
QUANTILES = {8: 6.5797, 16: 3.7527, 32: 3.1118, 64: 2.8804, 128: 2.7808, 256: 2.7344, 512: 2.7120}


def predict_adaptively(
    networks: Sequence[Network],
    item: Any,
    link: Link,
    *,
    tolerance: float,
    chunk_size: int | None = None,
    update: Callable[[int], object] = lambda draws: None,
) -> Prediction:
    """Averages over draws until each input of a batch has settled, or `MAX_DRAWS` are made.

    Args:
        networks: The members of an ensemble, or one. Each makes as many draws.
        item: The batch.
        link: As in `predict`.
        tolerance: Half width of the interval of the entropy in nats; with link "identity", of each mean.
        chunk_size: As in `predict`.
        update: Called with the number of draws made.
    """
    most = min([MAX_DRAWS, *(network.num_draws for network in networks if network.num_draws > 1)])
    remaining = torch.arange(num_examples(item), device="cpu")
    outputs = [torch.empty(0, device="cpu")] * len(networks)  # of each network: (n, remaining, K, *)
    temperatures = [network.temperature for network in networks]
    parts: list[Prediction] = []
    order: list[Tensor] = []
    count = 0
    first = 32 if any(network.dropout for network in networks) else 8
    for look in [*(n for n in QUANTILES if first <= n < most), most]:
        some = take(item, remaining.tolist())
        for member, network in enumerate(networks):
            if count and network.num_draws == 1:
                continue
            new = torch.cat(list(network.run(some, chunk_size, count, min(look, network.num_draws))))
            check_finite(apply_link(new, link, temperatures[member]), first_draw=count, inputs=remaining)
            outputs[member] = torch.cat([outputs[member], new]) if count else new
            update(len(new))
        count = look
        settled = (
            _settled(outputs, temperatures, link, tolerance).cpu()
            if count < most
            else torch.ones_like(remaining, dtype=torch.bool)
        )
        if settled.any():
            average = Average(link, keep_samples=False)
            for values, temperature in zip(outputs, temperatures, strict=True):
                average.add(values[:, settled], 1 / len(values), temperature)
            part = average.prediction()
            parts.append(replace(part, counts=torch.full((len(part),), count, device=part.mean.device)))
            order.append(remaining[settled])
        remaining = remaining[~settled]
        outputs = [values[:, ~settled] for values in outputs]
        if not len(remaining):
            break
    return join(parts, order=torch.cat(order))


def _settled(outputs: list[Tensor], temperatures: list[float], link: Link, tolerance: float) -> Tensor:
    """Returns for each input whether the confidence statement holds: (n, N, K, *) of each network → (N,)."""
    most = len(max(outputs, key=len))
    samples = torch.stack(
        [
            apply_link(values, link, temperature).expand(most, *values.shape[1:])
            for values, temperature in zip(outputs, temperatures, strict=True)
        ]
    ).mean(0)
    if link == "sigmoid":  # each label is a choice between two
        samples = torch.stack([samples, 1 - samples], dim=2)
    pairs = samples.unflatten(0, (-1, 2)).mean(1)
    quantile = QUANTILES[len(samples)]
    if link == "identity":
        return _within(quantile * _standard_error(pairs), tolerance)
    mean = pairs.mean(0)
    positive = mean.clamp_min(torch.finfo(mean.dtype).tiny)
    bias = (pairs.var(0) / len(pairs) / positive).sum(1) / 2
    width = quantile * _standard_error((pairs * -positive.log()).sum(2)) + bias
    first = mean.argmax(1, keepdim=True)
    lead = pairs.take_along_dim(first.unsqueeze(0), 2) - pairs  # (n / 2, N, K, *)
    ahead = lead.mean(0) > quantile * _standard_error(lead)
    alike: Tensor = ahead.scatter(1, first, True).flatten(1).all(1)
    return _within(width, tolerance) & alike


def _standard_error(values: Tensor) -> Tensor:
    return values.std(0) / math.sqrt(len(values))


def _within(width: Tensor, tolerance: float) -> Tensor:
    return torch.all((width <= tolerance).view(len(width), -1), dim=1)
