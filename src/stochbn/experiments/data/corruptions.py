"""Images → the same images, harder to recognise: rotated, noisy or blurred, at five strengths. Pure functions.

Uncertainty that is right must grow as inputs get harder, while they are still of known classes.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

Pixels = NDArray[np.float32]  # (N, C, H, W) in [0, 1]

STRENGTHS = (1, 2, 3, 4, 5)


def _rotate(pixels: Pixels, strength: int) -> Pixels:
    """Turns by 15° a strength, to either side by turns."""
    turned = pixels.copy()
    for side in (0, 1):
        angle = 15 * strength * (1 - 2 * side)
        turned[side::2] = ndimage.rotate(pixels[side::2], angle, axes=(2, 3), reshape=False, order=1)
    return turned


def _add_noise(pixels: Pixels, strength: int) -> Pixels:
    """Adds Gaussian noise with a standard deviation of 0.12 a strength."""
    noise = np.random.default_rng(strength).standard_normal(pixels.shape, dtype=np.float32)
    return pixels + np.float32(0.12 * strength) * noise


def _blur(pixels: Pixels, strength: int) -> Pixels:
    """Blurs by a Gaussian whose standard deviation is 0.6 pixels a strength, for images 28 wide."""
    sigma = 0.6 * strength * pixels.shape[-1] / 28
    blurred: Pixels = ndimage.gaussian_filter(pixels, sigma, axes=(2, 3))
    return blurred


CORRUPTIONS: dict[str, Callable[[Pixels, int], Pixels]] = {"rotation": _rotate, "noise": _add_noise, "blur": _blur}


def corrupt(images: Tensor, kind: str, strength: int) -> Tensor:
    """Makes images (N, C, H, W) of uint8 pixels harder; the same ones come out every time.

    Examples:
        >>> images = torch.zeros(2, 1, 9, 9, dtype=torch.uint8)
        >>> images[:, :, 4, 4] = 255
        >>> [corrupt(images, "blur", strength).max().item() for strength in (1, 3, 5)]
        [255, 121, 44]
    """
    pixels = images.numpy().astype(np.float32) / np.float32(255)
    harder = CORRUPTIONS[kind](pixels, strength)
    return torch.from_numpy((harder.clip(0, 1) * 255).round().astype(np.uint8))
