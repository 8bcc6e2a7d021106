"""Draws × batch → outputs, as fast as the arithmetic allows.

Draws are stacked with `vmap`, so that each weight is read once for all of them. Three things make that faster than
as many plain passes. BatchNorm with drawn statistics is an affine map, whose scale and shift are folded ahead, for all
draws. What comes before the first drawn number is computed once. And convolutions get their weights channels-last, the
layout in which the kernels need not reorder.
"""

import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import Draws
from stochbn.inference.affine import Affine, DrawnLayer, DrawnNormalization, fold
from stochbn.inference.compilation import CompiledPass, compiled_pass, fingerprint
from stochbn.inference.dropout import DropoutMasks, dropout_masks
from stochbn.inference.sharing import Recording
from stochbn.statistics.calls import Call, Called, device_of
from stochbn.statistics.channels_last import channels_last_weights
from stochbn.statistics.items import copy_to, fill, map_leaves, num_examples, tensors_in
from stochbn.statistics.layers import all_batch_norms, buffer_names, dropout_layers
from stochbn.statistics.mini_batches import STACKED_EXAMPLES
from stochbn.statistics.restoring import evaluating, keeping_tensors

Source = Distribution | Draws | None


class Drawn(NamedTuple):
    """Some draws, each tensor with one row a draw.

    Buffers by name; by layer affine maps, and what part of its mini-batch an input is; and the draws' indices.
    """

    buffers: dict[str, Tensor]
    affines: dict[str, Affine]
    shares: dict[str, Tensor]
    indices: Tensor


# The largest activation of a stack is kept below this (32 MB, a large cache); before it is known, each input value is
# taken to become so many.
STACKED_BYTES = 2**25
CHANNELS = 64
# Draws are made ahead, in blocks of at most so many numbers (2 MB in float64), so that those too are bounded.
BLOCK_NUMBERS = 2**18
FIRST_DRAWS = 64  # before it is known how many numbers a draw has


