"""One model and its draws → outputs of each draw, as fast as the arithmetic allows, from any thread.

Two paths lead there. A pass that is worth it is captured once, as a graph with the draws folded into its batch
(`graph`). What cannot be captured, or is over sooner than a capture, runs stacked on a twin of the model (`stacking`).
Which one depends on the model and on the call, never on what was called before, so equal calls give equal bits. To
count earlier calls would make repeated small ones faster, but which bits a thread gets would then depend on others.
"""

import contextlib
import copy
import logging
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from stochbn.distributions.base import Distribution
from stochbn.inference.engine.affine import fold, fold_single
from stochbn.inference.engine.captured import Captured, CaptureError, Prepared, Site
from stochbn.inference.engine.code import TRACING, first_line
from stochbn.inference.engine.dropout import dropout_key, dropout_map
from stochbn.inference.engine.graph import capture
from stochbn.inference.engine.identity import identify_call, identify_item, identify_model
from stochbn.inference.engine.sampling import Drawn, Sampler, Source, warn_of_dropout
from stochbn.inference.engine.stacking import Stacking
from stochbn.inference.engine.verification import verify
from stochbn.statistics.calls import Call, device_of
from stochbn.statistics.items import copy_to, fill, num_examples, tensors_in
from stochbn.statistics.layers import buffer_names, dropout_layers
from stochbn.statistics.restoring import raise_if_interrupted, run_uninterrupted

log = logging.getLogger("stochbn")

# Work is counted in uses of a parameter, one for each parameter, draw and input; an input value counts like so many
# parameters, which makes up for convolutions. A capture takes about as long as this much of it.
WORTH_CAPTURING = 10**9
USES_A_VALUE = 64
# A chunk of draws has at least so many rows, so that weights are not read more often than they need be, and more while
# its largest value stays in the cache.
CHUNK_ROWS = 64
CHUNK_BYTES = 2**21
STACKED_BYTES = 2**25  # on a twin, where values are only guessed: each input value becomes USES_A_VALUE
KEPT_NUMBERS = 2**23  # of the maps that are kept for later calls (32 MB)
FREED_BYTES = 31 * 2**20
MAX_GRAPHS = 16  # of a model; then the oldest goes


