"""Draws × batch → outputs for any model: all draws at once under `vmap`, or one by one, on a twin of the model."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from stochbn.inference.engine.affine import normalise_with
from stochbn.inference.engine.captured import CaptureError
from stochbn.inference.engine.dropout import DropoutSites, dropout_key, dropout_map
from stochbn.inference.engine.identity import identify_model
from stochbn.inference.engine.sampling import Drawn
from stochbn.statistics.calls import Call, Called
from stochbn.statistics.items import copy_to, describe, num_examples
from stochbn.statistics.layers import buffer_names
from stochbn.statistics.normalization import BatchNormCall, call_answered
from stochbn.statistics.restoring import keeping_tensors
from stochbn.statistics.twin import make_twin


class Output(Called):
    """A call that returns the tensor to average."""

    def forward(self, item: Any) -> Tensor:
        output = super().forward(item)
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor) or not (output.is_floating_point() and output.dim()):
            got = (
                f"{output.dtype} of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            )
            raise TypeError(
                f"Expected the model to return a floating-point tensor with a row an input, got {got}. "
                "Pick it out with call=, which gets what is predicted on: of a tensor "
                "call=lambda model, x: model(x)['out'], of a loader's batches (x, y) "
                "call=lambda model, batch: model(batch[0])['out']."
            )
        if output.shape[0] != (count := num_examples(item)):
            raise ValueError(
                f"Expected a row of output for each of {count} inputs of {describe(item)}, whose first tensor counts "
                f"them, got {output.shape[0]} rows. If an input has several, group them: "
                "call=lambda model, x: model(x).unflatten(0, (x.shape[0], -1)).transpose(1, 2). Of a loader's (x, y) "
                "call gets the whole: x is then its first part."
            )
        return output


class Stacking:
    """Passes of draws through a twin of a model. For one thread at a time: make one a call.

    Args:
        model: Left as it is.
        call: How it is called on an item.
        dropout_seed: Makes dropout's masks; None for no dropout.
        is_kept: Whether it may serve for more than one call.
    """

    def __init__(self, model: nn.Module, call: Call, dropout_seed: int | None, *, is_kept: bool = False) -> None:
        self.output = Output(make_twin(model), call)
        self._draw = torch.zeros((), dtype=torch.int64, device="cpu")
        self._sites: DropoutSites | None = None
        if dropout_seed is not None:

            def drop(layer: Any, name: str, call: int, x: Tensor) -> Tensor:
                key = dropout_key(dropout_seed, name, call)
                scale, shift = dropout_map(layer, key, self._draw, tuple(x.shape[1:]), x.dtype)
                return x * scale if shift is None else x * scale + shift

            self._sites = DropoutSites(self.output.model, drop)
        self._is_kept = is_kept
        self._before = self._identify() if is_kept else None

    def is_as_new(self) -> bool:
        """Returns whether the passes left nothing behind, such as a counter. Looks once, then takes that as so."""
        if self._before is not None:
            self._is_kept, self._before = self._identify() == self._before, None
        return self._is_kept

    def _identify(self) -> Hashable:
        try:
            return identify_model(self.output.model)
        except CaptureError:
            return object()  # like no other

    def run(self, draws: Drawn, item: Any) -> Tensor:
        """Runs all draws together: (S, N, …). Raises if the model cannot be vectorised."""
        flat, structure = tree_flatten(draws)  # what vmap takes apart fastest

        def forward(*values: Tensor) -> Tensor:
            return self._forward(tree_unflatten(list(values), structure), own)

        own = copy_to(item, draws.indices.device)  # the model may write into what it is given
        warn_of_loops: Any = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
        warn_of_loops(False)  # within vmap, over what it cannot stack: nothing that a user could change
        try:
            with keeping_tensors(self.output.model):  # what is bound under vmap would be dead in the next pass
                outputs: Tensor = vmap(forward, randomness="different")(*flat)
            return outputs
        finally:
            warn_of_loops(True)

    def run_one_by_one(self, draws: Drawn, item: Any) -> Tensor:
        """Runs the model as its author meant it, once a draw: (S, N, …)."""
        outputs = []
        for index in range(len(draws.indices)):
            draw = Drawn(*tree_map(lambda values, index=index: values[index], draws))
            with keeping_tensors(self.output.model):
                outputs.append(self._forward(draw, copy_to(item, draw.indices.device)))
        return torch.stack(outputs)

    def _forward(self, draw: Drawn, item: Any) -> Tensor:
        if self._sites is not None:
            self._draw = draw.indices
            self._sites.begin()
        if not draw.buffers:
            plain: Tensor = self.output(item)
            return plain
        buffers = {f"model.{name}": values for name, values in draw.buffers.items()}
        means = {id(values) for values in draw.buffers.values()}
        shares = {id(draw.buffers[buffer_names(name)[0]]): share for name, share in draw.shares.items()}

        def answer(call: BatchNormCall) -> Tensor:
            if call.training or id(call.running_mean) not in means:
                return F.batch_norm(*call)
            return normalise_with(call, shares.get(id(call.running_mean)), num_examples(item))

        # Without tie_weights=False a layer that two parents share would get its drawn buffers back as its own.
        run = partial(functional_call, self.output, buffers, (item,), tie_weights=False)
        output: Tensor = call_answered(answer, run)
        return output