class Predictor(Called):
    """A call that returns the outputs to average."""

    def forward(self, item: Any) -> Tensor:
        output = super().forward(item)
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor) or not (output.is_floating_point() and output.dim()):
            got = (
                f"{output.dtype} of shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            )
            raise TypeError(
                f"Expected the model to return a floating-point tensor with a row an input, got {got}. "
                "Pick it out with call=, for example call=lambda model, x: model(x)['out']."
            )
        return output


class Network:
    """One model and its draws."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        source: Source,
        *,
        num_samples: int,
        seed: int,
        dropout: bool,
        compiles: bool = False,
        num_masks: int | None = None,
    ) -> None:
        self.model = model
        self.call = call
        self.called = Predictor(model, call)
        self.source = source
        self.seed = seed
        self.dropout = dropout
        self.masks: DropoutMasks | None = None
        self.device = device_of(model)
        self.stacks = True  # until the model shows that it cannot be vectorised
        self.reuses = True  # until it shows that its passes cannot be shared, or not channels-last
        self.compiles = compiles
        self.compiled_rows = 0
        self.bytes_a_draw = _BYTES.setdefault(model, {})  # by the shapes of a batch
        self.temperature = 1.0
        self.num_masks = num_masks  # after so many draws, dropout's masks begin again
        self.block: tuple[range, Drawn] = (range(0), Drawn({}, {}, {}, torch.arange(0)))  # the draws at hand
        self.layers: dict[str, Any] = {} if source is None else dict(all_batch_norms(model))
        self.weights: dict[str, Tensor] | None = None
        if dropout:
            dropout_layers(model)
        if isinstance(source, Draws):
            self.num_draws = len(source)
            self._load(range(self.num_draws))
        else:
            self.num_draws = num_samples if dropout or source is not None else 1
        if isinstance(source, Distribution):
            self._load(range(min(FIRST_DRAWS, self.num_draws)))
            warn_of_dropout(source, dropout, stacklevel=5)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Has the model in eval mode and with this network's dropout masks. One model may serve several networks."""
        with evaluating(self.model):
            if self.dropout:
                with dropout_masks(self.model, self.seed) as self.masks:
                    yield
            else:
                yield

    def run(self, item: Any, chunk_size: int | None, first: int = 0, last: int | None = None) -> Iterator[Tensor]:
        """Yields outputs (s, N, …) of successive draws, from the first to before the last; without the temperature."""
        last = self.num_draws if last is None else last
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(item))
        # The mode holds within this generator only: whoever consumes it runs between two chunks in a mode of their own.
        with torch.set_grad_enabled(wants_gradient):
            if self.compiles and self.num_draws > 1 and not wants_gradient:
                chunks = self._run_compiled(item, chunk_size, first, last)
            else:
                chunks = self._run_eager(item, chunk_size, first, last)
        while True:
            with torch.set_grad_enabled(wants_gradient):
                outputs = next(chunks, None)
            if outputs is None:
                return
            yield outputs

    def _run_eager(self, item: Any, chunk_size: int | None, first: int, last: int) -> Iterator[Tensor]:
        batch = _Batch(item, self.device)
        while first < last:
            stop = min(first + (chunk_size or self._suitable_size(item)), last)
            if self.num_draws == 1 or chunk_size == 1:
                yield self._looped(first, stop, batch)
            else:
                yield self._stacked_if_possible(first, stop, batch)
            first = stop

    def _run_compiled(self, item: Any, chunk_size: int | None, first: int, last: int) -> Iterator[Tensor]:
        count = num_examples(item)
        self.compiled_rows = max(self.compiled_rows, count)
        item = copy_to(fill(item, self.compiled_rows), self.device)  # one shape, so that one code serves all batches
        if not chunk_size and _shapes(item) not in self.bytes_a_draw:
            with suppress(Exception):  # to know how large a stack may be; compiling will report what is wrong
                self._stacked(first, first + 1, _Batch(item, self.device))
        size = chunk_size or self._suitable_size(item)
        size = math.ceil((last - first) / math.ceil((last - first) / size))  # equal chunks: each size is compiled apart
        named = itertools.chain(
            self.called.named_parameters(remove_duplicate=False), self.called.named_buffers(remove_duplicate=False)
        )
        tensors = {name: tensor.detach() for name, tensor in named} | self._weights()
        fixed = [*tensors.values(), *tensors_in(item)]
        code: CompiledPass | None = None
        for start in range(first, last, size):
            stop = min(start + size, last)
            begin = max(first, stop - size)  # a last, smaller chunk goes over some draws again
            drawn, structure = tree_flatten(self._draws(begin, stop))

            def stack(*flat: Tensor, structure: Any = structure) -> Tensor:
                given = iter(flat)
                swapped = dict(zip(tensors, given, strict=False))
                own = map_leaves(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, item)
                return self._stack(swapped, tree_unflatten(list(given), structure), own)

            if code is None:
                constants = repr(map_leaves(lambda leaf: ... if isinstance(leaf, Tensor) else leaf, item))
                autocast = torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)
                seed = self.seed if self.dropout else None
                kind = (self.call, seed, tuple(tensors), structure, constants, autocast)
                code = compiled_pass(self.model, (kind, fingerprint(self.model)), stack, fixed, drawn)
                code.begin()
            yield code(fixed, drawn)[start - begin :, :count]
        if code is not None:
            code.begin()  # so that nothing of the batch is kept

    def _suitable_size(self, item: Any) -> int:
        guess = CHANNELS * sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(item))
        bound = STACKED_BYTES // max(1, self.bytes_a_draw.get(_shapes(item)) or guess)
        return max(1, min(STACKED_EXAMPLES // max(1, num_examples(item)), bound))

    def _stacked_if_possible(self, start: int, stop: int, batch: "_Batch") -> Tensor:
        problem: Exception | None = None
        while self.stacks:
            try:
                return self._stacked(start, stop, batch)
            except Exception as error:  # whatever it is, the loop below runs the model as its author meant it
                problem = error
                # Two steps down: without sharing and reordered weights, which most such models bear, then by a loop.
                self.stacks = self.reuses
                self.reuses = False
        outputs = self._looped(start, stop, batch)
        if problem is not None:
            reason = str(problem).strip().split("\n")[0]
            warnings.warn(
                f"{type(self.model).__name__} cannot be vectorised over draws, so they are computed one by one "
                f"({type(problem).__name__}: {reason}). chunk_size=1 says that this is meant.",
                stacklevel=4,
            )
        return outputs

    def _stacked(self, start: int, stop: int, batch: "_Batch") -> Tensor:
        weights = self._weights() if self.reuses and not torch.is_grad_enabled() else {}
        item, recording = batch.begin() if self.reuses else (batch.copy(), None)
        with keeping_tensors(self.model):
            return self._stack(weights, self._draws(start, stop), item, recording)

    def _stack(self, weights: dict[str, Tensor], draws: Drawn, item: Any, recording: Recording | None = None) -> Tensor:
        normalization = DrawnNormalization({}, recording, num_examples(item) if draws.shares else 0)
        flat, structure = tree_flatten(draws)  # what vmap takes apart fastest

        def forward(*values: Tensor) -> Tensor:
            draw: Drawn = tree_unflatten(list(values), structure)
            normalization.layers = self._drawn_layers(draw)
            return self._forward({**weights, **draw.buffers}, draw.indices, item, normalization)

        outputs: Tensor = vmap(forward, randomness="different")(*flat)
        self.bytes_a_draw[_shapes(item)] = normalization.most_bytes
        return outputs

    def _looped(self, start: int, stop: int, batch: "_Batch") -> Tensor:
        outputs = []
        for index in range(start, stop):
            draw = Drawn(*tree_map(lambda values: values[0], self._draws(index, index + 1)))
            mode = None
            item = batch.copy()
            if draw.shares:
                mode = DrawnNormalization(self._drawn_layers(draw), num_inputs=num_examples(item), stacked=False)
            outputs.append(self._forward(draw.buffers, draw.indices, item, mode))
        return torch.stack(outputs)

    def _drawn_layers(self, draw: Drawn) -> dict[int, DrawnLayer]:
        """Returns a draw's layers by the id of the running mean that `batch_norm` will be given."""
        return {
            id(draw.buffers[f"model.{buffer_names(name)[0]}"]): (self.layers[name], affine, draw.shares.get(name))
            for name, affine in draw.affines.items()
        }

    def _forward(
        self, tensors: dict[str, Tensor], index: Tensor, item: Any, mode: AbstractContextManager[Any] | None = None
    ) -> Tensor:
        if self.masks is not None:
            self.masks.select(index)
        with mode or nullcontext():
            # Without tie_weights=False a layer that two parents share would get its drawn buffers back as its own.
            output: Tensor = functional_call(self.called, tensors, (item,), tie_weights=False)
        return output

    def _weights(self) -> dict[str, Tensor]:
        if self.weights is None:
            self.weights = channels_last_weights(self.called)
        return self.weights

    def _draws(self, start: int, stop: int) -> Drawn:
        if self.source is None:
            return Drawn({}, {}, {}, self._indices(range(start, stop)))
        draws, block = self.block
        if not (start in draws and stop - 1 in draws):
            numbers = sum(values[0].numel() for values in block.buffers.values())
            ahead = max(stop - start, BLOCK_NUMBERS // numbers)
            self._load(range(start, min(start + ahead, self.num_draws)))
            draws, block = self.block
        part = slice(start - draws[0], stop - draws[0])
        buffers = {name: values[part] for name, values in block.buffers.items()}
        if torch.is_grad_enabled():  # the maps carry gradients to the layers' parameters, so each pass makes its own
            affines = fold(self.layers, buffers)
        else:
            affines = {name: (scale[part], shift[part]) for name, (scale, shift) in block.affines.items()}
        shares = {name: values[part] for name, values in block.shares.items()}
        return Drawn(buffers, affines, shares, block.indices[part])

    def _indices(self, draws: range) -> Tensor:
        index = torch.arange(draws.start, draws.stop, device=self.device)
        return index if self.num_masks is None else index % self.num_masks

    def _load(self, draws: range) -> None:
        if isinstance(self.source, Distribution):
            made = _sample(self.source, len(draws), self.seed, draws[0])
        else:
            assert self.source is not None
            made = self.source
        self.temperature = made.temperature
        made = made.match(self.model)
        buffers = {f"model.{name}": values for name, values in made.buffers.items()}
        with torch.no_grad():
            affines = fold(self.layers, buffers)
        self.block = (draws, Drawn(buffers, affines, dict(made.shares), self._indices(draws)))


def _shapes(item: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors_in(item))


# What the largest activation of a draw took, once it is known.
_BYTES: "WeakKeyDictionary[nn.Module, dict[tuple[torch.Size, ...], int]]" = WeakKeyDictionary()


def _sample(source: Distribution, count: int, seed: int, first: int) -> Draws:
    """Draws networks, or returns the last ones of a fitted distribution if they are asked for again."""
    asked = (count, seed, first)
    last = _LAST.get(source)
    if last is not None and last[0] == asked:
        return last[1]
    draws = source.sample(count, seed=seed, first=first)
    if isinstance(source, Distribution):  # which never changes; of any other kind nothing is known
        _LAST[source] = (asked, draws)
    return draws


# One input after the other asks for the same networks again and again, and drawing them can take as long as a pass.
_LAST: "WeakKeyDictionary[Distribution, tuple[tuple[int, int, int], Draws]]" = WeakKeyDictionary()


def warn_of_dropout(source: Distribution, dropout: bool, stacklevel: int) -> None:
    """Warns of statistics that were fitted under another rule."""
    if source.dropout != dropout:
        warnings.warn(
            f"The statistics were fitted with dropout={source.dropout} and are used with dropout={dropout}; "
            "fit them with the same.",
            stacklevel=stacklevel,
        )


class _Batch:
    """One batch on its way through all passes."""

    def __init__(self, item: Any, device: torch.device) -> None:
        self._item = item
        self._device = device
        self._copy: Any = None
        self._recording: Recording | None = None

    def copy(self) -> Any:
        """Returns the item for one pass, which may write into it."""
        return copy_to(self._item, self._device)

    def begin(self) -> tuple[Any, Recording]:
        """Returns the item, and what earlier passes over it have computed for this one."""
        if self._recording is not None and self._recording.reusable:
            self._recording.rewind()
        else:
            self._copy = self.copy()
            self._recording = Recording(tensors_in(self._copy))
        return self._copy, self._recording
