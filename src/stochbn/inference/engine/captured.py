"""A captured pass as data: two graphs, where draws enter them, and what they are called with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule


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


@dataclass(frozen=True)
class Captured:
    """A forward pass in two graphs, and what they are to be called with.

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
    """

    shared: GraphModule
    drawn: GraphModule
    shared_arguments: tuple[str, ...]
    drawn_arguments: tuple[str, ...]
    sites: tuple[Site, ...]
    constants: Mapping[str, Tensor]
    convolution_weights: frozenset[str]
    bytes_a_row: int


class Prepared(NamedTuple):
    """Two graphs and all that they take besides inputs, for some draws."""

    captured: Captured
    tensors: dict[str, Tensor]  # parameters, buffers and constants by name
    maps: list[Tensor | None]  # of the sites
