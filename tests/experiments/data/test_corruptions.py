import numpy as np
import pytest
import torch
from scipy import ndimage

from stochbn.experiments.data.corruptions import CORRUPTIONS, STRENGTHS, corrupt
from stochbn.experiments.data.splits import load_split


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_images_get_ever_harder(kind: str) -> None:
    images = load_split("digits", "test").images[:20]
    before = images.clone()
    harder = [corrupt(images, kind, strength) for strength in STRENGTHS]
    assert torch.equal(images, before)
    assert all(one.dtype == torch.uint8 and one.shape == images.shape for one in harder)
    change = [(one.float() - images.float()).square().mean().item() for one in harder]
    assert change == sorted(change)
    assert torch.equal(harder[2], corrupt(images, kind, 3))


def test_corruptions_are_what_they_say() -> None:
    images = load_split("digits", "test").images[:2]
    turned = corrupt(images, "rotation", 2)
    for image, result, angle in zip(images, turned, (30, -30), strict=True):
        expected = ndimage.rotate(image[0].numpy() / 255.0, angle, reshape=False, order=1)
        np.testing.assert_allclose(result[0].numpy() / 255, expected.clip(0, 1), atol=0.003)
    flat = torch.full((50, 1, 28, 28), 128, dtype=torch.uint8)
    noisy = corrupt(flat, "noise", 1).float() / 255
    assert noisy.std().item() == pytest.approx(0.12, abs=0.002)
    assert torch.equal(corrupt(flat[:1], "blur", 5), flat[:1])
