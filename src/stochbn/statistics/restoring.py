"""What a forward pass binds again in a model, put back as it was."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


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
