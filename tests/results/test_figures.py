"""Figures and the graph of the chain."""

import dataclasses

import numpy as np
import pytest
import torch

from neuroflux.inputs.chain import trace_chain
from neuroflux.inputs.datasets import open_data
from neuroflux.inputs.models import build_model
from neuroflux.results.figures import confusion_figure, mistakes_figure, pixels, plan_figure
from neuroflux.results.graph import chain_graph
from tests.conftest import write_npz
from tests.planning.test_partitioner import FALLING, MB, job, make_plan, profile


@pytest.fixture
def data(tmp_path):
    return open_data(str(write_npz(tmp_path / "data.npz")), root=tmp_path)


def text(figure):
    return " ".join(t.get_text() for axis in figure.axes for t in [*axis.texts, axis.title, *axis.get_yticklabels()])


def test_the_plan_shows_every_block():
    plan = make_plan(profile(FALLING), job(45 * MB))
    figure = plan_figure(plan)
    assert f"block {len(plan.blocks)}" in text(figure)
    assert f"batch {plan.blocks[0].batch}" in text(figure)
    image = pixels(figure)
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    assert len(np.unique(image)) > 10


def test_the_confusion_matrix_counts_every_test_image(data):
    predicted = data.test.labels.copy()
    predicted[0] = (predicted[0] + 1) % 3
    words = text(confusion_figure(data, predicted)).split()
    assert sum(int(word) for word in words if word.isdecimal()) >= len(data.test)
    assert "1" in words


def test_mistakes_are_shown_with_both_names(data):
    assert mistakes_figure(data, data.test.labels.copy()) is None
    wrong = (data.test.labels + 1) % 3
    named = dataclasses.replace(data, classes=["cat", "dog", "hen"])
    figure = mistakes_figure(named, wrong)
    assert "cat\nnot dog" in text(figure)
    assert pixels(figure).std() > 5


@pytest.mark.parametrize("name", ["vgg11", "resnet18"])
def test_the_graph_has_every_layer_and_no_loose_ends(name):
    torch.manual_seed(0)
    chain = trace_chain(build_model(name, num_classes=4, in_channels=3, image_size=32), (3, 32, 32))
    nodes = {node.name: node for node in chain_graph(chain).node}
    assert all(source in nodes for node in nodes.values() for source in node.input)
    assert len({n.split("/")[0] for n in nodes if n.startswith("layer_") and "/" in n}) == len(chain.layers)
    assert sum(node.op == "Conv2d" for node in nodes.values()) == sum(
        isinstance(m, torch.nn.Conv2d) for layer in chain.layers for m in layer.modules()
    )
    reached, front = set(), ["scores"]
    while front:
        here = front.pop()
        reached.add(here)
        front += [source for source in nodes[here].input if source not in reached]
    assert "images" in reached
