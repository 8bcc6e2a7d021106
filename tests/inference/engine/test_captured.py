"""What a captured pass says of itself."""

import torch
from torch import nn

from stochbn.inference.engine.graph import capture
from stochbn.statistics.calls import call_on_inputs


def test_sites_say_what_they_take() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=1e-3), nn.Dropout(0.5), nn.Flatten())
    options = {"layers": ["1"], "conditioned": ["1"], "dropout": True}
    captured = capture(model, call_on_inputs, torch.rand(2, 1, 6, 6), **options)
    norm, dropout = captured.sites
    assert (norm.layer, norm.units, norm.dropout_call, norm.eps) == ("1", (4, 4, 4), 0, 1e-3)
    assert norm.arguments == ("mean", "var", "share", "weight", "bias")
    assert (dropout.layer, dropout.units, dropout.dropout_call) == ("2", (4, 4, 4), 1)
    assert dropout.arguments == ("scale", "shift")
    assert captured.convolution_weights == {"0.weight"}