class Network:
    """One model and its draws. Threads may share it.

    Args:
        model: Left as it is.
        call: How it is called on an item.
        source: Of the draws; None for none.
        num_samples: S, unless `source` brings its own.
        seed: Of draws and masks.
        dropout: Whether dropout layers drop.
        compiles: Whether graphs are compiled.
        num_masks: After so many draws, dropout's masks begin again.
        num_batches: How many batches are to come; None for many.
    """

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
        num_batches: int | None = None,
    ) -> None:
        self.model = model
        self.dropout = dropout
        self.call = call
        self._source = source
        self._seed = seed
        self._compiles = compiles
        self._num_masks = num_masks
        self._num_batches = num_batches
        self.device = device_of(model)
        self._dropout_layers = dropout_layers(model) if dropout else {}
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.is_drawn = dropout or source is not None
        num_samples = num_samples if self.is_drawn else 1
        self._sampler = Sampler(model, source, num_samples=num_samples, seed=seed, num_masks=num_masks)
        self.num_draws, self.temperature = self._sampler.num_draws, self._sampler.temperature
        self._kept = _Kept()
        self._compiled_rows = 0
        if isinstance(source, Distribution):
            warn_of_dropout(source, dropout, stacklevel=5)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_kept": _Kept()}

    def to(self, device: torch.device) -> "Network":
        """Returns the same with a copy of the model on another device."""
        moved = copy.copy(self)
        moved.model = copy.deepcopy(self.model).to(device)
        moved.device = device_of(moved.model)
        moved._sampler = Sampler(
            moved.model, self._source, num_samples=self.num_draws, seed=self._seed, num_masks=self._num_masks
        )
        return moved

    def run(self, item: Any, chunk_size: int | None, first: int = 0, last: int | None = None) -> Iterator[Tensor]:
        """Yields outputs (s, N, …) of successive draws, from the first to before the last; without the temperature."""
        before = torch.is_grad_enabled()
        wants_gradient = before and any(tensor.requires_grad for tensor in tensors_in(item))
        chunks = self._run(item, chunk_size, first, self.num_draws if last is None else last, wants_gradient)
        while True:
            # The mode holds within the passes only. It is set back without a call of Python's, which Ctrl-C could end.
            try:
                torch._C._set_grad_enabled(wants_gradient)
                outputs = next(chunks, None)
            finally:
                torch._C._set_grad_enabled(before)
            if outputs is None:
                return
            yield outputs

    def prepare(self, item: Any) -> Prepared:
        """Returns what a pass of all draws over such items consists of.

        Raises:
            CaptureError: It cannot be captured.
        """
        with torch.no_grad():
            captured = self._capture_once(graph := self._find_graph(item), item)
            if captured is None:
                raise CaptureError(graph.problem)
            tensors = self._model_tensors(captured)
            return Prepared(captured, tensors, self._find_maps(captured, 0, self.num_draws, tensors))

    def _run(self, item: Any, chunk_size: int | None, first: int, last: int, wants_gradient: bool) -> Iterator[Tensor]:
        captured = None
        # Gradients take the other path, where they stop or go through as the model's author meant it.
        if self.is_drawn and not wants_gradient and (self._compiles or chunk_size != 1):
            captured = self._find_captured(item, last - first)
        if captured is not None:
            yield from self._run_captured(captured, item, chunk_size, first, last)
        else:
            yield from self._run_stacked(item, chunk_size, first, last)

    def _find_captured(self, item: Any, num_draws: int) -> Captured | None:
        """Returns the graph of a pass over such items, if it can be captured and the rule wants it."""
        if self._num_batches is not None and not self._compiles:
            values = sum(tensor.numel() for tensor in tensors_in(item))
            work = num_draws * (num_examples(item) * self._num_parameters + USES_A_VALUE * values)
            if self._num_batches * work <= WORTH_CAPTURING:
                return None
        captured = self._capture_once(graph := self._find_graph(item), item)
        if captured is None and self._compiles:
            raise RuntimeError(
                f"Expected {type(self.model).__name__} to compile, got a forward pass that cannot be captured: "
                f"{graph.problem}. Leave compile= off."
            )
        return captured

    def _run_captured(
        self, captured: Captured, item: Any, chunk_size: int | None, first: int, last: int
    ) -> Iterator[Tensor]:
        count, compiles = num_examples(item), self._compiles
        if compiles:  # for one shape, so that one code serves all batches
            self._compiled_rows = max(self._compiled_rows, count)
            item = fill(item, self._compiled_rows)
        num_inputs, tensors = num_examples(item), self._tensors_of(captured, item)
        size = chunk_size or max(1, CHUNK_ROWS // num_inputs, CHUNK_BYTES // (captured.bytes_a_row * num_inputs))
        size = math.ceil((last - first) / math.ceil((last - first) / size))  # equal chunks
        shared = captured.share(tensors, num_inputs, compiles=compiles)
        for start in range(first, last, size):
            stop = min(start + size, last)
            begin = max(first, stop - size) if compiles else start  # a last, smaller chunk: some draws again
            maps = self._find_maps(captured, begin, stop, tensors)
            outputs = captured.draw(shared, maps, stop - begin, num_inputs, compiles=compiles)
            yield outputs[start - begin :, :count]

    def _run_stacked(self, item: Any, chunk_size: int | None, first: int, last: int) -> Iterator[Tensor]:
        try:
            stacking = self._kept.idle.pop()  # one for each thread; to make one takes a millisecond
        except IndexError:
            stacking = self._make_stacking(is_kept=self._num_batches != 1)
        item = copy_to(item, self.device)
        values = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(item))
        most = min(CHUNK_ROWS // num_examples(item), STACKED_BYTES // max(1, USES_A_VALUE * values))
        size = chunk_size or max(1, most)
        for start in range(first, last, size):
            draws = self._sampler.take(start, min(start + size, last))
            if chunk_size == 1 or self.num_draws == 1:
                yield stacking.run_one_by_one(draws, item)
            else:
                yield self._stack_if_possible(stacking, draws, item)
        if stacking.is_as_new():
            self._kept.idle.append(stacking)

    def _make_stacking(self, *, is_kept: bool = False) -> Stacking:
        return Stacking(self.model, self.call, self._seed if self.dropout else None, is_kept=is_kept)

    def _stack_if_possible(self, stacking: Stacking, draws: Drawn, item: Any) -> Tensor:
        """Runs draws together: by vmap, or in a graph if vmap fails; one by one if that fails, too."""
        problem = _UNSTACKABLE.get(self.model, "")
        for _ in range(0 if self.model in _UNSTACKABLE else 2):  # once, for lack of memory, say, is not its fault
            try:
                return stacking.run(draws, item)
            except Exception as error:  # whatever it is, the loop below runs the model as its author meant it
                raise_if_interrupted(error)
                problem = f"{type(error).__name__}: {first_line(error)}"
        if self.is_drawn and not torch.is_grad_enabled():
            captured = self._capture_once(self._find_graph(item), item)
            if captured is not None:
                _UNSTACKABLE.setdefault(self.model, problem)
                return self._pass(captured, draws, item)
        outputs = stacking.run_one_by_one(draws, item)
        if _UNSTACKABLE.setdefault(self.model, problem):
            _UNSTACKABLE[self.model] = ""  # once
            warnings.warn(
                f"{type(self.model).__name__} cannot be vectorised over draws, so they are computed one by one "
                f"({problem}). chunk_size=1 says that this is meant.",
                stacklevel=8,  # who called predict
            )
        return outputs

    def _find_graph(self, item: Any) -> "_Graph":
        """Returns what there is of the graph of a pass over such items."""
        if getattr(_STATE, "is_capturing", False):  # a forward pass that predicts in turn: torch.export is busy
            return _Graph("it is called within a capture")
        try:
            if self._kept.identity is None:
                self._kept.identity = identify_model(self.model), identify_call(self.call, self.model)
            form = identify_item(item)
        except CaptureError as error:
            return _Graph(str(error))
        sampler, device = self._sampler, self.device.type
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        key = (self._kept.identity, form, (sampler.layers, sampler.conditioned, self.dropout), autocast)
        with _GRAPHS_LOCK:  # for a moment: a capture must not keep others waiting
            graphs = _GRAPHS.setdefault(self.model, OrderedDict())
            graph = graphs.setdefault(key, _Graph())
            graphs.move_to_end(key)
            if len(graphs) > MAX_GRAPHS:
                graphs.popitem(last=False)
        return graph

    def _capture_once(self, graph: "_Graph", item: Any) -> Captured | None:
        """Captures a graph if nobody did or tried; returns it, if there is one."""
        with graph.lock:
            if graph.captured is None and not graph.problem:  # or a thread is started in vain
                run_uninterrupted(partial(self._capture, graph, item), self.device.type, TRACING)
        return graph.captured

    def _capture(self, graph: "_Graph", item: Any) -> None:
        if graph.captured is not None or graph.problem:  # by a call that was interrupted, whose capture went on
            return
        _STATE.is_capturing = True
        try:
            graph.captured = self._capture_and_verify(item)
        except CaptureError as error:
            graph.problem = first_line(error)
            log.info("%s is not captured: %s", type(self.model).__name__, graph.problem)
        finally:
            _STATE.is_capturing = False
        # glibc hands freed blocks back to the system, and a page fault for each 4 kB brings them back, unless a larger
        # block was freed once (32 MB at most). The values of a chunk are such blocks, in every call: without this, page
        # faults took most of a small call's time. With other allocators it does nothing.
        with contextlib.suppress(RuntimeError):  # where memory is limited
            torch.empty(FREED_BYTES, dtype=torch.uint8, device="cpu")

    def _capture_and_verify(self, item: Any) -> Captured:
        sampler, run_model = self._sampler, self._make_stacking().run_one_by_one
        captured = capture(self.model, self.call, item, sampler.layers, sampler.conditioned, dropout=self.dropout)
        reordered = captured.convolution_weights if self.device.type == "cpu" else frozenset()
        for weights in (reordered, frozenset()):  # channels-last, if the model bears it
            candidate = replace(captured, convolution_weights=weights)
            try:
                verify(partial(self._pass, candidate), run_model, item, sampler.take(0, 1))
                return candidate
            except Exception as error:
                raise_if_interrupted(error)
                problem = error
        if isinstance(problem, CaptureError):
            raise problem
        raise CaptureError(f"{type(problem).__name__}: {problem}") from problem

    def _pass(self, captured: Captured, draws: Drawn, item: Any) -> Tensor:
        """Runs some draws at once: (S, N, …)."""
        tensors, count = self._tensors_of(captured, item), num_examples(item)
        maps = self._make_maps(captured, draws, tensors)
        return captured.draw(captured.share(tensors, count), maps, len(draws.indices), count)

    def _tensors_of(self, captured: Captured, item: Any) -> dict[str, Tensor]:
        """Returns the arguments of a graph by name: the model's tensors, and those of an item."""
        inputs = {f"input{number}": tensor.to(self.device) for number, tensor in enumerate(tensors_in(item))}
        return self._model_tensors(captured) | inputs

    def _model_tensors(self, captured: Captured) -> dict[str, Tensor]:
        """Returns the model's tensors as they are now; weights of convolutions channels-last, if they may be."""
        kept, reordered = self._kept.tensors, captured.convolution_weights
        if reordered not in kept:
            tensors: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
            tensors |= dict(self.model.named_buffers(remove_duplicate=False))
            tensors = {name: tensor.detach() for name, tensor in tensors.items()}
            for name in reordered & tensors.keys():
                if tensors[name].dim() == 4:
                    tensors[name] = tensors[name].to(memory_format=torch.channels_last)
            kept[reordered] = tensors
        return {**kept[reordered], **captured.constants}

    def _find_maps(self, captured: Captured, start: int, stop: int, tensors: dict[str, Tensor]) -> list[Tensor | None]:
        """Returns what the sites of a graph are handed for some draws; small ones are kept for later calls."""
        kept = self._kept
        maps = kept.maps.get((captured, start, stop))
        if maps is None:
            maps = self._make_maps(captured, self._sampler.take(start, stop), tensors)
            numbers = sum(value.numel() for value in maps if value is not None)
            if numbers * self.num_draws <= KEPT_NUMBERS * (stop - start):  # or draws would push each other out
                if kept.num_numbers + numbers > KEPT_NUMBERS:  # of other inputs or chunks: start again
                    kept.maps, kept.num_numbers = {}, 0
                kept.num_numbers += numbers
                kept.maps[captured, start, stop] = maps
        return maps

    def _make_maps(self, captured: Captured, draws: Drawn, tensors: dict[str, Tensor]) -> list[Tensor | None]:
        return [values for site in captured.sites for values in self._make_site_maps(site, draws, tensors)]

    def _make_site_maps(self, site: Site, draws: Drawn, tensors: dict[str, Tensor]) -> list[Tensor | None]:
        if site.dropout_call:
            key = dropout_key(self._seed, site.layer, site.dropout_call)
            layer = self._dropout_layers[site.layer]
            maps = dropout_map(layer, key, draws.indices, site.units, site.dtype)
            return [None if values is None else values.unsqueeze(1) for values in maps]
        mean, var = (draws.buffers[name] for name in buffer_names(site.layer))
        weight, bias = (None if name is None else tensors[name] for name in (site.weight, site.bias))
        if "slope" in site.arguments:
            return [*fold_single(mean, var, draws.shares[site.layer], weight, bias, site.eps)]
        if site.layer in draws.shares:
            return [mean[:, None], var[:, None], draws.shares[site.layer][:, None, None], weight, bias]
        space = (1,) * (len(site.units) - 1)
        return [values.view(len(values), 1, -1, *space) for values in fold(mean, var, weight, bias, site.eps)]


@dataclass
class _Kept:
    """What is made when it is first needed, of a model that does not change while its network is used."""

    identity: Hashable = None
    tensors: dict[frozenset[str], dict[str, Tensor]] = field(default_factory=dict)
    maps: dict[tuple[Captured, int, int], list[Tensor | None]] = field(default_factory=dict)
    num_numbers: int = 0  # in these
    idle: list[Stacking] = field(default_factory=list)


@dataclass(eq=False)
class _Graph:
    """A captured pass, or why there is none; neither, if nobody tried."""

    problem: str = ""
    captured: Captured | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_GRAPHS: "WeakKeyDictionary[nn.Module, OrderedDict[Hashable, _Graph]]" = WeakKeyDictionary()
_GRAPHS_LOCK = threading.Lock()
_STATE = threading.local()
_UNSTACKABLE: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()  # why, until a warning has said it
