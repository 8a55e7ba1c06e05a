"""Profiles that are kept: found again by the same settings, never used where anything differs or is damaged."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from neuroflux.inputs.chain import trace_chain
from neuroflux.planning.profiles import fingerprint, load_profile, save_profile
from neuroflux.train import main as train
from tests.planning.test_partitioner import layer, profile

CPU = torch.device("cpu")


def chain(width=8, size=16):
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 8, 3), nn.Flatten(), nn.LazyLinear(4)
    )
    model(torch.zeros(1, 3, size, size))
    return trace_chain(model, (3, size, size))


def test_the_name_depends_on_the_model_and_the_settings():
    names = {
        fingerprint(chain(), CPU, budget=1),
        fingerprint(chain(), CPU, budget=2),
        fingerprint(chain(width=9), CPU, budget=1),
        fingerprint(chain(size=12), CPU, budget=1),
    }
    assert len(names) == 4
    assert fingerprint(chain(), CPU, budget=1) in names


def test_a_profile_survives_the_disk(tmp_path):
    made = profile([layer("0"), layer("2")])
    save_profile(made, tmp_path / "a" / "b.json")
    assert load_profile(tmp_path / "a" / "b.json", chain()) == made


@pytest.mark.parametrize(
    "damage",
    ["", "[]", "{}", "no json", '{"layers": 3}', '{"layers": [{"name": "0"}]}'],
)
def test_a_damaged_profile_is_not_used(tmp_path, damage):
    (tmp_path / "p.json").write_text(damage)
    assert load_profile(tmp_path / "p.json", chain()) is None


@pytest.mark.parametrize("change", [{"name": "other"}, {"batches": [4]}, {"compact_peak": [1]}, {"fast_peak": "ab"}])
def test_a_profile_that_does_not_fit_is_not_used(tmp_path, change):
    values = profile([layer("0"), layer("2")]).to_dict()
    values["layers"][0] |= change
    (tmp_path / "p.json").write_text(json.dumps(values))
    assert load_profile(tmp_path / "p.json", chain()) is None


def test_a_second_run_plans_from_the_first_ones_profile(options, capsys):
    assert train([*options, "--out=a"]) == 0
    assert "earlier run" not in capsys.readouterr().out
    assert train([*options, "--out=b"]) == 0
    assert "planned from the profile of an earlier run" in capsys.readouterr().out
    assert Path("a/plan.json").read_text() == Path("b/plan.json").read_text()
    assert train([*options, "--out=c", "--fresh_profile"]) == 0
    assert train([*options, "--out=d", "--batch_limit=8"]) == 0
    assert "earlier run" not in capsys.readouterr().out
