"""A CNN as a chain of layers: traces the model, cuts it where one tensor is alive, and groups the pieces.

>>> chain = trace_chain(model, (3, 32, 32))                                              # doctest: +SKIP
>>> for layer in chain.layers:
...     x = layer(x)
>>> scores = chain.classifier(x)                                                         # equals model(x)
"""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# fake tensors import it late, and memory is measured from a process that has imported all that a run needs
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.models import describe_failure

# images in a shape-only run: unlikely as a product of sizes, so that a first dimension of this size is the batch
BATCH = 7


@dataclass
class Chain:
    """A model as layers and a classifier; applying them in order is the model's own forward, bit for bit.

    All are modules of one tensor to one tensor that share the model's parameters under the model's own names.
    `train()` and `eval()` work on them as on the model; move them (`to`) rather than the model. A layer never changes
    its input in place.

    Attributes:
        layers: the layers, from the images on. Layer i maps (n, *layer_input_shape(i)) to (n, *shapes[i]).
        classifier: what follows the last layer, to scores (n, classes): pooling, flatten, linear. It may have no
            parameters.
        names: for each layer, the qualified name of the first module in it that has parameters: `features.3`.
        shapes: for each layer, the shape (C, H, W) of its output for one image.
        input_shape: the shape (C, H, W) of one image.
    """

    layers: Sequence[nn.Module]
    classifier: nn.Module
    names: list[str]
    shapes: list[tuple[int, ...]]
    input_shape: tuple[int, int, int]

    def layer_input_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape (C, H, W) of the input of layer `index` for one image; `len(layers)`: the classifier's."""
        return self.shapes[index - 1] if index > 0 else self.input_shape


def trace_chain(model: nn.Module, input_shape: tuple[int, int, int]) -> Chain:
    """Return `model` as a chain of at least two layers. The model keeps its mode and state; nothing is computed.

    The forward is traced (`torch.fx`) and cut wherever exactly one tensor is alive. A piece with a weight (a conv or
    linear one, not a norm's) starts a layer; other pieces join the layer before them. A parameter that is used in
    several places keeps these in one layer. The classifier starts at the first piece after the last conv weight that
    ends the feature maps: a global pooling, a flatten. A module without children, or one whose forward cannot be
    traced or does other operations in training than in evaluation, is one piece and runs its own forward.

    Args:
        model: maps images (n, *input_shape) to scores (n, classes).
        input_shape: (C, H, W) of one image.

    Raises:
        NeuroFluxError: the forward cannot be traced, cannot take this shape, does not return (n, classes), or has
            fewer than two layers.
    """
    with _state_kept(model):
        training = model.training
        graph, constants, untraced = _trace(model)
        model.eval()
        return _Cutter(model, training, graph, constants, untraced, input_shape).chain()


class ByMode(nn.Module):
    """A constant that the model's forward sets by mode, such as the `training=` of a functional dropout."""

    def __init__(self, in_training: Any, in_evaluation: Any) -> None:
        super().__init__()
        self.in_training = in_training
        self.in_evaluation = in_evaluation

    def forward(self) -> Any:
        return self.in_training if self.training else self.in_evaluation

    def extra_repr(self) -> str:
        return f"{self.in_training} in training, {self.in_evaluation} in evaluation"


# ---- tracing ----


class _Untraceable(Exception):
    """The module at `path` cannot be traced."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


class _Root(nn.Module):
    """Calls the model with one argument, so that its other arguments keep their defaults."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


class _Tracer(fx.Tracer):
    # a buffer that the forward updates in place must be in the graph, not updated by tracing
    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, untraced: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.untraced = untraced

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self.model:
            return False
        if super().is_leaf_module(m, module_qualified_name) or _path(module_qualified_name) in self.untraced:
            return True
        # its own forward says what differs by mode: stochastic depth, say
        return next(m.children(), None) is None

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        path = _path(self.path_of_module(m))
        before = _random_state()
        try:
            result = super().call_module(m, forward, args, kwargs)
        except _Untraceable:
            raise
        except Exception as error:
            raise _Untraceable(path, describe_failure(error)) from error
        if _random_state() != before:
            # the trace has one outcome of the draw, which every run would repeat
            raise _Untraceable(path, "its forward draws random numbers that do not depend on the input")
        return result


