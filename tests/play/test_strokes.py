"""Strokes become images such as the digits' data set has, wherever and however large they are drawn."""

import itertools
import math

import pytest
import torch

from stochbn.experiments.data.embedded import load_digits
from stochbn.play.strokes import INK, MAX_POINTS, draw_image, parse_strokes


def draw(strokes):
    return draw_image(parse_strokes(strokes))[0, 0].float() / 255


def insert_middles(stroke):
    middles = [[(a + b) / 2 for a, b in zip(start, end, strict=True)] for start, end in itertools.pairwise(stroke)]
    return [point for pair in zip(stroke, [*middles, stroke[-1]], strict=True) for point in pair]


def test_place_and_size_do_not_matter(drawn):
    for strokes in drawn.values():
        moved = [[[7 + 3.5 * x, 900 + 3.5 * y] for x, y in stroke] for stroke in strokes]
        assert (draw(moved) - draw(strokes)).abs().max() < 0.3  # a bit here or there, by rounding
        assert (draw(moved) - draw(strokes)).abs().mean() < 0.005


def test_the_pen_s_speed_and_direction_do_not_matter(drawn):
    for strokes in drawn.values():
        back = [stroke[::-1] for stroke in strokes]
        slow = [insert_middles(stroke) for stroke in strokes]
        for other in (back, slow):
            assert (draw(other) - draw(strokes)).abs().mean() < 0.01


def test_images_look_like_the_data(drawn):
    images = load_digits()[0].float() / 255
    ink = images.mean((1, 2, 3))
    assert ink.mean() == pytest.approx(INK, abs=0.01)
    low, high = ink.quantile(torch.tensor([0.01, 0.99])).tolist()
    for strokes in drawn.values():
        image = draw(strokes)
        assert low < image.mean() < high
        columns = (torch.arange(28) + 0.5) / 28
        assert image[0:4].max() > 0.5  # from the top row of blocks
        assert image[-4:].max() > 0.5  # to the bottom
        assert (image.sum(0) * columns).sum() / image.sum() == pytest.approx(0.5, abs=0.1)


def test_a_line_is_drawn_by_hand():
    """A vertical line is a block of columns around the middle, as wide as makes the ink right."""
    image = draw([[[3, 0], [3, 50]]])
    torch.testing.assert_close(image, image.flip(1), rtol=0, atol=1e-6)
    assert image[14, 14] == 1
    assert image[14, :7].max() < 0.1
    assert image.mean() == pytest.approx(INK, abs=0.05)


def test_dots_dashes_and_scribbles_are_images_too():
    generator = torch.Generator().manual_seed(0)
    scribble = (100 * torch.rand(MAX_POINTS, 2, generator=generator)).tolist()
    for strokes in ([[[5, 5]]], [[[5, 5], [5, 5]]], [[[0, 3], [90, 3]]], [[], [[1, 1]], []], [scribble]):
        image = draw(strokes)
        assert image.shape == (28, 28)
        assert 0 < image.mean() <= 1


@pytest.mark.parametrize(
    "values",
    [
        *(
            None,
            3,
            {},
            [],
            [[]],
            [3],
            "ab",
            [["ab"]],
            [[[1]]],
            [[[1, 2, 3]]],
            [[[1, None]]],
            [[["1", 2]]],
            [[[True, 2]]],
        ),
        *([[[math.nan, 1]]], [[[math.inf, 1]]], [[[1, 1e300]]], [[[10**400, 1]]]),
    ],
)
def test_what_is_no_drawing(values):
    with pytest.raises(ValueError, match="Expected strokes as lists of points"):
        parse_strokes(values)


def test_a_drawing_without_end():
    with pytest.raises(ValueError, match=f"Expected at most {MAX_POINTS} points, got {MAX_POINTS + 1}. Clear"):
        parse_strokes([[[1, 1]] * (MAX_POINTS + 1)])
