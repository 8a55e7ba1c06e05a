"""Spans: how a chain is cut into what learns together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from neuroflux.inputs.chain import trace_chain
from neuroflux.planning.methods import METHODS, Whole, join
from neuroflux.planning.spans import equal_spans, longest_spans, rate_share


def net():
    def conv(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    pool = nn.MaxPool2d(2)
    return nn.Sequential(
        conv(3, 8), pool, conv(8, 16), pool, conv(16, 32), conv(32, 32), nn.Flatten(), nn.Linear(512, 5)
    )


@pytest.fixture
def chain():
    torch.manual_seed(0)
    return trace_chain(net(), (3, 16, 16))


@given(st.integers(1, 40), st.integers(1, 50))
def test_equal_spans_cover_every_layer(layers, length):
    spans = equal_spans(layers, length)
    assert sum(spans) == layers
    assert set(spans[:-1]) <= {length}
    assert 1 <= spans[-1] <= length


def test_joined_layers_are_the_same_model(chain):
    images = torch.rand(2, 3, 16, 16)
    joined = join(chain, [1, 2, 1])
    assert joined.shapes == [chain.shapes[0], chain.shapes[2], chain.shapes[3]]
    assert joined.names == [chain.names[0], f"{chain.names[1]}..{chain.names[2]}", chain.names[3]]
    assert joined.layers[0] is chain.layers[0]
    assert isinstance(joined.layers[1], Whole)
    ours, theirs = images, images
    for layer in joined.layers:
        ours = layer.eval()(ours)
    for layer in chain.layers:
        theirs = layer.eval()(theirs)
    assert torch.equal(ours, theirs)


def test_spans_grow_with_the_room_until_one_holds_all(chain):
    counts = [len(longest_spans(chain, room, 1)) for room in (0, 10**5, 10**6, 10**7, 10**9)]
    assert counts[0] == 4
    assert counts[-1] == 1
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 2


def test_spans_need_more_room_with_more_state(chain):
    rooms = [
        next(room for room in range(0, 10**8, 10_000) if len(longest_spans(chain, room, states)) == 1)
        for states in (1, 2)
    ]
    weights = sum(p.numel() for layer in chain.layers for p in layer.parameters())
    assert rooms[1] - rooms[0] == pytest.approx(4 * weights, abs=20_000)


def test_a_span_of_all_layers_is_the_chain_of_the_baselines(chain):
    ours, theirs = METHODS["neuroflux"].chain(chain, [4], "int8"), METHODS["backprop"].chain(chain, [4], "int8")
    assert ours.names == theirs.names
    assert type(ours.layers[0]) is type(theirs.layers[0]) is Whole


def test_longer_spans_learn_at_lower_rates():
    assert rate_share(1) == 1
    assert rate_share(2) > rate_share(4) > rate_share(13) == pytest.approx(0.015 / 0.05, rel=0.1)
