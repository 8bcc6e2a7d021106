"""Held-out data → how wide the distribution is to be, and a temperature or a noise level, by the NLL.

The spread that mini-batches had in training need not be the one that predicts best. All spreads are tried on the same
draws (common random numbers) and compared input by input, so their losses differ by what the spread does and not by
chance. `choosing` has the rule.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast, overload

from torch import Tensor, nn

from stochbn.distributions.base import Distribution
from stochbn.distributions.seeds import random_seed
from stochbn.distributions.tuning import Score, Spread, Tuning
from stochbn.inference.choosing import FEWEST_MISTAKES, Choice, distance, order
from stochbn.inference.engine.sampling import warn_of_dropout
from stochbn.inference.held_out import HeldOut
from stochbn.inference.predict import check_options
from stochbn.inference.prediction import Link
from stochbn.statistics.calls import Call, call_on_item, unwrap
from stochbn.statistics.checks import check_whole
from stochbn.statistics.layers import all_batch_norms
from stochbn.statistics.mini_batches import check_loader

SPREADS = tuple(2 ** (step / 2) for step in range(-2, 5))  # 0.5, 0.71, 1, …, 4
NARROWER = tuple(2 ** (step / 2) for step in range(-6, -2))  # 0.13, …, 0.35, tried if 0.5 is best
WIDER = tuple(2 ** (step / 2) for step in range(5, 9))  # 5.7, …, 16, tried if 4 is best
AROUND = tuple(2 ** (step / 2) for step in range(-2, 3))  # for one group of layers, times what all have
TEMPERATURES = tuple(2 ** (step / 4) for step in range(-8, 13))  # 0.25, …, 1, …, 8
NOISES = tuple(2 ** (step / 4) for step in range(-12, 5))  # 0.13, …, 1, …, 2, times the plain network's error
NUM_DRAWS, NUM_CHEAP_DRAWS = 8, 64  # of all layers, and of the last one alone

T = TypeVar("T", bound=Distribution | Sequence[Distribution])


# The options are those of the function itself; to repeat them here would be to write them three times.
@overload
def tune(model: nn.Module | Sequence[nn.Module], stats: None, loader: Iterable[Any], **options: Any) -> Tuning: ...
@overload
def tune(model: nn.Module | Sequence[nn.Module], stats: T, loader: Iterable[Any], **options: Any) -> T: ...
def tune(  # type: ignore[misc]
    model: nn.Module | Sequence[nn.Module],
    stats: T | None,
    loader: Iterable[Any],
    *,
    choose: Literal["spread", "temperature", "both"] = "both",
    link: Link = "softmax",
    num_groups: int = 1,
    num_samples: int | None = None,
    seed: int | None = 0,
    dropout: bool = False,
    call: Call | None = None,
    target: Callable[[Any], Tensor] | None = None,
    progress: bool = True,
) -> T | Tuning:
    """Chooses the spread and a temperature that predict held-out labels best, if they do so distinguishably.

    The plain network, the fitted spread and spreads around it are scored on the same data, each with temperatures too.
    What was fitted stands unless another pair of spread and temperature is better by more than one standard error of
    the paired difference. Then the spread nearest to the fitted one is taken that is within one standard error of the
    best pair, and there the temperature nearest to 1. Standard errors count the chance of inputs and of draws.
    `print(stats.tuning)` shows the scores and says what they mean. Data with fewer than ten mistakes choose nothing,
    and a warning says so: the surest network would win, however sure. No model is changed.

    A spread of k multiplies every deviation from the centre by k. The variances of batch statistics fall with the size
    of the batch, so it stands for mini-batches k² times smaller than those of training. The cost is that of 58 passes
    over the data where all layers are drawn: 8 draws for each of 7 spreads, and the plain network twice. If the best
    spread is the smallest or the largest of them, a second pass tries others beyond it.

    Args:
        model: A trained network, or several, which are then tuned together, to one spread and temperature.
        stats: What `fit` returned for it; for several a sequence. None gives the plain network a temperature.
        loader: Held-out data with labels, seen neither in training nor in the test: batches `(x, y)`.
        choose: What to choose: the spread; a temperature, which divides every draw's outputs before the softmax, at the
            fitted spread; or both. The default is both: pairs of them are then compared, so that draws are not narrowed
            where a temperature would do at the fitted spread. The NLL of held-out data cannot see what a narrower
            spread costs on out-of-domain inputs; "spread" keeps wider draws where a network is overconfident.
        link: As in `predict`. With "sigmoid" labels are 0 or 1, of the outputs' shape, and an input's loss is the sum
            over its labels. With "identity" it is that of a Gaussian whose variance is that of the draws plus noise²;
            the noise takes the temperature's place, and the best one is always taken. Where outputs have places, such
            as pixels, it is the mean over them.
        num_groups: Into how many groups of successive layers the network is cut, each with a spread of its own; as many
            as there are layers for one each. They are chosen one after the other by the same rule, each against what it
            had before, in one more pass each.
        num_samples: Draws for each spread that is tried. The default is 8, and 64 where only the BatchNorm layer that
            the model defines last is drawn, without dropout: that is cheap. More draws distinguish smaller differences;
            with fewer than 8 the draws' part of the standard errors is rough.
        seed: Of the draws, as in `predict`.
        dropout: As in `predict`. The plain network then has dropout too.
        call: As in `predict`.
        target: Returns the labels of a batch; by default they are the second of a tuple or list.
        progress: Show a progress bar.

    Returns:
        The distribution, or the list of them, with `tuning` set, which `predict` follows and `save` includes. Without
        `stats` a `Tuning`, which `predict`, `Predictor` and `export` take in their place.

    Examples:
        >>> import stochbn, torch
        >>> _ = torch.manual_seed(2)
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> inputs = [torch.randn(16, 2) for _ in range(20)]
        >>> batches = [(x, model(x).softmax(1).multinomial(1)[:, 0]) for x in inputs]
        >>> stats = stochbn.fit(model, batches[:10], progress=False)
        >>> tuned = stochbn.tune(model, stats, batches[10:], progress=False)
        >>> tuned
        Factorized(1 layers, 8 channels, batch_size=16, num_batches=10, tuned)
        >>> len(tuned.tuning.scores) >= 9
        True
        >>> plain = stochbn.tune(model, None, batches[10:], progress=False)
        >>> plain
        Tuning(spread=None, temperature=1.0, noise=None)
    """
    models, members = _list_members(model, stats)
    for member in members:
        warn_of_dropout(member, dropout, stacklevel=3)
    if num_samples is None:
        num_samples = _default_draws(models, members, dropout)
    check_options(num_samples=num_samples, chunk_size=None, link=link)
    num_groups, num_samples = check_whole("num_groups", num_groups, 1), check_whole("num_samples", num_samples, 2)
    _check_choice(choose, num_groups, members)
    check_loader(loader)
    held_out = HeldOut(
        models,
        members,
        list(loader) if isinstance(loader, Iterator) else loader,  # it may be read more than once
        call or call_on_item,
        target,
        link,
        num_samples=num_samples,
        seed=random_seed() if seed is None else check_whole("seed", seed, -(2**63)),
        dropout=dropout,
        progress=progress,
    )
    tuning, warned = _Search(held_out, choose).run(num_groups)
    for sentence in warned:
        warnings.warn(sentence, stacklevel=2)
    if stats is None or not members:
        return tuning
    tuned = [replace(member, tuning=tuning) for member in members]
    return cast(T, tuned if isinstance(stats, Sequence) else tuned[0])


def _list_members(model: nn.Module | Sequence[nn.Module], stats: Any) -> tuple[list[nn.Module], list[Distribution]]:
    """Lists models and their distributions, none for plain networks."""
    models = [unwrap(one) for one in model] if isinstance(model, (Sequence, nn.ModuleList)) else [unwrap(model)]
    given = list(stats) if isinstance(stats, Sequence) else [stats] * (len(models) if stats is None else 1)
    for member in given:
        if not (isinstance(member, Distribution) or all(one is None for one in given)):
            raise TypeError(
                f"Expected what stochbn.fit returned, or None, got {type(member).__name__}. The order is "
                "tune(model, stats, val_loader)."
            )
    if not models or len(given) != len(models):
        raise ValueError(
            f"Expected models and a distribution for each, got {len(models)} and {len(given)}. Fit each model on its "
            "own: [stochbn.fit(model, loader) for model in models]."
        )
    return models, [member for member in given if member is not None]


def _default_draws(models: Sequence[nn.Module], members: Sequence[Distribution], dropout: bool) -> int:
    """Returns how many draws to score: more where they repeat nothing but the end of the network."""
    if dropout or not members:
        return NUM_DRAWS
    names = [list(all_batch_norms(model)) for model in models]
    is_last = [len(own) > 1 and list(member.layers) == own[-1:] for own, member in zip(names, members, strict=True)]
    return NUM_CHEAP_DRAWS if all(is_last) else NUM_DRAWS


def _check_choice(choose: str, num_groups: int, members: list[Distribution]) -> None:
    if choose not in ("spread", "temperature", "both"):
        raise ValueError(f"Expected choose to be 'spread', 'temperature' or 'both', got {choose!r}.")
    if not members and (choose == "spread" or num_groups > 1):
        raise ValueError(
            f"Expected statistics to choose a spread of, got None with choose={choose!r} and num_groups={num_groups}. "
            "Pass what stochbn.fit returned, or leave both out for a temperature."
        )
    if choose == "temperature" and num_groups > 1:
        raise ValueError(
            f"Expected no groups of layers for a temperature alone, got num_groups={num_groups}. Pass choose='both', "
            "or leave num_groups out: groups are for spreads."
        )
    names = [list(member.layers) for member in members]
    if num_groups > 1 and (num_groups > len(names[0]) or any(one != names[0] for one in names)):
        raise ValueError(
            f"Expected at most as many groups as layers, and the same layers in all models, got num_groups="
            f"{num_groups} for {len(names[0])} layers. Pass fewer."
        )


class _Search:
    """Passes over held-out data, what was scored in them, and what is to be warned of."""

    def __init__(self, held_out: HeldOut, choose: str) -> None:
        self.held_out = held_out
        self.choose = choose
        self.is_regression = held_out.link == "identity"
        self.levels = TEMPERATURES
        self.scores: dict[Any, Score] = {}
        self.warned: list[str] = []
        if self.is_regression:
            error = held_out.root_mean_square()
            if not 0 < error < math.inf:
                raise ValueError(
                    f"Expected an error of the network to measure noise by, got {error:g}. Check that the labels are "
                    "not the network's own outputs."
                )
            self.levels = tuple(error * factor for factor in NOISES)

    def run(self, num_groups: int) -> tuple[Tuning, list[str]]:
        spreads = () if not self.held_out.members else SPREADS if self.choose != "temperature" else (1.0,)
        choice = self._measure(spreads, "tune")
        row = choice.reference[0]
        if not self.is_regression and (choice.losses.num_labels < 2 or not choice.is_decisive):
            return self._refuse(choice)
        if len(spreads) > 1:
            choice, row, level = self._choose_spread(choice)
        else:
            row, level = choice.choose([row], [0.0])
        if num_groups > 1:
            choice, row, level = self._choose_groups(choice, row, num_groups)
        self._warn_of_level(choice, row, level)
        self._keep([choice.score(row, level)])
        return self._conclude(choice, row, level, choice.verdict(row, level, list(self.scores.values())))

    def _measure(self, spreads: Sequence[Spread], title: str) -> Choice:
        losses = self.held_out.measure(spreads, self.levels, title)
        unit = None if self.is_regression else self.levels.index(1.0)
        choice = Choice(losses, unit, self.choose != "spread" or self.is_regression, self.held_out.dropout)
        self._keep(score for score in choice.scores() if not isinstance(score.spread, Mapping))
        return choice

    def _keep(self, scores: Iterable[Score]) -> None:
        """Adds scores; those of a later pass over the same data replace earlier ones."""
        self.scores |= {(str(score.spread), score.temperature, score.noise): score for score in scores}

    def _choose_spread(self, choice: Choice) -> tuple[Choice, int, int]:
        """Chooses among the spreads tried, and tries others further out if the best of them lies at the end."""
        rows = range(1, len(choice.losses.spreads))
        best, (row, level) = choice.best_row(rows), self._nearest(choice)
        if choice.losses.spreads[row] == 1.0 or best not in (rows[0], rows[-1]):
            return choice, row, level
        # All of that side again: only losses of one pass are in one order, if the loader shuffles.
        further = SPREADS[: SPREADS.index(1.0) + 1], SPREADS[SPREADS.index(1.0) :]
        tried = NARROWER + further[0] if best == rows[0] else further[1] + WIDER
        choice = self._measure(tried, f"tune, {'narrower' if best == rows[0] else 'wider'}")
        rows = range(1, len(tried) + 1)
        best, (row, level) = choice.best_row(rows), self._nearest(choice)
        spread = choice.losses.spreads[best]
        if choice.losses.spreads[row] != 1.0 and spread == NARROWER[0]:
            self.warned.append(
                f"The NLL is lowest at {spread:.3g}, the smallest spread tried: on these data draws do not improve it. "
                "The fitted spread, stats.untuned(), may still expose out-of-domain inputs."
            )
        elif choice.losses.spreads[row] != 1.0 and spread == WIDER[-1]:
            self.warned.append(
                f"The NLL is lowest at {spread:.3g}, the largest spread tried: draws far wider than mini-batches ever "
                "were. Check that the labels are those of the inputs."
            )
        return choice, row, level

    def _nearest(self, choice: Choice) -> tuple[int, int]:
        spreads = cast(Sequence[float], choice.losses.spreads[1:])
        return choice.choose(range(1, len(spreads) + 1), [distance(spread) for spread in spreads])

    def _choose_groups(self, choice: Choice, row: int, num_groups: int) -> tuple[Choice, int, int]:
        """Chooses the spread of one group of layers after the other, each against what it had before."""
        names = list(self.held_out.members[0].layers)
        chosen = dict.fromkeys(names, cast(float, choice.losses.spreads[row]))
        bounds = [round(number * len(names) / num_groups) for number in range(num_groups + 1)]
        for start, stop in itertools.pairwise(bounds):
            tried = [{**chosen, **{name: chosen[name] * k for name in names[start:stop]}} for k in AROUND]
            choice = self._measure([1.0, *tried], f"tune {names[start] or 'layer'}")
            row, level = choice.choose(range(2, len(tried) + 2), [distance(k) for k in AROUND])
            chosen = tried[row - 2]
        return choice, row, level

    def _warn_of_level(self, choice: Choice, row: int, level: int) -> None:
        best, last = choice.best_level(row), len(self.levels) - 1
        if best not in (0, last) or level == choice.unit:
            return
        what, end = "noise" if self.is_regression else "temperature", "smallest" if best == 0 else "largest"
        remedy = "Check that the labels are those of the inputs"
        if best == 0:
            remedy += ", and that training has not seen them"
        self.warned.append(f"The NLL is lowest at {what} {self.levels[best]:.3g}, the {end} tried. {remedy}.")

    def _refuse(self, choice: Choice) -> tuple[Tuning, list[str]]:
        """Chooses nothing, where labels would have the surest network win, or chance would decide."""
        row, level = choice.reference
        count = choice.losses.num_mistakes
        problem = f"Held-out data with {count or 'no'} {'mistake' if count == 1 else 'mistakes'}"
        if choice.losses.num_labels < 2:
            problem = "Labels of one kind only"
        self.warned.append(
            f"{problem} cannot choose a spread or a temperature: mistakes decide how sure to be. What was fitted "
            f"stands; pass held-out data with all classes, and enough for {FEWEST_MISTAKES} mistakes."
        )
        return self._conclude(choice, row, level, [choice.tell_winner(row, level, level)] if row else [])

    def _conclude(self, choice: Choice, row: int, level: int, verdict: list[str]) -> tuple[Tuning, list[str]]:
        scores = tuple(sorted(self.scores.values(), key=order))
        temperature, noise = self.levels[level], None
        if self.is_regression:
            temperature, noise = 1.0, self.levels[level]
        return Tuning(choice.losses.spreads[row], temperature, scores, noise, (*verdict, *self.warned)), self.warned
