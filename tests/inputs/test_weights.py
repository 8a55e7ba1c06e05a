"""Weights to start from: found under other names, matched by shape, never run as code."""

import pickle

import pytest
import torch
from torch import nn

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.models import build_model
from neuroflux.inputs.weights import load_weights, read_tensors


def net(classes=3):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, classes))


@pytest.fixture
def trained():
    torch.manual_seed(7)
    model = net()
    model[1].running_mean.add_(3)
    return model


WRAPPINGS = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "parallel": lambda state: {f"module.{key}": value for key, value in state.items()},
    "lightning": lambda state: {"state_dict": {f"model.module.{key}": value for key, value in state.items()}},
    "compiled": lambda state: {"model": {f"_orig_mod.{key}": value for key, value in state.items()}},
    "streamlined": lambda state: {"format": 1, "weights": {f"layers.0.{key}": value for key, value in state.items()}},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_tensor_is_found_in_what_trainers_wrap_it_in(wrapping, trained, tmp_path):
    torch.save(WRAPPINGS[wrapping](trained.state_dict()), tmp_path / "w.pth")
    model = net()
    loaded = load_weights(model, str(tmp_path / "w.pth"), "net")
    assert len(loaded.loaded) == 8
    assert not loaded.missing
    assert not loaded.unfit
    assert torch.equal(model[0].weight, trained[0].weight)
    assert torch.equal(model[1].running_mean, trained[1].running_mean)


def test_what_does_not_fit_is_kept_and_named(trained, tmp_path):
    torch.save({**trained.state_dict(), "extra": torch.ones(1)}, tmp_path / "w.pth")
    model = net(classes=5)
    before = model[4].weight.clone()
    text = str(load_weights(model, str(tmp_path / "w.pth"), "net"))
    assert torch.equal(model[4].weight, before)
    assert "6 of 8 tensors" in text
    assert "4.weight (3x4 there, 5x4 here)" in text
    assert "not used: extra" in text


def test_weights_of_another_model_are_refused(tmp_path):
    torch.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "w.pth")
    with pytest.raises(NeuroFluxError, match="none of its 2 tensors"):
        load_weights(net(), str(tmp_path / "w.pth"), "net")
    torch.save({"a": 1}, tmp_path / "none.pth")
    with pytest.raises(NeuroFluxError, match="no tensors by name"):
        load_weights(net(), str(tmp_path / "none.pth"), "net")


def test_every_flipped_bit_in_a_tensor_is_noticed(trained, tmp_path):
    path = tmp_path / "w.pth"
    torch.save(trained.state_dict(), path)
    whole = path.read_bytes()
    place = whole.index(trained[0].weight.detach().numpy().tobytes())
    for offset in range(0, trained[0].weight.numel() * 4, 37):
        damaged = bytearray(whole)
        damaged[place + offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        with pytest.raises(NeuroFluxError, match="damaged"):
            read_tensors(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_ends_too_early_is_noticed(trained, tmp_path, share):
    path = tmp_path / "w.pth"
    torch.save(trained.state_dict(), path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(NeuroFluxError, match="damaged"):
        read_tensors(path)


class Evil:
    def __reduce__(self):
        return (open, ("executed", "w"))


def test_code_in_a_file_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"0.weight": Evil()}, "evil.pth")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pth", "evil.pkl"):
        with pytest.raises(NeuroFluxError, match="cannot read"):
            load_weights(net(), name, "net")
    assert not (tmp_path / "executed").exists()


def test_torchvisions_weights_are_found_by_the_models_name(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    torch.manual_seed(1)
    original = build_model("resnet18", num_classes=1000, in_channels=3, image_size=224)
    torch.save(original.state_dict(), tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    model = build_model("resnet18", num_classes=10, in_channels=3, image_size=32)
    loaded = load_weights(model, "torchvision:DEFAULT", "resnet18")
    assert [text.split()[0] for text in loaded.unfit] == ["conv1.weight", "fc.weight", "fc.bias"]
    assert torch.equal(model.layer1[0].conv1.weight, original.layer1[0].conv1.weight)


def test_without_a_network_it_says_where_the_file_goes(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    with pytest.raises(NeuroFluxError, match=r"put the file there by hand: .*resnet18-f37072fd.pth"):
        load_weights(net(), "torchvision:ResNet18_Weights.IMAGENET1K_V1", "resnet18")
