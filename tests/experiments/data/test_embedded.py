import torch

from stochbn.experiments.data.embedded import load_digits, render_glyphs


def test_digits_are_the_known_ones_enlarged():
    images, labels = load_digits()
    assert images.shape == (1797, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(images, load_digits()[0])


def test_glyphs_are_determined_by_their_seed():
    images, labels = render_glyphs(60, seed=3)
    again, _ = render_glyphs(100, seed=3)
    other, _ = render_glyphs(60, seed=4)
    assert torch.equal(images, again[:60])
    assert not torch.equal(images, other)
    assert labels.tolist() == list(range(10)) * 6
    assert render_glyphs(0)[0].shape == (0, 1, 28, 28)


def test_glyphs_belong_to_the_caller():
    images, _ = render_glyphs(10)
    expected = images.clone()
    images.zero_()
    assert torch.equal(render_glyphs(10)[0], expected)


def test_glyphs_are_varied_bright_letters_on_dark():
    images, _ = render_glyphs(200)
    assert images.shape == (200, 1, 28, 28)
    assert images.dtype == torch.uint8
    assert len({image.tobytes() for image in images.numpy()}) == 200
    assert (images.flatten(1).max(1).values > 120).all()
    ink = images.float().flatten(1).mean(1) / 255
    assert ink.min() > 0.02
    assert ink.max() < 0.7
