"""What is shared and what is drawn, and that a graph depends on its arguments alone."""

import pytest
import torch
from torch import Tensor, nn

from stochbn.inference.engine.affine import apply_to_rows, pool_before, repeat_rows
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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layers", [["1"], ["1", "5"]])
def test_pooling_comes_before_the_draws(in_place: bool, layers: list[str]) -> None:
    def block(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(in_place), nn.MaxPool2d(2, stride=1, padding=1)]

    model = nn.Sequential(*block(3), *block(4))
    captured = capture(model, call_on_inputs, torch.randn(5, 3, 8, 8), layers, dropout=False)
    where = [[node.target for node in part.graph.nodes] for part in (captured.shared, captured.drawn)]
    assert [targets.count(pool_before) for targets in where] == [1, len(layers) - 1]
    assert captured.bytes_a_row == 4 * 4 * 7 * 7  # what the first pooling leaves


def test_pooling_first_gives_the_same_bits() -> None:
    """Also where γ < 0 turns the order of values around, or is 0."""
    x, weight = torch.randn(6, 5, 8, 8), torch.tensor([2.0, -1.0, 0.0, -0.5, 1.0])
    scale, shift = torch.rand(3, 1, 5, 1, 1) * weight.view(-1, 1, 1), torch.randn(3, 1, 5, 1, 1)
    options = ([3, 2], [2, 2], [1, 1], [1, 1], True)
    pool = torch.ops.aten.max_pool2d.default
    after = pool(apply_to_rows(x, scale, shift, num_draws=3, is_drawn=False).relu(), *options)
    before = apply_to_rows(pool_before(x, weight, *options), scale, shift, num_draws=3, is_drawn=False).relu()
    assert torch.equal(before, after)


def test_pooling_stays_where_something_else_reads_what_it_pools() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x).relu()
            return nn.functional.max_pool2d(h, 2).mean((2, 3)) + h.mean((2, 3))

    captured = capture(Branching(), call_on_inputs, torch.randn(5, 3, 8, 8), ["norm"], dropout=False)
    assert pool_before not in [node.target for node in (*captured.shared.graph.nodes, *captured.drawn.graph.nodes)]
