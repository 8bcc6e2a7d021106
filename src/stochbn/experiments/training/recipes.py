"""What each network is trained on and how, as plain data. A recipe and a seed determine a run.

LeNet-5 follows the authors' published setting: Adam at 1e-3 falling linearly to 0, batch size 16, 50 epochs,
pixels in [0, 1], dropout 0.5 after each block where there is dropout.

On CIFAR5 the authors train for up to 200 epochs, which takes weeks on a few cores; those recipes are named `…-authors`.
Ours take 30 epochs (ResNet-18 36) of SGD with one cycle, in steps of 64 images that are normalised in mini-batches of
16, the authors' M. SGD was chosen over Adam on validation images, in a short pilot with a narrow VGG-11. After 16
epochs two VGG-11 had a training loss of 0.13 and 8.0 % of the validation images wrong: not yet the overconfident
networks that the paper is about.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from stochbn.experiments.training import networks

SGD_LEARNING_RATE = 0.05  # with the lowest validation NLL of 0.01, 0.02, 0.05 and 0.1 on digits, over three seeds
# How a name says what was changed.
_WORDS = {
    "batch_size": "batch{}",
    "class_seed": "classes{}",
    "dropout": "p{}",
    "epochs": "{}epochs",
    "ghost_size": "ghost{}",
    "learning_rate": "lr{}",
    "optimizer": "{}",
}


@dataclass(frozen=True)
class Recipe:
    """One way to train one network; its name is also the folder of its checkpoints.

    Examples:
        >>> RECIPES["lenet5"].mini_batch_size
        16
    """

    name: str  # key in `RECIPES`
    network: Literal["lenet5", "vgg11", "resnet18"]  # which function of `networks` builds it
    data: Literal["mnist", "cifar5", "cifar10", "digits"]  # which data set it learns, as `data.load_split` knows it
    num_classes: int  # outputs of the network
    in_channels: int  # 1 for grey images, 3 for colour
    epochs: int  # passes over the training split
    batch_size: int  # images in a step of the optimiser; an incomplete last batch is dropped
    # `adam` with a learning rate falling linearly to 0, or `sgd` with Nesterov momentum and one cycle
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3  # the first one of Adam, the highest one of the cycle
    weight_decay: float = 0.0  # L2 penalty
    width: float = 1.0  # multiplies the number of channels and units
    dropout: float = 0.0  # probability to drop; 0 for a network without dropout layers
    augment: bool = False  # whether to crop (reflect padding 4) and flip at random
    class_seed: int | None = None  # draws CIFAR5's known classes; None takes classes 0 to 4
    # Images that are normalised together, a part of the batch (ghost batches); None takes all of it
    ghost_size: int | None = None
    # Sides in pixels that training images are shrunk to, each for an equal share of the epochs; the last is their own
    image_sizes: tuple[int, ...] = ()
    # Whether the network runs in bfloat16, which is faster where the processor has it; weights stay in float32
    mixed_precision: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_sizes", tuple(self.image_sizes))  # a checkpoint's JSON has a list
        if self.ghost_size is not None and (self.ghost_size < 2 or self.batch_size % self.ghost_size):
            suggested = next((size for size in (16, 8, 4, 2) if self.batch_size % size == 0), self.batch_size)
            raise ValueError(
                f"Expected a ghost size of at least 2 that divides the batch size {self.batch_size}, got "
                f"{self.ghost_size}. Take {suggested}, say."
            )

    @property
    def mini_batch_size(self) -> int:
        """M, the number of images whose statistics normalise them together in training."""
        return self.ghost_size or self.batch_size

    def image_size(self, epoch: int) -> int | None:
        """Returns the side in pixels of the training images in this epoch; None for their own.

        Examples:
            >>> recipe = RECIPES["resnet18"]
            >>> [recipe.image_size(epoch) for epoch in (0, recipe.epochs // 2, recipe.epochs - 1)]
            [16, 24, 32]
        """
        return self.image_sizes[epoch * len(self.image_sizes) // self.epochs] if self.image_sizes else None

    def build_network(self) -> nn.Module:
        """Builds the untrained network from torch's random state."""
        if self.network == "resnet18" and self.dropout:
            raise ValueError(f"Expected no dropout in resnet18, got {self.dropout}. The paper's ResNet has none.")
        options: dict[str, Any] = {"dropout": self.dropout} if self.dropout else {}
        build: Callable[..., nn.Module] = getattr(networks, self.network)
        return build(self.num_classes, self.in_channels, width=self.width, **options)

    def vary(self, **changes: Any) -> "Recipe":
        """Returns the recipe with some fields changed, under a name that says which; None changes nothing.

        Another optimiser gets a learning rate of its own: Adam's is too small for SGD, and SGD's too large for Adam.

        Examples:
            >>> RECIPES["digits"].vary(optimizer="sgd", epochs=3).name
            'digits-3epochs-sgd'
        """
        given = {field: value for field, value in changes.items() if value is not None}
        if "class_seed" in given and self.data != "cifar5":
            raise ValueError(
                f"Expected a class seed with CIFAR5 only, got one with {self.name}. Its classes are fixed."
            )
        if given.get("optimizer", "adam") not in ("adam", "sgd"):
            raise ValueError(f"Expected optimizer to be adam or sgd, got {given['optimizer']!r}.")
        if not 0 < given.get("dropout", 0.5) < 1 or ("dropout" in given and not self.dropout):
            raise ValueError(
                f"Expected a dropout rate between 0 and 1 for a recipe with dropout, got {given['dropout']} for "
                f"{self.name}. Take one such as lenet5-dropout."
            )
        name = "-".join([self.name, *(_WORDS[field].format(given[field]) for field in sorted(given))])
        if given.get("optimizer", self.optimizer) != self.optimizer:
            given.setdefault("learning_rate", {"adam": 1e-3, "sgd": SGD_LEARNING_RATE}[given["optimizer"]])
        return replace(self, name=name, **given)


_CIFAR5: dict[str, Any] = {
    "batch_size": 64,
    "ghost_size": 16,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "weight_decay": 5e-4,
    "augment": True,
}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("lenet5", "lenet5", "mnist", 10, 1, epochs=50, batch_size=16),
        Recipe("lenet5-dropout", "lenet5", "mnist", 10, 1, epochs=50, batch_size=16, dropout=0.5),
        Recipe("vgg11", "vgg11", "cifar5", 5, 3, epochs=30, **_CIFAR5),
        Recipe("vgg11-dropout", "vgg11", "cifar5", 5, 3, epochs=30, dropout=0.5, **_CIFAR5),
        Recipe(
            "resnet18",
            "resnet18",
            "cifar5",
            5,
            3,
            epochs=36,
            image_sizes=(16, 16, 24, 32),
            mixed_precision=True,
            **_CIFAR5,
        ),
        Recipe("vgg11-authors", "vgg11", "cifar5", 5, 3, epochs=200, batch_size=16, augment=True),
        Recipe("vgg11-dropout-authors", "vgg11", "cifar5", 5, 3, epochs=200, batch_size=16, dropout=0.5, augment=True),
        Recipe("resnet18-authors", "resnet18", "cifar5", 5, 3, epochs=200, batch_size=16, augment=True),
        Recipe("digits", "lenet5", "digits", 10, 1, epochs=120, batch_size=16, width=0.25),
        Recipe("digits-dropout", "lenet5", "digits", 10, 1, epochs=120, batch_size=16, width=0.25, dropout=0.2),
    )
}


