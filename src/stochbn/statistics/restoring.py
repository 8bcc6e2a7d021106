"""What a pass may change of a model or a process, put back as it was."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd


@contextmanager
def evaluating(model: nn.Module, *, dropout: bool = False) -> Iterator[None]:
    """Puts every module in eval mode, dropout layers in training mode if asked, and each back as it was."""
    changed = []
    try:
        for module in model.modules():
            wanted = dropout and isinstance(module, _DropoutNd)
            if module.training != wanted:
                changed.append((module, module.training))
                module.training = wanted
        with keeping_tensors(model):
            yield
    finally:
        for module, mode in changed:
            module.training = mode


@contextmanager
def keeping_tensors(model: nn.Module) -> Iterator[None]:
    """Restores buffers and tensor attributes that a forward pass of the model binds again, such as a running average.

    What it binds under `vmap` would be a tensor that is dead outside.
    """
    places = [place for module in model.modules() for place in (module._buffers, module.__dict__)]
    before = [dict(place) for place in places]
    try:
        yield
    finally:
        for place, kept in zip(places, before, strict=True):
            if len(place) == len(kept) and all(map(operator.is_, place.values(), kept.values())):
                continue
            bound = [key for key, value in place.items() if isinstance(value, Tensor) and kept.get(key) is not value]
            lost = [key for key, value in kept.items() if isinstance(value, Tensor) and place.get(key) is not value]
            for key in (*bound, *lost):
                if key in kept:
                    place[key] = kept[key]
                else:
                    del place[key]


@contextmanager
def preserving_rng(device: torch.device) -> Iterator[None]:
    """Restores the state of torch's generators, the CPU's and the device's, on exit."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
