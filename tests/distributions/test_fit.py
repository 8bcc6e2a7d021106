import itertools
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

import stochbn
from oracles import calibrate, small_cnn
from stochbn.statistics.parts import ALONE, Part


def test_loader_tuple_dict_and_call_give_the_same(model: nn.Module, batches: list[Tensor]) -> None:
    reference = stochbn.fit(model, batches, progress=False).layers["7"].moments.mean
    labels = torch.zeros(16)
    loader = DataLoader(TensorDataset(torch.cat(batches), torch.zeros(192)), batch_size=16)
    for data, call in (
        ([(x, labels) for x in batches], None),
        ([{"input": x} for x in batches], None),
        ([{"image": x, "id": "a"} for x in batches], lambda model, batch: model(batch["image"])),
        (loader, None),
        (iter(batches), None),
    ):
        stats = stochbn.fit(model, data, call=call, progress=False)
        assert torch.equal(stats.layers["7"].moments.mean, reference)
        assert (stats.batch_size, stats.num_batches) == (16, 12)


def test_items_that_the_default_call_cannot_pass(model: nn.Module, batches: list[Tensor]) -> None:
    with pytest.raises(TypeError, match=r"got dict\(image=Tensor\[16, 1, 8, 8\]\).*Pass call="):
        stochbn.fit(model, [{"image": x} for x in batches], progress=False)


def test_incomplete_last_batch_is_dropped(model: nn.Module, batches: list[Tensor]) -> None:
    loader = DataLoader(torch.cat([*batches, torch.full((3, 1, 8, 8), 50.0)]), batch_size=16)
    stats = stochbn.fit(model, loader, progress=False)
    assert stats.num_batches == 12
    assert torch.equal(
        stats.layers["1"].moments.mean, stochbn.fit(model, batches, progress=False).layers["1"].moments.mean
    )


def test_num_batches_limits_the_data(model: nn.Module, batches: list[Tensor]) -> None:
    few = stochbn.fit(model, batches, num_batches=3, progress=False)
    assert few.num_batches == 3
    same = stochbn.fit(model, batches[:3], progress=False)
    assert torch.equal(few.layers["4"].moments.mean, same.layers["4"].moments.mean)


def test_a_bar_counts_what_its_reader_has(model: nn.Module, batches: list[Tensor], capsys) -> None:
    stochbn.fit(model, Part(batches[:3], ALONE, whole_length=12))
    assert "/3" in (shown := capsys.readouterr().err)
    assert "/12" not in shown


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_batches(model: nn.Module, batches: list[Tensor], count: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 mini-batches to fit, got {count}"):
        stochbn.fit(model, batches[:count], progress=False)


def test_bad_arguments(model: nn.Module, batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="batch_size of at least 2, got 1"):
        stochbn.fit(model, batches, batch_size=1)
    with pytest.raises(ValueError, match="num_batches of at least 2, got 1"):
        stochbn.fit(model, batches, num_batches=1)
    with pytest.raises(ValueError, match="'empirical', got 'flow'"):
        stochbn.fit(model, batches, family="flow")
    with pytest.raises(TypeError, match=r"Expected a model \(an eager torch.nn.Module\), got list. Check the order"):
        stochbn.fit(batches, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated
        scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(2)))
    with pytest.raises(TypeError, match="scripted from"):
        stochbn.fit(scripted, batches)
    with pytest.raises(TypeError, match="iterable of batches, got Tensor"):
        stochbn.fit(model, batches[0])
    with pytest.raises(ValueError, match="with Dropout layers for dropout=True, got Sequential with none"):
        stochbn.fit(model, batches, dropout=True)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.BatchNorm1d(2), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_layer_that_never_runs_is_named_and_left_out() -> None:
    batches = [torch.randn(8, 2) for _ in range(5)]
    model = calibrate(Unused(), batches)
    with pytest.warns(UserWarning, match=r"layers 'unused' were used in fewer than 2"):
        stats = stochbn.fit(model, batches, progress=False)
    assert list(stats.layers) == ["used"]
    assert stochbn.predict(model, stats, torch.randn(3, 2)).num_samples == 50
    with pytest.raises(ValueError, match=r"one that uses none of 'unused'"):
        stochbn.fit(model, batches, layers=["unused"], progress=False)


