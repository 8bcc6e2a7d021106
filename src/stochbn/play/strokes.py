"""Strokes of a pen → an image as the digits' data set would have it.

Its digits were scanned, scaled to 32 × 32 bits and counted in blocks of 4 × 4. All reach from the top row of blocks to
the bottom one, whatever their size on paper. Ink covers nearly the same share of each image, 0.31 ± 0.03 of it: a one
is a thick line, an eight a thin one. Strokes are scaled, inked and counted in the same way here, as a network that is
shown anything else is asked a question that it was never trained for.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stochbn.experiments.data.embedded import enlarge

MAX_POINTS = 20_000  # of one drawing; minutes of a fast pen
INK = 0.305  # mean share of ink in the data set's images
MAX_PLACES = 4096  # of points whose distances to all bits are computed
_BITS = 32
_MARGIN = 2.5  # bits between the middle of a stroke and the edge: half the width of a usual stroke
_WIDEST = 24.0  # bits: six of eight blocks, as wide as the data set's digits are
_RADII = (1.2, 5.5)  # least and most bits from the middle of a stroke to its edge
_STRETCH = 2.0  # the most that a flat drawing is made higher, or a wide one narrower


def parse_strokes(values: Any) -> list[Tensor]:
    """Checks what a page sent, `[[[x, y], …], …]`, and returns each stroke's points, (P, 2).

    Examples:
        >>> parse_strokes([[[0, 1], [2, 3.5]]])
        [tensor([[0.0000, 1.0000],
                [2.0000, 3.5000]], dtype=torch.float64)]
    """
    wrong = ValueError("Expected strokes as lists of points [x, y] in finite numbers, at least one.")
    if not isinstance(values, list) or not all(isinstance(stroke, list) for stroke in values):
        raise wrong
    count = sum(map(len, values))
    if count > MAX_POINTS:
        raise ValueError(f"Expected at most {MAX_POINTS} points, got {count}. Clear the drawing.")
    for point in (point for stroke in values for point in stroke):
        if not isinstance(point, list) or len(point) != 2:
            raise wrong
        if not all(type(x) in (int, float) and abs(x) < 1e6 for x in point):  # NaN is below nothing
            raise wrong
    if not count:
        raise wrong
    return [torch.tensor(stroke, dtype=torch.float64) for stroke in values if stroke]


def draw_image(strokes: Sequence[Tensor]) -> Tensor:
    """Draws strokes, (P, 2) each with x to the right and y down, as an image (1, 1, 28, 28) in uint8.

    Examples:
        >>> draw_image([torch.tensor([[5.0, 0.0], [5.0, 90.0]])]).shape
        torch.Size([1, 1, 28, 28])
    """
    placed = _place(torch.cat(list(strokes)).double()).split([len(stroke) for stroke in strokes])
    points = torch.cat([_fill(stroke) for stroke in placed])
    if len(points) > MAX_PLACES:  # a scribble, of which half a bit is more than enough
        points = (points * 2).round().unique(dim=0) / 2
    centres = torch.arange(_BITS, dtype=torch.float64) + 0.5
    rows, columns = torch.meshgrid(centres, centres, indexing="ij")
    bits = torch.stack([columns, rows], -1).view(-1, 2)
    distances = torch.cdist(bits, points).amin(1)  # (1024,)
    radius = float(distances.quantile(INK).clamp(*_RADII))
    counts = (distances <= radius).view(8, 4, 8, 4).sum((1, 3))  # 0 to 16, (8, 8)
    return enlarge(counts.unsqueeze(0))


def _place(points: Tensor) -> Tensor:
    """Scales points to the height of the image and to the width that digits have, and centres them."""
    low, high = points.amin(0), points.amax(0)
    width, height = (high - low).clamp_min(1e-9).tolist()
    inner = _BITS - 2 * _MARGIN
    scale = inner / max(width, height)
    tall = min(inner / height, scale * _STRETCH)
    wide = min(tall, max(scale / _STRETCH, (_WIDEST - 2 * _MARGIN) / width))
    return (points - (low + high) / 2) * torch.tensor([wide, tall], dtype=points.dtype) + _BITS / 2


def _fill(stroke: Tensor) -> Tensor:
    """Adds points along a stroke, (P, 2), so that the nearest point is nearly the nearest place of the line."""
    steps = stroke.diff(dim=0)
    longest = float(steps.norm(dim=1).max()) if len(steps) else 0.0
    num_parts = max(1, math.ceil(2 * longest))  # of half a bit
    fractions = torch.arange(num_parts, dtype=stroke.dtype) / num_parts
    between = stroke[:-1, None] + steps[:, None] * fractions[:, None]  # (P - 1, parts, 2)
    return torch.cat([between.flatten(0, 1), stroke[-1:]])
