"""Choosing an exit, and the model file."""

import pickle

import pytest
import torch

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.chain import trace_chain
from neuroflux.inputs.models import build_model
from neuroflux.planning.heads import make_head
from neuroflux.training.exits import Description, StreamlinedModel, choose_exit, layers_worth_training, load


@pytest.mark.parametrize(
    ("accuracies", "tolerance", "chosen"),
    [
        ([0.5, 0.7, 0.8], 0.0, 2),
        ([0.5, 0.8, 0.8], 0.0, 1),
        ([0.5, 0.796, 0.8], 0.005, 1),
        ([0.5, 0.794, 0.8], 0.005, 2),
        ([0.9], 0.1, 0),
        ([0.8, 0.7, 0.6], 0.0, 0),
    ],
)
def test_the_shallowest_exit_within_the_tolerance_is_chosen(accuracies, tolerance, chosen):
    assert choose_exit(accuracies, tolerance) == chosen


@pytest.mark.parametrize(
    ("accuracies", "lookahead", "count"),
    [([], 2, 4), ([], 9, 11), ([0.5, 0.6, 0.4, 0.3], 2, 4), ([0.4, 0.5, 0.6], 2, 5), ([0.3, 0.3], 0, 1)],
)
def test_depth_grows_with_the_best_exit(accuracies, lookahead, count):
    assert layers_worth_training(accuracies, lookahead) == count


@pytest.fixture
def model():
    torch.manual_seed(3)
    chain = trace_chain(build_model("vgg11", num_classes=4, in_channels=3, image_size=32), (3, 32, 32))
    description = Description("vgg11", 2, 16, list("abcd"), [1, 32, 32], 3, [100.0], [50.0])
    return StreamlinedModel(list(chain.layers[:2]), make_head(chain, 1, 4, 16, 0), description).eval()


def test_a_saved_model_predicts_the_same(model, tmp_path):
    model.save(tmp_path / "model.pt")
    images = torch.randint(0, 256, (5, 1, 32, 32), dtype=torch.uint8)
    again = load(tmp_path)
    assert again.classes == list("abcd")
    assert not again.training
    assert torch.equal(again(images), model(images))
    torch.testing.assert_close(again(images / 255.0), model(images))
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())


def test_a_head_depends_on_its_seed_alone(model):
    chain = trace_chain(build_model("vgg11", num_classes=4, in_channels=3, image_size=32), (3, 32, 32))
    first = make_head(chain, 1, 4, 16, 0).state_dict()
    torch.rand(5)
    state = torch.get_rng_state()
    second = make_head(chain, 1, 4, 16, 0).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first["conv.weight"], make_head(chain, 1, 4, 16, 1).state_dict()["conv.weight"])


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/neuroflux-was-here", "w"))


@pytest.mark.parametrize("content", [b"", b"not a model", pickle.dumps({"a": 1}), pickle.dumps(Evil())])
def test_a_file_that_is_no_model_is_refused(content, tmp_path):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(NeuroFluxError, match=r"model\.pt"):
        load(tmp_path)


def test_pickled_code_in_a_torch_file_is_refused(tmp_path, monkeypatch):
    torch.save({"format": 1, "description": Evil(), "weights": {}}, tmp_path / "model.pt")
    with pytest.raises(NeuroFluxError, match="cannot read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "this version reads format 1"),
        ({"description": {}}, "not a NeuroFlux model"),
        ({"weights": {}}, "do not fit vgg11"),
    ],
)
def test_a_model_of_another_kind_is_refused(model, tmp_path, change, message):
    model.save(tmp_path / "model.pt")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    torch.save({**content, **change}, tmp_path / "model.pt")
    with pytest.raises(NeuroFluxError, match=message):
        load(tmp_path)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(NeuroFluxError, match=r"there is no file .*model\.pt"):
        load(tmp_path)
