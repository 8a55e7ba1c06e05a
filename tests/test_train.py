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


def test_a_plan_is_printed_for_programs_and_for_people(options, capsys):
    from neuroflux.plan import main as plan

    capsys.readouterr()
    assert plan([*options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert Plan.from_dict(printed).budget == 200_000_000
    assert plan(options) == 0
    said = capsys.readouterr().out
    assert "what other budgets would buy" in said
    assert [f"| {size} MB" in said for size in ("100.0", "150.0", "200.0", "300.0", "400.0")] == [True] * 5


def weights(folder):
    return torch.load(f"{folder}/model.pt", weights_only=True)["weights"]


def assert_same(first, second):
    assert weights(first).keys() == weights(second).keys()
    assert all(torch.equal(weights(first)[name], weights(second)[name]) for name in weights(first))
    assert summary(first)["exits"] == summary(second)["exits"]


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_run_stopped_after_any_pass_ends_as_one_that_was_not(options, three_blocks, monkeypatch, count, optimizer):
    from neuroflux.training.checkpoint import Checkpoints

    fixed = [*options, f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9", "--epochs=3", "--augment=flip+crop"]
    fixed.append(f"--optimizer={optimizer}")
    assert train([*fixed, "--out=whole"]) == 0
    left, original = [count], Checkpoints.save_pass

    def save(self, *values):
        original(self, *values)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save_pass", save)
    with pytest.raises(SystemExit):
        train([*fixed, "--out=run"])
    assert train(["--out=run", "--resume"]) == 0
    assert_same("whole", "run")
    assert not Path("run/checkpoints/pass.pt").exists()


def test_backpropagation_goes_on_after_its_last_pass_too(options, monkeypatch):
    from neuroflux.training.checkpoint import Checkpoints

    for method in ("backprop", "accumulate"):
        fixed = [*options, f"--method={method}", "--epochs=3"]
        assert train([*fixed, f"--out=whole-{method}"]) == 0
        with monkeypatch.context() as patch:
            original = Checkpoints.save_pass

            def save(self, *values, original=original):
                original(self, *values)
                raise KeyboardInterrupt

            patch.setattr(Checkpoints, "save_pass", save)
            with pytest.raises(SystemExit):
                train([*fixed, f"--out=run-{method}"])
        assert train([f"--out=run-{method}", "--resume"]) == 0
        assert_same(f"whole-{method}", f"run-{method}")


def test_a_damaged_pass_is_trained_again(options, monkeypatch, capsys):
    from neuroflux.training.pipeline import Run

    assert train([*options, "--out=whole"]) == 0
    original = Run._evaluate

    def evaluate_once(self, result, block, *rest):
        if block.passes == 2:
            raise KeyboardInterrupt
        original(self, result, block, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_evaluate", evaluate_once)
        with pytest.raises(SystemExit):
            train([*options, "--out=run"])
    Path("run/checkpoints/pass.pt").write_bytes(b"not a file of tensors")
    capsys.readouterr()
    assert train(["--out=run", "--resume"]) == 0
    assert "block 1 starts again" in capsys.readouterr().out
    assert_same("whole", "run")


def stopped_by(how, options, folder):
    """Return (exit code, what it says) of a run that `how` was sent to after its second pass."""
    command = [sys.executable, "-m", "neuroflux.train", *options, f"--out={folder}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(neuroflux.__file__).parents[1])])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    for line in process.stdout:
        if "pass 2/" in line:
            process.send_signal(how)
            break
    _, error = process.communicate(timeout=60)
    return process.returncode, error.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize(("how", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_a_run_cleanly_and_it_says_what_was_kept(options, how, code, word):
    returned, error = stopped_by(getattr(signal, how), [*options, "--epochs=500"], "run")
    assert returned == code
    assert error.startswith(f"neuroflux: {word}; kept: block 1 up to pass ")
    assert error.endswith("; continue with --resume --out run")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_killed_run_ends_as_one_that_was_not(options):
    more = [*options, "--epochs=30"]
    assert train([*more, "--out=whole"]) == 0
    code, _ = stopped_by(signal.SIGKILL, [*more, "--plan=whole/plan.json"], "run")
    assert code == -signal.SIGKILL
    assert train(["--out=run", "--resume"]) == 0
    assert_same("whole", "run")


@pytest.mark.parametrize(("answer", "code"), [("", 0), ("y", 0), ("n", 2)])
def test_at_a_terminal_the_same_command_asks_whether_to_go_on(options, monkeypatch, capsys, answer, code):
    from neuroflux.training.checkpoint import Checkpoints

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_pass", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            train([*options, "--out=run"])
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert train([*options, "--out=run"]) == code
    assert asked == ["run holds a run that is not finished. Go on with it? [Y/n] "]


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


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_blocks_learn_from_caches_of_every_kind(options, three_blocks, kind):
    more = [f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9", f"--cache_dtype={kind}"]
    assert train([*options, *more, "--out=run"]) == 0
    assert summary("run")["test_accuracy"] > 0.6


def test_without_a_cache_blocks_learn_from_images_changed_anew(options, three_blocks, monkeypatch):
    from neuroflux.training.checkpoint import Checkpoints

    more = [f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9", "--cache_views=0", "--augment=flip+crop"]
    assert train([*options, *more, "--out=whole"]) == 0
    result = summary("whole")
    assert len(result["blocks"]) == 3
    assert "cache" not in result["seconds"]
    assert result["test_accuracy"] > 0.6
    original = Checkpoints.save_pass

    def save(self, number, state):
        original(self, number, state)
        if number == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_pass", save)
        with pytest.raises(SystemExit):
            train([*options, *more, "--out=run"])
    assert not Path("run/cache").exists()
    assert train(["--out=run", "--resume"]) == 0
    assert_same("whole", "run")


def test_heads_that_look_ahead_are_saved_and_loaded(options):
    assert train([*options, "--out=run", "--head=auglocal", "--gradient_span=2", "--tolerance=0.9"]) == 0
    result, model = summary("run"), neuroflux.load("run")
    assert result["chosen"] == 0
    assert len([module for module in model.head.modules() if isinstance(module, nn.Conv2d)]) == 1
    assert evaluate(["run"]) == 0


def test_a_run_starts_from_the_weights_of_an_earlier_one(options, capsys):
    assert train([*options, "--out=first", "--epochs=6"]) == 0
    capsys.readouterr()
    assert train([*options, "--out=second", "--init=first", "--epochs=1", "--lr=0.0001", "--seed=1"]) == 0
    text = capsys.readouterr().out
    assert "started from first: " in text
    assert train([*options, "--out=third", "--epochs=1", "--lr=0.0001", "--seed=1"]) == 0
    first = neuroflux.load("first").state_dict()["layers.0.0.0.weight"]
    near, far = (neuroflux.load(run).state_dict()["layers.0.0.0.weight"] for run in ("second", "third"))
    assert (near - first).abs().max() < 0.01 < (far - first).abs().max()


def test_frozen_layers_keep_weights_and_statistics_and_run_once(options, capsys):
    import mine

    before = mine.make(3)
    for module in before.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.add_(0.1)
    torch.save(before.state_dict(), "before.pth")
    more = ["--init=before.pth", "--freeze=2", "--epochs=3", "--min_gain=0", "--lookahead=9", "--tolerance=0"]
    for method in ("neuroflux", "backprop"):
        assert train([*options, *more, f"--out={method}", f"--method={method}"]) == 0
        assert "started from before.pth: 26 of 26 tensors" in capsys.readouterr().out
        after = {name.split(".", 2)[2]: tensor for name, tensor in weights(method).items() if name[0] == "l"}
        frozen = [name for name in after if name.startswith(("0.", "1."))]
        assert len(frozen) == 14
        assert all(torch.equal(before.state_dict()[name], after[name]) for name in frozen)
        assert not torch.equal(before.state_dict()["2.0.weight"], after["2.0.weight"])
    plan = Plan.from_dict(json.loads(Path("neuroflux/plan.json").read_text()))
    assert (plan.blocks[0].last, plan.blocks[0].passes) == (1, 0)
    result = summary("neuroflux")
    assert result["exits"][:2] == [0.0, 0.0]
    assert result["chosen"] >= 2
    assert "frozen" in Path("neuroflux/report.md").read_text()


def test_a_run_with_frozen_layers_is_resumed(options, capsys, monkeypatch):
    more = ["--freeze=1", "--min_gain=0", "--lookahead=9"]
    assert train([*options, *more, "--out=whole"]) == 0

    from neuroflux.training.pipeline import Run

    def stop(self, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_train_block", stop)
        with pytest.raises(SystemExit):
            train([*options, *more, "--out=broken"])
    assert train(["--out=broken", "--resume"]) == 0
    assert summary("broken")["exits"] == summary("whole")["exits"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--freeze=4"], "--freeze 4 leaves nothing to train"),
        (["--freeze=-1"], "--freeze -1 is too small"),
        (["--init=nowhere.pth"], "--init nowhere.pth: there is no such file or folder"),
        (["--init=data.npz"], "cannot read data.npz"),
        (["--init=torchvision:DEFAULT"], "torchvision has no such weights"),
        (["--init=torchvision:ResNet18_Weights.NOTHING"], "torchvision has no such weights"),
        (["--gradient_span=0"], "--gradient_span '0' makes no sense"),
        (["--gradient_span=some"], "write layer, auto or a number"),
        (["--cache_views=-1"], "--cache_views -1 is too small"),
        (["--head=wide"], "--head 'wide' is none of conv, auglocal"),
    ],
)
def test_nonsense_is_one_line(options, capsys, more, said):
    assert train([*options, *more, "--out=run"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_the_chosen_model_is_tuned_end_to_end_and_kept_only_if_better(options, capsys):
    more = ["--epochs=1", "--lr=0.005", "--tolerance=0"]
    assert train([*options, *more, "--out=plain"]) == 0
    assert train([*options, *more, "--out=tuned", "--finetune=6"]) == 0
    plain, tuned = summary("plain"), summary("tuned")
    assert tuned["exits"] == plain["exits"]
    assert len(tuned["finetuned"]["epoch_seconds"]) == 6
    assert tuned["val_accuracy"] == tuned["finetuned"]["accuracies"][0] > plain["val_accuracy"]
    assert "**Fine-tuning**: 6 passes" in Path("tuned/report.md").read_text()
    assert evaluate(["tuned"]) == 0
    assert f"test accuracy {tuned['test_accuracy']:.4f}" in capsys.readouterr().out
    assert train([*options, "--epochs=6", "--out=best"]) == 0
    assert train([*options, "--epochs=6", "--out=worse", "--finetune=1"]) == 0
    if summary("worse")["finetuned"]["accuracies"][0] <= summary("best")["val_accuracy"]:
        assert_same("best", "worse")
        assert "it was undone" in Path("worse/report.md").read_text()


def test_fine_tuning_is_stopped_and_resumed_like_a_block(options, monkeypatch):
    from neuroflux.training.checkpoint import Checkpoints

    fixed = [*options, "--finetune=3", "--epochs=1", "--lr=0.005"]
    assert train([*fixed, "--out=whole"]) == 0
    original, plan = Checkpoints.save_pass, Plan.from_dict(json.loads(Path("whole/plan.json").read_text()))

    def save(self, number, state):
        original(self, number, state)
        if number > len(plan.blocks):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save_pass", save)
        with pytest.raises(SystemExit):
            train([*fixed, "--out=run"])
    assert train(["--out=run", "--resume"]) == 0
    assert_same("whole", "run")
