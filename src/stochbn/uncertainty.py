"""Pure functions of probabilities: `samples` (S, N, K, *), S draws of N inputs over K classes, or `probs` (N, K, *).

`*` is any trailing shape, such as the pixels of a segmentation. Entropies are in nats.
"""

import torch
from torch import Tensor


def entropy(probs: Tensor) -> Tensor:
    """Entropy −Σ_k p_k log p_k of the predictive distribution: total uncertainty.

    Shape:
        (N, K, *) → (N, *), between 0 and log K.

    Examples:
        >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([0.6931, 0.0000])
    """
    return entropy_terms(probs).sum(1)


def expected_entropy(samples: Tensor) -> Tensor:
    """Mean over the draws of each draw's entropy: aleatoric uncertainty.

    Shape:
        (S, N, K, *) → (N, *).

    Examples:
        >>> expected_entropy(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
        tensor([0.3466])
    """
    return entropy_terms(samples).sum(2).mean(0)


def mutual_information(samples: Tensor) -> Tensor:
    """Entropy of the mean less the mean entropy: epistemic uncertainty, the draws' disagreement; never below 0.

    Shape:
        (S, N, K, *) → (N, *).

    Examples:
        >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
        tensor([0.6931])
    """
    return (entropy(samples.mean(0)) - expected_entropy(samples)).clamp_min(0)


def nll(probs: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood −log p(y | x), in nats.

    A probability that underflowed to 0 counts as the smallest positive number of its precision.

    Shape:
        (N, K, *), (N, *) → ().

    Examples:
        >>> nll(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor(0.6931)
    """
    chosen = probs.gather(1, class_indices(probs, targets))
    return -chosen.clamp_min(torch.finfo(probs.dtype).tiny).log().mean()


def error(probs: Tensor, targets: Tensor) -> Tensor:
    """Fraction of wrong classes.

    Shape:
        (N, K, *), (N, *) → ().

    Examples:
        >>> error(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    class_indices(probs, targets)
    return (probs.argmax(1) != targets).to(probs.dtype).mean()


def brier(probs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared distance Σ_k (p_k − [k = y])² to the true class, between 0 and 2.

    Shape:
        (N, K, *), (N, *) → ().

    Examples:
        >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        tensor(0.5000)
    """
    truth = torch.zeros_like(probs).scatter(1, class_indices(probs, targets), 1.0)
    return (probs - truth).square().sum(1).mean()


def ece(probs: Tensor, targets: Tensor, num_bins: int = 15) -> Tensor:
    """Expected calibration error: |accuracy − confidence| averaged over equal bins of confidence, by their size.

    Bin b of B holds confidences in (b/B, (b + 1)/B]; confidence 1 is in the last.

    Shape:
        (N, K, *), (N, *) → ().

    Examples:
        >>> ece(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0, 1]))
        tensor(0.3000)
    """
    if num_bins < 1:
        raise ValueError(f"Expected num_bins of at least 1, got {num_bins}. Pass 15, as is usual.")
    class_indices(probs, targets)
    confidence, predicted = probs.max(1)
    confidence = confidence.flatten()
    correct = (predicted == targets).to(probs.dtype).flatten()
    bins = bin_of(confidence, num_bins)
    gaps = torch.zeros(num_bins, dtype=probs.dtype, device=probs.device).index_add(0, bins, correct - confidence)
    return gaps.abs().sum() / confidence.numel()


def bin_of(confidence: Tensor, num_bins: int) -> Tensor:
    """Returns which of the equal bins of `ece` each confidence is in, of the same shape."""
    return ((confidence * num_bins).ceil().long() - 1).clamp(0, num_bins - 1)


def aurc(probs: Tensor, targets: Tensor, uncertainty: Tensor) -> Tensor:
    """Area under the risk-coverage curve: the error among the k most certain inputs, averaged over k = 1, …, N.

    It is low where the mistakes are the most uncertain; by chance it is the error itself. Inputs of equal uncertainty
    count as in random order: each has their mean error.

    Shape:
        (N, K, *), (N, *), (N, *) → ().

    Examples:
        >>> probs, targets = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1])
        >>> aurc(probs, targets, entropy(probs)), aurc(probs, targets, -entropy(probs))
        (tensor(0.2500), tensor(0.7500))
    """
    class_indices(probs, targets)
    if uncertainty.shape != targets.shape:
        raise ValueError(
            f"Expected one uncertainty for each target, {tuple(targets.shape)}, got {tuple(uncertainty.shape)}. "
            "Pass pred.entropy, for example."
        )
    wrong = (probs.argmax(1) != targets).double().flatten()  # whole counts, which float32 would round
    return risk_by_coverage(wrong, uncertainty.flatten()).mean().to(probs.dtype)


def risk_by_coverage(losses: Tensor, uncertainty: Tensor) -> Tensor:
    """Returns the mean loss of the 1, 2, …, n most certain, (n,), of losses (n,) whose uncertainties may be equal."""
    _, places, sizes = uncertainty.unique(return_inverse=True, return_counts=True)  # in ascending order
    means = torch.zeros(len(sizes), dtype=losses.dtype, device=losses.device).index_add(0, places, losses) / sizes
    risks: Tensor = means.repeat_interleave(sizes).cumsum(0) / torch.arange(1, len(losses) + 1, device=losses.device)
    return risks


def fpr95(known: Tensor, other: Tensor) -> Tensor:
    """False-positive rate at 95 % found: the share of known inputs as uncertain as 95 % of the others, or more.

    Shape:
        (N,), (M,) → (), of uncertainties of known inputs and of those to be found, such as out-of-domain ones.

    Examples:
        >>> fpr95(torch.tensor([0.1, 0.2, 0.5]), torch.tensor([0.4, 0.9]))
        tensor(0.3333)
    """
    for values in (known, other):
        if values.dim() != 1 or values.numel() == 0 or not values.isfinite().all():
            raise ValueError(
                f"Expected finite uncertainties of shape (N,) and (M,), got {tuple(known.shape)} and "
                f"{tuple(other.shape)}. Pass pred.entropy of one input or more each."
            )
    num_spared = len(other) * 5 // 100  # of the others, in whole numbers: 0.95 M may be rounded up
    threshold = other.sort().values[num_spared]
    return (known >= threshold).to(known.dtype).mean()


def entropy_terms(probs: Tensor) -> Tensor:
    """Returns −p log p, 0 at p = 0, with a finite gradient there too."""
    return probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log().neg()


def class_indices(probs: Tensor, targets: Tensor) -> Tensor:
    """Checks targets against probs and returns them for `gather`: (N, K, *), (N, *) → (N, 1, *)."""
    expected = (probs.shape[0], *probs.shape[2:])
    if tuple(targets.shape) != expected:
        raise ValueError(
            f"Expected targets of shape {expected} for probs of shape {tuple(probs.shape)}, "
            f"got {tuple(targets.shape)}. Pass class indices, and probs as (N, K, …)."
        )
    if (
        targets.is_floating_point()
        or targets.numel() == 0
        or not 0 <= int(targets.min()) <= int(targets.max()) < probs.shape[1]
    ):
        raise ValueError(
            f"Expected targets that are class indices in [0, {probs.shape[1]}), got {targets.dtype} "
            f"{'empty' if targets.numel() == 0 else f'from {targets.min()} to {targets.max()}'}."
        )
    return targets.unsqueeze(1).long()
