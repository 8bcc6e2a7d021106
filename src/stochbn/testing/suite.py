"""`check_model`: runs all checks on one network and reports."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from stochbn.inference.prediction import Link
from stochbn.statistics.calls import Call, unwrap
from stochbn.statistics.checks import listing
from stochbn.statistics.items import rows
from stochbn.statistics.layers import Layers
from stochbn.statistics.progress import progress_bar
from stochbn.testing.checks import CHECKS, SkippedError, Subject
from stochbn.testing.fingerprint import Fingerprint
from stochbn.testing.references import copy_model

NUM_ITEMS = 8  # of the loader that are used, at most
NUM_INPUTS = 3  # of the example, at most: the conditioned reference takes a pass for each of them and each draw


class CheckError(AssertionError):
    """A network, or the package with it, does not keep what is promised. `report` has all checks, also the passed."""

    def __init__(self, report: "Report") -> None:
        super().__init__(f"Expected every check to pass, got {listing(report.failed)} failed.\n{report}")
        self.report = report


class Report(dict[str, str]):
    """What each check found, by name: "passed …", "skipped: why" or "failed: what". `str` has a line for each."""

    def __str__(self) -> str:
        return "\n".join(f"{name:<{max(map(len, self))}}  {found}" for name, found in self.items())

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [name for name, found in self.items() if found.startswith("failed")]


def check_model(
    model: nn.Module,
    example: Any,
    loader: Iterable[Any],
    *,
    batch_size: int | None = None,
    layers: Layers | Literal["last"] = None,
    family: Literal["factorized", "lowrank", "empirical"] = "factorized",
    link: Link = "softmax",
    call: Call | None = None,
    tolerance: float | None = None,
    skip: Collection[str] = (),
    progress: bool = False,
) -> Report:
    """Checks that a network of yours can be trusted with this package. Works on copies of it, and never changes it.

    | check | what is compared |
    | --- | --- |
    | `fit` | the fitted moments, with NumPy's of what hooks saw |
    | `predict` | `predict` and `Predictor`, with a deep copy for each draw that has its statistics in its buffers |
    | `conditioned` | the same for `conditioned=True`, input by input |
    | `compiled` | `predict(…, compile=True)`, with `predict` |
    | `exported` | an `.onnx` file in ONNX Runtime, with `predict` |
    | `threads` | several threads at once, with one thread, bit for bit |
    | `unchanged` | the network before, during and after: tensors, modes, hooks, attributes |
    | `round trip` | statistics that were saved and loaded, with themselves, bit for bit |

    Compiling needs a C++ compiler, exporting the extra `export`, and both a forward pass that can be captured; where
    that is missing, the check is skipped. Eight batches of the loader and three inputs of the example are used.

    Args:
        model: As for `fit`.
        example: A batch such as `predict` takes.
        loader: As for `fit`; it need not be shuffled.
        batch_size: As for `fit`, and so are `layers` and `family`.
        layers: As there.
        family: As there.
        link: As for `predict`.
        call: As for both.
        tolerance: The largest difference that passes for rounding; by default the square root of the machine epsilon of
            the network's coarsest dtype, which is half of its digits: 3.5e-4 in float32. Means are compared in units of
            their channel's σ, and so are their spreads; log σ² as it is; outputs in units of the largest of their
            class.
        skip: Names of checks to leave out.
        progress: Show a progress bar.

    Returns:
        A `Report`, to print: a line for each check.

    Raises:
        CheckError: Something failed. It is an `AssertionError`, and lists all checks.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [torch.randn(16, 2) for _ in range(8)]
        >>> for x in loader:
        ...     _ = model(x)
        >>> print(check_model(model, loader[0], loader, skip=["compiled", "exported"]))
        fit          passed, largest difference ..., 0.00035 allowed
        predict      passed, largest difference ..., 0.00035 allowed
        conditioned  passed, largest difference ..., 0.00035 allowed
        compiled     skipped: as asked
        exported     skipped: as asked
        threads      passed, bit for bit
        unchanged    passed, bit for bit
        round trip   passed, bit for bit
    """
    if find_spec("numpy") is None:
        raise ModuleNotFoundError("Expected NumPy for stochbn.testing. pip install numpy.")
    if unknown := set(skip) - CHECKS.keys():
        raise ValueError(f"Expected skip= to name checks among {listing(CHECKS, 8)}, got {listing(sorted(unknown))}.")
    original = unwrap(model)
    before = Fingerprint(original)
    subject = Subject(
        copy_model(original),
        rows(example, 0, NUM_INPUTS),
        list(itertools.islice(loader, NUM_ITEMS)),
        {"batch_size": batch_size or getattr(loader, "batch_size", None), "layers": layers, "family": family},
        link,
        call,
        tolerance if tolerance is not None else _rounding(original),
    )
    _ = subject.before, subject.modes
    _ = subject.stats, subject.eager  # what is wrong with the arguments shows here, as it always does
    report = Report()
    with progress_bar("check", "check", len(CHECKS), shown=progress) as bar:
        for name, check in CHECKS.items():
            report[name] = "skipped: as asked" if name in skip else _run(check, subject)
            bar.update()
    if changed := before.changes(original):
        report["unchanged"] = f"failed: the network itself was changed, not only a copy of it: {listing(changed)}"
    if report.failed:
        raise CheckError(report)
    return report


def _rounding(model: nn.Module) -> float:
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    epsilons = [float(torch.finfo(tensor.dtype).eps) for tensor in tensors]
    return math.sqrt(max(epsilons, default=torch.finfo(torch.float32).eps))


def _run(check: Callable[[Subject], float | None], subject: Subject) -> str:
    try:
        difference = check(subject)
    except SkippedError as reason:
        return f"skipped: {reason}"
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return f"failed: {kind}{(str(error).strip().splitlines() or [''])[0]}"
    if difference is None:
        return "passed, bit for bit"
    return f"passed, largest difference {difference:.2g}, {subject.tolerance:.2g} allowed"
