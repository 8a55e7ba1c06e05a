"""Packed activations: what is kept, how exactly, and that gradients stay right."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from neuroflux.planning.packing import _Packed, pack, packed_activations


@given(st.integers(1, 6), st.integers(1, 2000), st.floats(0.001, 1000), st.floats(-100, 100), st.integers(0, 99))
def test_eight_bits_are_off_by_half_a_step_at_most(images, size, scale, shift, seed):
    values = torch.randn(images, size, generator=torch.Generator().manual_seed(seed)) * scale + shift
    restored = pack(values, "int8").unpack()
    step = (values.amax(1) - values.amin(1)) / 255
    # the step itself is rounded to a float, which shows 255 steps away
    allowed = step[:, None] * 0.501 + values.abs().amax() * 1e-5
    assert ((restored - values).abs() <= allowed).all()


def test_what_relu_shut_stays_shut():
    values = torch.randn(4, 3000).relu()
    restored = pack(values, "int8").unpack()
    assert (restored[values == 0] == 0).all()


def test_constant_images_and_places_are_kept_exactly():
    assert torch.equal(pack(torch.full((2, 50), 7.5), "int8").unpack(), torch.full((2, 50), 7.5))
    places = torch.tensor([[0, 5, 70_000]])
    assert torch.equal(pack(places, "int8").unpack(), places)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(1024, 5),
    )  # fmt: skip


def gradients(kind):
    model, images = network(), torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    if kind is None:
        loss = model(images).square().mean()
    else:
        with packed_activations(model.parameters(), kind):
            loss = model(images).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("kind", "close"), [("bf16", 0.02), ("int8", 0.1)])
def test_gradients_are_near_the_exact_ones(kind, close):
    for packed, exact in zip(gradients(kind), gradients(None), strict=True):
        if exact.norm() > 1e-4:  # a bias before a norm has none
            assert (packed - exact).norm() / exact.norm() < close


def saved_bytes(kind):
    """Return the bytes that a forward pass keeps for the backward pass, each tensor counted once."""
    model, kept, images = network(), {}, torch.rand(8, 3, 16, 16)

    def count(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if kind is None:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(images)
        return sum(kept.values())
    with packed_activations(model.parameters(), kind):
        scores = model(images)
    size = sum(o.values.untyped_storage().nbytes() for o in gc.get_objects() if isinstance(o, _Packed))
    del scores
    assert not any(isinstance(o, _Packed) for o in gc.get_objects())
    return size


def test_what_is_kept_is_packed_once_and_goes_with_the_graph():
    gc.collect()
    assert 0 < saved_bytes("int8") < 0.5 * saved_bytes(None)
    assert saved_bytes("int8") < saved_bytes("bf16") < saved_bytes(None)
