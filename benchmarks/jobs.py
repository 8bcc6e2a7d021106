"""What the soak does: calls whose answers are known, faults that are meant, and calls that are interrupted."""

import copy
import random
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stochbn

NUM_MODELS = 3
NUM_SAMPLES = 8
NUM_PROBLEMS = 5  # of a job that are kept as text
# Between answers that are the same but for rounding. torch.export switches oneDNN off for the whole process while it
# captures, and whatever other threads compute meanwhile rounds otherwise, the models themselves too.
ROUNDING = 1e-5


class Fault(Exception):  # noqa: N818
    """What is raised on purpose."""


@dataclass
class Tally:
    """What came of one job's calls.

    Attributes:
        calls: How many were made.
        raised: How many ended in an error that they were made to end in.
        rounded: How many gave the right answer with other bits.
        wrong: How many things went wrong.
        problems: The first of them.
    """

    calls: int = 0
    raised: int = 0
    rounded: int = 0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """Counts something wrong, and keeps the first few."""
        self.wrong += 1
        if len(self.problems) < NUM_PROBLEMS:
            self.problems.append(problem)

    def attempt(self, work: Callable[[], Tensor], expected: Tensor, *faults: type[BaseException]) -> None:
        """Makes a call that gives what is expected, or raises one of the faults."""
        self.calls += 1
        try:
            found = work()
        except faults:
            self.raised += 1
        except Exception as error:
            self.note(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        else:
            if not torch.allclose(found, expected, rtol=0, atol=ROUNDING):
                self.note(f"another answer, off by {float((found - expected).abs().max()):.2g}")
            self.rounded += not torch.equal(found, expected)
            if torch._C._len_torch_function_stack():  # after an interrupt, the next call removes it
                self.note("a function mode was left active")
        if not torch.is_grad_enabled():
            self.note("gradients were left off")
            torch.set_grad_enabled(True)
        functorch: Any = torch._C._functorch
        if functorch.get_dynamic_layer_stack_depth():
            self.note("a level of vmap was left active")


class Scene:
    """Models, inputs and the answers to them, computed alone."""

    def __init__(self, seed: int, folder: Path) -> None:
        torch.manual_seed(seed)
        self.folder = folder
        (folder / "directory").mkdir()
        self.batches = [torch.rand(8, 3, 8, 8) for _ in range(6)]
        self.inputs = [torch.rand(count, 3, 8, 8) for count in (1, 3, 8)]
        self.models = [make_model(self.batches) for _ in range(NUM_MODELS)]
        self.stats = [stochbn.fit(model, self.batches, progress=False) for model in self.models]
        self.predictors = [
            stochbn.Predictor(model, stats, num_samples=NUM_SAMPLES)
            for model, stats in zip(self.models, self.stats, strict=True)
        ]
        pairs = [(m, i) for m in range(NUM_MODELS) for i in range(len(self.inputs))]
        self.plain = {pair: self.call(*pair) for pair in pairs}
        self.predicted = {pair: self.predict(self.models[pair[0]], *pair) for pair in pairs}
        self.prepared = {(m, i): samples(self.predictors[m](self.inputs[i])) for m, i in pairs}
        self.pairs = pairs
        self.dropped: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def call(self, m: int, i: int) -> Tensor:
        """Calls a shared model itself."""
        with torch.no_grad():
            output: Tensor = self.models[m](self.inputs[i])
        return output

    def predict(self, model: nn.Module, m: int, i: int, **options: Any) -> Tensor:
        """Predicts for an input, with the m-th statistics."""
        return samples(stochbn.predict(model, self.stats[m], self.inputs[i], num_samples=NUM_SAMPLES, **options))

    def copy(self, m: int) -> nn.Module:
        """Returns a model of its own, which nobody may hold in the end."""
        model = copy.deepcopy(self.models[m])
        self.dropped.add(model)
        return model


def make_model(batches: list[Tensor]) -> nn.Module:
    """Returns a small network with running statistics of the batches, in eval mode."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )
    with torch.no_grad():
        for batch in batches * 10:
            model(batch)
    return model.eval()


def samples(prediction: stochbn.Prediction) -> Tensor:
    assert prediction.samples is not None
    return prediction.samples


# Each job takes the scene, its tally, random choices, and which model and which input.
Job = Callable[[Scene, Tally, random.Random, int, int], None]


def use_predict(scene: Scene, tally: Tally, _: random.Random, m: int, i: int) -> None:
    tally.attempt(lambda: scene.predict(scene.models[m], m, i), scene.predicted[m, i])


def use_predictor(scene: Scene, tally: Tally, _: random.Random, m: int, i: int) -> None:
    tally.attempt(lambda: samples(scene.predictors[m](scene.inputs[i])), scene.prepared[m, i])


def use_model(scene: Scene, tally: Tally, _: random.Random, m: int, i: int) -> None:
    tally.attempt(lambda: scene.call(m, i), scene.plain[m, i])


def make_and_drop(scene: Scene, tally: Tally, _: random.Random, m: int, i: int) -> None:
    model = scene.copy(m)
    tally.attempt(lambda: stochbn.fit(model, scene.batches, progress=False).centre, scene.stats[m].centre)
    tally.attempt(lambda: scene.predict(model, m, i), scene.predicted[m, i])
    predictor = stochbn.Predictor(model, scene.stats[m], num_samples=NUM_SAMPLES)
    tally.attempt(lambda: samples(predictor(scene.inputs[i])), scene.prepared[m, i])


def fail_in_forward(scene: Scene, tally: Tally, chance: random.Random, m: int, i: int) -> None:
    """A pass that fails while stacked may succeed one by one, which rounds otherwise."""

    def call(model: nn.Module, x: Tensor) -> Any:
        if chance.random() < 0.8:  # in most of the three attempts that a call has
            raise Fault
        return model(x)

    model = scene.copy(m)
    tally.attempt(lambda: scene.predict(model, m, i, call=call), scene.predicted[m, i], Fault)
    tally.attempt(lambda: scene.predict(model, m, i), scene.predicted[m, i])


def fail_in_loader(scene: Scene, tally: Tally, chance: random.Random, m: int, _: int) -> None:
    last = chance.randrange(2 * len(scene.batches))

    def loader() -> Iterator[Tensor]:
        for number, batch in enumerate(scene.batches):
            if number == last:
                raise Fault
            yield batch

    fit = lambda: stochbn.fit(scene.models[m], loader(), progress=False).centre  # noqa: E731
    tally.attempt(fit, scene.stats[m].centre, Fault)


def fail_in_file(scene: Scene, tally: Tally, chance: random.Random, m: int, _: int) -> None:
    path = scene.folder / chance.choice(["directory", f"{m}.sbn.safetensors", "nowhere/file"])

    def save_and_load() -> Tensor:
        scene.stats[m].save(path)
        return stochbn.load(path).centre

    tally.attempt(save_and_load, scene.stats[m].centre, OSError, ValueError)


JOBS: dict[str, tuple[Job, ...]] = {
    "predict": (use_predict,),
    "predict, a second thread": (use_predict,),
    "Predictor": (use_predictor,),
    "Predictor, a second thread": (use_predictor,),
    "the models themselves": (use_model,),
    "models made and dropped": (make_and_drop,),
    "faults": (fail_in_forward, fail_in_loader, fail_in_file),
}
INTERRUPTED = "interrupted"


def be_interrupted(scene: Scene, tally: Tally, chance: random.Random) -> None:
    """Calls that a signal ends at a random moment, or just not. Only the main thread gets signals."""
    job, (m, i) = chance.choice(["predict", "fit", "Predictor"]), chance.choice(scene.pairs)

    def call() -> Tensor:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + chance.random() * 0.1)
        if job == "fit":
            found = stochbn.fit(scene.models[m], scene.batches, progress=False).centre
        elif job == "predict":
            found = scene.predict(scene.models[m], m, i)
        else:
            found = samples(
                stochbn.Predictor(scene.models[m], scene.stats[m], num_samples=NUM_SAMPLES)(scene.inputs[i])
            )
        signal.setitimer(signal.ITIMER_REAL, 0)
        return found

    answers = {"fit": scene.stats[m].centre, "predict": scene.predicted[m, i], "Predictor": scene.prepared[m, i]}
    try:
        tally.attempt(call, answers[job], KeyboardInterrupt)
    except KeyboardInterrupt:  # it came on the way out
        tally.raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
