"""Losses of single inputs → which spread and temperature to take, their scores, and a verdict in words.

One rule for both. What was fitted stands, unless another choice is better by more than one standard error of their
paired difference; then the nearest to it is taken that is within one standard error of the best. The spread comes
first, then the temperature. The NLL of held-out data cannot see what narrower draws cost on out-of-domain inputs. So
neither noise nor a temperature that does as well at the fitted spread may narrow them.

Two things make a difference uncertain, the inputs and the draws. Inputs differ in their losses. All inputs share the
draws, so what these add is seen by leaving out one part of them after another (the jackknife). It takes draws as
independent. Real mini-batches are drawn without repeats, so for them it is a little too large.

A mean of losses is as uncertain as the number of mistakes in it: right answers all ask for more confidence, a little
each, and the few wrong ones for less. Where there are hardly any, the standard error is too small itself, since the
mistakes that other data would hold are missing from it. So fewer than `FEWEST_MISTAKES` choose nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stochbn.distributions.tuning import Score, Spread
from stochbn.inference.held_out import Losses

FEWEST_MISTAKES = 10  # to choose by: their number is then known to a third, 1 / √10


def compare(losses: Tensor, reference: Tensor, without: Tensor | None = None) -> tuple[float, float]:
    """Returns the mean of (N,) paired differences, and its standard error.

    Args:
        losses: (N,), one of each input.
        reference: (N,), of the same inputs.
        without: (P,), what the mean would be without one of P parts of the draws; None where there are no draws, or
            where their noise does not count.

    Examples:
        >>> import torch
        >>> losses, reference = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])
        >>> compare(losses, reference)
        (1.0, 1.0)
        >>> difference, error = compare(losses, reference, torch.tensor([0.0, 2.0]))
        >>> difference, round(error**2, 6)
        (1.0, 2.0)
    """
    differences = losses - reference
    count = len(differences)
    if count < 2:
        return float(differences.mean()), math.inf
    variance = float(differences.var()) / count
    if without is not None:
        variance += (len(without) - 1) * float(without.var(correction=0))
    return float(differences.mean()), math.sqrt(variance)


def choose_nearest(losses: Tensor, distances: Sequence[float], without: Tensor | None = None) -> int:
    """Returns the row of (R, N) that is nearest to what was fitted, of those within one standard error of the best.

    Means without each part of the draws, (R, P), make the standard errors those of the draws too.

    Examples:
        >>> import torch
        >>> losses = torch.tensor([[2.0, 2.0, 2.0], [1.0, 1.2, 1.1], [0.9, 1.1, 1.2]])
        >>> choose_nearest(losses, distances=[0, 1, 2])
        1
    """
    means = losses.mean(1).tolist()
    best = min(range(len(means)), key=means.__getitem__)

    def is_near(row: int) -> bool:
        noise = None if without is None else without[row] - without[best]
        difference, error = compare(losses[row], losses[best], noise)
        return difference <= error

    near = [row for row in range(len(means)) if row == best or is_near(row)]
    return min(near, key=lambda row: (round(distances[row], 9), means[row]))


@dataclass(frozen=True, eq=False)
class Choice:
    """Losses, and what may be chosen by them.

    Attributes:
        losses: Of the network without draws, and of every spread.
        unit: Which of the levels stands, 1 for temperatures; None for noise, where the best one is taken.
        is_free: Whether spreads may have another level than that.
        dropout: Whether the network without draws has dropout.
    """

    losses: Losses
    unit: int | None
    is_free: bool
    dropout: bool

    def best_level(self, row: int) -> int:
        """Returns at which of the levels that a row may have its NLL is lowest."""
        levels = self._levels(row)
        return levels[int(self.losses.values[row, list(levels)].mean(1).argmin())]

    def _levels(self, row: int) -> Sequence[int]:
        if row and self.unit is not None and not self.is_free:
            return [self.unit]
        return range(len(self.losses.levels))

    def best_row(self, rows: Sequence[int]) -> int:
        """Returns which of some rows has the lowest NLL, each at its best level."""
        return min(rows, key=lambda row: float(self.losses.values[row, self.best_level(row)].mean()))

    def choose(self, rows: Sequence[int], distances: Sequence[float]) -> tuple[int, int]:
        """Returns which of some rows to take, and at which level: the nearest row, and there the level nearest to 1.

        All pairs are compared at once, so a spread is not changed where a temperature would do. A row other than the
        nearest has to be better than that one, at whatever level.
        """
        found = {}
        nearest = min(zip(distances, rows, strict=True))[1]
        limit = self.losses.values[nearest, self.best_level(nearest)].mean()
        for row, distance in zip(rows, distances, strict=True):
            for level in [self.best_level(row)] if self.unit is None else self._levels(row):
                if row == nearest or self.losses.values[row, level].mean() < limit:
                    found[row, level] = round(distance, 9), round(abs(math.log(self.losses.levels[level])), 9)
        ranks = sorted(set(found.values()))
        chosen = choose_nearest(
            torch.stack([self.losses.values[pair] for pair in found]),
            [ranks.index(farness) for farness in found.values()],
            torch.stack([self.losses.without[pair] for pair in found]),
        )
        return list(found)[chosen]

    @property
    def _count(self) -> str:
        return f"{self.losses.values.shape[2]:,} inputs"

    @cached_property
    def reference(self) -> tuple[int, int]:
        """Row and level of the fitted spread, or of the plain network if there is no spread."""
        row = self.losses.spreads.index(1.0) if len(self.losses.spreads) > 1 else 0
        return row, self.best_level(row) if self.unit is None else self.unit

    def score(self, row: int, level: int) -> Score:
        difference, error = self.compare((row, level), self.reference)
        value, nll = self.losses.levels[level], float(self.losses.values[row, level].mean())
        if self.unit is None:
            return Score(self.losses.spreads[row], 1.0, nll, difference, error, value)
        return Score(self.losses.spreads[row], value, nll, difference, error)

    def scores(self) -> list[Score]:
        """Lists every row as it is, and with its best temperature; in regression, with its best noise."""
        found = []
        for row in range(len(self.losses.spreads)):
            best = self.best_level(row)
            levels = {best} if self.unit is None else {self.unit, best} if self.is_free or not row else {self.unit}
            found += [self.score(row, level) for level in levels]
        return found

    def compare(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[float, float]:
        """Compares two ways to predict, each a row and a level."""
        values, without = self.losses.values, self.losses.without
        return compare(values[one], values[other], without[one] - without[other])

    def describe(self, row: int, level: int) -> str:
        spread = self.losses.spreads[row]
        name = "dropout alone" if self.dropout else "the plain network"
        if spread is not None:
            name = "draws with a spread by layer" if isinstance(spread, Mapping) else f"draws at spread {spread:.3g}"
        value = f"{self.losses.levels[level]:.3g}"
        if level in (0, len(self.losses.levels) - 1):
            value += " (the end of what was tried)"
        if self.unit is None:
            return f"{name} with noise {value}"
        return name if level == self.unit else f"{name} {'at' if spread is None else 'and'} temperature {value}"

    @property
    def is_decisive(self) -> bool:
        """Whether there are mistakes enough to choose by; regression needs none."""
        return self.unit is None or self.losses.num_mistakes >= FEWEST_MISTAKES

    def tell_winner(self, row: int, level: int, rival_level: int) -> str:
        """Says whether draws or the network without them had the lower NLL."""
        rival = (0, rival_level)
        gap, error = self.compare((row, level), rival)
        winner, loser = ((row, level), rival) if gap <= 0 else (rival, (row, level))
        # One standard error is enough to choose by, but not for a claim.
        is_sure = self.is_decisive and abs(gap) > 2 * error
        size = f"{abs(gap):.4f} ± {error:.4f}{'' if is_sure else ', which may be chance'}"
        advice = "" if gap <= 0 else "; draws may still help out of domain"
        names = f"{self.describe(*winner)} had a lower NLL than {self.describe(*loser)}"
        return f"On {self._count}, {names}, by {size}{advice}."

    def verdict(self, row: int, level: int, scores: Sequence[Score]) -> list[str]:
        """Says in sentences what won, whether the network is sure enough, and why a spread was taken."""
        rival = (0, self.best_level(0))
        said = [self.tell_winner(row, level, rival[1])] if row else []
        if self.unit is not None:
            gain, error = self.compare(rival, (0, self.unit))
            if gain < -error:
                kind = "overconfident" if self.losses.levels[rival[1]] > 1 else "underconfident"
                name = "Dropout alone" if self.dropout else "The plain network"
                said.append(f"{name} is {kind}: its best temperature is {self.losses.levels[rival[1]]:.3g}.")
        return [*said, *self._explain(row, level, scores)]

    def _explain(self, row: int, level: int, scores: Sequence[Score]) -> list[str]:
        """Says why what was fitted stands, or what changing the spread means."""
        spread = self.losses.spreads[row]
        stands = "temperature 1 stands" if spread is None else "the fitted spread stands"
        if (row, level) == self.reference and all(abs(s.difference or 0) <= (s.standard_error or 0) for s in scores):
            return [f"{self._count} are too few to choose: no difference exceeds its standard error. So {stands}."]
        if spread == 1.0 and len({str(s.spread) for s in scores}) > 2:
            return ["No spread is better than the fitted one by more than one standard error, so that stands."]
        if spread is None:
            is_same = self.unit == level
            return ["No temperature is better than 1 by more than one standard error."] if is_same else []
        if isinstance(spread, float) and spread != 1.0:
            fitted = self.reference[0]
            gap, error = self.compare((row, level), (fitted, self.best_level(fitted)))
            kind, cost = "wider", ""
            if spread < 1:
                kind, cost = (
                    "narrower",
                    " They say less about out-of-domain inputs; stats.untuned() keeps the fitted spread.",
                )
            return [f"Draws are {kind} than fitted, for an NLL lower by {-gap:.4f} ± {error:.4f}.{cost}"]
        return []


def order(score: Score) -> tuple[bool, bool, float, float, float]:
    """Sorts scores: the network without draws, spreads as they grow, spreads by layer; and by level."""
    is_drawn, is_by_layer = score.spread is not None, isinstance(score.spread, Mapping)
    spread = score.spread if isinstance(score.spread, float) else 0.0
    return is_drawn, is_by_layer, spread, abs(math.log(score.temperature)), score.noise or 0.0


def distance(spread: Spread) -> float:
    """Returns how far a spread is from the fitted one: |log k|."""
    assert isinstance(spread, float)
    return abs(math.log(spread))
