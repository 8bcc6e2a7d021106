import re
from dataclasses import replace

import pytest

from stochbn.experiments.training.recipes import EXPERIMENTS, RECIPES, SGD_LEARNING_RATE, Recipe


@pytest.mark.parametrize("size", [1, 24, 128])
def test_a_ghost_size_that_does_not_divide_the_batch_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"at least 2 that divides the batch size 64, got {size}\. Take 16, say"):
        RECIPES["vgg11"].vary(ghost_size=size)


def test_mini_batches_are_ghosts_where_there_are_some() -> None:
    assert (RECIPES["vgg11"].batch_size, RECIPES["vgg11"].mini_batch_size) == (64, 16)
    assert RECIPES["vgg11-authors"].mini_batch_size == 16
    assert RECIPES["vgg11"].vary(ghost_size=32).name == "vgg11-ghost32"


def test_images_grow_to_their_own_size() -> None:
    recipe = RECIPES["resnet18"]
    assert [recipe.image_size(epoch) for epoch in range(36)] == [16] * 18 + [24] * 9 + [32] * 9
    assert RECIPES["vgg11"].image_size(3) is None


def test_the_recipes_that_networks_are_trained_by_stay_as_they_are() -> None:
    # A checkpoint is of another recipe as soon as one of these changes.
    assert RECIPES["vgg11"] == Recipe(
        "vgg11",
        "vgg11",
        "cifar5",
        5,
        3,
        epochs=30,
        batch_size=64,
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=5e-4,
        augment=True,
        ghost_size=16,
    )
    assert RECIPES["resnet18"] == replace(
        RECIPES["vgg11"],
        name="resnet18",
        network="resnet18",
        epochs=36,
        image_sizes=(16, 16, 24, 32),
        mixed_precision=True,
    )
    assert RECIPES["lenet5"] == Recipe("lenet5", "lenet5", "mnist", 10, 1, epochs=50, batch_size=16)


def test_plain_networks_come_first() -> None:
    runs = [(recipe.name, seed) for recipe, seed in EXPERIMENTS["vgg11"].runs()]
    assert runs == [("vgg11", seed) for seed in range(6)] + [("vgg11-dropout", seed) for seed in range(2)]
    assert len(EXPERIMENTS["resnet18"].runs()) == 6


@pytest.mark.parametrize("batch_size", [6, 18, 7, 64])
def test_the_ghost_size_that_an_error_suggests_works(batch_size: int) -> None:
    with pytest.raises(ValueError, match="divides the batch size") as caught:
        replace(RECIPES["vgg11"], batch_size=batch_size, ghost_size=5)
    suggested = int(re.search(r"Take (\d+), say", str(caught.value))[1])
    assert replace(RECIPES["vgg11"], batch_size=batch_size, ghost_size=suggested).mini_batch_size == suggested


def test_another_optimiser_gets_a_learning_rate_of_its_own() -> None:
    assert RECIPES["vgg11"].vary(optimizer="adam").learning_rate == 1e-3
    assert RECIPES["vgg11"].vary(optimizer="sgd").learning_rate == RECIPES["vgg11"].learning_rate
    assert RECIPES["digits"].vary(optimizer="sgd").learning_rate == SGD_LEARNING_RATE
    assert RECIPES["digits"].vary(optimizer="adam", learning_rate=0.5).learning_rate == 0.5
