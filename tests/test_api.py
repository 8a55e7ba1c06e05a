"""The same from Python, with the user's own model and data sets."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import neuroflux
from neuroflux.errors import BudgetTooSmall, NeuroFluxError

SETTINGS = {"budget": "200MB", "epochs": 2, "precision": "fp32", "batch_limit": 16, "progress": False}


def arrays():
    archive = np.load("data.npz")
    images = torch.from_numpy(archive["train_images"]).permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(archive["train_labels"])


@pytest.fixture
def model(workplace):
    import mine

    torch.manual_seed(0)
    return mine.make(3)


class Noisy(Dataset):
    """Float images that are different every time, as random transforms make them."""

    def __init__(self):
        self.images, self.targets = arrays()
        self.asked = 0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        self.asked += 1
        return self.images[index] / 255 + 0.01 * torch.randn(3, 16, 16), int(self.targets[index])


def test_uint8_images(model):
    images, labels = arrays()
    data = TensorDataset(images, labels)
    result = neuroflux.fit(model, data, TensorDataset(images[:20], labels[:20]), test=data, out="run", **SETTINGS)
    assert result.summary["test_accuracy"] > 0.9
    right = (result.model(images).argmax(1) == labels).sum()
    assert int(right) == round(result.summary["test_accuracy"] * len(labels))
    assert (result.folder / "report.md").exists()


def test_float_images_are_used_as_the_transforms_make_them(model):
    data = Noisy()
    result = neuroflux.fit(model, data, out="run", **SETTINGS)
    assert data.asked > 2 * len(data) * 0.8
    assert result.summary["val_accuracy"] > 0.8
    images, labels = arrays()
    assert (result.model(images / 255).argmax(1) == labels).float().mean() > 0.8


def test_the_model_that_was_passed_in_is_trained_in_place(model):
    before = model[0][0].weight.detach().clone()
    images, labels = arrays()
    neuroflux.fit(model, TensorDataset(images, labels), out="run", **SETTINGS)
    assert not torch.equal(before, model[0][0].weight)


def test_a_model_without_a_name_is_loaded_into_a_new_one(model):
    import mine

    images, labels = arrays()
    result = neuroflux.fit(model, TensorDataset(images, labels), out="run", **SETTINGS)
    with pytest.raises(NeuroFluxError, match="model="):
        neuroflux.load("run")
    again = neuroflux.load("run", model=mine.make(3))
    assert torch.equal(again(images), result.model(images))


def test_a_plan_alone_trains_nothing(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images, labels = arrays()
    plan = neuroflux.make_plan(model, TensorDataset(images, labels), budget="200MB", precision="fp32")
    assert plan.budget == 200_000_000
    assert len(plan.layers) == 4
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_the_floor_is_in_the_error(model):
    images, labels = arrays()
    with pytest.raises(BudgetTooSmall) as error:
        neuroflux.make_plan(model, TensorDataset(images, labels), budget="1MB", precision="fp32")
    assert error.value.floor > 1_000_000
    assert error.value.layer


def test_settings_that_do_not_exist_are_refused(model):
    images, labels = arrays()
    with pytest.raises(NeuroFluxError, match="speed"):
        neuroflux.fit(model, TensorDataset(images, labels), speed="high")
