"""Interleaved timing, and the arithmetic of medians and ratios."""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

SHORTEST = 0.05  # seconds: what takes less is repeated within one measurement, for the clock's sake


def interleave(
    runs: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    seed: int = 0,
    shortest: float = SHORTEST,
    update: Callable[[str], object] = lambda doing: None,
) -> dict[str, list[float]]:
    """Times all runs in each of `repeats` rounds, in an order that changes, after one of each that does not count.

    Returns:
        Seconds that one run took, by name, one number a round: those of a round were measured side by side.
    """
    numbers = {}
    for name, run in runs.items():
        update(f"warming up {name}")
        numbers[name] = max(1, math.ceil(shortest / max(seconds(run), 1e-9)))
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name in order.sample(list(runs), len(runs)):
            update(f"round {turn + 1} of {repeats}, {name}")
            times[name].append(seconds(runs[name], numbers[name]))
    return times


def seconds(run: Callable[[], object], number: int = 1) -> float:
    """Times a run, the mean of `number` in a row."""
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": middle, "q1": low, "q3": high}


def ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Divides round by round: what slows a whole round down cancels."""
    return [time / base for time, base in zip(times, baseline, strict=True)]


def affordable(num_draws: int, cost: float, budget: float) -> int:
    """Returns how many draws of a given cost in seconds fit into the budget, at least two.

    Fewer than asked for come in fours, so that the stacks of `predict` at 16 rows stay whole.
    """
    if num_draws * cost <= budget:
        return num_draws
    most = int(budget / cost)
    most -= most % 4 if most > 4 else 0
    return min(num_draws, max(2, most))
