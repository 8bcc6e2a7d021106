"""Which methods predict with the networks of a data set, with how many draws, and what is measured besides.

A pass of one network over the 12,500 images of CIFAR5 that are predicted takes minutes on one core, over the 25,000 of
MNIST seconds. So the numbers of draws differ, and on CIFAR5 nothing is tuned here: spreads and temperatures are chosen
later, from the predictions on validation images.
"""

from dataclasses import dataclass, replace

from stochbn.experiments.methods import METHODS, SPREADS, Method
from stochbn.experiments.training.recipes import Recipe


@dataclass(frozen=True)
class Curve:
    """How the effect of M is measured on one network with SBN."""

    batch_sizes: tuple[int, ...]  # each M
    num_samples: int  # draws
    num_inputs: int  # at most so many of test and of out-of-domain images
    num_fit_inputs: int | None = None  # training images that the statistics are fitted on; None takes all


@dataclass(frozen=True)
class Protocol:
    """What `evaluate` computes."""

    num_samples: int  # S, draws of each method that is drawn at random
    plain: tuple[Method, ...]  # methods of networks without dropout
    dropout: tuple[Method, ...]  # methods of networks with it
    curve: Curve  # of the effect of M
    num_kept: int = 256  # draws of the methods that take statistics of real mini-batches, each once
    num_kept_by_stage: int = 256  # the same where the whole last stage is drawn, which is more expensive
    num_fit_batches: int | None = None  # how many mini-batches those are taken from; None takes all
    compiles_ends: bool = False  # whether predictions that draw the end of the network alone are compiled
    has_appendices: bool = True  # whether exact inference, Appendices A and B and the effect of S are measured too

    def draws(self, recipe: Recipe) -> dict[str, int]:
        """Returns the key of every method for a network, with the most networks that it draws."""
        return {method.key: self._num_draws(method) for method in self.methods(recipe)}

    def methods(self, recipe: Recipe) -> tuple[Method, ...]:
        """Returns the methods for a network."""
        return self.dropout if recipe.dropout else self.plain

    def vary(self, num_samples: int | None) -> "Protocol":
        """Returns the protocol with another S, also in the curve; None leaves it."""
        if num_samples is None:
            return self
        return replace(self, num_samples=num_samples, curve=replace(self.curve, num_samples=num_samples))

    def _num_draws(self, method: Method) -> int:
        drawing = method.drawing
        if drawing.family is None and not drawing.dropout:
            return 1
        if not drawing.exhaustive:
            return self.num_samples
        return self.num_kept_by_stage if drawing.layers == "stage" else self.num_kept


def _methods(*keys: str) -> tuple[Method, ...]:
    return tuple(METHODS[key] for key in keys)


SMALL = Protocol(
    num_samples=50,
    plain=_methods("plain", "sbn", "tuned", "last"),
    dropout=_methods("dropout", "dropout+sbn", "dropout+tuned"),
    curve=Curve(batch_sizes=(4, 8, 16, 32, 64, 128), num_samples=50, num_inputs=2000),
)
_PLAIN = (*_methods("plain", "sbn"), *(METHODS["last"].at(spread) for spread in SPREADS))
LARGE = Protocol(
    num_samples=20,  # ten antithetic pairs, about as accurate as 60 independent draws (results/draws.json)
    plain=(*_PLAIN, *(METHODS["stage"].at(spread) for spread in SPREADS[1:4])),
    dropout=_methods("dropout", "dropout+sbn"),
    curve=Curve(batch_sizes=(8, 16, 32, 64, 128), num_samples=8, num_inputs=1000, num_fit_inputs=8192),
    num_kept_by_stage=32,  # 256 draws of VGG-11's last stage cost sixteen times the whole network, at every spread
    num_fit_batches=256,
    # Compiled, 256 draws in VGG-11's last layer cost 0.7 plain passes, else 1.0 (results/last-layer.json, N = 128).
    # Draws in all layers gain nothing by it: convolutions are most of them.
    compiles_ends=True,
    has_appendices=False,  # the paper shows them for LeNet-5
)


# The last stage of ResNet-18 is a quarter of its work, so draws there are more expensive still.
LARGEST = replace(LARGE, plain=(*_PLAIN, METHODS["stage"].at(1.0)), num_kept_by_stage=16)


def choose_protocol(recipe: Recipe) -> Protocol:
    """Returns the protocol of a recipe's data set and network.

    Examples:
        >>> from stochbn.experiments.training.recipes import RECIPES
        >>> list(choose_protocol(RECIPES["vgg11-dropout"]).draws(RECIPES["vgg11-dropout"]).items())
        [('dropout', 20), ('dropout+sbn', 20)]
    """
    if not recipe.data.startswith("cifar"):
        return SMALL
    return LARGEST if recipe.network == "resnet18" else LARGE
