import pytest

from stochbn.experiments.evaluation.protocols import LARGE, SMALL, choose_protocol
from stochbn.experiments.training.recipes import RECIPES

LASTS = {f"last@{spread}": 256 for spread in ("0.50", "0.71", "1.00", "1.41", "2.00", "2.83")}


@pytest.mark.parametrize(
    ("recipe", "draws"),
    [
        ("lenet5", {"plain": 1, "sbn": 50, "tuned": 50, "last": 256}),
        ("digits-dropout", {"dropout": 50, "dropout+sbn": 50, "dropout+tuned": 50}),
        ("vgg11", {"plain": 1, "sbn": 20, **LASTS, "stage@0.71": 32, "stage@1.00": 32, "stage@1.41": 32}),
        ("vgg11-dropout", {"dropout": 20, "dropout+sbn": 20}),
        ("resnet18", {"plain": 1, "sbn": 20, **LASTS, "stage@1.00": 16}),
    ],
)
def test_what_is_predicted(recipe: str, draws: dict[str, int]) -> None:
    assert choose_protocol(RECIPES[recipe]).draws(RECIPES[recipe]) == draws


def test_another_number_of_draws() -> None:
    assert SMALL.vary(None) is SMALL
    fewer = LARGE.vary(6)
    assert (fewer.num_samples, fewer.curve.num_samples) == (6, 6)
    draws = fewer.draws(RECIPES["vgg11"])
    assert (draws["sbn"], draws["last@1.00"]) == (6, 256)


def test_the_paper_shows_its_appendices_for_lenet5() -> None:
    assert [choose_protocol(RECIPES[name]).has_appendices for name in ("lenet5", "digits", "vgg11", "resnet18")] == [
        *(True, True, False, False),
    ]
