"""Tables and plots of a comparison, from made-up outcomes."""

import json

import pytest
from PIL import Image

from neuroflux.results.comparison import Cell, Comparison, one_line, time_to, write_comparison

MB = 10**6


def outcome(test, wall, peak, curve):
    return {
        "test_accuracy": test,
        "exits": [test],
        "chosen": 0,
        "wall": wall,
        "peak": {"measured": peak * MB, "predicted": peak * MB},
        "blocks": [{"first": 0, "last": 0, "batch": 32}],
        "parameters": {"model": 1000, "full": 2000},
        "images_per_second": {"model": 50.0, "full": 40.0},
        "curve": [{"seconds": s, "passes": k, "val": t, "test": t} for k, (s, t) in enumerate(curve, 1)],
    }


@pytest.fixture
def folder(tmp_path):
    def put(cell, value):
        run = cell.folder(tmp_path)
        run.mkdir(parents=True, exist_ok=True)
        if "reason" in value:
            run.with_suffix(".refused.json").write_text(json.dumps(value))
        else:
            (run / "summary.json").write_text(json.dumps(value))

    for seed, shift in enumerate((-0.02, 0.0, 0.02)):
        put(Cell("neuroflux", "200MB", seed), outcome(0.7 + shift, 60, 180, [(20, 0.5), (40, 0.61), (60, 0.7 + shift)]))
        put(Cell("backprop", "200MB", seed), outcome(0.6, 100, 190, [(50, 0.4), (100, 0.6)]))
        put(Cell("neuroflux", "100MB", seed), outcome(0.5, 90, 95, [(90, 0.5)]))
        put(Cell("backprop", "100MB", seed), {"reason": "the budget is below the floor of 150 MB"})
    return tmp_path


@pytest.fixture
def cells():
    return [Cell(m, b, s) for b in ("200MB", "100MB") for s in range(3) for m in ("neuroflux", "backprop")]


def test_the_target_is_what_backprop_ends_with_here_or_at_the_next_larger_budget(folder, cells):
    comparison = Comparison(folder, cells, None)
    assert comparison.budgets == ["100MB", "200MB"]
    assert comparison.target("200MB") == pytest.approx(0.6)
    assert comparison.target("100MB") == pytest.approx(0.6)
    assert Comparison(folder, cells, 0.3).target("100MB") == 0.3


def test_the_table_says_who_is_sooner_and_who_cannot_run(folder, cells):
    text = Comparison(folder, cells, None).tables()
    small, large = text.split("### 200MB")
    assert "0.700 ± 0.020 (3 seeds)" in large
    assert "40 (2.5x)" in large
    assert "| backprop  | cannot run" in small
    assert "- backprop: the budget is below the floor of 150 MB" in small
    assert "not reached" in small


def test_when_accuracy_was_reached():
    run = outcome(0.7, 60, 180, [(20, 0.5), (40, 0.61)])
    assert time_to(run, 0.5) == 20
    assert time_to(run, 0.55) == 40
    assert time_to(run, 0.62) is None


def test_all_is_written_and_every_plot_shows_something(folder, cells):
    write_comparison(folder, cells, None, "the command")
    values = json.loads((folder / "comparison.json").read_text())
    assert values["command"] == "the command"
    assert len(values["runs"]) == 12
    assert sum("reason" in run for run in values["runs"]) == 3
    markdown = (folder / "comparison.md").read_text()
    for name in ("accuracy_over_time", "time_to_target", "peak_memory", "final_models"):
        assert f"{name}.png" in markdown
        with Image.open(folder / f"{name}.png") as image:
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_a_cell_that_is_not_finished_has_no_outcome(tmp_path):
    cell = Cell("backprop", "1GB", 0)
    assert cell.outcome(tmp_path) is None
    cell.folder(tmp_path).mkdir(parents=True)
    (cell.folder(tmp_path) / "summary.json").write_text("{}")  # the run ended, but the comparison did not note it
    assert cell.outcome(tmp_path) is None
    assert "not finished" in one_line(cell, tmp_path)
