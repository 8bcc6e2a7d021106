"""Models, batches and generators are left as they were."""

import copy
import math
import signal
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate
from stochbn.statistics.restoring import run_uninterrupted
from stochbn.statistics.twin import make_twin


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "tensors": [id(t) for t in (*model.parameters(), *model.buffers())],
        "modes": [m.training for m in model.modules()],
        "momenta": [getattr(m, "momentum", None) for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
    }


def assert_unchanged(model: nn.Module, before: dict[str, object], is_random: bool = False) -> None:
    after = snapshot(model)
    for key in ("state", "rng"):
        found, expected = after.pop(key), before.pop(key)
        if not (key == "rng" and is_random):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert after == before


class Trap:
    """A loader that shuffles by torch's generator and fails halfway."""

    def __init__(self, batches: list[Tensor], error: BaseException | None) -> None:
        self.batches, self.error = batches, error

    def __iter__(self):
        for position, index in enumerate(torch.randperm(len(self.batches)).tolist()):
            if self.error is not None and position == 5:
                raise self.error
            yield self.batches[index]


@pytest.mark.parametrize("error", [None, RuntimeError("halfway"), KeyboardInterrupt()])
@pytest.mark.parametrize("train_mode", [False, True])
def test_fit_leaves_the_model_as_it_was(
    dropout_model: nn.Module, batches: list[Tensor], error: BaseException | None, train_mode: bool
) -> None:
    dropout_model.train(train_mode)
    dropout_model[0].training = not train_mode
    before = snapshot(dropout_model)
    loader = Trap(batches, error)
    if error is None:
        stochbn.fit(dropout_model, loader, dropout=True, progress=False)
    else:
        with pytest.raises(type(error)):
            stochbn.fit(dropout_model, loader, dropout=True, progress=False)
    assert_unchanged(dropout_model, before, is_random=True)  # the loader shuffles, and masks are drawn


def test_the_random_state_is_not_touched_where_nothing_is_random(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor
) -> None:
    before = snapshot(dropout_model)
    stats = stochbn.fit(dropout_model, batches, progress=False)
    stochbn.predict(dropout_model, stats, x, num_samples=3)
    stochbn.Predictor(dropout_model, stats, num_samples=3)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the labels are noise
        stochbn.tune(dropout_model, stats, [(b, torch.arange(len(b)) % 3) for b in batches], progress=False)
    stochbn.exact_predict(dropout_model, batches, x, num_samples=3)
    assert_unchanged(dropout_model, before)


def test_exception_inside_the_forward_pass(model: nn.Module, batches: list[Tensor]) -> None:
    wrong = torch.rand(16, 1, 12, 12)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        stochbn.fit(model, [*batches[:3], wrong], progress=False)
    assert_unchanged(model, before)


class Shared(nn.Module):
    """One BatchNorm layer below two parents."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(4)
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), norm), nn.Sequential(nn.Linear(4, 4), norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Remembers(nn.Module):
    """Binds buffers and attributes anew in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        self.seen = 0.9 * self.seen + y.detach().mean(0)
        self.last = self.latest = y
        return y + 0.1 * self.seen


@pytest.mark.parametrize("kind", [Shared, Remembers])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_nothing_drawn_stays_behind(kind: type[nn.Module], chunk_size: int | None) -> None:
    batches = [torch.randn(8, 4) for _ in range(6)]
    model = calibrate(kind(), batches)
    model.last = None
    model.__dict__.pop("latest", None)
    before = snapshot(model)
    stats = stochbn.fit(model, batches, progress=False)
    for _ in range(2):
        stochbn.predict(model, stats, batches[0], num_samples=5, chunk_size=chunk_size)
    stochbn.exact_predict(model, batches, batches[0], num_samples=3)
    assert_unchanged(model, before)
    assert model.last is None
    assert not hasattr(model, "latest")
    copy.deepcopy(model)
    if kind is Shared:
        draws = stats.sample(5, seed=0)
        x = torch.randn(3, 4)
        pred = stochbn.predict(model, stats, x, num_samples=5, chunk_size=chunk_size, link="identity")
        for index in range(5):
            twin = copy.deepcopy(model).eval()
            twin.a[1].running_mean.copy_(draws[index]["a.1.running_mean"])
            twin.a[1].running_var.copy_(draws[index]["a.1.running_var"])
            torch.testing.assert_close(pred.samples[index], twin(x), rtol=1e-5, atol=1e-6)


def test_batches_are_not_written_to() -> None:
    class InPlace(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    batches = [torch.randn(8, 4) for _ in range(4)]
    kept = [batch.clone() for batch in batches]
    model = calibrate(InPlace(nn.BatchNorm1d(4)), [batch.clone() for batch in batches])
    stochbn.fit(model, batches, progress=False)
    stochbn.exact_predict(model, batches, batches[0], num_samples=2)
    assert all(torch.equal(a, b) for a, b in zip(batches, kept, strict=True))


def test_predict_and_exact_leave_the_model_as_it_was(
    dropout_model: nn.Module, batches: list[Tensor], x: Tensor
) -> None:
    dropout_model.train()
    stats = stochbn.fit(dropout_model, batches, dropout=True, progress=False)
    wrong = torch.rand(2, 1, 12, 12)
    before = snapshot(dropout_model)
    stochbn.predict(dropout_model, stats, x, num_samples=4, dropout=True)
    stochbn.exact_predict(dropout_model, Trap(batches, None), x, num_samples=4)
    with pytest.raises(RuntimeError):
        stochbn.predict(dropout_model, stats, wrong, num_samples=4, dropout=True)
    with pytest.raises(RuntimeError):
        stochbn.exact_predict(dropout_model, Trap(batches, RuntimeError()), x, num_samples=8)
    assert_unchanged(dropout_model, before)


def test_dropout_is_active_only_when_asked(dropout_model: nn.Module) -> None:
    batches = [torch.ones(20, 400)] * 30
    model = calibrate(nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(400)), batches)
    with pytest.warns(UserWarning, match="does not look like the training data"):
        off = stochbn.fit(model, batches, progress=False).layers["1"].moments
    assert off.variance[0].max() == 0
    on = stochbn.fit(model, batches, dropout=True, progress=False).layers["1"].moments
    # Of ones, Dropout(p) makes batch means of mean 1 and variance p / (1 − p) / M; 5 standard errors over 400 channels.
    variance = 0.2 / 0.8 / 20
    assert on.mean[0].mean().item() == pytest.approx(1, abs=5 * math.sqrt(variance / (30 * 400)))
    assert on.variance[0].mean().item() == pytest.approx(variance, rel=5 * math.sqrt(2 / (29 * 400)))

    twin = make_twin(dropout_model.train(), dropout=True)
    assert [m.training for m in twin] == [isinstance(m, nn.Dropout) for m in twin]


def test_what_was_interrupted_while_it_waited_never_begins() -> None:
    lock, ran = threading.RLock(), []
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    before = set(threading.enumerate())
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)  # as Ctrl-C, which a runner may ignore
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                run_uninterrupted(lambda: ran.append(1), "cpu", lock)
    finally:
        signal.signal(signal.SIGALRM, previous)
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert ran == []
    run_uninterrupted(lambda: ran.append(2), "cpu", lock)
    assert ran == [2]
