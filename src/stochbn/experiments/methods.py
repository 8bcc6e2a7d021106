"""The one table of methods: what each is called, how it predicts and how it looks, wherever a table or figure shows it.

A key is what files and code use; a label is for people, and nothing depends on its wording.
"""

from dataclasses import dataclass, replace
from typing import Literal

# Okabe and Ito's palette, which colour-blind readers can distinguish.
GREY, BLACK = "#777777", "#000000"
BLUE, GREEN, VERMILION, ORANGE, PURPLE, SKY = "#0072b2", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#56b4e9"

SPREADS = tuple(2 ** (step / 2) for step in range(-2, 4))  # 0.5, 0.71, 1, 1.41, 2, 2.83: what can be chosen from later


@dataclass(frozen=True)
class Drawing:
    """How networks are drawn around a trained one."""

    # Of the fitted statistics; None draws no statistics, "exact" takes training mini-batches (eq. 3)
    family: Literal["factorized", "empirical", "exact"] | None = None
    # Which BatchNorm layers are drawn: all of them, the last stage of the network, or its last layer alone
    layers: Literal["all", "stage", "last"] = "all"
    conditioned: bool = False  # whether each input is counted into the mini-batch that normalises it
    tuned: bool = False  # whether a spread is chosen for the network on validation data
    tempered: bool = False  # whether a temperature is chosen with it, as `stochbn.tune` does by default
    dropout: bool = False  # whether dropout stays active
    apart: bool = False  # of "empirical", whether correlations between channels are destroyed
    spread: float | None = None  # a fixed one, in place of the fitted or a tuned one
    # Of "empirical", whether every mini-batch that was kept is drawn once, in place of S of them
    exhaustive: bool = False


@dataclass(frozen=True)
class Method:
    """A row of a table, a line of a figure."""

    key: str  # in files and code
    label: str  # in tables and figures
    colour: str  # of its lines
    line: str  # their style, as Matplotlib names it
    drawing: Drawing  # how each of its networks is drawn
    # Of an ensemble, the key of the method whose networks it averages; its own if they are drawn for it
    members: str | None = None

    @property
    def group(self) -> Literal["network", "ensemble", "dropout"]:
        """What it needs: one trained network, several of them, or one with dropout layers."""
        if self.members is not None:
            return "ensemble"
        return "dropout" if self.drawing.dropout else "network"

    def at(self, spread: float) -> "Method":
        """Returns the method with a fixed spread, under a key and a label of its own.

        Examples:
            >>> METHODS["last"].at(0.5).key
            'last@0.50'
        """
        return replace(
            self,
            key=f"{self.key}@{spread:.2f}",
            label=f"{self.label}, spread {spread:.2f}",
            drawing=replace(self.drawing, tuned=False, spread=spread),
        )

    def tempered(self) -> "Method":
        """Returns the method with a temperature chosen on validation data, under a key and a label of its own.

        Examples:
            >>> METHODS["plain"].tempered().label
            'One network + temperature'
        """
        return replace(self, key=f"{self.key}+temperature", label=f"{self.label} + temperature")


_SBN = Drawing("factorized")
_REAL = Drawing("empirical", conditioned=True)
_STAGE = replace(_REAL, layers="stage", exhaustive=True)
_LAST = replace(_REAL, layers="last", exhaustive=True)
_DROPOUT_SBN = replace(_SBN, dropout=True)


def _tuned(drawing: Drawing) -> Drawing:
    return replace(drawing, tuned=True)


METHODS: dict[str, Method] = {
    method.key: method
    for method in (
        # One network.
        Method("plain", "One network", GREY, "-", Drawing()),
        Method("sbn", "SBN", GREEN, "--", _SBN),
        Method("tuned", "Tuned SBN", GREEN, ":", _tuned(_SBN)),
        Method("empirical", "Real mini-batches", SKY, "-", Drawing("empirical")),
        Method("real-tuned", "Real mini-batches, conditioned, tuned", PURPLE, ":", _tuned(_REAL)),
        Method("stage", "Last stage", ORANGE, "--", _STAGE),
        Method("stage-tuned", "Last stage, tuned", ORANGE, "-.", _tuned(_STAGE)),
        Method("last", "Last layer", PURPLE, "-", _LAST),
        Method("last-tuned", "Last layer, tuned", PURPLE, "-.", _tuned(_LAST)),
        Method("last-both", "Last layer, tuned with T", BLACK, "-.", replace(_tuned(_LAST), tempered=True)),
        Method("channels-apart", "Real mini-batches, channels apart", GREY, ":", Drawing("empirical", apart=True)),
        Method("exact", "Exact (eq. 3)", BLACK, "-", Drawing("exact")),
        # Several networks.
        Method("ensemble", "Deep Ensembles", BLUE, "-", Drawing(), "plain"),
        Method("ensemble+sbn", "Deep Ensembles + SBN", BLUE, "--", _SBN, "sbn"),
        Method("ensemble-tempered", "Deep Ensembles, each + temperature", SKY, "-.", Drawing(), "plain+temperature"),
        Method("ensemble+last", "Deep Ensembles + last layer", ORANGE, "-", _LAST, "last"),
        Method("ensemble+last-tuned", "Deep Ensembles + last layer, tuned", ORANGE, "-.", _tuned(_LAST), "last-tuned"),
        # Networks with dropout.
        Method("dropout", "Dropout", VERMILION, "-", Drawing(dropout=True)),
        Method("dropout+sbn", "Dropout + SBN", VERMILION, "--", _DROPOUT_SBN),
        Method("dropout+tuned", "Dropout + tuned SBN", VERMILION, ":", _tuned(_DROPOUT_SBN)),
    )
}