def test_compiled_model_is_fitted_and_predicted_by_what_it_wraps(
    model: nn.Module, stats: stochbn.Factorized, batches: list[Tensor], x: Tensor
) -> None:
    compiled = torch.compile(model, backend="eager")
    assert list(stochbn.fit(compiled, batches, progress=False).layers) == ["1", "4", "7"]
    assert torch.equal(stochbn.predict(compiled, stats, x).probs, stochbn.predict(model, stats, x).probs)


def test_gradients_are_off_and_modes_do_not_matter(model: nn.Module, batches: list[Tensor]) -> None:
    recorded = []
    model.register_forward_hook(lambda _, __, output: recorded.append(output.requires_grad))
    a = stochbn.fit(model.eval(), batches, progress=False).layers["7"].moments.mean
    b = stochbn.fit(model.train(), batches, progress=False).layers["7"].moments.mean
    assert torch.equal(a, b)
    assert not any(recorded)


def test_progress_bar(model: nn.Module, batches: list[Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    stochbn.fit(model, batches)
    assert "fit" in capsys.readouterr().err
    stochbn.fit(model, iter(batches), progress=False)
    assert capsys.readouterr().err == ""


def test_fitting_stops_when_the_standard_errors_are_small_enough(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)

    def endless():
        while True:
            yield torch.rand(16, 1, 8, 8, generator=generator)

    counts = []
    for standard_error in (0.1, 0.03):
        stats = stochbn.fit(
            calibrate(model, list(itertools.islice(endless(), 20))), endless(), standard_error=standard_error
        )
        counts.append(stats.num_batches)
        for layer in stats.layers.values():
            of_mean, of_log = (layer.moments.variance / stats.num_batches).sqrt()
            assert (of_mean / (layer.moments.mean[1] / 2).exp()).max() <= standard_error
            assert of_log.max() <= standard_error
    assert 2 < counts[0] < counts[1]
    with pytest.raises(ValueError, match="standard_error above 0"):
        stochbn.fit(model, endless(), standard_error=0)


def test_the_standard_error_is_that_of_repeated_fits(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(16, 1, 8, 8, generator=generator) for _ in range(400)]
    calibrate(model, batches)
    fits = [stochbn.fit(model, batches[i : i + 20], progress=False) for i in range(0, 400, 20)]
    name = next(iter(fits[0].layers))
    centres = torch.stack([fit.layers[name].moments.mean for fit in fits])  # (20, 2, C)
    stated = torch.stack([(fit.layers[name].moments.variance / 20).sqrt() for fit in fits]).mean(0)
    # A standard deviation of 20 fits is known to 16 %, and the median of several channels better.
    assert 0.7 < (centres.std(0) / stated).median() < 1.3


@pytest.mark.filterwarnings("ignore:The model has seen")
def test_the_progress_bar_tells_the_standard_error(
    model: nn.Module, batches: list[Tensor], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = partial(tqdm, mininterval=0)  # else a fast machine is done before the bar is drawn again
    monkeypatch.setattr("stochbn.statistics.progress.tqdm", eager)
    stochbn.fit(model, batches * 20, progress=True)
    assert "standard_error=" in capsys.readouterr().err


class Sometimes(nn.Module):
    """Uses its second layer in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.often(x)
        return self.rarely(x) if self.count % 15 == 1 else x


def test_standard_error_waits_for_layers_that_are_rarely_used() -> None:
    batches = [torch.randn(16, 2) for _ in range(60)]
    model = Sometimes().eval()
    stats = stochbn.fit(model, batches, standard_error=10.0, progress=False)
    assert list(stats.layers) == ["often", "rarely"]
    assert stats.num_batches == 20  # after 10, the second layer was seen once


def test_nan_in_a_layer_that_is_rarely_used() -> None:
    batches = [torch.randn(16, 2) for _ in range(20)]
    model = Sometimes().eval()
    model.often.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf in layer 'rarely'"):
        stochbn.fit(model, batches, layers=["rarely"], progress=False)


class Twice(nn.Module):
    """Uses one BatchNorm layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x).relu())


def test_a_layer_that_is_used_twice_has_no_joint_statistics() -> None:
    batches = [torch.randn(16, 4) for _ in range(5)]
    model = calibrate(Twice(), batches)
    stochbn.fit(model, batches, progress=False)
    with pytest.raises(ValueError, match=r"once in each forward pass.*'norm'.*family='factorized'"):
        stochbn.fit(model, batches, family="empirical", progress=False)


def test_a_layer_that_is_not_used_is_left_out(batches: list[Tensor]) -> None:
    model = calibrate(small_cnn(), batches)
    model.unused = nn.BatchNorm1d(2)
    model.forward = lambda x: nn.Sequential(*list(model)[:-1])(x)
    with pytest.warns(UserWarning, match="'unused' were used in fewer"):
        stats = stochbn.fit(model, batches, family="lowrank", progress=False)
    assert stats.factors.shape[2] == sum(stats.sizes) == 20


class Later(nn.Module):
    """Uses a second BatchNorm layer from some call on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.BatchNorm1d(4), nn.BatchNorm1d(4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x)) if self.calls > 15 else self.first(x)


def test_a_layer_that_is_used_later_has_no_joint_statistics() -> None:
    batches = [torch.randn(16, 4) for _ in range(30)]
    model = calibrate(Later(), batches)
    model.calls = 0
    with pytest.raises(ValueError, match=r"once in each forward pass.*'second'"):
        stochbn.fit(model, batches, family="lowrank", progress=False)


def test_options_that_are_not_a_familys() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="one of 'factorized', 'lowrank', 'empirical'"):
        stochbn.fit(model, [], family="psychic")
    with pytest.raises(ValueError, match="rank= with family='lowrank', got it with 'factorized'"):
        stochbn.fit(model, [], rank=5)
    with pytest.raises(ValueError, match="num_kept= with family='empirical', got it with 'lowrank'"):
        stochbn.fit(model, [], family="lowrank", num_kept=5)
    with pytest.raises(ValueError, match="rank of at least 1"):
        stochbn.fit(model, [], family="lowrank", rank=0)


class Backwards(nn.Module):
    """Registers its layers in another order than it calls them in; its very last one has no running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.called_last = nn.BatchNorm1d(4)
        self.called_first = nn.BatchNorm1d(4)
        self.untracked = nn.BatchNorm1d(4, track_running_stats=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.untracked(self.called_last(self.dropout(self.called_first(x))))


@pytest.mark.parametrize("dropout", [False, True])
def test_the_last_layer_is_that_of_the_forward_pass(dropout: bool) -> None:
    data = [torch.randn(8, 4) for _ in range(20)]
    model = calibrate(Backwards(), data)
    fitted = []
    for layers in ("last", ["called_last"]):
        torch.manual_seed(1)
        fitted.append(stochbn.fit(model, data, layers=layers, dropout=dropout, family="empirical", progress=False))
    assert list(fitted[0].layers) == ["called_last"]
    assert fitted[0].excluded == ("called_first", "untracked")
    assert torch.equal(fitted[0].observations, fitted[1].observations)
    assert fitted[0].num_batches == 20  # the mini-batch that found the layer is fitted like the others


def test_a_layer_that_is_called_last_can_be_passed_by_its_name() -> None:
    model = nn.Sequential()
    model.add_module("last", nn.BatchNorm1d(4))
    model.add_module("other", nn.BatchNorm1d(4))
    data = [torch.randn(8, 4) for _ in range(20)]
    calibrate(model, data)
    assert list(stochbn.fit(model, data, layers=["last"], progress=False).layers) == ["last"]
    assert list(stochbn.fit(model, data, layers="last", progress=False).layers) == ["other"]