def _path(traced: str) -> str:
    """Return the name in the model of what is `model.NAME` in the traced root; the model itself is ''."""
    return traced.removeprefix("model").removeprefix(".")


def _random_state() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state[1].tobytes(), numpy_state[2]


def _trace(model: nn.Module) -> tuple[fx.Graph, dict[str, Tensor], dict[str, str]]:
    """Return the graph (targets are the model's names), the constants it uses, and what was not traced, and why."""
    untraced: dict[str, str] = {}
    while True:
        try:
            model.train()
            graph, constants = _trace_once(model, untraced)
            model.eval()
            evaluation, evaluation_constants = _trace_once(model, untraced)
            constants |= _join_modes(graph, constants, evaluation, evaluation_constants)
            return graph, constants, untraced
        except _Untraceable as error:
            # a part of the model becomes one piece that runs its own forward; the model itself cannot
            if not error.path or error.path in untraced:
                where = f"{error.path!r} of " if error.path else ""
                raise NeuroFluxError(
                    f"cannot cut {where}{type(model).__name__} into layers: {error.reason}; "
                    "move that step into a module of its own"
                ) from error
            untraced[error.path] = error.reason


def _trace_once(model: nn.Module, untraced: dict[str, str]) -> tuple[fx.Graph, dict[str, Any]]:
    root = _Root(model)
    try:
        graph = _Tracer(model, tuple(untraced)).trace(root)
    except _Untraceable:
        raise
    except Exception as error:
        raise _Untraceable("", describe_failure(error)) from error
    constants = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            if node.target.startswith("model."):
                node.target = _path(node.target)
            else:  # a tensor made in the forward: the tracer keeps it on the root
                constants[node.target] = getattr(root, node.target)
    return graph, constants


def _join_modes(
    training: fx.Graph, training_constants: dict[str, Any], evaluation: fx.Graph, evaluation_constants: dict[str, Any]
) -> dict[str, Any]:
    """Make `training` right in both modes: a constant that differs becomes a ByMode module. Return these by name.

    Raises:
        _Untraceable: the graphs differ in more than constants; names the innermost module where they start to.
    """
    added: dict[str, Any] = {}
    same: dict[fx.Node, fx.Node] = {}
    for ours, theirs in zip(list(training.nodes), list(evaluation.nodes), strict=False):

        def join(a: Any, b: Any, ours: fx.Node = ours, theirs: fx.Node = theirs) -> Any:
            if isinstance(a, fx.Node) and same.get(a) is b:
                return a
            if type(a) is type(b):
                if isinstance(a, (tuple, list)) and len(a) == len(b):
                    items = [join(x, y) for x, y in zip(a, b, strict=True)]
                    return type(a)(*items) if hasattr(a, "_fields") else type(a)(items)
                if isinstance(a, dict) and a.keys() == b.keys():
                    return {key: join(a[key], b[key]) for key in a}
                if isinstance(a, slice):
                    return slice(join(a.start, b.start), join(a.stop, b.stop), join(a.step, b.step))
            kinds = (bool, int, float, str, type(None), torch.dtype, torch.device)
            if isinstance(a, kinds) and isinstance(b, kinds):
                if a == b:
                    return a
                name = f"_by_mode{len(added)}"
                added[name] = ByMode(a, b)
                with training.inserting_before(ours):
                    return training.call_module(name)
            raise _modes_differ(ours, theirs)

        if ours.op != theirs.op or ours.target != theirs.target:
            raise _modes_differ(ours, theirs)
        if ours.target in training_constants and not torch.equal(
            training_constants[ours.target], evaluation_constants[theirs.target]
        ):
            raise _modes_differ(ours, theirs)
        ours.args, ours.kwargs = join(ours.args, theirs.args), join(ours.kwargs, theirs.kwargs)
        same[ours] = theirs
    # the last nodes compared are the outputs, so graphs of different lengths have differed above
    return added


def _modes_differ(*nodes: fx.Node) -> _Untraceable:
    innermost: list[str] = []
    for node in nodes:
        path = _modules(node)
        if len(path) > len(innermost):
            innermost = path
    return _Untraceable(
        innermost[-1] if innermost else "", "its forward does other operations in training than in evaluation"
    )


