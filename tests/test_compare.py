"""The comparison from the command line, with real runs of a tiny model."""

import json
import os
from pathlib import Path

import pytest

import neuroflux
from neuroflux.compare import main as compare


@pytest.fixture
def arguments(options, monkeypatch):
    paths = [os.getcwd(), str(Path(neuroflux.__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    shared = [option for option in options if not option.startswith("--budget")]
    return [*shared, "--out=c"]


def test_methods_are_compared_and_finished_runs_are_kept(arguments, capsys):
    command = [*arguments, "--methods=neuroflux,backprop", "--budgets=1KB,200MB"]
    assert compare(command) == 0
    out = capsys.readouterr().out
    assert "neuroflux-1KB-seed0: cannot run: the budget of 1.0 kB is below the floor" in out
    assert "with --method backprop" in out
    runs = json.loads(Path("c/comparison.json").read_text())["runs"]
    assert len(runs) == 4
    ran = [run for run in runs if "reason" not in run]
    assert {run["method"] for run in ran} == {"neuroflux", "backprop"}
    for run in ran:
        assert len(run["curve"]) == 2 or run["method"] == "neuroflux"
        assert all(0 <= point["test"] <= 1 for point in run["curve"])
        assert run["seconds"] > run["curve"][-1]["seconds"] > run["curve"][0]["seconds"] > 0
    times = {path: path.stat().st_mtime_ns for path in Path("c/runs").glob("*/summary.json")}
    assert len(times) == 2
    assert compare([*command, "--seeds=0"]) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--methods=neuroflux,bakprop", "did you mean 'backprop'"),
        ("--budgets=200MB,lots", "'lots' is not a size"),
        ("--seeds=0,x", "write whole numbers"),
        ("--methods=,", "at least one value"),
        ("--budget=1MB", "--budget"),
    ],
)
def test_a_bad_setting_ends_in_one_line(arguments, flag, says, capsys):
    capsys.readouterr()
    assert compare([*arguments, flag]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert "\n" not in error


def test_a_folder_of_other_settings_is_refused(arguments, capsys):
    assert compare([*arguments, "--methods=neuroflux", "--budgets=1KB"]) == 0
    assert compare([*arguments, "--methods=neuroflux", "--budgets=1KB", "--epochs=3"]) == 2
    assert "another --epochs (2)" in capsys.readouterr().err
