"""Every number of the study, typed, and the file that keeps them. `study.json` is read back as it was written."""

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from stochbn.experiments.data.sources import DataError, write_atomically
from stochbn.experiments.report.differences import Difference
from stochbn.experiments.report.scores import Score
from stochbn.experiments.report.tables import rounded
from stochbn.experiments.study.draws import Sizes

T = TypeVar("T")


@dataclass(frozen=True)
class Chance:
    """The ECE to expect if probabilities are right: the mean, and what is exceeded in one case of twenty."""

    mean: float
    high: float


@dataclass(frozen=True)
class Quality:
    """What a method scores."""

    scores: dict[str, Score]  # by metric
    each: tuple[dict[str, float], ...]  # the same of every network or of the ensemble, without a deviation
    chance: Chance  # of the ECE
    # NLL, ECE and error by corruption, such as "noise 3"; empty where it was not measured
    corruptions: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Choice:
    """The spread that validation data chose for a network, and the curve of spreads and their NLL."""

    seed: int
    spread: float
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Cost:
    """What a prediction costs in forward passes, and what has to be trained and kept for it."""

    passes: int
    weights_bytes: int
    statistics_bytes: int
    train_hours: float


@dataclass(frozen=True)
class Row:
    """One method."""

    seeds: tuple[int, ...]  # of its networks
    std_over: str  # what the ± is the standard deviation over, in words
    plain: Quality  # as it is
    tempered: Quality  # with the temperature that validation data chose
    temperatures: tuple[float, ...]  # those, of each network or of the ensemble
    choices: tuple[Choice, ...]  # the spreads, where they were chosen
    cost: Cost  # of one network, or of the whole ensemble


@dataclass(frozen=True)
class Distance:
    """How far a method is from exact inference on the same inputs, the mean over networks (`measure_distances`)."""

    total_variation_test: float
    total_variation_out_of_domain: float
    entropy_correlation: float
    nll: float
    auroc_entropy: float
    num_networks: int


@dataclass(frozen=True)
class Limit:
    """What the best spread and temperature, chosen on test labels, would have given (`measure_limits`)."""

    nll: float
    nll_temperature_only: float
    nll_temperature: float
    auroc: float
    num_networks: int


@dataclass(frozen=True)
class FirstDraws:
    """The scores of a method's first draws: the mean over networks, and the standard deviation if there are several."""

    num_samples: int
    scores: dict[str, float]
    std: dict[str, float]


@dataclass(frozen=True)
class Results:
    """The whole study: what made it, how much was measured, and every number, by the keys of methods.

    `commit` is the code that scored, `drawn_at` that which made the draws; `metrics` says what each score means.
    """

    experiment: str
    command: str
    commit: str
    drawn_at: tuple[str, ...]
    versions: dict[str, str]
    draw_seed: int
    sizes: Sizes
    num_inputs: dict[str, int]
    metrics: dict[str, str]
    methods: dict[str, Row]
    differences: tuple[Difference, ...]
    first_draws: dict[str, tuple[FirstDraws, ...]]
    limits: dict[str, Limit]
    distances: dict[str, Distance]
    weights_sha256: dict[str, str]

    def write(self, path: Path) -> None:
        """Writes all numbers, to six digits."""
        text = json.dumps(rounded(asdict(self)), indent=1, ensure_ascii=False) + "\n"
        write_atomically(path, text.encode())

    @staticmethod
    def read(path: Path) -> "Results":
        """Reads what `write` wrote.

        Raises:
            DataError: The file is missing, damaged or something else.
        """
        try:
            return _decode(Results, json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError, LookupError) as error:
            message = f"Expected the numbers of a study in {path}, got {error!r}. Run the study again."
            raise DataError(message) from error


def _decode(kind: type[T], value: Any) -> T:
    """Returns a value from JSON as the type that it had: a dataclass, a tuple or a dict of such, or itself."""
    found, arguments = value, get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        found = kind(**{field.name: _decode(hints[field.name], value[field.name]) for field in fields(kind)})
    elif get_origin(kind) is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        found = tuple(_decode(one, item) for one, item in zip(kinds, value, strict=True))
    elif get_origin(kind) is dict:
        found = {key: _decode(arguments[1], item) for key, item in value.items()}
    return cast(T, found)
