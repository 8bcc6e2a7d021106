"""Two data sets that need no download: scikit-learn's digits, and letters A to J from matplotlib's fonts.

The letters ("glyphs") stand to the digits as notMNIST stands to MNIST: 28 × 28, bright on dark, filling the frame.
"""

from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
import sklearn.datasets  # type: ignore[import-untyped]
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

LETTERS = tuple("ABCDEFGHIJ")
_SIZE = 28
_SCALE = 4  # letters are drawn this much larger and then averaged down, for smooth edges
_FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10", "cmmi10", "cmsy10"),
)


def load_digits() -> tuple[Tensor, Tensor]:
    """Returns scikit-learn's 1,797 digits as images `(N, 1, 28, 28)`, uint8, and labels `(N,)`.

    They are 8 × 8 with 17 levels of grey; enlarged by bicubic interpolation.

    Examples:
        >>> images, labels = load_digits()
        >>> images.shape, labels[:3].tolist()
        (torch.Size([1797, 1, 28, 28]), [0, 1, 2])
    """
    digits = sklearn.datasets.load_digits()
    return enlarge(torch.from_numpy(digits.images)), torch.from_numpy(digits.target).long()


def enlarge(counts: Tensor) -> Tensor:
    """Turns levels of grey from 0 to 16, `(N, 8, 8)`, into images `(N, 1, 28, 28)`, uint8.

    Examples:
        >>> enlarge(torch.full((2, 8, 8), 16)).unique()
        tensor([255], dtype=torch.uint8)
    """
    images = counts.float()[:, None] * (255 / 16)
    images = F.interpolate(images, size=(_SIZE, _SIZE), mode="bicubic", align_corners=False)
    return images.round().clamp(0, 255).to(torch.uint8)


def render_glyphs(num_images: int = 1000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draws letters A to J in turn, in a random font, size, place and rotation.

    The same seed gives the same letters; a larger number begins with those of a smaller one.

    Returns:
        Images `(N, 1, 28, 28)`, uint8, and labels `(N,)`, 0 for A.

    Examples:
        >>> images, labels = render_glyphs(20)
        >>> images.shape, labels[:3].tolist()
        (torch.Size([20, 1, 28, 28]), [0, 1, 2])
    """
    return torch.from_numpy(_render(num_images, seed).copy()), torch.arange(num_images) % len(LETTERS)


@lru_cache(maxsize=1)  # 1,000 letters take a second and a half, and every evaluation asks for the same ones
def _render(num_images: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = {name: ImageFont.truetype(folder / f"{name}.ttf", 160) for name in _FONTS}
    images = np.zeros((num_images, 1, _SIZE, _SIZE), np.uint8)
    for index in range(num_images):
        images[index, 0] = _draw(LETTERS[index % len(LETTERS)], fonts[random.choice(_FONTS)], random)
    return images


def _draw(letter: str, font: ImageFont.FreeTypeFont, random: np.random.Generator) -> np.ndarray:
    left, top, right, bottom = (round(edge) for edge in font.getbbox(letter))
    tight = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(tight).text((-left, -top), letter, fill=255, font=font)
    tight = tight.rotate(random.uniform(-15, 15), Image.Resampling.BICUBIC, expand=True)
    tight = tight.crop(tight.getbbox())

    scale = random.uniform(22, 28) * _SCALE / max(tight.size)
    tight = tight.resize((max(1, round(tight.width * scale)), max(1, round(tight.height * scale))))
    canvas = Image.new("L", (_SIZE * _SCALE, _SIZE * _SCALE))
    shift = random.uniform(-2, 2, size=2) * _SCALE
    corner = [round((canvas.width - side) / 2 + move) for side, move in zip(tight.size, shift, strict=True)]
    canvas.paste(tight, (corner[0], corner[1]))
    return np.asarray(canvas.resize((_SIZE, _SIZE), Image.Resampling.BOX))
