"""The bounds that the measurements are held against, and whether they are met. Pure."""

from typing import Any

from benchmarks.contenders import OURS_PREPARED, PLAIN
from benchmarks.measure import summarise
from benchmarks.subjects import KINDS

TARGET_SAMPLES = 50
OURS_NAMES = tuple(contender.name for contender in OURS_PREPARED)
# Time of ours over that of S plain passes, by network and N, at S = 50.
RATIOS = {
    "lenet5": {1: 0.15, 16: 0.50, 128: 0.50},
    "vgg11": {1: 0.24, 16: 0.87, 128: 0.93},
    "resnet18": {1: 0.45, 16: 0.95, 128: 0.90},
}
GEMM_FRACTION = 0.5  # of the machine's rate, at N = 1
GEMM_NETWORKS = ("vgg11", "resnet18")
FIT_TO_PASSES = 1.15
GHOST_TO_FIT = 0.7
MEMORY = 1.10  # peak at the largest S over that at the smallest


def ratio_target(network: str, num_rows: int, num_samples: int, contender: str) -> float | None:
    """Returns the bound on the ratio of one contender in one cell, if there is one."""
    if num_samples != TARGET_SAMPLES or contender not in OURS_NAMES:
        return None
    return RATIOS.get(network, {}).get(num_rows)


def add_fractions(cells: list[dict[str, Any]], rate: float) -> None:
    """Adds to each cell's plain passes and ours the fraction of the machine's rate that they reach."""
    for cell in cells:
        needed = dict.fromkeys(OURS_NAMES, cell["flops"]["needed"])
        needed[PLAIN.name] = cell["samples"] * cell["flops"]["pass"]
        for name, found in cell["contenders"].items():
            if name in needed:
                found["gemm_fraction"] = needed[name] / found["seconds"]["median"] / rate


def judge(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Lists every bound that something was measured for: what, the bound, the measured number, whether it is met."""
    verdicts = []

    def add(what: str, target: float, measured: float, at_least: bool = False) -> None:
        met = measured >= target if at_least else measured <= target
        verdicts.append({"what": what, "at_least" if at_least else "at_most": target, "measured": measured, "met": met})

    for cell in results["cells"]:
        network, rows, samples = cell["network"], cell["rows"], cell["samples"]
        where = f"{KINDS[network].name}, N = {rows}, S = {samples}"
        for name, found in cell["contenders"].items():
            target = ratio_target(network, rows, samples, name)
            if target is not None:
                add(f"{name} / plain passes, {where}", target, found["ratio"]["median"])
                if rows == 1 and network in GEMM_NETWORKS:
                    add(f"{name}, fraction of the GEMM rate, {where}", GEMM_FRACTION, found["gemm_fraction"], True)
    for fit in results["fit"]:
        name = KINDS[fit["network"]].name
        add(f"fit / training-mode passes, {name}", FIT_TO_PASSES, fit["fit_to_passes"]["median"])
        add(f"ghost batches of 256 / loader of 16, {name}", GHOST_TO_FIT, fit["ghost_to_fit"]["median"])
    for case in results["memory"]:
        first, last = (case["measured"][place]["samples"] for place in (0, -1))
        where = f"{KINDS[case['network']].name}, N = {case['rows']}"
        add(f"peak memory, S = {last} / S = {first}, {where}", MEMORY, case["last_to_first"])
    return verdicts


def growth_medians(points: list[dict[str, Any]], contender: str) -> list[float]:
    """Returns the median time at each point of growth."""
    return [summarise(point["times"][contender])["median"] for point in points]
