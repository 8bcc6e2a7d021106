import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stochbn.experiments.contents import GALLERY, check_contents

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


def outputs(*names: str, size: int = 5) -> dict[str, Tensor]:
    probs = torch.rand(size, 3).softmax(1)
    found = {"log_probs": probs.log().half(), "expected_entropy": torch.special.entr(probs).sum(1)}
    return {f"{name}/{kind}": tensor.clone() for name in names for kind, tensor in found.items()}


def predictions() -> tuple[dict[str, Any], dict[str, Tensor]]:
    header = {
        **dict.fromkeys(("experiment", "recipe", "data", "out_of_domain", "command", "commit"), "text"),
        **dict.fromkeys(("batch_size", "epochs", "num_samples"), 1),
        **dict.fromkeys(("seed", "draw_seed", "train_seconds"), 0),
        "kind": "predictions",
        "classes": ["a", "b", "c"],
        "validation_nll": [0.5],
        "versions": {"torch": "2"},
    }
    parts = ("test", "out-of-domain", "validation")
    labels = {"labels": torch.tensor([0, 1, 2, 0, 1]), "labels/validation": torch.tensor([2, 1, 2, 0, 1])}
    return header, outputs(*(f"{method}/{part}" for method in ("plain", "sbn") for part in parts)) | labels


def diagnostics() -> tuple[dict[str, Any], dict[str, Tensor]]:
    stage = {"lower": [-0.5, 0.01], "marginal": [-0.4, 0.01], "gap": [0.1, 0.01]}
    row = dict.fromkeys(("nll", "entropy_test", "entropy_out_of_domain", "auroc"), 0.5)
    header = {
        "kind": "diagnostics",
        "network": "it",
        "commit": "abc",
        "statistics": {"layers": ["bn"], "num_batches": 4, "batch_size": 16},
        "bound": {"before": stage, "after": dict(stage), "num_examples": 5, "num_samples": 8, "batch_size": 16},
        "by_samples": [{"num_samples": 8, **row}],
        "by_batch_size": [{"batch_size": 8, **row}],
        "gallery": {"method": "SBN", "classes": ["a", "b"], "out_of_domain_classes": ["c"]},
    }
    shapes = {"observed": (4, 2, 2), "centre": (2, 2), "std": (2, 2), "ks": (2, 5)}
    tensors = {f"statistics/bn/{name}": torch.rand(shape) for name, shape in shapes.items()}
    tensors |= {"statistics/bn/channels": torch.tensor([0, 4]), "exact/test/index": torch.arange(5)}
    for group in GALLERY:
        tensors[f"gallery/{group}/images"] = torch.zeros(3, 1, 4, 4, dtype=torch.uint8)
        tensors[f"gallery/{group}/entropy"] = torch.rand(3)
        tensors |= {f"gallery/{group}/{name}": torch.zeros(3, dtype=torch.uint8) for name in ("predicted", "labels")}
    return header, tensors | outputs("exact/test")


def test_sound_files() -> None:
    check_contents(*predictions())
    check_contents(*diagnostics())
    check_contents({"kind": "predictions of something else"}, {})


def without(*parts: str) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


@pytest.mark.parametrize("missing", [("validation",), ("out-of-domain",), ("sbn/",), ("validation", "out-of-domain")])
def test_a_file_may_lack_methods_and_parts(missing: tuple[str, ...]) -> None:
    header, tensors = predictions()
    without(*missing)(header, tensors)
    check_contents(header, tensors)


