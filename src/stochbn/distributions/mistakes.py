"""What a fit shows of the likeliest mistakes: other data than in training, not shuffled, or of another batch size."""

import math
import warnings

import torch
from torch import Tensor, nn

from stochbn.distributions.base import Distribution
from stochbn.distributions.factorized import Factorized
from stochbn.statistics.layers import all_batch_norms

# A layer has drifted when half of its channels are this far from the running statistics: one standard deviation, or a
# factor of 4 in variance. That leaves room for dropout, which raises variances in training and which fitting may leave
# off: p = 0.5 doubles the second moment of what it passes on.
MAX_SHIFT = 1.0
MAX_LOG_RATIO = 1.386


def warn_of_drift(stats: Distribution, model: nn.Module) -> None:
    """Warns of data that the model's running statistics do not fit."""
    drifts = stats.drift(model)
    name, (shift, ratio) = max(drifts.items(), key=lambda d: max(d[1][0] / MAX_SHIFT, d[1][1] / MAX_LOG_RATIO))
    if shift > MAX_SHIFT or ratio > MAX_LOG_RATIO:
        warnings.warn(
            f"The loader does not look like the training data: in layer {name!r} the typical channel's mean is "
            f"{shift:.2f} standard deviations from the model's running mean, and its variance differs by a factor of "
            f"{math.exp(ratio):.2f}. Check the preprocessing, or whether the model is trained; "
            "stats.drift(model) lists all layers.",
            stacklevel=3,
        )


def warn_of_order(moments: Factorized, within: dict[str, list[Tensor]]) -> None:
    """Warns of data that are not shuffled: mini-batches then differ by more than random ones could.

    Means of M random inputs have an M-th of the variance of the inputs, so the ratio is about 1 with shuffled data, or
    below: layers before have normalised some of it away. With data sorted by class it is many times that in some layer.
    """
    bound = 2 + 6 * math.sqrt(2 / (moments.num_batches - 1))  # and some standard errors of a variance
    for name, found in within.items():
        if name not in moments.layers:
            continue
        allowed = torch.cat(found).double().mean(0).cpu() / moments.batch_size  # (C,)
        ratio = float((moments.layers[name].moments.variance[0] / allowed).nanmedian())
        if ratio > bound:
            warnings.warn(
                f"The loader does not seem to be shuffled: in layer {name!r} the means of mini-batches vary "
                f"{ratio:.0f} times as much as those of random ones would. Pass DataLoader(…, shuffle=True), as in "
                "training.",
                stacklevel=3,
            )
            return


def warn_of_size(moments: Factorized, model: nn.Module) -> None:
    """Warns of mini-batches that the model cannot have been trained with: it saw fewer than one epoch of them has."""
    counters = [norm.num_batches_tracked for name, norm in all_batch_norms(model).items() if name in moments.layers]
    seen = max((int(counter) for counter in counters if counter is not None), default=0)
    if 0 < seen < moments.num_batches:
        warnings.warn(
            f"The model has seen {seen} mini-batches in training, and this loader has {moments.num_batches} of M = "
            f"{moments.batch_size}. If these are the training data, M was larger: pass batch_size= as in training.",
            stacklevel=3,
        )
