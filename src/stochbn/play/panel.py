"""The demo's network, drawn 256 times: what all of them say of an image, and whether a rule would answer."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import stochbn
from stochbn.experiments.data.splits import Split, load_split, to_inputs
from stochbn.experiments.training.checkpoints import load_network
from stochbn.experiments.training.recipes import RECIPES, Recipe
from stochbn.experiments.training.train import train

NUM_NETWORKS = 256
NUM_PASSES = 4  # over the 75 mini-batches of training: each of 256 networks is to have one of its own


@dataclass(frozen=True)
class Panel:
    """Networks that vote on images, and a rule that says when their answer is good enough.

    Attributes:
        predictor: All of them.
        rule: Made from digits that training has not seen.
        digits: Images that may be shown as examples of what the networks know; the rule has seen them.
        letters: And of what they do not know.
    """

    predictor: stochbn.Predictor
    rule: stochbn.AbstainRule
    digits: Split
    letters: Split

    def describe(self) -> dict[str, Any]:
        """Returns what a page says about the networks and the rule."""
        return {
            "classes": self.digits.classes,
            "num_networks": NUM_NETWORKS,
            "threshold": self.rule.threshold if math.isfinite(self.rule.threshold) else None,  # JSON has no infinity
            "risk": self.rule.risk,
            "confidence": self.rule.confidence,
            "coverage": self.rule.coverage,
            "num_held_out": self.rule.num_inputs,
        }

    def answer(self, image: Tensor) -> dict[str, Any]:
        """Returns what the networks say of one image, (1, 1, 28, 28) in uint8, and the image as they see it."""
        prediction = self.predictor(to_inputs(image))
        samples = prediction.samples
        assert samples is not None
        draws = samples[:, 0]  # (S, K)
        low, high = draws.quantile(torch.tensor([0.05, 0.95]), dim=0).tolist()
        entropy, epistemic = float(prediction.entropy[0]), float(prediction.epistemic[0])
        return {
            "predicted": int(prediction.classes[0]),
            "probs": prediction.probs[0].tolist(),
            "low": low,
            "high": high,
            "votes": draws.argmax(1).bincount(minlength=draws.shape[1]).tolist(),
            "entropy": entropy,
            "epistemic": epistemic,
            "disagreement": epistemic / entropy if entropy > 0 else 0.0,
            "abstains": not bool(self.rule(prediction)[0]),
            "image": image.flatten().tolist(),
        }

    def example(self, kind: str, number: int) -> dict[str, Any]:
        """Returns the answer to one of the examples, a "digit" or else a "letter", and what it shows."""
        split = self.digits if kind == "digit" else self.letters
        index = number % len(split)
        shown = split.classes[int(split.labels[index])]
        return {**self.answer(split.images[index : index + 1]), "shown": shown}


def load_panel(console: Console, recipe: Recipe | None = None) -> Panel:
    """Loads the demo's first network, which is trained if it is not there, and draws 256 from it.

    The draws are those that the guide recommends: kept mini-batches in the last layer, with the input counted in. The
    rule has the library's defaults. The 200 validation images alone are too few to prove an error of 1 %, so the test
    images join them; the network was trained on neither.
    """
    recipe = recipe or RECIPES["digits"]
    network = load_network(train(recipe, 0, console=console))
    training, validation, test = (load_split(recipe.data, part) for part in ("train", "validation", "test"))
    order = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(training), generator=order) for _ in range(NUM_PASSES)]
    loader = [
        to_inputs(training.images[batch])
        for whole in orders
        for batch in whole.split(recipe.mini_batch_size)
        if len(batch) == recipe.mini_batch_size
    ]
    stats = stochbn.fit(
        network, loader, layers="last", family="empirical", num_kept=NUM_NETWORKS, conditioned=True, progress=False
    )
    predictor = stochbn.Predictor(network, stats, num_samples=NUM_NETWORKS)
    held_out = to_inputs(torch.cat([validation.images, test.images]))
    rule = stochbn.abstain(predictor(held_out), torch.cat([validation.labels, test.labels]))
    predictor.warm_up(held_out[:1])
    return Panel(predictor, rule, test, load_split(recipe.data, "out-of-domain"))
