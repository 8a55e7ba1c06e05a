"""The main job from end to end, on a tiny model and tiny data."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import neuroflux
from neuroflux.evaluate import main as evaluate
from neuroflux.planning.partitioner import Plan
from neuroflux.train import main as train


def summary(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def test_a_run_leaves_what_it_promises(options, capsys):
    assert train([*options, "--out=run"]) == 0
    names = {path.name for path in Path("run").iterdir()}
    assert {"config.yaml", "plan.json", "metrics.jsonl", "checkpoints", "model.pt", "report.md"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert not names & {"cache", "weights"}
    result = summary("run")
    assert result["test_accuracy"] > 0.9
    assert 1 <= len(result["exits"]) <= 4
    assert 0 < result["peak"]["measured"] <= result["budget"]["bytes"] == 200_000_000
    assert result["seconds"]["profile"] > 0
    report = Path("run/report.md").read_text()
    assert f"{result['test_accuracy']:.4f}" in report
    assert "200MB = 200,000,000 bytes" in report
    assert "200MB = 200,000,000 bytes" in capsys.readouterr().out


def test_the_model_is_loaded_and_evaluated_to_the_last_image(options, capsys):
    assert train([*options, "--out=run"]) == 0
    model = neuroflux.load("run")
    archive = np.load("data.npz")
    images = torch.from_numpy(archive["test_images"]).permute(0, 3, 1, 2)
    right = int((model(images).argmax(1).numpy() == archive["test_labels"]).sum())
    assert right == round(summary("run")["test_accuracy"] * 30)
    capsys.readouterr()
    assert evaluate(["run"]) == 0
    assert f"({right} of 30 images)" in capsys.readouterr().out


def test_three_blocks_train_from_caches(options, three_blocks):
    assert train([*options, "--out=run", f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9"]) == 0
    result = summary("run")
    assert [block["first"] for block in result["blocks"]] == [0, 1, 3]
    assert result["seconds"]["cache"] > 0
    assert not Path("run/cache").exists()
    assert max(result["exits"]) > 0.9


def test_finished_layers_run_forward_only_once_more_to_write_the_cache(options, three_blocks, monkeypatch):
    counts: dict[str, list[int]] = {}
    phases = []

    import mine

    from neuroflux.training.pipeline import Run

    original, tell = mine.make, Run._tell

    def counting(num_classes):
        model = original(num_classes)
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                calls = counts.setdefault(name, [])
                module.register_forward_hook(
                    lambda _module, args, _output, calls=calls: calls.append((phases[-1], len(args[0])))
                )
        return model

    monkeypatch.setattr(mine, "make", counting)
    monkeypatch.setattr(
        Run,
        "_tell",
        lambda self, event, *values: (event == "phase" and phases.append(values), tell(self, event, *values)),
    )
    assert train([*options, "--out=run", f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9"]) == 0
    assert len(counts) == 4
    data = summary("run")["images"]
    block_of = dict(zip(counts, (1, 2, 2, 3), strict=True))
    for name, calls in counts.items():
        own = f"block {block_of[name]}"
        start = max(k for k, (phase, _) in enumerate(calls) if phase == ("train", own))
        after = [(phase, size) for phase, size in calls[start + 1 :] if phase != ("evaluate", "")]
        training = [size for (phase, detail), size in after if phase == "train" or (phase == "cache" and detail != own)]
        cached = sum(size for phase, size in after if phase == ("cache", own))
        assert training == []
        assert cached == (data["train"] + data["val"] if block_of[name] < 3 else 0)


def test_the_same_seed_gives_the_same_model_twice(options):
    for name in ("a", "b"):
        assert train([*options, f"--out={name}"]) == 0
    first, second = (torch.load(f"{name}/model.pt", weights_only=True)["weights"] for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert summary("a")["exits"] == summary("b")["exits"]


def test_another_seed_gives_another_model(options):
    for seed in (0, 1):
        assert train([*options, f"--out=run{seed}", f"--seed={seed}"]) == 0
    first, second = (torch.load(f"run{seed}/model.pt", weights_only=True)["weights"] for seed in (0, 1))
    assert not torch.equal(first["layers.0.0.0.weight"], second["layers.0.0.0.weight"])


@pytest.mark.parametrize("damage", ["none", "flipped bit", "missing"])
def test_an_interrupted_run_goes_on_after_its_last_finished_block(options, three_blocks, monkeypatch, damage, capsys):
    from neuroflux.training.pipeline import Run

    fixed = [*options, f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9"]
    assert train([*fixed, "--out=whole"]) == 0
    original = Run._train_block

    def interrupted(self, number, *rest):
        if number == 3:
            raise KeyboardInterrupt
        return original(self, number, *rest)

    monkeypatch.setattr(Run, "_train_block", interrupted)
    with pytest.raises(SystemExit) as stop:
        train([*fixed, "--out=run"])
    assert stop.value.code == 130
    assert "kept: 2 finished blocks" in capsys.readouterr().err
    trained = []
    monkeypatch.setattr(
        Run, "_train_block", lambda self, number, *rest: trained.append(number) or original(self, number, *rest)
    )
    cache = Path("run/cache/level-2/train.npy")
    if damage == "flipped bit":
        content = bytearray(cache.read_bytes())
        content[5000] ^= 1
        cache.write_bytes(content)
    elif damage == "missing":
        cache.unlink()
    assert train(["--out=run", "--resume"]) == 0
    assert trained == [3]
    assert summary("run")["exits"] == summary("whole")["exits"]
    assert ("is written again" in capsys.readouterr().out) == (damage != "none")


def test_depth_stops_when_a_block_brings_nothing(options, three_blocks):
    assert train([*options, "--out=run", f"--plan={three_blocks}", "--min_gain=0.9", "--lookahead=9"]) == 0
    result = summary("run")
    assert len(result["blocks"]) == 2
    assert result["planned_blocks"] == 3
    assert len(result["exits"]) == 3
    assert "Layers 4 to 4 were not trained" in Path("run/report.md").read_text()


def test_a_run_without_out_finds_a_free_folder(options):
    assert train(options) == 0
    assert train(options) == 0
    assert {path.name for path in Path("runs").iterdir()} == {
        "mine.make-data-neuroflux-200MB",
        "mine.make-data-neuroflux-200MB-2",
    }


def test_settings_from_a_file_and_the_command_line(options):
    assert train([*options, "--out=a"]) == 0
    assert train(["--config=a/config.yaml", "--out=b", "--epochs=1"]) == 0
    assert json.loads(Path("b/plan.json").read_text())["epochs"] == 1
    assert summary("b")["model"] == "mine:make"


def test_a_written_plan_is_the_plan_that_is_followed(options):
    assert train([*options, "--out=a"]) == 0
    plan = json.loads(Path("a/plan.json").read_text())
    plan["blocks"][0]["batch"] = 5
    Path("edited.json").write_text(json.dumps(plan))
    assert train([*options, "--out=b", "--plan=edited.json"]) == 0
    assert Plan.from_dict(json.loads(Path("b/plan.json").read_text())).blocks[0].batch == 5
    assert summary("b")["blocks"][0]["batch"] == 5


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_cleanly_and_says_what_was_kept(options):
    command = [sys.executable, "-m", "neuroflux.train", *options, "--out=run", "--epochs=500"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(neuroflux.__file__).parents[1])])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if "pass 1/" in line:
            process.send_signal(signal.SIGINT)
            break
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip() == "neuroflux: interrupted; no block was finished yet; continue with --resume --out run"


def spans(folder):
    return json.loads((Path(folder) / "plan.json").read_text())["spans"]


def test_with_room_for_everything_an_automatic_span_is_backpropagation(options):
    assert train([*options, "--out=ours", "--gradient_span=auto", "--epochs=4"]) == 0
    assert train([*options, "--out=theirs", "--method=backprop", "--epochs=4"]) == 0
    assert spans("ours") == spans("theirs") == [4]
    ours, theirs = neuroflux.load("ours").state_dict(), neuroflux.load("theirs").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)  # after 5 steps in each of 4 passes


def test_spans_learn_together_and_end_in_one_exit(options):
    assert train([*options, "--out=run", "--gradient_span=3", "--min_gain=0", "--tolerance=0"]) == 0
    assert spans("run") == [3, 1]
    result = summary("run")
    assert len(result["exits"]) == 2
    model = neuroflux.load("run")
    assert len(model.layers) == [3, 4][result["chosen"]]
    assert evaluate(["run"]) == 0


def test_a_plan_with_spans_is_followed_and_resumed(options, tmp_path):
    assert train([*options, "--out=first", "--gradient_span=2"]) == 0
    plan = Path("first/plan.json")
    assert train([*options, "--out=second", f"--plan={plan}"]) == 0
    assert spans("second") == [2, 2]
    values = json.loads(plan.read_text())
    plan.write_text(json.dumps({**values, "spans": [2, 1]}))
    assert train([*options, "--out=third", f"--plan={plan}"]) == 2


def test_blocks_learn_from_several_views(options, three_blocks):
    more = [f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9", "--cache_views=3", "--augment=flip+crop"]
    assert train([*options, *more, "--out=run"]) == 0
    assert train([*options, *more, "--out=again"]) == 0
    assert summary("run")["exits"] == summary("again")["exits"]
    assert summary("run")["test_accuracy"] > 0.6