PREDICTIONS: dict[str, tuple[Change, str]] = {
    "no seed": (lambda h, t: h.pop("seed"), r"expected header\.seed, got none"),
    "one class": (lambda h, t: h.update(classes=["a"]), "at least 2 classes"),
    "no epoch": (lambda h, t: h.update(validation_nll=[]), r"an epoch for header\.validation_nll"),
    "record": (lambda h, t: h.update(methods={"sbn": {}}), r"expected header\.methods\.sbn\.commit"),
    "no labels": (lambda h, t: t.pop("labels"), "expected a tensor for labels"),
    "no labels of validation": (lambda h, t: t.pop("labels/validation"), "a tensor for labels/validation"),
    "no class": (lambda h, t: t["labels"].fill_(3), r"numbers in \[0, 3\) for labels"),
    "fewer labels": (lambda h, t: t.update(labels=t["labels"][:4]), r"shape \[5\] for labels"),
    "labels as floats": (lambda h, t: t.update(labels=torch.zeros(5)), "torch.uint8 or .* for labels"),
    "other tensor": (lambda h, t: t.update(virus=torch.zeros(1)), "a known name for tensor 'virus'"),
    "other part": (lambda h, t: t.update(outputs("sbn/train")), "known parts of the data"),
    "no methods": (without("plain", "sbn"), "expected predictions for its tensors"),
    "no test": (without("/test/"), "known parts of the data"),
    "part missing": (without("sbn/validation"), "a tensor for sbn/validation/log_probs"),
    "size": (lambda h, t: t.update(outputs("sbn/test", size=4)), r"shape \[5, 3\] for sbn/test/log_probs"),
    "empty": (
        lambda h, t: t.update({name: value[:0] for name, value in t.items()}),
        "at least one number for labels",
    ),
    "nan": (lambda h, t: t["sbn/test/log_probs"].fill_(math.nan), "finite numbers for sbn/test/log_probs"),
    "sums": (lambda h, t: t["sbn/test/log_probs"].fill_(0), "that sum to 1 for sbn/test/log_probs"),
    "no chance": (lambda h, t: t["sbn/test/log_probs"].fill_(-60000), "that sum to 1 for sbn/test/log_probs"),
    "entropy": (lambda h, t: t["sbn/test/expected_entropy"].fill_(2), "entropies between 0 and log 3"),
    "type": (
        lambda h, t: t.update({"sbn/test/log_probs": torch.zeros(5, 3, dtype=torch.complex64)}),
        "torch.float16 or .* for sbn/test/log_probs",
    ),
}
DIAGNOSTICS: dict[str, tuple[Change, str]] = {
    "no network": (lambda h, t: h.pop("network"), r"expected header\.network"),
    "no mini-batches": (lambda h, t: h["statistics"].update(num_batches=0), "at least 1 as header.statistics.num"),
    "no layers": (lambda h, t: h["statistics"].update(layers=[]), "a layer for"),
    "other layer": (lambda h, t: h["statistics"].update(layers=["x"]), "a tensor for statistics/x/ks"),
    "bound": (lambda h, t: h["bound"]["after"].update(gap=[1]), r"2 values as header\.bound\.after\.gap"),
    "no rows": (lambda h, t: h.update(by_samples=[]), r"a row for header\.by_samples"),
    "row": (lambda h, t: h["by_batch_size"][0].pop("nll"), r"expected header\.by_batch_size\[0\]\.nll"),
    "no classes": (lambda h, t: h["gallery"].update(classes=[]), r"classes for header\.gallery"),
    "channel": (lambda h, t: t["statistics/bn/channels"].fill_(5), r"numbers in \[0, 5\) for statistics/bn/channels"),
    "distance": (lambda h, t: t["statistics/bn/ks"].fill_(2), "distances up to 1"),
    "one mini-batch": (
        lambda h, t: t.update({"statistics/bn/observed": torch.zeros(1, 2, 2)}),
        "at least 2 mini-batches",
    ),
    "observed": (lambda h, t: t["statistics/bn/observed"].fill_(math.inf), "finite numbers for statistics/bn/obs"),
    "index": (lambda h, t: t["exact/test/index"].fill_(-1), r"numbers in \[0, ∞\) for exact/test/index"),
    "predicted": (lambda h, t: t["gallery/certain test/predicted"].fill_(2), r"numbers in \[0, 2\)"),
    "labels": (lambda h, t: t["gallery/certain out-of-domain/labels"].fill_(1), r"numbers in \[0, 1\)"),
    "channels": (
        lambda h, t: t.update({"gallery/certain test/images": torch.zeros(3, 2, 4, 4, dtype=torch.uint8)}),
        "1 or 3 channels",
    ),
}


@pytest.mark.parametrize("case", PREDICTIONS)
def test_unsound_predictions(case: str) -> None:
    header, tensors = predictions()
    change, message = PREDICTIONS[case]
    change(header, tensors)
    with pytest.raises(ValueError, match=message):
        check_contents(header, tensors)


@pytest.mark.parametrize("case", DIAGNOSTICS)
def test_unsound_diagnostics(case: str) -> None:
    header, tensors = diagnostics()
    change, message = DIAGNOSTICS[case]
    change(header, tensors)
    with pytest.raises(ValueError, match=message):
        check_contents(header, tensors)
