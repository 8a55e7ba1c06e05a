"""What people look at: lines, the report, TensorBoard events."""

import io
import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from neuroflux.results.progress import Progress
from neuroflux.results.report import render, table
from neuroflux.train import main as train
from neuroflux.training.block import Progress as Step
from tests.planning.test_partitioner import FALLING, MB, job, make_plan, profile


class Terminal(io.StringIO):
    def isatty(self):
        return True


def play(stream):
    plan = make_plan(profile(FALLING), job(45 * MB))
    progress = Progress(45 * MB, stream)
    progress.planned(plan)
    progress.block_started(1, plan.blocks[0])
    for images in (50, 100):
        progress.stepped(1, 1, Step(images, 100, 50, [2.0, 1.5], 30 * MB, 0.0, 0.0, 5))
    progress.epoch_ended(1, 1, [0.4, 0.5], [2.0, 1.5], 3.0)
    progress.close()
    return stream.getvalue()


def test_away_from_a_terminal_there_are_plain_lines():
    text = play(io.StringIO())
    assert "\r" not in text
    assert "\x1b" not in text
    assert "pass 1/5: 3.0 s, loss 1.500, validation accuracy by exit 0.400 0.500, peak 30.0 MB" in text


def test_at_a_terminal_there_is_a_bar_with_rate_and_memory():
    text = play(Terminal())
    assert "img/s" in text
    assert "peak=30.0 MB of 45.0 MB" in text


def test_tables_are_aligned():
    lines = table(["a", "long header"], [["value", "1"], ["x", "22"]]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_the_report_says_what_the_summary_holds(options):
    assert train([*options, "--out=run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    text = render(summary)
    for value in (summary["parameters"]["full"], summary["parameters"]["model"], summary["budget"]["bytes"]):
        assert f"{value:,}" in text
    assert f"layer {summary['chosen'] + 1} of 4" in text
    assert text.count("| chosen |") == 1
    for phase in ("data", "profile", "train", "evaluate"):
        assert f"| {phase} " in text


def test_tensorboard_finds_curves_text_and_the_memory_chart(options):
    assert train([*options, "--out=run"]) == 0
    events = EventAccumulator("run")
    events.Reload()
    tags = events.Tags()
    summary = json.loads(Path("run/summary.json").read_text())
    exits = len(summary["exits"])
    assert {f"accuracy/exit-{k:02d}" for k in range(1, exits + 1)} <= set(tags["scalars"])
    assert {"memory/peak MB", "memory/budget MB", "loss/layer-01", "accuracy/best exit"} <= set(tags["scalars"])
    steps = [event.step for event in events.Scalars("accuracy/exit-01")]
    images = summary["images"]["train"]
    assert len(steps) == len(summary["blocks"][0]["curve"]) >= 2
    assert all(images * k - k <= step <= images * k for k, step in enumerate(steps, 1))
    assert {"plan/text_summary", "report/text_summary"} <= set(tags["tensors"])


def test_metrics_have_a_line_for_every_pass(options):
    assert train([*options, "--out=run"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    blocks = json.loads(Path("run/summary.json").read_text())["blocks"]
    expected = [number for block in blocks for number in range(1, len(block["curve"]) + 1)]
    assert [line["epoch"] for line in lines if line["event"] == "pass"] == expected
    assert lines[-1]["event"] == "end"
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_a_trace_shows_what_runs_in_every_block(options, three_blocks):
    more = ["--profile_trace", f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9"]
    assert train([*options, "--out=run", *more]) == 0
    for number in (1, 2, 3):
        events = json.loads(Path(f"run/trace/block-{number}.json").read_text())["traceEvents"]
        assert any("convolution" in event.get("name", "") for event in events)
