"""What several tests share: a tiny data set, a tiny model, and the command line run in this process."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

TINY_MODEL = '''
"""A model of the user's own."""
from torch import nn

def conv(a, b, *more):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), *more)

def make(num_classes):
    return nn.Sequential(
        conv(3, 8, nn.MaxPool2d(2)), conv(8, 16), conv(16, 16, nn.MaxPool2d(2)), conv(16, 24),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, num_classes),
    )

def branchy(num_classes):
    class Branchy(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
        def forward(self, x):
            return self.conv(x) if x.sum() > 0 else x
    return Branchy()

def broken(num_classes):
    raise RuntimeError("no weights today")
'''


def write_npz(path, count=90, classes=3, side=16, **more):
    """Write an .npz of images whose class shows as the place of a bright square."""
    draw = np.random.default_rng(0)
    labels = np.arange(count) % classes
    images = draw.integers(0, 90, (count, side, side, 3), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[2 + 4 * label : 6 + 4 * label, 4:12] += 120
    test = slice(0, count // 3)
    arrays = {"train_images": images, "train_labels": labels, "test_images": images[test], "test_labels": labels[test]}
    np.savez(path, **(arrays | more))
    return path


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty current folder that holds data.npz and mine.py, as a user's would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("mine", None)
    Path("mine.py").write_text(TINY_MODEL)
    write_npz("data.npz")
    return tmp_path


@pytest.fixture
def options(workplace):
    """The options of a run that takes a second."""
    return [
        "--data=data.npz",
        "--model=mine:make",
        "--data_root=root",
        "--budget=200MB",
        "--epochs=2",
        "--precision=fp32",
        "--batch_limit=16",
        "--threads=2",
    ]


@pytest.fixture
def three_blocks(options, capsys):
    """The path of a plan with three blocks for the run of `options`."""
    from neuroflux.plan import main

    assert main([*options, "--out=planned"]) == 0
    capsys.readouterr()
    path = Path("planned/plan.json")
    plan = json.loads(path.read_text())
    whole = plan["blocks"][0]
    bounds = [(0, 0), (1, 2), (3, 3)]
    plan["blocks"] = [{**whole, "first": first, "last": last, "cache_bytes": 10**6} for first, last in bounds]
    path.write_text(json.dumps(plan))
    return str(path)
