"""What is shared and what is drawn, and that a graph depends on its arguments alone."""

import torch
from torch import Tensor, nn

from stochbn.inference.engine.affine import repeat_rows
from stochbn.inference.engine.graph import capture
from stochbn.statistics.calls import call_on_inputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.second(self.norm(h) + h)


def test_the_cut() -> None:
    captured = capture(Net(), call_on_inputs, torch.randn(5, 3), ["norm"], dropout=False)
    assert captured.shared_arguments == ("first.weight", "first.bias", "input0")
    assert captured.drawn_arguments == ("second.weight", "second.bias")
    (site,) = captured.sites
    assert (site.layer, site.units, site.weight, site.bias) == ("norm", (4,), "norm.weight", "norm.bias")
    assert captured.bytes_a_row == 4 * 4
    assert not list(captured.shared.parameters())
    assert not list(captured.drawn.parameters())


def test_arguments_decide() -> None:
    captured = capture(Net(), call_on_inputs, torch.randn(5, 3), ["norm"], dropout=False)
    weight, bias = torch.randn(4, 3), torch.randn(4)
    x = torch.randn(2, 3)
    (h,) = captured.shared(2, weight, bias, x)
    torch.testing.assert_close(h, (x @ weight.T + bias).relu())
    scale, shift = torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    head = torch.eye(2, 4), torch.zeros(2)
    outputs = captured.drawn(h, *head, 3, 2, scale, shift)
    torch.testing.assert_close(outputs.view(3, 2, 2), (h * scale + shift + h)[..., :2])


def test_rows_of_every_draw() -> None:
    x = torch.arange(6).view(2, 3)
    assert torch.equal(repeat_rows(x, 2), torch.cat([x, x]))
