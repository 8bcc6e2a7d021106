"""The checks, each a function of a subject: returns the largest difference, None for none, or raises."""

import functools
import importlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stochbn
from stochbn.distributions.base import Distribution
from stochbn.inference.engine.captured import CaptureError
from stochbn.inference.export import _has_compiler, name_inputs
from stochbn.inference.predict import Predictor
from stochbn.inference.prediction import Link, Prediction
from stochbn.statistics.calls import Call, call_on_inputs, device_of
from stochbn.statistics.checks import listing
from stochbn.statistics.items import concatenate, copy_to, num_examples, rows, tensors_in
from stochbn.testing.fingerprint import Fingerprint, Watching, bits_of
from stochbn.testing.references import copy_model, count_in, hooked_statistics, naive_outputs

NUM_SAMPLES = 6
NUM_THREADS = 4
# ONNX Runtime's errors for files that are right, such as convolutions in float64 or bfloat16. It may not be installed.
_NOT_IN_RUNTIME = ("NotImplemented", "InvalidGraph")


class SkippedError(Exception):
    """Why a check cannot be made."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A copy of the network with all that the checks need."""

    model: nn.Module
    example: Any
    items: Sequence[Any]
    fit_options: dict[str, Any]
    link: Link
    call: Call | None
    tolerance: float

    @cached_property
    def before(self) -> Fingerprint:
        return Fingerprint(self.model)

    @cached_property
    def modes(self) -> tuple[bool, int]:
        return _modes()

    def fit(self) -> Distribution:
        return stochbn.fit(self.model, self.items, **self.fit_options, call=self.call, progress=False)

    @cached_property
    def stats(self) -> Distribution:
        return self.fit()

    def predict(self, stats: Distribution, inputs: Any, link: Link, **options: Any) -> Prediction:
        return stochbn.predict(self.model, stats, inputs, num_samples=NUM_SAMPLES, link=link, call=self.call, **options)

    @cached_property
    def eager(self) -> Prediction:
        return self.predict(self.stats, self.example, self.link)

    def prepare(self, stats: Distribution) -> Predictor:
        return stochbn.Predictor(self.model, stats, num_samples=NUM_SAMPLES, link="identity", call=self.call)

    @cached_property
    def predictor(self) -> Predictor:
        return self.prepare(self.stats)

    def require_capture(self) -> None:
        try:
            self.predictor._networks[0].prepare(self.example)
        except CaptureError as error:
            raise SkippedError(f"the forward pass cannot be captured: {error}") from error

    def compare(self, found: Tensor | None, expected: Tensor | None, what: str, link: Link = "identity") -> float:
        """Returns the largest difference of what draws give, (S, N, K, *): of probabilities, or of raw outputs."""
        assert found is not None
        assert expected is not None
        if found.shape != expected.shape:
            raise AssertionError(f"{what} has shape {list(found.shape)}, not {list(expected.shape)}")
        found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
        return self.judge(float(((found - expected).abs() / _units(expected, link)).max()), what)

    def judge(self, difference: float, what: str) -> float:
        if not difference <= self.tolerance:
            raise AssertionError(f"{what} differs by {difference:.2g}, {self.tolerance:.2g} allowed")
        return difference


def _modes() -> tuple[bool, int]:
    return torch.is_grad_enabled(), torch._C._len_torch_function_stack()


