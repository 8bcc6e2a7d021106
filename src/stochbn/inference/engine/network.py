"""One model and its draws → outputs of each draw, as fast as the arithmetic allows, from any thread.

Two paths lead there. A pass that is worth it is captured once, as a graph with the draws folded into its batch
(`graph`). What cannot be captured, or is over sooner than a capture, runs stacked on a twin of the model (`stacking`).
Which one depends on the model and on the call, never on what was called before, so equal calls give equal bits.
"""

import copy
import logging
import math
import threading
import warnings
import weakref
from collections.abc import Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from stochbn.distributions.base import Distribution
from stochbn.distributions.draws import Draws
from stochbn.inference.engine.affine import fold
from stochbn.inference.engine.dropout import dropout_key, dropout_map
from stochbn.inference.engine.graph import Captured, CaptureError, Site, capture
from stochbn.inference.engine.stacking import Drawn, Stacking
from stochbn.statistics.calls import Call, device_of
from stochbn.statistics.items import copy_to, fill, map_leaves, num_examples, rows, tensors_in
from stochbn.statistics.layers import buffer_names, dropout_layers

log = logging.getLogger("stochbn")

Source = Distribution | Draws | None

# A capture takes about as long as this many uses of a parameter, one for each parameter, draw and input; an input value
# counts like so many parameters, which makes up for convolutions.
WORTH_CAPTURING = 10**9
USES_A_VALUE = 64
# The largest drawn value of a chunk is kept below this, which is about where the time a draw takes is lowest.
CHUNK_BYTES = 2**24
STACKED_ROWS = 64  # on a twin, where the size of values is not known ahead
# Draws are made ahead, in blocks of at most so many numbers (32 MB in float64), and so are their maps.
BLOCK_NUMBERS = 2**22
FIRST_DRAWS = 64  # before it is known how many numbers a draw has
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
        self.call = call
        self.source = source
        self.seed = seed
        self.dropout = dropout
        self.compiles = compiles
        self.num_masks = num_masks
        self.num_batches = num_batches
        self.device = device_of(model)
        self.temperature = 1.0
        self.compiled_rows = 0
        self._block = (range(0), Drawn({}, {}, torch.arange(0)))  # the draws at hand
        self._maps: dict[Hashable, list[Tensor | None]] = {}
        self._tensors: dict[Hashable, dict[str, Tensor]] = {}
        self._parameter_count = sum(parameter.numel() for parameter in model.parameters())
        self.dropout_layers = dropout_layers(model) if dropout else {}
        if isinstance(source, Draws):
            self.num_draws = len(source)
            self._load(range(self.num_draws))
        else:
            self.num_draws = num_samples if dropout or source is not None else 1
        if isinstance(source, Distribution):
            self._load(range(min(FIRST_DRAWS, self.num_draws)))
            warn_of_dropout(source, dropout, stacklevel=5)

    def to(self, device: torch.device) -> "Network":
        """Returns the same with a copy of the model on another device."""
        model = copy.deepcopy(self.model).to(device)
        return Network(
            model,
            self.call,
            self.source,
            num_samples=self.num_draws,
            seed=self.seed,
            dropout=self.dropout,
            compiles=self.compiles,
            num_masks=self.num_masks,
            num_batches=self.num_batches,
        )

    def run(self, item: Any, chunk_size: int | None, first: int = 0, last: int | None = None) -> Iterator[Tensor]:
        """Yields outputs (s, N, …) of successive draws, from the first to before the last; without the temperature."""
        last = self.num_draws if last is None else last
        if num_examples(item) == 0:
            raise ValueError("Expected at least one input, got an empty batch. Leave empty batches out.")
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(item))
        before = torch.is_grad_enabled()
        chunks = self._run(item, chunk_size, first, last, wants_gradient)
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

    def _run(self, item: Any, chunk_size: int | None, first: int, last: int, wants_gradient: bool) -> Iterator[Tensor]:
        is_drawn = self.dropout or self.source is not None
        # Gradients take the other path, where they stop or go through as the model's author meant it.
        if is_drawn and not wants_gradient:
            captures = self.compiles or (chunk_size != 1 and self._is_worth_capturing(item, last - first))
            graph = self._find_graph(item) if captures else None
            if graph is not None and self.compiles:
                graph.check(type(self.model).__name__)
            if graph is not None and graph.captured is not None:
                yield from self._run_graph(graph, item, chunk_size, first, last, compiles=self.compiles)
                return
        stacking = Stacking(self.model, self.call, self.seed if self.dropout else None)
        item = copy_to(item, self.device)
        while first < last:
            stop = min(first + (chunk_size or self._stack_size(item)), last)
            draws = self._draws(first, stop)
            if chunk_size == 1 or self.num_draws == 1:
                yield stacking.run_one_by_one(draws, item)
            else:
                yield self._stack_if_possible(stacking, draws, item)
            first = stop

    def _is_worth_capturing(self, item: Any, num_draws: int) -> bool:
        if self.num_batches is None:
            return True
        count = num_examples(item)
        values = sum(tensor.numel() for tensor in tensors_in(item))
        uses = count * self._parameter_count + USES_A_VALUE * values
        return self.num_batches * num_draws * uses > WORTH_CAPTURING

    def _stack_size(self, item: Any) -> int:
        values = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(item))
        return max(1, min(STACKED_ROWS // max(1, num_examples(item)), CHUNK_BYTES // max(1, USES_A_VALUE * values)))

    def _stack_if_possible(self, stacking: Stacking, draws: Drawn, item: Any) -> Tensor:
        if self.model not in _UNSTACKABLE:
            try:
                return stacking.run(draws, item)
            except Exception as error:  # whatever it is, the loop below runs the model as its author meant it
                problem = error
            outputs = stacking.run_one_by_one(draws, item)
            _UNSTACKABLE.add(self.model)
            warnings.warn(
                f"{type(self.model).__name__} cannot be vectorised over draws, so they are computed one by one "
                f"({type(problem).__name__}: {_first_line(problem)}). chunk_size=1 says that this is meant.",
                stacklevel=6,
            )
            return outputs
        return stacking.run_one_by_one(draws, item)

    def _run_graph(
        self, graph: "_Graph", item: Any, chunk_size: int | None, first: int, last: int, *, compiles: bool
    ) -> Iterator[Tensor]:
        captured = graph.captured
        assert captured is not None
        count = num_examples(item)
        if compiles:  # for one shape, so that one code serves all batches
            self.compiled_rows = max(self.compiled_rows, count)
            item = fill(item, self.compiled_rows)
        item = map_leaves(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, item)
        num_inputs = num_examples(item)
        tensors = dict(self._find_tensors(graph))
        tensors |= {f"input{number}": tensor for number, tensor in enumerate(tensors_in(item))}
        size = chunk_size or max(1, CHUNK_BYTES // max(1, captured.bytes_a_row * num_inputs))
        size = math.ceil((last - first) / math.ceil((last - first) / size))  # equal chunks
        given = [tensors[name] for name in captured.shared_arguments]
        run_shared = graph.compile(captured.shared, given) if compiles else captured.shared.forward
        shared = run_shared(*given)
        weights = [tensors[name] for name in captured.drawn_arguments]
        for start in range(first, last, size):
            stop = min(start + size, last)
            begin = max(first, stop - size) if compiles else start  # a last, smaller chunk: some draws again
            arguments = [*shared, *weights, stop - begin, num_inputs, *self._find_maps(graph, begin, stop)]
            run_drawn = graph.compile(captured.drawn, arguments) if compiles else captured.drawn.forward
            outputs: Tensor = run_drawn(*arguments)
            yield outputs.unflatten(0, (stop - begin, -1))[start - begin :, :count]

    def _find_graph(self, item: Any) -> "_Graph":
        """Returns the graph of a pass over such items, captured when it is first asked for."""
        layers = () if self.source is None else tuple(_layers(self._block[1]))
        conditioned = tuple(self._block[1].shares)
        tensors = tensors_in(item)
        count = num_examples(item)
        key = (
            weakref.ref(self.call),
            _fingerprint(self.model),
            layers,
            conditioned,
            self.dropout,
            repr(map_leaves(lambda leaf: ... if isinstance(leaf, Tensor) else leaf, item)),
            tuple((t.shape[t.dim() > 0 and len(t) == count :], t.dim(), t.dtype) for t in tensors),
            (torch.is_autocast_enabled(self.device.type), torch.get_autocast_dtype(self.device.type)),
        )
        with _GRAPHS_LOCK:
            graphs = _GRAPHS.setdefault(self.model, {})
            if key not in graphs:
                graphs[key] = graph = _Graph()
                try:
                    graph.captured = capture(self.model, self.call, item, layers, conditioned, dropout=self.dropout)
                    self._verify(graph, item)
                except CaptureError as error:
                    graph.captured, graph.problem = None, str(error)
                    log.info("%s is not captured: %s", type(self.model).__name__, error)
                except BaseException:
                    del graphs[key]
                    raise
                if len(graphs) > MAX_GRAPHS:
                    del graphs[next(iter(graphs))]
            return graphs[key]

    def _verify(self, graph: "_Graph", item: Any) -> None:
        """Compares two draws with the model itself, and finds out whether it bears convolutions channels-last."""
        item = _distinct(rows(item, 0, 3), 3)
        draws = self._draws(0, min(2, self.num_draws))
        stacking = Stacking(self.model, self.call, self.seed if self.dropout else None)
        problem = "it gives other numbers as a graph"
        for graph.is_reordered in (True, False):
            try:
                expected = stacking.run_one_by_one(draws, copy_to(item, self.device))
                found = torch.cat(list(self._run_graph(graph, item, None, 0, len(draws.indices), compiles=False)))
            except Exception as error:
                problem = f"{type(error).__name__}: {_first_line(error)}"
                continue
            tolerance = torch.finfo(expected.dtype).eps ** 0.5
            largest = float(expected.nan_to_num(0, 0, 0).abs().max())
            if found.shape == expected.shape and torch.allclose(
                found, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True
            ):
                return
        raise CaptureError(problem)

    def _find_tensors(self, graph: "_Graph") -> dict[str, Tensor]:
        """Returns the model's tensors by name as they are now; those of convolutions channels-last."""
        assert graph.captured is not None
        key = (graph, graph.is_reordered)
        if key not in self._tensors:
            tensors: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
            tensors |= dict(self.model.named_buffers(remove_duplicate=False))
            tensors = {name: tensor.detach() for name, tensor in tensors.items()} | dict(graph.captured.constants)
            if graph.is_reordered and self.device.type == "cpu":
                for name in graph.captured.convolution_weights & tensors.keys():
                    if tensors[name].dim() == 4:
                        tensors[name] = tensors[name].to(memory_format=torch.channels_last)
            self._tensors[key] = tensors
        return self._tensors[key]

    def _find_maps(self, graph: "_Graph", start: int, stop: int) -> list[Tensor | None]:
        """Returns what the sites of a graph are handed for some draws."""
        key = (graph, start, stop)
        maps = self._maps.get(key)
        if maps is None:
            assert graph.captured is not None
            tensors, draws = self._find_tensors(graph), self._draws(start, stop)
            maps = [value for site in graph.captured.sites for value in self._make_maps(site, draws, tensors)]
            numbers = sum(value.numel() for value in maps if value is not None)
            if numbers * len(self._maps) < BLOCK_NUMBERS:
                self._maps[key] = maps
        return maps

    def _make_maps(self, site: Site, draws: Drawn, tensors: dict[str, Tensor]) -> list[Tensor | None]:
        if site.dropout_call:
            key = dropout_key(self.seed, site.layer, site.dropout_call)
            layer = self.dropout_layers[site.layer]
            maps = dropout_map(layer, key, draws.indices, site.units, site.dtype)
            return [None if values is None else values.unsqueeze(1) for values in maps]
        mean, var = (draws.buffers[name] for name in buffer_names(site.layer))
        weight, bias = (None if name is None else tensors[name] for name in (site.weight, site.bias))
        if site.layer in draws.shares:
            return [mean[:, None], var[:, None], draws.shares[site.layer][:, None, None], weight, bias]
        space = (1,) * (len(site.units) - 1)
        return [values.view(len(values), 1, -1, *space) for values in fold(mean, var, weight, bias, site.eps)]

    def _draws(self, start: int, stop: int) -> Drawn:
        if self.source is None:
            return Drawn({}, {}, self._indices(range(start, stop)))
        draws, block = self._block
        if not (start in draws and stop - 1 in draws):
            numbers = sum(values[0].numel() for values in block.buffers.values())
            ahead = max(stop - start, BLOCK_NUMBERS // numbers)
            draws, block = self._load(range(start, min(start + ahead, self.num_draws)))
        part = slice(start - draws[0], stop - draws[0])
        buffers, shares = (
            {name: values[part] for name, values in mapping.items()} for mapping in (block.buffers, block.shares)
        )
        return Drawn(buffers, shares, block.indices[part])

    def _indices(self, draws: range) -> Tensor:
        index = torch.arange(draws.start, draws.stop, device=self.device)
        return index if self.num_masks is None else index % self.num_masks

    def _load(self, draws: range) -> tuple[range, Drawn]:
        if isinstance(self.source, Distribution):
            made = _sample(self.source, len(draws), self.seed, draws[0])
        else:
            assert self.source is not None
            made = self.source
        self.temperature = made.temperature
        made = made.match(self.model)
        self._block = block = (draws, Drawn(dict(made.buffers), dict(made.shares), self._indices(draws)))
        return block


class _Graph:
    """A captured pass, or why there is none; and its code."""

    def __init__(self, captured: Captured | None = None, is_reordered: bool = False) -> None:
        self.captured = captured
        self.is_reordered = is_reordered  # whether it was found to give the same with convolutions channels-last
        self.problem = ""
        self._codes: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def check(self, name: str) -> None:
        """Raises if there is nothing to compile."""
        if self.captured is None:
            raise RuntimeError(
                f"Expected {name} to compile, got a forward pass that cannot be captured: {self.problem}. Leave "
                "compile= off."
            )

    def compile(self, part: GraphModule, arguments: list[Any]) -> Any:
        """Returns the code of one of the two graphs for arguments of such shapes, compiled when it is first needed."""
        key = (
            id(part),
            *((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments),
        )
        with self._lock:
            if key not in self._codes:
                # A module of its own: torch.compile keeps only a few codes for one.
                code = torch.compile(GraphModule(part, part.graph), dynamic=False)
                try:
                    code(*arguments)
                except Exception as error:
                    raise RuntimeError(
                        f"Expected the pass to compile, got {type(error).__name__}: {_first_line(error)}. "
                        "Leave compile= off; and see that there is a C++ compiler, which it needs."
                    ) from error
                self._codes[key] = code
                if len(self._codes) > MAX_GRAPHS:
                    del self._codes[next(iter(self._codes))]
            return self._codes[key]


_GRAPHS: "WeakKeyDictionary[nn.Module, dict[Hashable, _Graph]]" = WeakKeyDictionary()
_GRAPHS_LOCK = threading.RLock()
_UNSTACKABLE: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _layers(draws: Drawn) -> list[str]:
    suffix = "running_mean"
    return [name[: -len(suffix)].rstrip(".") for name in draws.buffers if name.endswith(suffix)]


def _fingerprint(model: nn.Module) -> Hashable:
    """Returns what of a model is built into a graph, as far as can be seen: structure, and attributes of modules."""
    plain = (bool, int, float, str, type(None))
    return repr(model), tuple(
        (key, id(value) if isinstance(value, Tensor) else value)
        for module in model.modules()
        for key, value in vars(module).items()
        if isinstance(value, (*plain, Tensor)) and key != "training"
    )


def _distinct(item: Any, count: int) -> Any:
    """Repeats an item's examples until there are `count`, and changes the numbers in those that were added."""
    own = num_examples(item)
    factors = torch.tensor([1 - 0.25 * max(0, row - own + 1) for row in range(count)])

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and len(leaf) == count:
            return leaf * factors.to(leaf).view(-1, *(1 for _ in leaf.shape[1:]))
        return leaf

    return map_leaves(change, fill(item, count))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "?").splitlines()[0]


def _sample(source: Distribution, count: int, seed: int, first: int) -> Draws:
    """Draws networks, or returns the last ones of a fitted distribution if they are asked for again."""
    asked = (count, seed, first)
    last = _LAST.get(source)
    if last is not None and last[0] == asked:
        return last[1]
    draws = source.sample(count, seed=seed, first=first)
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
