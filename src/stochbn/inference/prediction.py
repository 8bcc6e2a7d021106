"""Draws' outputs → prediction: links, streaming averages, and the uncertainties that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from stochbn.statistics.moments import Moments
from stochbn.statistics.normalization import widen
from stochbn.uncertainty import entropy, entropy_terms

Link = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, eq=False)
class Prediction:
    """The predictive distribution of N inputs, averaged over S draws.

    With link "softmax" an input has K class probabilities, at every place of a trailing shape `*` if there is one (the
    pixels of a segmentation). With "sigmoid" each output is the probability of a label of its own. With "identity"
    outputs are raw, as in regression: they have `mean` and `std`, and no entropy.

    `pred[mask]`, `pred[indices]` and `pred[start:stop]` are the predictions of some of the inputs.

    Attributes:
        link: How outputs became what is averaged.
        num_samples: S, over all members of an ensemble; the most of any input where they differ.
        mean: (N, K, *) mean over the draws; `probs` is another name for it where it holds probabilities.
        std: (N, K, *) standard deviation over the draws, 0 for a single one.
        samples: (S, N, K, *) each draw's, or None with `keep_samples=False`.
        expected_entropy: (N, *) mean of the draws' entropies; (N, K, *) with "sigmoid"; None with "identity".
        counts: (N,) how many draws each input took, of every member, with `num_samples="auto"`; else None.
        noise: With "identity", the tuned standard deviation of what no network explains; else None.
    """

    link: Link
    num_samples: int
    mean: Tensor
    std: Tensor
    samples: Tensor | None
    expected_entropy: Tensor | None
    counts: Tensor | None = None
    noise: float | None = None

    @property
    def probs(self) -> Tensor:
        """(N, K, *) predictive probabilities, eq. 3."""
        self._require_probabilities("probs")
        return self.mean

    @property
    def classes(self) -> Tensor:
        """(N, *) the most probable class. (N, K, *) with "sigmoid": 1 where a label is more probable than not, or 0."""
        self._require_probabilities("classes")
        return (self.mean > 0.5).long() if self.link == "sigmoid" else self.mean.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """(N, *) probability of `classes`, at most 1. (N, K, *) with "sigmoid"."""
        self._require_probabilities("confidence")
        return torch.maximum(self.mean, 1 - self.mean) if self.link == "sigmoid" else self.mean.amax(1)

    @property
    def entropy(self) -> Tensor:
        """(N, *) entropy of `probs` in nats, total uncertainty = aleatoric + epistemic. (N, K, *) with "sigmoid"."""
        self._require_probabilities("entropy")
        return _entropy(self.mean, self.link)

    @property
    def aleatoric(self) -> Tensor:
        """(N, *) what the draws agree to be uncertain about: the mean of their entropies."""
        return self._require_probabilities("aleatoric")

    @property
    def epistemic(self) -> Tensor:
        """(N, *) what the draws disagree about: the mutual information of class and draw; never below 0."""
        expected = self._require_probabilities("epistemic")
        return (self.entropy - expected).clamp_min(0)

    @property
    def total_std(self) -> Tensor:
        """(N, K, *) standard deviation of what will be observed: that of the draws and the noise, √(std² + noise²)."""
        if self.noise is None:
            raise AttributeError(
                "Expected a noise level for total_std, got none. Pass what "
                "stochbn.tune(model, stats, val_loader, link='identity') returned."
            )
        return (self.std.square() + self.noise**2).sqrt()

    def _require_probabilities(self, name: str) -> Tensor:
        if self.expected_entropy is None:
            raise AttributeError(
                f"Expected link 'softmax' or 'sigmoid' for {name}, got 'identity': raw outputs have mean and std."
            )
        return self.expected_entropy

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> "Prediction":
        """Returns the predictions of the inputs that a mask (N,), a tensor of indices or a slice selects."""
        # A number would drop the axis of inputs, which all that follows needs.
        if not isinstance(rows, slice) and not (isinstance(rows, Tensor) and rows.dim() == 1):
            got = f"a tensor {tuple(rows.shape)}" if isinstance(rows, Tensor) else repr(rows)
            raise TypeError(
                f"Expected a mask (N,), a tensor of indices or a slice, got {got}. Pass pred[3:4] for input 3 alone."
            )
        return replace(
            self,
            mean=self.mean[rows],
            std=self.std[rows],
            samples=None if self.samples is None else self.samples[:, rows],
            expected_entropy=None if self.expected_entropy is None else self.expected_entropy[rows],
            counts=None if self.counts is None else self.counts[rows],
        )

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.mean.shape))
        return f"Prediction({shape}, link={self.link!r}, num_samples={self.num_samples})"


class Average:
    """Streams draws' outputs, (s, N, K, *) at a time, into what a `Prediction` holds."""

    def __init__(self, link: Link, keep_samples: bool, checks: bool = True) -> None:
        self.link = link
        self.keep_samples = keep_samples
        self.checks = checks  # of the values; not in a pass that is exported
        self.count = 0
        self.samples: list[Tensor] = []
        self.moments: Moments | None = None
        self.entropy: Tensor | None = None  # the draws' own, summed with their weights

    def add(self, outputs: Tensor, weight: float = 1.0, temperature: float = 1.0) -> None:
        """Takes raw outputs of some draws, each of which counts by `weight`."""
        samples = apply_link(outputs, self.link, temperature, self.checks)
        new = Moments.of(samples).scale(weight)
        self.moments = self.moments.merge(new) if self.moments else new
        if self.checks and not self.moments.mean.isfinite().all():  # which is smaller than all samples
            check_finite(samples, first_draw=self.count)
        self.count += len(samples)
        if self.link != "identity":
            entropies = _entropy(samples.flatten(0, 1), self.link).unflatten(0, samples.shape[:2])
            total = entropies.sum(0) * weight
            self.entropy = total if self.entropy is None else self.entropy + total
        if self.keep_samples:
            self.samples.append(samples)

    def prediction(self) -> Prediction:
        """Returns the average so far."""
        assert self.moments is not None
        variance = self.moments.deviation / self.moments.weight
        varies = variance > 0  # the square root has no gradient at 0
        return Prediction(
            link=self.link,
            num_samples=self.count,
            mean=self.moments.mean,
            std=torch.where(varies, variance, 1.0).sqrt() * varies,
            samples=torch.cat(self.samples) if self.keep_samples else None,
            expected_entropy=None if self.entropy is None else self.entropy / self.moments.weight,
        )


