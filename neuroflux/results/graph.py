"""The chain as a graph that TensorBoard shows: every layer is a group of its operations, beside its head."""

from __future__ import annotations

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.versions_pb2 import VersionDef
from torch import fx, nn

from neuroflux.inputs.chain import Chain


def chain_graph(chain: Chain) -> GraphDef:
    """Return `chain` as a graph: images, layers one after the other with a head each, and the classifier."""
    nodes = [_node("images", "images", [], chain.input_shape)]
    source = "images"
    for number, (layer, name) in enumerate(zip(chain.layers, chain.names, strict=True), 1):
        scope = f"layer_{number:02d}_{_plain(name)}"
        inside, source = _inside(layer, scope, source)
        nodes += inside
        nodes.append(_node(f"{scope}/output", "features", [source], chain.shapes[number - 1]))
        source = f"{scope}/output"
        if number < len(chain.layers):
            nodes.append(_node(f"{scope}/head", "auxiliary head", [source], ()))
    inside, source = _inside(chain.classifier, "classifier", source)
    return GraphDef(node=[*nodes, *inside, _node("scores", "scores", [source], ())], versions=VersionDef(producer=22))


def _inside(module: nn.Module, scope: str, source: str) -> tuple[list[NodeDef], str]:
    """Return the nodes of `module` below `scope`, fed by `source`, and the name of the last one."""
    if not isinstance(module, fx.GraphModule):
        return [
            _node(f"{scope}/{type(module).__name__}", type(module).__name__, [source], ())
        ], f"{scope}/{type(module).__name__}"
    names: dict[fx.Node, str] = {}
    nodes = []
    for node in module.graph.nodes:
        inputs = [names[other] for other in node.all_input_nodes if other in names]
        if node.op == "placeholder":
            names[node] = source
        elif node.op == "output":
            source = inputs[0] if inputs else source
        else:
            names[node] = f"{scope}/{node.name}"
            nodes.append(_node(names[node], _kind(module, node), inputs, ()))
    return nodes, source


def _kind(module: fx.GraphModule, node: fx.Node) -> str:
    """Return what `node` does: the class of its module, or the name of its function."""
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


def _node(name: str, kind: str, inputs: list[str], shape: tuple[int, ...]) -> NodeDef:
    attributes = {"shape": AttrValue(s=" x ".join(map(str, shape)).encode())} if shape else {}
    return NodeDef(name=name, op=kind, input=inputs, attr=attributes)


def _plain(name: str) -> str:
    """Return `name` without the characters that TensorBoard takes for groups."""
    return "".join(character if character.isalnum() else "_" for character in name)
