"""A captured pass → two graphs: what the draws share, and the rest, in which S draws are rows of the batch.

Each drawn BatchNorm layer, and each dropout layer, becomes an affine map of its own for every draw. From the first of
them on values have S · N rows: what joins from before is repeated, and sizes that were computed from the batch are
multiplied by S. Where the batch is not the first axis of a drawn value that would be wrong, so it is refused.

The graphs hold no tensor of the model. Parameters, buffers and the draws' maps are their arguments, so they follow a
model that is trained further, and any thread may run them.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from stochbn.inference.engine.affine import (
    add_to_rows,
    apply_to_rows,
    condition_rows,
    own_moments,
    pool_before,
    repeat_rows,
    squash_rows,
)
from stochbn.inference.engine.captured import Captured, CaptureError, Site
from stochbn.inference.engine.dropout import DROPOUT_SITE

aten = torch.ops.aten
MODEL = "output.model."  # where the model stands in what is captured


class Folding:
    """Builds the two graphs, node by node.

    Args:
        exported: The pass.
        drawn_buffers: Layers by the ids of their buffers.
        conditioned: Layers where inputs are counted in.
    """

    def __init__(self, exported: ExportedProgram, drawn_buffers: dict[int, str], conditioned: frozenset[str]) -> None:
        self.exported = exported
        self.drawn_buffers = drawn_buffers
        self.conditioned = conditioned
        self.names = self._name_arguments()
        self.nodes = list(exported.graph.nodes)
        self.symbol = self._find_symbol()
        self.shared, self.drawn = Graph(), Graph()
        self.placed: dict[Node, Node] = {}  # a node of the pass → its copy in one of the two graphs
        self.dependent: set[Node] = set()  # what differs from draw to draw
        self.passed: dict[Node, Node] = {}  # a shared node → the argument of `drawn` that holds its value
        self.repeated: dict[Node, Node] = {}  # the same with rows for every draw
        self.counts = [self.drawn.placeholder(name) for name in ("num_draws", "num_inputs")]
        self.shared_count = self.shared.placeholder("num_inputs")
        self.pools: dict[Node, Node] = {}  # a pooling that was moved in front of its layer → what it would have pooled
        self.extra: list[Node] = []  # what the shared graph computes besides: own moments of inputs, pooled values
        self.extra_arguments: list[Node] = []
        self.sites: list[Site] = []
        self.site_arguments: list[Node] = []

    def fold(self) -> Captured:
        """Places every node in one of the two graphs."""
        for node in self.nodes:
            if node.op == "placeholder":
                self.placed[node] = self.shared.placeholder(node.name)
            elif node.op == "call_function":
                self._place(node)
            elif node.op == "output":
                ((output,),) = node.args
                if output not in self.dependent:
                    raise CaptureError("what it returns does not depend on the layers that are drawn")
                self.drawn.output(self.placed[output])
            else:
                raise CaptureError(f"{_locate(node)}a part of it is no plain graph ({node.target})")
        own = [node for node in self.passed if node in self.names]  # arguments that the drawn graph reads itself
        boundary = [node for node in self.passed if node not in self.names]
        self.shared.output((*(self.placed[node] for node in boundary), *self.extra))
        self.shared.eliminate_dead_code()
        used = [node for node in self.names if self.placed[node].users]
        for node in self.names.keys() - used:
            self.shared.erase_node(self.placed[node])
        _write_over_activations(self.drawn)
        shared, weights = ([self.passed[node] for node in nodes] for nodes in (boundary, own))
        _put_first(self.drawn, [*shared, *self.extra_arguments, *weights, *self.counts, *self.site_arguments])
        convolutions = [node for node in self.nodes if node.target in (aten.conv2d.default, aten.convolution.default)]
        return Captured(
            GraphModule({}, self.shared),
            GraphModule({}, self.drawn),
            tuple(self.names[node] for node in used),
            tuple(self.names[node] for node in own),
            tuple(self.sites),
            self.exported.constants,
            frozenset(self.names[node.args[1]] for node in convolutions if node.args[1] in self.names),
            self._find_bytes_a_row(),
        )

    def _name_arguments(self) -> dict[Node, str]:
        """Returns for each placeholder the name of the tensor that it stands for, `input0`, … for inputs."""
        signature = self.exported.graph_signature
        names: dict[str, str] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names = {place: name.removeprefix(MODEL) for place, name in names.items()}
        names |= signature.inputs_to_lifted_tensor_constants
        names |= {str(place): f"input{number}" for number, place in enumerate(signature.user_inputs)}
        placeholders = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        if faulty := [node.name for node in placeholders if node.name not in names]:
            raise CaptureError(f"it takes {faulty[0]}, which is no tensor")
        self.values = {
            node: self.exported.constants.get(names[node.name], self.exported.state_dict.get(MODEL + names[node.name]))
            for node in placeholders
        }
        return {node: names[node.name] for node in placeholders}

    def _find_symbol(self) -> Any:
        """Returns the symbol of the batch size."""
        sizes = (node.meta["val"].shape[0] for node in self.names if node.meta["val"].dim())
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return size.node.expr
        raise CaptureError("its batch size is fixed")

    def _place(self, node: Node) -> None:
        name = getattr(node.target, "__name__", str(node.target))
        if name.startswith(("_assert", "sym_constrain")) and not node.users:
            return
        is_dropout = node.target in _DROPOUT and not node.args[2]  # of a layer in eval mode, which leaves all as it is
        if is_dropout or node in self.pools:
            source = node.all_input_nodes[0] if is_dropout else self.pools[node]
            self.placed[node] = self.placed[source]
            if source in self.dependent:
                self.dependent.add(node)
            return
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(f"{_locate(node)}it draws random numbers of its own")
        if node.target is DROPOUT_SITE:
            self._add_site(node, None, apply_to_rows, layer=node.args[1], dropout_call=node.args[2])
            return
        if layer := self._drawn_layer(node):
            self._add_batch_norm(node, layer)
            return
        # A view would ask for values that lie in memory as the model's own do; ours may lie channels-last.
        target: Any = aten.reshape.default if node.target is aten.view.default else node.target
        is_drawn = not self.dependent.isdisjoint(node.all_input_nodes)
        if is_drawn:
            self.dependent.add(node)
            self._check_rows(node)
            if self._add_shared(node):
                return
        find, graph = (self._repeat, self.drawn) if is_drawn else (self.placed.__getitem__, self.shared)
        args: Any = map_arg(node.args, find)
        kwargs: Any = map_arg(node.kwargs, find)
        if target is operator.getitem and args[0].target in _OURS:
            self.placed[node] = args[0]  # of what torch returns beside the normalised values nothing is used
            return
        self.placed[node] = graph.call_function(target, args, dict(kwargs))

    def _add_shared(self, node: Node) -> bool:
        """Adds a shared value of the same shape, a shortcut, without repeating it; returns whether it is one."""
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            return False
        pair: list[Any] = sorted(node.args, key=lambda argument: argument not in self.dependent)
        drawn, shared = pair
        values = [argument.meta.get("val") for argument in pair if isinstance(argument, Node)]
        shapes = [value.shape for value in values if isinstance(value, Tensor)]
        if shared in self.dependent or len(shapes) < 2 or shapes[0] != shapes[1]:
            return False
        arguments = (self._pass(drawn), self._pass(shared))
        self.placed[node] = self.drawn.call_function(add_to_rows, arguments, {"num_draws": self.counts[0]})
        return True

    def _drawn_layer(self, node: Node) -> str | None:
        """Returns the drawn layer that a node normalises for."""
        values = [self.values.get(argument) for argument in node.all_input_nodes]
        names = [self.drawn_buffers[id(value)] for value in values if id(value) in self.drawn_buffers]
        if not names:
            return None
        if node.target not in _EPS or (node.target is aten.batch_norm.default and node.args[5]):
            raise CaptureError(f"{_locate(node)}layer {names[0]!r} does not normalise by torch's batch_norm")
        if any(argument is not None and argument not in self.names for argument in node.args[1:3]):
            raise CaptureError(f"{_locate(node)}layer {names[0]!r} computes its weight or bias")
        return names[0]

    def _add_batch_norm(self, node: Node, layer: str) -> None:
        target: Any = node.target
        x: Any = node.args[0]
        weight, bias = (self.names.get(argument) for argument in node.args[1:3])  # type: ignore[arg-type]
        function: Any = apply_to_rows
        arguments: tuple[str, ...] = ("scale", "shift")
        if layer in self.conditioned:
            value = x.meta["val"]
            if value.dim() == 2 and self._scale(x, value.shape[0]) == 1:
                function, arguments = squash_rows, ("scale", "shift", "slope", "bias")
            else:
                function, arguments = condition_rows, ("mean", "var", "share", "weight", "bias")
        about = {"arguments": arguments, "weight": weight, "bias": bias, "eps": node.args[_EPS[target]]}
        self._add_site(node, self._move_pool(node), function, layer=layer, **about)

    def _move_pool(self, node: Node) -> Node | None:
        """Returns the max-pooling behind a layer, or behind its ReLU, if nothing else reads what lies between.

        Both are monotone, so it may come first: then the draws have a quarter of the values, say, and the same bits.
        """
        path = [node]
        while len(path[-1].users) == 1:
            (follower,) = path[-1].users
            if follower.target is aten.max_pool2d.default:
                for between in path:
                    between.meta["val"] = follower.meta["val"]
                self.pools[follower] = path[-1]
                return follower
            is_first_of_several = follower.target is operator.getitem and follower.args[1] == 0
            if follower.target is not aten.relu.default and not is_first_of_several:
                break
            path.append(follower)
        return None

    def _add_site(self, node: Node, pool: Node | None, function: Any, **about: Any) -> None:
        x = node.args[0]
        assert isinstance(x, Node)
        self.dependent.add(node)
        self._check_rows(x)
        value = x.meta["val"]
        site = Site(units=tuple(map(int, value.shape[1:])), dtype=value.dtype, **about)
        given = [self.drawn.placeholder(f"{name}_{len(self.sites)}") for name in site.arguments]
        options: dict[str, Any] = {"num_draws": self.counts[0], "is_drawn": x in self.dependent}
        own = []
        if function is condition_rows:
            count = self.drawn.call_function(operator.mul, tuple(self.counts)) if x in self.dependent else None
            own = [self._call_on(x, own_moments, count or self.shared_count)]
            options |= {"num_inputs": self.counts[1], "eps": site.eps}
        if pool is None:
            source = self._pass(x)
        else:
            weight: Any = node.args[1]
            find = self._pass if x in self.dependent else self.placed.__getitem__
            source = self._call_on(x, pool_before, weight and find(weight), *pool.args[1:])
        self.placed[node] = self.drawn.call_function(function, (source, *own, *given), options)
        self.sites.append(site)
        self.site_arguments += given

    def _call_on(self, x: Node, function: Any, *arguments: Any) -> Node:
        """Adds a call on a value where that is computed, once a batch if it can be, for the drawn graph to read."""
        if x in self.dependent:
            return self.drawn.call_function(function, (self.placed[x], *arguments))
        self.extra.append(self.shared.call_function(function, (self.placed[x], *arguments)))
        self.extra_arguments.append(self.drawn.placeholder(f"extra_{len(self.extra)}"))
        return self.extra_arguments[-1]

    def _pass(self, node: Node) -> Node:
        """Returns what a drawn node reads: a drawn value, or an argument that holds a shared one."""
        if node in self.dependent:
            return self.placed[node]
        if node not in self.passed:
            self.passed[node] = self.drawn.placeholder(node.name)
        return self.passed[node]

    def _repeat(self, node: Node) -> Node:
        """The same, with rows for every draw if there are rows, and sizes of the batch for all of them together."""
        value: Any = node.meta.get("val")
        is_size = isinstance(value, torch.SymInt)
        sizes = [value] if is_size else value.shape if isinstance(value, Tensor) else []
        if node in self.dependent or not any(isinstance(size, torch.SymInt) for size in sizes):
            return self._pass(node)
        if is_size:
            self._scale(node, value)
        else:
            self._check_rows(node)
        if node not in self.repeated:
            function = operator.mul if is_size else repeat_rows
            self.repeated[node] = self.drawn.call_function(function, (self._pass(node), self.counts[0]))
        return self.repeated[node]

    def _scale(self, node: Node, size: Any) -> int:
        """Returns how many times the batch size a size is; no other would be right for S · N rows."""
        factor = size.node.expr / self.symbol
        if factor.free_symbols or not factor.is_Integer:
            raise CaptureError(f"{_locate(node)}a size is no multiple of the batch size")
        return int(factor)

    def _check_rows(self, node: Node) -> None:
        """Refuses a drawn value whose first axis is not the batch, or that has the batch elsewhere."""
        for value in _values(node):
            elsewhere = any(isinstance(size, torch.SymInt) for size in value.shape[1:])
            if not value.dim() or not isinstance(value.shape[0], torch.SymInt) or elsewhere:
                raise CaptureError(f"{_locate(node)}inputs are no longer rows, or are mixed")
            self._scale(node, value.shape[0])

    def _find_bytes_a_row(self) -> int:
        return max(
            self._scale(node, value.shape[0]) * value.shape[1:].numel() * value.element_size()
            for node in self.dependent
            for value in _values(node)
        )


def _values(node: Node) -> list[Tensor]:
    """Lists the tensors that a node returns; BatchNorm in eval mode has empty ones among them."""
    values = node.meta.get("val")
    values = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in values if isinstance(value, Tensor) and 0 not in value.shape]


# BatchNorm in a captured pass, in the two forms that torch writes it, and where its ε stands.
_EPS = {aten.batch_norm.default: 7, aten._native_batch_norm_legit_no_training.default: 6}
_OURS = (apply_to_rows, condition_rows, squash_rows)
_DROPOUT = {
    getattr(aten, name).default for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
}


# What returns new memory, never a view.
_FRESH = (*_OURS, add_to_rows, aten.conv2d.default, aten.linear.default, aten.add.Tensor)


def _write_over_activations(graph: Graph) -> None:
    """Has ReLU write over what nothing else reads: activations are what a drawn part spends its time on."""
    for node in graph.nodes:
        if node.target is aten.relu.default:
            (x,) = node.args
            if x.target in _FRESH and len(x.users) == 1:
                node.target = aten.relu_.default


def _put_first(graph: Graph, placeholders: Sequence[Node]) -> None:
    """Puts arguments in this order, in front of everything else."""
    for node in reversed(placeholders):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def _locate(node: Node) -> str:
    """Says where in the model's code a node stands, if that is known."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return f"at `{lines[-1]}` " if lines else ""