def _modules(node: fx.Node) -> list[str]:
    """Return the names of the model's modules in whose forward `node` is, from the outermost."""
    stack = [_path(name) for name, _ in node.meta.get("nn_module_stack", {}).values()]
    return stack[1:-1] if node.op == "call_module" else stack[1:]  # without the model and the called module


# ---- shapes ----


class _Recorder(fx.Interpreter):
    """Runs a graph module and keeps each node's shape for one image; None: not a tensor with the batch first."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False
        self.shapes: dict[str, tuple[int, ...] | None] = {}
        self.node: fx.Node | None = None
        self.batch = 0

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        value = super().run_node(n)
        if n.op == "placeholder":
            self.batch = value.shape[0]
        is_batch = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self.batch
        self.shapes[n.name] = tuple(value.shape[1:]) if is_batch else None
        return value


class _Recorded(nn.Module):
    """A graph module run by a recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.graph_module = recorder.module

    def forward(self, x: Tensor) -> Any:
        return self.recorder.run(x)


@contextmanager
def _quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a traceback where an operation refuses a shape: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled


def _run_fake(module: nn.Module, shape: Sequence[int], device: torch.device) -> tuple[Any, bool]:
    """Run `module` on a batch of `shape` without computing; return its result and whether it changed its input."""
    with _quiet_fakes(), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        # stand-ins for the parameters and buffers too: a norm in training would update the real ones
        state = [*module.named_parameters(), *module.named_buffers()]
        stand_ins: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in state}
        x = torch.empty((BATCH, *shape), device=device)
        version = x._version
        result = functional_call(module, stand_ins, (x,))
        return result, x._version != version


def _shapes(
    graph_module: fx.GraphModule, input_shape: tuple[int, ...], device: torch.device
) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each node's value for one image; None: not a tensor with the batch first."""
    recorder = _Recorder(graph_module)
    try:
        try:
            _run_fake(_Recorded(recorder), input_shape, device)
        except Exception:
            # a module that looks at values cannot run without them; any other error comes again
            with torch.no_grad():
                recorder.run(torch.zeros((1, *input_shape), device=device))
    except Exception as error:
        node = recorder.node
        place = f" at {_readable(node)}" if node is not None else ""
        size = "x".join(map(str, input_shape))
        raise NeuroFluxError(
            f"the model cannot take images of {size}: {describe_failure(error)}{place}; "
            "use another image size or another model"
        ) from error
    return recorder.shapes


@contextmanager
def _state_kept(model: nn.Module) -> Iterator[None]:
    """Undo what tracing does to the attributes of the model's modules, and to the random state."""
    kept = []
    for module in model.modules():
        tables = [table for table in vars(module).values() if isinstance(table, (dict, set))]
        kept.append((module, dict(vars(module)), [(table, table.copy()) for table in tables]))
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, attributes, contents in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, content in contents:
                table.clear()
                table.update(content)


# ---- cutting ----


@dataclass
class _Piece:
    """The nodes between two neighbouring cuts."""

    nodes: list[fx.Node]
    source: fx.Node  # the value that comes in
    result: fx.Node  # the value that goes out


