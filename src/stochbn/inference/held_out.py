"""Held-out data × spreads × temperatures → the loss of every input, from one pass over the data."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import length_hint
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import join_draws
from stochbn.distributions.seeds import member_seed
from stochbn.distributions.tuning import Spread, Tuning
from stochbn.inference.engine.network import Network
from stochbn.inference.prediction import Link, check_logits
from stochbn.statistics.calls import Call, device_of
from stochbn.statistics.items import describe
from stochbn.statistics.mini_batches import length
from stochbn.statistics.moments import Moments
from stochbn.statistics.normalization import widen
from stochbn.statistics.parts import peers_of
from stochbn.statistics.progress import progress_bar
from stochbn.statistics.restoring import KeepingModes
from stochbn.uncertainty import class_indices

NO_ANSWER = 1e6  # nats, the loss in regression where a spread so wide that it overflows gives no number
NUM_PARTS = 4  # of the draws, at most: each is left out once, to see what difference the draws themselves make

T = TypeVar("T")

_TARGET = "Pass target=, for example target=lambda batch: batch['labels']."


@dataclass(frozen=True, eq=False)
class Losses:
    """The loss of each input under each spread and temperature, or noise level.

    Attributes:
        spreads: R of them; None for the network without draws of statistics, which is the first.
        levels: L temperatures, or noise levels in regression.
        values: (R, L, N) in float64 on the CPU.
        without: (R, L, P), the mean over inputs if one of P parts of the draws is left out: how much the draws matter.
        num_labels: How many different labels there are, counted up to two.
        num_mistakes: How many inputs the network without draws gets wrong, in any of their labels; 0 in regression.
    """

    spreads: tuple[Spread | None, ...]
    levels: tuple[float, ...]
    values: Tensor
    without: Tensor
    num_labels: int
    num_mistakes: int


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The data to tune on, and how models are to be run on them.

    Attributes:
        models: One, or the members of an ensemble.
        members: The distribution of each; empty for none.
        loader: Labelled batches. It may be read more than once, in another order each time.
        call: How a model is called on a batch.
        target: Returns the labels of a batch; None for the second of a tuple or list.
        link: As in `predict`.
        num_samples: Draws for each spread.
        seed: Of the draws, which are the same for all spreads.
        dropout: Whether dropout layers drop.
        progress: Whether to show a bar.
    """

    models: Sequence[nn.Module]
    members: Sequence[Distribution]
    loader: Iterable[Any]
    call: Call
    target: Callable[[Any], Tensor] | None
    link: Link
    num_samples: int
    seed: int
    dropout: bool
    progress: bool

    def measure(self, spreads: Sequence[Spread], levels: Sequence[float], title: str) -> Losses:
        """Returns the losses of the network without draws, and of each spread, in one pass: so that they are paired."""
        plain = self._networks(())
        drawn = self._networks(spreads) if spreads else []
        parts: list[Tensor] = []
        sums: list[Tensor] = []  # of each batch, (1, R, L, P)
        known = torch.empty(0, device="cpu")
        num_mistakes = 0

        def add(item: Any, labels: Tensor) -> None:
            nonlocal known, num_mistakes
            rows = [self._losses(plain, None, item, labels, levels)]
            rows += [self._losses(drawn, row, item, labels, levels) for row in range(len(spreads))]
            parts.append(torch.stack([values for values, _ in rows]).cpu())
            sums.append(torch.stack([without.sum(2).T for _, without in rows])[None].cpu())
            known = torch.cat([known, labels.flatten().cpu()]).unique()[:2]
            num_mistakes += self._count_mistakes(plain, item, labels)

        self._visit(add, title)
        values, known = self._gather(parts, 2), self._gather([known]).unique()[:2]
        num_mistakes = sum(peers_of(self.loader).gather(num_mistakes))
        without = self._gather(sums).sum(0) / values.shape[2]
        return Losses((None, *spreads), tuple(levels), values, without, len(known), num_mistakes)

    def root_mean_square(self) -> float:
        """Returns the error of the network without draws in regression, over all inputs and outputs."""
        plain, squares = self._networks(()), []

        def add(item: Any, labels: Tensor) -> None:
            moments, labels = self._moments(plain, None, item, labels)
            squares.append((labels - reduce(Moments.merge, moments).mean).square().flatten().cpu())

        self._visit(add, "tune, error")
        return float(self._gather(squares).mean().sqrt())

    def _gather(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        """Puts together what all readers of the data found, in the order of the data."""
        found = peers_of(self.loader).gather([torch.cat(parts, dim)] if parts else [])
        if not any(found):
            raise ValueError(
                "Expected at least one batch of held-out data, got an empty loader, or one that can be read only once. "
                "Pass a DataLoader or a list."
            )
        return torch.cat([part for each in found for part in each], dim)

    def _visit(self, add: Callable[[Any, Tensor], None], title: str) -> None:
        """Hands over every batch with its labels."""
        with (
            KeepingModes(),
            torch.no_grad(),
            progress_bar(title, "batch", length_hint(self.loader) or None, shown=self.progress) as bar,
        ):
            for item in self.loader:
                labels = _second(item) if self.target is None else self.target(item)
                if not isinstance(labels, Tensor):
                    raise TypeError(f"Expected labels as a tensor, got {describe(labels)}. {_TARGET}")
                add(item, labels.to(device_of(self.models[0])))
                bar.update()

    @property
    def num_parts(self) -> int:
        """How many parts the draws are in."""
        return int(deal_parts(self.num_samples).max()) + 1

    def _networks(self, spreads: Sequence[Spread]) -> list[Network]:
        return [self._network(number, spreads) for number in range(len(self.models))]

    def _network(self, number: int, spreads: Sequence[Spread]) -> Network:
        """Returns one of the models with the draws of all spreads, one after the other; without them, as it is."""
        seed, draws = member_seed(self.seed, number), None
        if spreads:
            member = self.members[number]
            draws = join_draws(
                [replace(member, tuning=Tuning(spread)).sample(self.num_samples, seed=seed) for spread in spreads]
            )
        return Network(
            self.models[number],
            self.call,
            draws,
            num_samples=self.num_samples,
            seed=seed,
            dropout=self.dropout,
            num_masks=self.num_samples,
            num_batches=(length(self.loader) or 0) * max(1, len(spreads)) or None,
        )

    def _run(self, networks: Sequence[Network], row: int | None, item: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yields outputs (s, N, …) of all members for one spread, the part that each draw is in, and its weight."""
        for network in networks:
            count = network.num_draws if row is None else self.num_samples
            start, parts = 0 if row is None else row * count, deal_parts(count)
            for outputs in network.run(item, None, start, start + count):
                outputs, own, parts = widen(outputs), parts[: len(outputs)], parts[len(outputs) :]
                if self.link == "softmax":
                    check_logits(outputs)
                if row is None and not outputs.isfinite().all():
                    raise ValueError(
                        "Expected finite outputs, got NaN or Inf from the network itself. Check the held-out data, and "
                        "the model's own output on them."
                    )
                yield outputs, own.to(outputs.device), 1 / (len(networks) * count)

    def _losses(
        self, networks: Sequence[Network], row: int | None, item: Any, labels: Tensor, levels: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Returns −log p(y | x) of the mean over draws, (L, N), and of the mean without each part of them, (P, L, N).

        An input's loss is the sum over its labels, and the mean over its places.
        """
        if self.link == "identity":
            moments, labels = self._moments(networks, row, item, labels)
            noise = torch.tensor(levels, dtype=torch.float64).to(labels).view(-1, *[1] * labels.dim())

            def gaussian(chosen: list[Moments]) -> Tensor:
                merged = reduce(Moments.merge, chosen)
                variance = merged.deviation / merged.weight + noise.square()  # (L, N, …)
                losses = ((2 * math.pi * variance).log() + (labels - merged.mean).square() / variance) / 2
                return losses.nan_to_num(NO_ANSWER, NO_ANSWER)

            return self._leave_out(moments, gaussian)
        probs: list[Any] = [0.0] * len(levels)  # of the labels, (P, N, …) at each level, added up in each part
        weights: Any = 0.0  # of the parts, (P,)
        for outputs, parts, weight in self._run(networks, row, item):
            outputs = outputs.nan_to_num(0.0, 0.0, 0.0)  # overflow of a spread too wide: as good as no answer
            weights = weights + weight * parts.bincount(minlength=self.num_parts)
            for number, level in enumerate(levels):
                each = weight * _label_probs(outputs / level, labels, self.link)
                # Added up and not multiplied by a matrix, which autocast would do in bfloat16.
                probs[number] += each.new_zeros(self.num_parts, *each.shape[1:]).index_add_(0, parts, each)

        def cross_entropy(chosen: list[int]) -> Tensor:
            mean: Tensor = torch.stack([each[chosen].sum(0) for each in probs]) / weights[chosen].sum()
            return -mean.clamp_min(torch.finfo(mean.dtype).tiny).log().double()

        return self._leave_out(weights.nonzero().flatten().tolist(), cross_entropy)

    def _leave_out(self, parts: list[T], loss: Callable[[list[T]], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the loss (L, N) of all parts of the draws, and (P, L, N) without each; the same if there are none."""

        def of_inputs(chosen: list[T]) -> Tensor:
            losses = loss(chosen)
            if self.link != "softmax" and losses.dim() > 2:
                losses = losses.sum(2)
            return losses.flatten(2).mean(2) if losses.dim() > 2 else losses

        whole = of_inputs(parts)
        if len(parts) == 1:
            return whole, whole.expand(self.num_parts, *whole.shape)
        return whole, torch.stack([of_inputs(parts[:i] + parts[i + 1 :]) for i in range(len(parts))])

    def _count_mistakes(self, plain: Sequence[Network], item: Any, labels: Tensor) -> int:
        """Counts inputs of which some label is not the likeliest."""
        if self.link == "identity":
            return 0
        is_softmax = self.link == "softmax"
        probs: Any = 0.0  # (N, K, *)
        for outputs, _, weight in self._run(plain, None, item):
            probs = probs + weight * (outputs.softmax(2) if is_softmax else outputs.sigmoid()).sum(0)
        if is_softmax:
            wrong = probs.argmax(1) != labels  # (N, *)
        else:
            wrong = (probs > 0.5) != like_outputs(labels, probs, self.link).bool()  # (N, K, *)
        return int(wrong.flatten(1).any(1).sum() if wrong.dim() > 1 else wrong.sum())

    def _moments(
        self, networks: Sequence[Network], row: int | None, item: Any, labels: Tensor
    ) -> tuple[list[Moments], Tensor]:
        """Returns mean and variance of each part of the draws, (N, …) in float64, and labels of the same shape."""
        found: dict[int, Moments] = {}
        for outputs, parts, weight in self._run(networks, row, item):
            for part in parts.unique().tolist():
                new = Moments.of(outputs[parts == part].double()).scale(weight)
                found[part] = found[part].merge(new) if part in found else new
        moments = list(found.values())
        labels = like_outputs(labels, moments[0].mean, self.link).double()
        if not labels.isfinite().all():
            raise ValueError("Expected finite labels, got NaN or Inf. Leave those inputs out.")
        return moments, labels


def deal_parts(count: int) -> Tensor:
    """Returns the part that each of some draws is in; antithetic pairs stay together if there are four draws or more.

    Examples:
        >>> deal_parts(10).tolist(), deal_parts(3).tolist(), deal_parts(1).tolist()
        ([0, 0, 1, 1, 2, 2, 3, 3, 0, 0], [0, 1, 2], [0])
    """
    size = 2 if count >= 4 else 1
    return torch.arange(count, device="cpu") // size % NUM_PARTS


def _second(item: Any) -> Any:
    if isinstance(item, (tuple, list)) and len(item) > 1:
        return item[1]
    raise TypeError(f"Expected batches (x, y) with labels, got {describe(item)}. {_TARGET}")


def _label_probs(outputs: Tensor, labels: Tensor, link: Link) -> Tensor:
    """Returns the probability that each draw gives to the labels: (s, N, K, *) → (s, N, *); with sigmoid the same."""
    if link == "softmax":
        if labels.is_floating_point():
            raise ValueError(
                f"Expected class indices as labels for link='softmax', got {labels.dtype}. Pass link='sigmoid' for "
                "labels of 0 and 1, or link='identity' for regression."
            )
        index = class_indices(outputs[0], labels).expand(len(outputs), *[-1] * (outputs.dim() - 1))
        return outputs.softmax(2).gather(2, index).squeeze(2)
    labels = like_outputs(labels, outputs[0], link)
    if not ((labels == 0) | (labels == 1)).all():
        raise ValueError(
            f"Expected labels of 0 and 1 for link='sigmoid', got {labels.min()} to {labels.max()}. Pass link='softmax' "
            "for class indices, or link='identity' for regression."
        )
    return ((2 * labels.to(outputs) - 1) * outputs).sigmoid()  # of label 0 too, without 1 − p


def like_outputs(labels: Tensor, outputs: Tensor, link: Link) -> Tensor:
    """Returns labels in the shape of outputs, (N, …): of a single output they may be (N,)."""
    if labels.shape == outputs.shape:
        return labels
    if labels.unsqueeze(1).shape == outputs.shape:
        return labels.unsqueeze(1)
    raise ValueError(
        f"Expected labels of the outputs' shape {list(outputs.shape)} for link='{link}', got {list(labels.shape)}. "
        "Reshape them with target=, or pass link='softmax' for class indices."
    )
