"""A captured pass as data: two graphs, where draws enter them, and what they are called with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from stochbn.inference.engine.code import Code


class CaptureError(Exception):
    """A model whose forward pass is no graph that draws can be folded into; the message says which line of it."""


@dataclass(frozen=True)
class Site:
    """Where draws enter the graph: a call of a BatchNorm or of a dropout layer.

    Attributes:
        layer: Its name.
        units: Shape of an input there, without the batch.
        dtype: Of the values there.
        arguments: What the drawn graph is handed for it, one tensor a name: `scale` and `shift`; where inputs are
            counted into their mini-batches, `mean`, `var`, `share`, `weight` and `bias`, or, if an input has one value
            a channel, `scale`, `shift`, `slope` and `bias`.
        dropout_call: For dropout, which of the layer's calls in a pass it is, from 1; 0 for BatchNorm.
        weight: Name of the parameter that is γ; None for none.
        bias: The same of β.
        eps: ε.
    """

    layer: str
    units: tuple[int, ...]
    dtype: torch.dtype
    arguments: tuple[str, ...] = ("scale", "shift")
    dropout_call: int = 0
    weight: str | None = None
    bias: str | None = None
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class Captured:
    """A forward pass in two graphs, and what they are to be called with. Threads may share it.

    Attributes:
        shared: Computes from N and the arguments what the draws have in common, a tuple.
        drawn: Computes the outputs (S · N, …) from these values, the parameters that it reads, S, N, and the arguments
            of every site.
        shared_arguments: Names of what `shared` takes: parameters, buffers, constants, and inputs (`input0`, …).
        drawn_arguments: Names of what `drawn` takes after the shared values.
        sites: In the order of the pass.
        constants: Tensors of the model that are neither parameters nor buffers.
        convolution_weights: Names of those that the CPU wants channels-last.
        bytes_a_row: Of the largest drawn value, for one input and one draw.
        code: What the graphs were compiled to.
    """

    shared: GraphModule
    drawn: GraphModule
    shared_arguments: tuple[str, ...]
    drawn_arguments: tuple[str, ...]
    sites: tuple[Site, ...]
    constants: Mapping[str, Tensor]
    convolution_weights: frozenset[str]
    bytes_a_row: int
    code: Code = field(default_factory=Code)

    def share(self, tensors: Mapping[str, Tensor], num_inputs: int, *, compiles: bool = False) -> list[Tensor]:
        """Computes what the draws have in common, and lists with it the parameters that they read."""
        given = [num_inputs, *(tensors[name] for name in self.shared_arguments)]
        run = self.code.get("shared", self.shared, given) if compiles else self.shared.forward
        return [*run(*given), *(tensors[name] for name in self.drawn_arguments)]

    def draw(
        self,
        shared: Sequence[Tensor],
        maps: Sequence[Tensor | None],
        num_draws: int,
        num_inputs: int,
        *,
        compiles: bool = False,
    ) -> Tensor:
        """Computes the outputs of some draws from what `share` returned and the draws' maps: (S, N, …)."""
        given: list[Any] = [*shared, num_draws, num_inputs, *maps]
        run = self.code.get("drawn", self.drawn, given) if compiles else self.drawn.forward
        outputs: Tensor = run(*given)
        stacked: Tensor = outputs.unflatten(0, (num_draws, -1))
        return stacked


class Prepared(NamedTuple):
    """Two graphs and all that they take besides inputs, for some draws."""

    captured: Captured
    tensors: dict[str, Tensor]  # parameters, buffers and constants by name
    maps: list[Tensor | None]  # of the sites