@dataclass(frozen=True)
class Experiment:
    """The networks behind one block of the paper's Table 1: plain ones, also as an ensemble, and with dropout."""

    name: str  # key in `EXPERIMENTS`, and the folder under `results/`
    recipe: Recipe  # of the plain networks
    num_seeds: int  # how many plain networks, with seeds 0, 1, …; all of them make the ensemble
    dropout_recipe: Recipe | None = None  # of the networks with dropout, or None where the paper has none
    num_dropout_seeds: int = 0  # how many of those
    options: str = ""  # what was changed in both recipes, as on the command line with a space in front

    def runs(self) -> list[tuple[Recipe, int]]:
        """Lists recipe and seed of every network, the plain ones first.

        Examples:
            >>> len(EXPERIMENTS["lenet5"].runs())
            9
        """
        numbers = ((self.recipe, self.num_seeds), (self.dropout_recipe, self.num_dropout_seeds))
        return [(recipe, seed) for recipe, number in numbers if recipe for seed in range(number)]

    def vary(self, **changes: Any) -> "Experiment":
        """Returns the experiment with both recipes changed, as `Recipe.vary` does.

        Examples:
            >>> EXPERIMENTS["vgg11"].vary(class_seed=1).dropout_recipe.name
            'vgg11-dropout-classes1'
        """
        given = {field: value for field, value in sorted(changes.items()) if value is not None}
        return replace(
            self,
            recipe=self.recipe.vary(**given),
            dropout_recipe=self.dropout_recipe and self.dropout_recipe.vary(**given),
            options="".join(f" --{field.replace('_', '-')} {value}" for field, value in given.items()),
        )


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment("lenet5", RECIPES["lenet5"], 6, RECIPES["lenet5-dropout"], 3),
        Experiment("vgg11", RECIPES["vgg11"], 6, RECIPES["vgg11-dropout"], 2),
        Experiment("resnet18", RECIPES["resnet18"], 6),
        Experiment("digits", RECIPES["digits"], 4, RECIPES["digits-dropout"], 2),
    )
}
