"""What is around a call must not change its numbers: the order of a batch, a default device, a failed export."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate, naive
from stochbn.statistics.items import num_examples

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, within the compiler
    pytest.mark.filterwarnings("ignore:The loader does not look like the training data"),
]
WAYS: dict[str, dict[str, Any]] = {
    "small": {},
    "prepared": {},
    "one by one": {"chunk_size": 1},
    "compiled": {"compile": True},
}


def run(way: str, model: nn.Module, stats: stochbn.Distribution, item: Any, **options: Any) -> stochbn.Prediction:
    options = WAYS[way] | options
    if way == "prepared":
        return stochbn.Predictor(model, stats, num_samples=6, **options)(item)
    return stochbn.predict(model, stats, item, num_samples=6, **options)


class Gain(nn.Module):
    """Takes something that is one value for all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return self.head(self.norm(x * gain))


@pytest.fixture
def vectors() -> list[Tensor]:
    return [torch.randn(16, 4) for _ in range(12)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("conditioned", [False, True])
def test_the_order_of_a_batch_does_not_matter(way: str, conditioned: bool, vectors: list[Tensor]) -> None:
    model, gain = Gain().eval(), torch.full((1,), 2.0)
    fits = [
        stochbn.fit(model, loader, conditioned=conditioned, progress=False)
        for loader in ([{"x": x, "gain": gain} for x in vectors], [{"gain": gain, "x": x} for x in vectors])
    ]
    assert [stats.batch_size for stats in fits] == [16, 16]
    x = vectors[0][:6]
    first, second = (run(way, model, fits[0], item).probs for item in ({"x": x, "gain": gain}, {"gain": gain, "x": x}))
    assert first.shape == (6, 3)
    assert torch.equal(first, second)


def test_what_counts_as_the_batch() -> None:
    x, one, table = torch.zeros(6, 4), torch.zeros(1), torch.zeros(10, 4)
    assert num_examples((x, one)) == num_examples((one, x)) == num_examples((x, table)) == 6
    assert num_examples((one, one)) == 1
    assert num_examples((table, x)) == 10  # and then the output has another number of rows


class Parts(nn.Module):
    """Has five rows of output for each input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.flatten(0, 1)))


@pytest.mark.parametrize("way", WAYS)
def test_outputs_have_a_row_an_input_and_the_advice_helps(way: str) -> None:
    model = Parts().eval()
    stats = stochbn.fit(model, [torch.randn(16, 5, 4) for _ in range(8)], progress=False)
    x = torch.randn(6, 5, 4)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"a row of output for each of .* inputs of .*, got .* rows"
    ) as error:
        run(way, model, stats, x)
    advice = str(error.value).split("call=")[1].split(". ")[0].rstrip(".")
    pred = run(way, model, stats, x, call=eval(advice))
    assert pred.probs.shape == (6, 3, 5)
    expected = naive(model, stats.sample(6, seed=0), x).unflatten(1, (6, 5)).transpose(2, 3)
    torch.testing.assert_close(pred.samples, expected)


def test_a_table_in_front_of_the_inputs_is_noticed(vectors: list[Tensor]) -> None:
    class Table(Gain):
        def forward(self, table: Tensor, x: Tensor) -> Tensor:
            return super().forward(x, table.sum())

    model = Table().eval()
    stats = stochbn.fit(model, vectors, call=lambda model, x: model(torch.ones(10), x), progress=False)
    with pytest.raises(
        ValueError, match=r"each of 10 inputs of tuple\(Tensor\[10\], Tensor\[6, 4\]\), whose first tensor"
    ):
        stochbn.predict(model, stats, (torch.ones(10), vectors[0][:6]))


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"num_samples": "auto"}])
def test_an_empty_batch_is_refused(
    model: nn.Module, stats: stochbn.Distribution, x: Tensor, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="at least one input, got an empty batch"):
        stochbn.predict(model, stats, [x, x[:0]], **options)


def test_an_empty_batch_is_refused_where_statistics_are_made(
    model: nn.Module, stats: stochbn.Distribution, batches: list[Tensor]
) -> None:
    empty = batches[0][:0]
    for loader in ([empty, *batches], [*batches[:5], empty, *batches[5:]]):
        with pytest.raises(ValueError, match="at least one input, got an empty batch"):
            stochbn.fit(model, loader, progress=False)
    labels = torch.zeros(16, dtype=torch.long)
    with pytest.raises(ValueError, match="at least one input, got an empty batch"):
        stochbn.tune(model, stats, [(batches[0], labels), (empty, labels[:0])], progress=False)


@pytest.mark.parametrize("place", [0, 30])
def test_auto_names_the_input_that_is_not_finite(
    model: nn.Module, stats: stochbn.Distribution, batches: list[Tensor], place: int
) -> None:
    x = torch.cat(batches)[:40]
    x[place] = torch.nan
    with pytest.raises(ValueError, match=f"from draw 0 for input {place} of its batch"):
        stochbn.predict(model, stats, x, num_samples="auto")


def fit_and_predict(model: nn.Module, batches: list[Tensor], **options: Any) -> Tensor:
    stats = stochbn.fit(model, batches, progress=False, **options)
    return stochbn.predict(model, stats, batches[0]).probs


def tune_and_predict(model: nn.Module, batches: list[Tensor]) -> Tensor:
    stats = stochbn.fit(model, batches, progress=False)
    labels = torch.arange(16, device="cpu") % 3
    return stochbn.predict(
        model, stochbn.tune(model, stats, [(x, labels) for x in batches[:3]], progress=False), batches[0]
    ).probs


USES: dict[str, Callable[[nn.Module, list[Tensor]], Tensor]] = {
    **{
        family: lambda m, b, f=family: fit_and_predict(m, b, family=f)
        for family in ("factorized", "lowrank", "empirical")
    },
    "conditioned": lambda m, b: fit_and_predict(m, b, conditioned=True),
    "tune": tune_and_predict,
    "auto": lambda m, b: stochbn.predict(m, stochbn.fit(m, b, progress=False), b[0], num_samples="auto").probs,
    "prepared": lambda m, b: stochbn.Predictor(m, stochbn.fit(m, b, progress=False))(b[0]).probs,
    "dropout": lambda m, b: stochbn.predict(m, None, b[0], dropout=True, num_samples=4).probs,
    "exact": lambda m, b: stochbn.exact_predict(m, b, b[0], num_samples=4).probs,
}


@pytest.mark.filterwarnings("ignore:The NLL is lowest at")  # the labels are noise
@pytest.mark.parametrize("use", USES)
def test_a_default_device_does_not_matter(use: str, batches: list[Tensor], dropout_model: nn.Module) -> None:
    expected = USES[use](dropout_model, batches)
    with torch.device("meta"):
        assert torch.equal(USES[use](dropout_model, batches), expected)


def test_a_failed_export_leaves_no_trace_in_the_statistics(
    model: nn.Module, stats: stochbn.Distribution, x: Tensor, tmp_path: Any
) -> None:
    class Predicts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return stochbn.predict(model, fresh, x).probs

    stats.save(tmp_path / "net.sbn.safetensors")
    fresh = stochbn.load(tmp_path / "net.sbn.safetensors")
    expected = stochbn.predict(model, stats, x).probs
    with pytest.raises(Exception, match=r"data-dependent|capture"):
        torch.export.export(Predicts(), (x,))
    assert torch.equal(stochbn.predict(model, fresh, x).probs, expected)


def test_a_model_that_keeps_its_buffers_elsewhere_lives_on(vectors: list[Tensor]) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.kept = nn.BatchNorm1d(4), {}

        def forward(self, x: Tensor) -> Tensor:
            self.kept["mean"] = self.norm.running_mean
            return self.norm(x) + self.kept["mean"]

    model = calibrate(Keeps(), vectors)
    expected = model(vectors[0])
    stats = stochbn.fit(model, vectors, progress=False)
    pred = stochbn.predict(model, stats, vectors[0], num_samples=4)
    assert model.kept["mean"] is model.norm.running_mean
    assert torch.equal(model(vectors[0]), expected)
    torch.testing.assert_close(pred.samples, naive(model, stats.sample(4, seed=0), vectors[0]))


@pytest.mark.parametrize(
    "read",
    [
        lambda h: h if h.is_contiguous() else -h,
        lambda h: h if h.dim_order() == (0, 1, 2, 3) else -h,
        lambda h: torch.as_strided_copy(h, (h.shape[0], 6, 36), (216, 36, 1)),
        lambda h: torch.as_strided_scatter(h, torch.zeros_like(h[:, 0]), (h.shape[0], 6, 6), (216, 6, 1)),
    ],
)
def test_a_model_that_looks_at_memory(read: Callable[[Tensor], Tensor], batches: list[Tensor], x: Tensor) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Linear(216, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(read(self.norm(self.conv(x)).relu()).flatten(1))

    model = calibrate(Looks(), batches)
    stats = stochbn.fit(model, batches, progress=False)
    expected = naive(model, stats.sample(6, seed=0), x)
    for way in ("prepared", "one by one"):
        torch.testing.assert_close(run(way, model, stats, x).samples, expected, rtol=1e-4, atol=1e-6)