def _units(expected: Tensor, link: Link) -> Tensor:
    """Returns what (S, N, K, *) are measured in: raw outputs in the largest of their class, probabilities in 1."""
    if link != "identity":
        return expected.new_ones(())
    largest = expected.abs().amax([axis for axis in range(expected.dim()) if axis != 2], keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def _check_fit(subject: Subject) -> float:
    import numpy as np

    stats, size = subject.stats, subject.stats.batch_size
    whole = functools.reduce(concatenate, subject.items)
    parts = [rows(whole, start, start + size) for start in range(0, num_examples(whole) - size + 1, size)]
    seen = hooked_statistics(subject.model, parts, layers=stats.layers.keys(), call=subject.call)
    if unseen := [name for name in stats.layers if name not in seen]:
        raise SkippedError(f"hooks do not see {listing(unseen)}, which the forward pass does not call as modules")
    if stats.num_batches != len(parts):
        raise AssertionError(f"{stats.num_batches} mini-batches were counted, not {len(parts)}")
    differences = []
    for name, layer in stats.layers.items():
        expected = np.stack([seen[name].mean(0), seen[name].std(0, ddof=1)])  # (2, 2, C)
        found = np.stack([value.cpu().numpy() for value in (layer.moments.mean, layer.moments.variance.sqrt())])
        difference = np.abs(found - expected)
        difference[:, 0] /= np.exp(expected[0, 1] / 2)
        differences.append(subject.judge(float(difference.max()), f"layer {name!r}"))
    return max(differences)


def _check_predict(subject: Subject) -> float:
    draws = subject.stats.sample(NUM_SAMPLES, seed=0)
    expected = naive_outputs(subject.model, draws, subject.example, call=subject.call)
    links: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda outputs: outputs.softmax(2),
        "sigmoid": lambda outputs: outputs.sigmoid(),
        "identity": lambda outputs: outputs,
    }
    samples = links[subject.link](expected.double())
    return max(
        _compare_paths(subject, subject.stats, subject.predictor, expected),
        subject.compare(subject.eager.samples, samples, f"what predict gives with link {subject.link!r}", subject.link),
        subject.compare(subject.eager.mean[None], samples.mean(0, keepdim=True), "the mean over draws", subject.link),
    )


def _check_conditioned(subject: Subject) -> float:
    stats = replace(subject.stats, conditioned=True)
    draws = stats.sample(NUM_SAMPLES, seed=0)
    one_by_one = [rows(subject.example, i, i + 1) for i in range(num_examples(subject.example))]
    change = functools.partial(count_in, layers=stats.layers.keys(), share=1 / stats.batch_size)
    outputs = [naive_outputs(subject.model, draws, one, call=subject.call, change=change) for one in one_by_one]
    return _compare_paths(subject, stats, subject.prepare(stats), torch.cat(outputs, dim=1))


def _compare_paths(subject: Subject, stats: Distribution, predictor: Predictor, expected: Tensor) -> float:
    found = {
        "what predict gives": subject.predict(stats, subject.example, "identity"),
        "what predict gives with chunk_size=1": subject.predict(stats, subject.example, "identity", chunk_size=1),
        "what Predictor gives": predictor(subject.example),
    }
    return max(subject.compare(prediction.samples, expected, what) for what, prediction in found.items())


def _check_compiled(subject: Subject) -> float:
    if not _has_compiler():
        raise SkippedError("there is no C++ compiler")
    subject.require_capture()
    found = subject.predict(subject.stats, subject.example, subject.link, compile=True)
    return subject.compare(found.samples, subject.eager.samples, "what predict gives with compile=True", subject.link)


def _check_exported(subject: Subject) -> float:
    subject.require_capture()
    differences = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        options: dict[str, Any] = {"num_samples": NUM_SAMPLES, "link": subject.link, "call": subject.call}
        try:
            stochbn.export(subject.model, subject.stats, subject.example, path, **options)
        except (ModuleNotFoundError, torch.onnx.OnnxExporterError) as error:  # without the extra; what ONNX cannot say
            raise SkippedError(str(error).splitlines()[0]) from error
        except Exception as error:
            if type(error).__name__ in _NOT_IN_RUNTIME:
                raise SkippedError(f"ONNX Runtime cannot run it: {str(error).splitlines()[0]}") from error
            raise
        session = importlib.import_module("onnxruntime").InferenceSession(
            path.read_bytes(), providers=["CPUExecutionProvider"]
        )
        for inputs in (subject.example, rows(subject.example, 0, 1)):
            eager = subject.predict(subject.stats, inputs, subject.link)
            given = dict(zip(name_inputs(inputs), (t.numpy(force=True) for t in tensors_in(inputs)), strict=True))
            taken = {place.name: given[place.name] for place in session.get_inputs()}
            for place, values in zip(session.get_outputs(), session.run(None, taken), strict=True):
                expected, units = getattr(eager, place.name).cpu(), _units(eager.mean[None].cpu(), subject.link)
                difference = ((torch.from_numpy(values) - expected).abs() / units).max()
                differences.append(subject.judge(float(difference), f"{place.name} of the file"))
    return max(differences)


