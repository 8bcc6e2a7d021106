"""What must be the same on every rank, in words short enough to be exchanged and shown."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import Draws
from stochbn.distributions.files import pack
from stochbn.distributions.storage import brief, seal
from stochbn.statistics.calls import unwrap
from stochbn.statistics.parts import Peers
from stochbn.statistics.twin import make_snapshot

_PLAIN = (bool, int, float, str, type(None))


def check_call(function: Callable[..., Any], peers: Peers, **arguments: Any) -> dict[str, Any]:
    """Raises if ranks call a function with different options, statistics or models. Returns its options, all of them.

    Args:
        function: The plain one.
        peers: The ranks.
        arguments: Those of the call. Its data are each rank's own.
    """
    bound = inspect.signature(function).bind(**arguments)  # which names an option that it does not have
    bound.apply_defaults()
    data = {"loader", "inputs"}
    values = {name: describe(value) for name, value in bound.arguments.items() if name not in data | {"progress"}}
    peers.agree({"function": function.__name__, **values})
    options = {name: value for name, value in bound.arguments.items() if name not in {"model", "stats"} | data}
    return options | {"progress": options["progress"] and peers.rank == 0}


def describe(value: Any) -> str:
    """Puts an argument into words that are equal where it is.

    Examples:
        >>> describe(nn.BatchNorm1d(3))
        'BatchNorm1d of 2 parameters and 3 buffers (...)'
        >>> describe([1, None]), describe(len)
        ('[1, None]', 'len')
    """
    if isinstance(value, nn.Module):
        model = unwrap(value)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        shapes = {name: list(buffer.shape) for name, buffer in buffers.items()}
        code = digest(parameters, about=shapes)
        return f"{type(model).__name__} of {len(parameters)} parameters and {len(buffers)} buffers ({code})"
    if isinstance(value, Distribution):
        header, tensors = pack(value)
        return f"{value} ({digest(tensors, about=header)})"
    if isinstance(value, Draws):
        return f"{len(value)} draws ({digest(value.buffers, about=value.temperature)})"
    if isinstance(value, (Sequence, nn.ModuleList)) and not isinstance(value, str):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, _PLAIN):
        return brief(repr(value))
    if callable(value):  # two processes have no object in common, but names
        return getattr(value, "__qualname__", type(value).__name__)
    return brief(value)


def digest(tensors: Mapping[str, Tensor], about: object = None) -> str:
    """Returns a few letters that are the same for the same tensors, to every bit."""
    return str(seal({"about": about}, {name: tensor.detach().cpu() for name, tensor in tensors.items()})["checksum"])[
        :8
    ]


def with_first_buffers(model: Any, peers: Peers) -> Any:
    """Returns a model with the buffers of rank 0's; several models, each so.

    DistributedDataParallel gives all ranks those of rank 0 before a forward pass, and each changes them during it. So
    after training they differ. Then others than rank 0 get a copy of their model, which stays as it is.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList):
        return [with_first_buffers(one, peers) for one in model]
    model = unwrap(model)
    buffers = {name: buffer.detach().cpu() for name, buffer in model.named_buffers()}
    if len(set(peers.gather(digest(buffers)))) == 1:
        return model
    given = peers.first(buffers)
    if peers.rank == 0:
        return model
    copied = make_snapshot(model)
    for name, buffer in copied.named_buffers():
        buffer.copy_(given[name])
    return copied
