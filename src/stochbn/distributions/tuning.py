"""What held-out data chose: a spread, a temperature or a noise level, and the scores that it was chosen by."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Spread = float | Mapping[str, float]


@dataclass(frozen=True)
class Score:
    """How one way to predict did on the held-out data.

    Attributes:
        spread: Of its draws; None for the network without draws of statistics.
        temperature: That its outputs were divided by.
        nll: Its mean negative log-likelihood in nats.
        difference: Its NLL less that of the reference: the fitted spread at temperature 1 (in regression, at its best
            noise), or the plain network if there is no distribution. None in files that 0.1.0 wrote.
        standard_error: Of that difference, paired: the two are compared input by input. It counts the chance of other
            inputs and of other draws. None where the difference is.
        noise: Its noise level, in regression.
    """

    spread: Spread | None
    temperature: float
    nll: float
    difference: float | None = None
    standard_error: float | None = None
    noise: float | None = None


@dataclass(frozen=True)
class Tuning:
    """What `stochbn.tune` chose on held-out data, and what it had to choose from. `print` shows a table and a verdict.

    Attributes:
        spread: Multiplies the deviations from the centre: one number, or one for each layer by name. A spread of k is
            that of mini-batches k² times smaller. None if a plain network was tuned: then `predict`, `Predictor` and
            `export` take the tuning itself in place of `stats`.
        temperature: Divides the outputs of every draw, before the softmax or the sigmoid.
        scores: What was tried, each with its NLL.
        noise: The standard deviation of what regression cannot explain, one number for all outputs; else None.
        verdict: What the scores say, a sentence each.
    """

    spread: Spread | None = 1.0
    temperature: float = 1.0
    scores: tuple[Score, ...] = field(default=(), repr=False)
    noise: float | None = None
    verdict: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        spreads = self.spread.values() if isinstance(self.spread, Mapping) else [self.spread or 0.0]
        most = sys.float_info.max  # and not infinity, which a whole number of any size is below
        if not all(0 <= spread <= most for spread in spreads) or not 0 < self.temperature <= most:
            raise ValueError(
                "Expected finite spreads of at least 0 and a temperature above 0, got "
                f"{self.spread} and {self.temperature}. Tuning() is the fitted spread and no temperature."
            )
        if self.noise is not None and not 0 < self.noise <= sys.float_info.max:
            raise ValueError(f"Expected a finite noise above 0, got {self.noise}. Leave it out where there is none.")

    @property
    def curve(self) -> tuple[tuple[float, float, float], ...]:
        """The spreads tried in common for all layers, each with its best temperature and the NLL there."""
        best: dict[float, Score] = {}
        for score in self.scores:
            if isinstance(score.spread, float) and (score.spread not in best or score.nll < best[score.spread].nll):
                best[score.spread] = score
        return tuple((spread, best[spread].temperature, best[spread].nll) for spread in sorted(best))

    def to_dict(self) -> dict[str, Any]:
        """Returns it for a file's header, with the curve, which is what version 0.1.0 reads."""
        return asdict(self) | {"curve": self.curve}

    def __str__(self) -> str:
        if not self.scores:
            return repr(self)
        level = "temperature" if self.noise is None else "noise"
        reference = "plain network" if self.spread is None else "fitted spread"
        rows = [("spread", level, "NLL", f"difference to the {reference}")]
        rows += [self._format(score) for score in self.scores]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*map(str.rjust, row[:3], widths), row[3]]).rstrip() for row in rows]
        return "\n".join([*lines, *self.verdict])

    def _format(self, score: Score) -> tuple[str, str, str, str]:
        values = score.spread.values() if isinstance(score.spread, Mapping) else [score.spread]
        spread = ", ".join("plain" if value is None else f"{value:.3g}" for value in values)
        level = score.temperature if score.noise is None else score.noise
        compared = ""
        if score.difference is not None:
            is_reference = score.difference == score.standard_error == 0
            compared = "reference" if is_reference else f"{score.difference:+.4f} ± {score.standard_error:.4f}"
        is_chosen = (score.spread, score.temperature, score.noise) == (self.spread, self.temperature, self.noise)
        marked = f"{compared:<17}  chosen" if is_chosen else compared
        return spread, f"{level:.3g}", f"{score.nll:.4f}", marked