def _check_threads(subject: Subject) -> None:
    stats, predictor = subject.stats, subject.predictor
    other = replace(
        subject, model=copy_model(subject.model).eval()
    )  # to be called by itself too, which is its own affair

    def call(inputs: Any) -> Any:
        with torch.no_grad():
            output = (other.call or call_on_inputs)(other.model, copy_to(inputs, device_of(other.model)))
        return getattr(output, "logits", output)

    runs: dict[str, Callable[[Any], Any]] = {
        "predict": lambda inputs: other.predict(stats, inputs, "identity").samples,
        "Predictor": lambda inputs: predictor(inputs).samples,
        "the network itself": call,
    }
    jobs = [(name, inputs) for inputs in (subject.example, rows(subject.example, 0, 1)) for name in runs]
    alone = [runs[name](inputs) for name, inputs in jobs]
    start = threading.Barrier(NUM_THREADS)

    def work(thread: int) -> set[str]:
        start.wait()
        order = jobs[thread:] + jobs[:thread]  # threads do different work at a time
        expected = alone[thread:] + alone[:thread]
        return {name for (name, inputs), one in zip(order, expected, strict=True) if not _same(runs[name](inputs), one)}

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        wrong = sorted(set().union(*pool.map(work, range(NUM_THREADS))))
    if wrong:
        raise AssertionError(f"other numbers in {NUM_THREADS} threads than in one from {', '.join(wrong)}")


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(bits_of(found), bits_of(expected))


def _check_unchanged(subject: Subject) -> None:
    with Watching(subject.model, subject.before) as watching:
        subject.fit()
        subject.predict(subject.stats, subject.example, subject.link)
        subject.prepare(subject.stats)
    if watching.changed:
        raise AssertionError(f"during a call the network is changed: {listing(dict.fromkeys(watching.changed))}")
    if changed := subject.before.changes(subject.model):
        raise AssertionError(f"after the calls the network is changed: {listing(changed)}")
    if subject.modes != _modes():
        raise AssertionError("after the calls torch's gradient mode or function modes are others")


def _check_round_trip(subject: Subject) -> None:
    stats = subject.stats
    with tempfile.TemporaryDirectory() as folder:
        stats.save(Path(folder) / "model.sbn.safetensors")
        loaded = stochbn.load(Path(folder) / "model.sbn.safetensors")
    for field in fields(stats):
        if not _equal(getattr(loaded, field.name), getattr(stats, field.name)):
            raise AssertionError(f"{field.name} is another after saving and loading")
    again = subject.predict(loaded, subject.example, subject.link)
    if not _same(again.mean, subject.eager.mean):
        raise AssertionError("predictions are others after saving and loading")


def _equal(found: Any, expected: Any) -> bool:
    """Compares layers, moments, tensors, names and numbers exactly."""
    if isinstance(expected, Tensor):
        return _same(found, expected.cpu())
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(_equal(found[key], expected[key]) for key in expected)
    if hasattr(expected, "__dataclass_fields__"):
        return all(_equal(getattr(found, field.name), getattr(expected, field.name)) for field in fields(expected))
    return bool(found == expected)


CHECKS: dict[str, Callable[[Subject], float | None]] = {
    "fit": _check_fit,
    "predict": _check_predict,
    "conditioned": _check_conditioned,
    "compiled": _check_compiled,
    "exported": _check_exported,
    "threads": _check_threads,
    "unchanged": _check_unchanged,
    "round trip": _check_round_trip,
}