class _Cutter:
    """Cuts a traced graph into pieces and groups them into layers and a classifier."""

    def __init__(
        self,
        model: nn.Module,
        training: bool,
        graph: fx.Graph,
        constants: dict[str, Any],
        untraced: dict[str, str],
        input_shape: tuple[int, int, int],
    ) -> None:
        self.model = model
        self.training = training
        self.constants = constants
        self.untraced = untraced
        self.input_shape = input_shape
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.attributes = {
            node.target: constants[node.target] if node.target in constants else _attribute(model, node.target)
            for node in graph.nodes
            if node.op in ("call_module", "get_attr")
        }
        self.shapes = _shapes(fx.GraphModule(self.attributes, graph).eval(), input_shape, self.device)
        self._take_batch_sizes_where_used(graph)
        # a parameter or a constant is no value that crosses a cut: each piece fetches its own
        self.nodes = [node for node in graph.nodes if not self._is_fetched(node)]
        self.alive = self._alive()

    def chain(self) -> Chain:
        output = self.nodes[-1].args[0]
        shape = self.shapes.get(output.name) if isinstance(output, fx.Node) else None
        if not isinstance(output, fx.Node) or shape is None or len(shape) != 1:
            found = f"(n, {', '.join(map(str, shape))})" if shape is not None else f"{output}"
            raise NeuroFluxError(
                f"{type(self.model).__name__} must return one tensor of shape (n, classes); it returns {found}"
            )
        pieces = self._pieces(output)
        weights = [self._weights(piece) for piece in pieces]
        last_conv = max((i for i, dims in enumerate(weights) if 4 in dims), default=-1)
        end = next((i for i in range(last_conv + 1, len(pieces)) if not self._keeps_maps(pieces[i])), len(pieces))
        # heads take feature maps, so a layer starts only on one
        starts = [i for i in range(end) if weights[i] and self._has_maps(pieces[i].source)]
        if len(starts) < 2 or end == len(pieces) or not self._has_maps(pieces[end - 1].result):
            raise self._too_few(pieces, len(starts))
        starts[0] = 0
        groups = [pieces[a:b] for a, b in zip(starts, [*starts[1:], end], strict=True)]
        return Chain(
            layers=[self._module(group, "Layer") for group in groups],
            classifier=self._module(pieces[end:], "Classifier"),
            names=[self._name(group) for group in groups],
            shapes=[self.shapes[group[-1].result.name] or () for group in groups],
            input_shape=self.input_shape,
        )

    def _take_batch_sizes_where_used(self, graph: fx.Graph) -> None:
        """Make `n = x.size(0); ...; y.view(n, -1)` read y's own batch size, so that n is not alive in between."""
        for node in list(graph.nodes):
            if not self._is_batch_size(node):
                continue
            for user in list(node.users):
                tensor = next((n for n in user.all_input_nodes if self.shapes[n.name] is not None), None)
                if tensor is not None:
                    with graph.inserting_before(user):
                        size = graph.call_method("size", (tensor, 0))
                    user.replace_input_with(node, size)
                    self.shapes[size.name] = None

    def _is_batch_size(self, node: fx.Node) -> bool:
        def is_batch(value: Any) -> bool:
            return isinstance(value, fx.Node) and self.shapes[value.name] is not None

        if node.op == "call_method" and node.target == "size" and node.args[1:] == (0,):
            return is_batch(node.args[0])
        if node.target is operator.getitem and node.args[1] == 0 and isinstance(node.args[0], fx.Node):
            sizes = node.args[0]
            if (sizes.target == "size" and len(sizes.args) == 1) or sizes.args[1:] == ("shape",):
                return is_batch(sizes.args[0])
        return False

    def _is_fetched(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or isinstance(self.attributes.get(node.target), ByMode)

    def _alive(self) -> list[list[fx.Node]]:
        """Return for each node the values that exist after it and are needed later."""
        index = {node: i for i, node in enumerate(self.nodes)}
        alive: list[list[fx.Node]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for j in range(i, max((index[user] for user in node.users), default=i)):
                alive[j].append(node)
        return alive

    def _pieces(self, output: fx.Node) -> list[_Piece]:
        tied: set[int] = set()
        places: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for tensor in self._tensors(node):
                places.setdefault(id(tensor), []).append(i)
        for indices in places.values():
            # one parameter learns from one loss
            tied.update(range(indices[0], indices[-1]))
        pieces = []
        start, source = 0, self.nodes[0]
        last = len(self.nodes) - 2  # the last node is the output
        for i in range(1, last + 1):
            alive = self.alive[i]
            if i == last or (len(alive) == 1 and self.shapes[alive[0].name] is not None and i not in tied):
                result = output if i == last else alive[0]
                pieces.append(_Piece(self.nodes[start + 1 : i + 1], source, result))
                start, source = i, result
        return pieces

    def _tensors(self, node: fx.Node) -> list[Tensor]:
        """Return what a node uses that has a state: the parameters, and the buffers of a module that it calls."""
        if node.op == "call_module":
            module = self.attributes[node.target]
            tensors = [*module.parameters(), *module.buffers()]
        else:
            tensors = []
        fetched = [self.attributes[n.target] for n in node.all_input_nodes if n.op == "get_attr"]
        return tensors + [tensor for tensor in fetched if isinstance(tensor, nn.Parameter)]

    def _weights(self, piece: _Piece) -> set[int]:
        """Return the numbers of dimensions of the piece's weights: 4 for a conv, 2 for a linear; a scale has none."""
        parameters = [t for node in piece.nodes for t in self._tensors(node) if isinstance(t, nn.Parameter)]
        return {p.ndim for p in parameters if sum(size > 1 for size in p.shape) >= 2}

    def _name(self, group: list[_Piece]) -> str:
        for node in (node for piece in group for node in piece.nodes):
            if node.op == "call_module" and next(self.attributes[node.target].parameters(), None) is not None:
                return str(node.target)
            for source in node.all_input_nodes:
                if source.op == "get_attr" and isinstance(self.attributes[source.target], nn.Parameter):
                    return str(source.target).rpartition(".")[0] or str(source.target)
        raise AssertionError("a layer starts at a parameter")

    def _has_maps(self, value: fx.Node) -> bool:
        return len(self.shapes[value.name] or ()) == 3

    def _keeps_maps(self, piece: _Piece) -> bool:
        """Whether the piece makes feature maps from feature maps, rather than pooling them into a vector."""
        source, result = self.shapes[piece.source.name] or (), self.shapes[piece.result.name] or ()
        if len(source) != 3 or len(result) != 3:
            return False
        if result[1:] == (1, 1) != source[1:] and any(self._is_average_pool(node) for node in piece.nodes):
            return False
        try:
            larger, _ = _run_fake(
                self._build([piece], "Piece").eval(), (source[0], 2 * source[1], 2 * source[2]), self.device
            )
        except Exception:  # it takes this one size, as a flatten with a fixed size does
            return False
        return larger.shape[2] > result[1] and larger.shape[3] > result[2]

    def _is_average_pool(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.attributes[node.target], nn.AvgPool2d)
        return node.target is nn.functional.avg_pool2d

    def _module(self, group: list[_Piece], kind: str) -> fx.GraphModule:
        """Return the pieces as one module, in the model's mode, that leaves its input as it was."""
        module = self._build(group, kind)
        if self._changes_input(module, group[0].source):
            module = self._build(group, kind, copies_input=True)
        own = set(self.model.modules())
        for part in module.modules():
            if part not in own:
                part.training = self.training
        return module

    def _changes_input(self, module: fx.GraphModule, source: fx.Node) -> bool:
        try:
            return any(
                _run_fake(module.train(mode), self.shapes[source.name] or (), self.device)[1] for mode in (True, False)
            )
        except Exception:  # it looks at values: unknown
            return True

    def _build(self, group: list[_Piece], kind: str, copies_input: bool = False) -> fx.GraphModule:
        graph = fx.Graph()
        source = graph.placeholder(group[0].source.name)
        if copies_input:
            source = graph.call_method("clone", (source,))
        copies = {group[0].source: source}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:  # a parameter or a constant
                copies[node] = graph.node_copy(node)
            return copies[node]

        for piece in group:
            for node in piece.nodes:
                copies[node] = graph.node_copy(node, copied)
        graph.output(copies[group[-1].result])
        module = fx.GraphModule(self.attributes, graph, kind)
        for node in graph.nodes:
            if node.op == "get_attr" and not isinstance(self.attributes[node.target], nn.Parameter):
                # a graph module saves every buffer; the model does not save all that its forward uses
                owner, _, field = str(node.target).rpartition(".")
                theirs = None if node.target in self.constants else self.model.get_submodule(owner)
                if theirs is None or field not in theirs._buffers or field in theirs._non_persistent_buffers_set:
                    module.get_submodule(owner)._non_persistent_buffers_set.add(field)
        return module

    def _too_few(self, pieces: list[_Piece], count: int) -> NeuroFluxError:
        longest = max(pieces, key=lambda piece: len(piece.nodes))
        crossing = [self.alive[self.nodes.index(node)] for node in longest.nodes[:-1]]
        together = max(crossing, key=len, default=[])
        names = ", ".join(_readable(node) for node in together[:6]) + (", ..." if len(together) > 6 else "")
        reasons = [f"alive together inside the longest part without a cut: {names}"] if together else []
        reasons += [f"{path!r} is one piece: {reason}" for path, reason in list(self.untraced.items())[:2]]
        return NeuroFluxError(
            f"{type(self.model).__name__} gives {count} layer(s) before its classifier and 2 are needed; a layer has a "
            "conv or linear weight, takes and gives feature maps, and ends where one tensor is alive"
            + "".join(f"; {reason}" for reason in reasons)
        )


def _readable(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _attribute(model: nn.Module, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)