def join(parts: Sequence[Prediction], order: Tensor | None = None) -> Prediction:
    """Puts the predictions of successive batches together; or of the inputs in the order that `order`, (N,), has."""
    if not parts:
        raise ValueError("Expected at least one batch of inputs, got an empty loader. Pass one with data.")
    places = None if order is None else order.argsort()

    def cat(name: str, dim: int = 0) -> Any:
        values = [getattr(part, name) for part in parts]
        if values[0] is None:
            return None
        whole = values[0] if len(values) == 1 else torch.cat(values, dim)
        return whole if places is None else whole.index_select(dim, places.to(whole.device))

    return Prediction(
        link=parts[0].link,
        num_samples=max(part.num_samples for part in parts),
        mean=cat("mean"),
        std=cat("std"),
        samples=cat("samples", 1),
        expected_entropy=cat("expected_entropy"),
        counts=cat("counts"),
    )


def _entropy(probs: Tensor, link: Link) -> Tensor:
    if link == "sigmoid":
        return entropy_terms(probs) + entropy_terms(1 - probs)
    return entropy(probs)


def apply_link(outputs: Tensor, link: Link, temperature: float = 1.0, checks: bool = True) -> Tensor:
    """Turns raw outputs (S, N, …) into what is averaged, in float32 or better. Regression has no temperature."""
    outputs = widen(outputs)
    if link == "identity":
        return outputs
    if link == "sigmoid":
        return (outputs / temperature).sigmoid()
    if checks:
        check_logits(outputs)
    return (outputs / temperature).softmax(2)


def check_finite(samples: Tensor, *, first_draw: int, inputs: Tensor | None = None) -> None:
    """Refuses NaN and Inf among (s, N, …), and says of which draw and input; the N inputs may be some of a batch."""
    if samples.isfinite().all():
        return
    draw, row = (int(i) for i in (~samples.isfinite()).nonzero()[0][:2])
    raise ValueError(
        f"Expected finite outputs, got NaN or Inf from draw {first_draw + draw} for input "
        f"{row if inputs is None else int(inputs[row])} of its batch. Check that input, and the model's output on it."
    )


def check_logits(outputs: Tensor) -> None:
    """Refuses outputs (S, N, …) that a softmax over classes would make nonsense of."""
    if outputs.dim() < 3 or outputs.shape[2] < 2:
        raise ValueError(
            f"Expected outputs (N, K, …) with K ≥ 2 classes for link='softmax', got {list(outputs.shape[1:])}. "
            "Pass link='sigmoid' for independent labels or link='identity' for regression."
        )
    outputs = outputs.detach()
    if outputs.amin() >= 0 and (outputs.sum(2) - 1).abs().max() < 1e-3:
        raise ValueError(
            "Expected logits for link='softmax', got outputs that are probabilities already: the model ends in a "
            "softmax. Undo it with call=lambda model, x: model(x).log(), or of a loader's batches (x, y) with "
            "call=lambda model, batch: model(batch[0]).log()."
        )
