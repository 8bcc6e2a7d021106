"""Networks that nobody here wrote, unmodified: fit, vectorised prediction, the loop, their own buffers as a draw."""

import importlib
import os
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import stochbn
from oracles import calibrate

os.environ["HF_HUB_OFFLINE"] = "1"


def import_quietly(name: str) -> ModuleType:
    """Imports a library when a test needs it, as that takes longer than the test, in every process that collects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own imports
        return importlib.import_module(name)


def monai(kind: str, *arguments: int, **options: object) -> nn.Module:
    return getattr(import_quietly("monai.networks.nets"), kind)(*arguments, **options)


def transformer(kind: str, **config: object) -> nn.Module:
    transformers = import_quietly("transformers")
    settings = getattr(transformers, f"{kind}Config")(num_labels=5, **config)
    return getattr(transformers, f"{kind}ForImageClassification")(settings)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "monai DenseNet 2d": (
        lambda: monai("DenseNet", 2, 1, 5, init_features=8, growth_rate=4, block_config=(2, 2)),
        (1, 32, 32),
    ),
    "monai DenseNet121": (lambda: monai("DenseNet121", 2, 1, 5, init_features=8, growth_rate=2), (1, 64, 64)),
    "monai UNet 2d, segmentation": (
        lambda: monai("UNet", 2, 1, 3, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="batch"),
        (1, 16, 16),
    ),
    "monai UNet 3d, segmentation": (
        lambda: monai("UNet", 3, 1, 3, channels=(4, 8), strides=(2,), norm="batch"),
        (1, 8, 8, 8),
    ),
    "monai SegResNet 3d, segmentation": (
        lambda: monai("SegResNet", 3, 4, 1, 3, norm="batch", blocks_down=(1, 1), blocks_up=(1,)),
        (1, 8, 8, 8),
    ),
    "transformers ResNet": (
        lambda: transformer("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        (3, 32, 32),
    ),
    "transformers RegNet": (
        lambda: transformer("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
        (3, 32, 32),
    ),
    "transformers MobileNetV2": (lambda: transformer("MobileNetV2", depth_multiplier=0.1, image_size=32), (3, 32, 32)),
    "transformers EfficientNet": (
        # The default initialisation is so small that all activations vanish beside ε.
        lambda: transformer(
            "EfficientNet",
            image_size=32,
            width_coefficient=0.1,
            depth_coefficient=0.1,
            hidden_dim=128,
            initializer_range=0.5,
        ),
        (3, 32, 32),
    ),
}


@pytest.mark.filterwarnings("ignore:The model has seen")  # it was calibrated on batches of 8
@pytest.mark.parametrize("kind", NETWORKS)
def test_fit_and_predict(kind: str) -> None:
    build, shape = NETWORKS[kind]
    batches = [torch.rand(8, *shape) for _ in range(4)]
    model = calibrate(build(), batches)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert norms
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.rand(3, *shape)

    def output(x: Tensor) -> Tensor:
        result = model(x)
        return getattr(result, "logits", result).detach()

    reference = output(x)
    own = {name: b[None] for name, b in model.named_buffers() if name.endswith(("running_mean", "running_var"))}
    same = stochbn.predict(model, stochbn.Draws(own), x, link="identity")
    torch.testing.assert_close(same.mean, reference, rtol=1e-5, atol=1e-6)
    stats = stochbn.fit(model, batches, batch_size=4, progress=False)
    assert len(stats.layers) == len(norms)
    assert stats.num_batches == 8
    pred = stochbn.predict(model, stats, x, num_samples=4)  # falling back to the loop would warn, and fail
    looped = stochbn.predict(model, stats, x, num_samples=4, chunk_size=1)
    torch.testing.assert_close(pred.samples, looped.samples, rtol=1e-3, atol=1e-5)
    assert pred.probs.shape == reference.shape
    assert pred.entropy.shape == (3, *reference.shape[2:])
    assert pred.std.max() > 0
    exact = stochbn.exact_predict(model, batches, x, num_samples=2)
    assert exact.probs.shape == reference.shape
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(output(x), reference)
