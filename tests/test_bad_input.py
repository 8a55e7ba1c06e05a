"""Every bad input ends in one clear line on stderr and exit code 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import neuroflux
from neuroflux.evaluate import main as evaluate
from neuroflux.plan import main as plan
from neuroflux.train import main as train
from tests.conftest import write_npz


def refused(main, arguments, capsys):
    """Return the line that `main` ends with."""
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert error.startswith("neuroflux: ")
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--budget=abc", "'abc' is not a size: write it like 512MB"),
        ("--budget=0", "not a positive size"),
        ("--budget=-5MB", "'-5MB' is not a size"),
        ("--budget=1KB", "below the floor of"),
        ("--data=nowhere/at/all", "nowhere/at/all"),
        ("--data=missing.npz", "missing.npz"),
        ("--data=cifr10", "did you mean 'cifar10'"),
        ("--model=vgg166", "did you mean 'vgg16'"),
        ("--model=resnet_18", "did you mean 'resnet18'"),
        ("--model=vit_b_16", "vit_b_16"),
        ("--model=nowhere:make", "nowhere"),
        ("--model=mine:mkae", "did you mean"),
        ("--model=mine:broken", "no weights today"),
        ("--model=mine:branchy", "control flow"),
        ("--method=neuroflx", "did you mean 'neuroflux'"),
        ("--optimizer=sdg", "did you mean 'sgd'"),
        ("--precision=bf61", "did you mean 'bf16'"),
        ("--device=tpu9", "--device 'tpu9' cannot be used here"),
        ("--epochs=0", "at least 1"),
        ("--epochs=many", "epochs"),
        ("--lr=-1", "must be above 0"),
        ("--lr=nan", '"lr"'),
        ("--batch-limit=1", "at least 2"),
        ("--tolerance=2", "must be in [0, 1)"),
        ("--limit-train=0", "at least 2"),
        ("--epohcs=3", "did you mean --epochs?"),
        ("--config=missing.yaml", "missing.yaml"),
        ("--plan=missing.json", "cannot read the plan missing.json"),
        ("--resume", "holds no run to resume"),
        ("--image_size=2", "at least 8"),
        ("--image_size=100000", "at most 4096"),
        ("--seed=99999999999999999999", "at most 1000000000"),
        ("--threads=9999", "too large"),
    ],
)
def test_a_bad_setting(options, capsys, flag, says):
    assert says in refused(train, [*options, "--out=run", flag], capsys)


def test_the_budget_that_the_error_names_is_enough(options):
    def run(*more):  # in a process of its own: a few megabytes count here
        command = [sys.executable, "-m", "neuroflux.train", *options, *more]
        environment = {**os.environ, "PYTHONPATH": str(Path(neuroflux.__file__).parents[1])}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    refusal = run("--out=a", "--budget=2MB")
    assert refusal.returncode == 2
    enough = refusal.stderr.split("--budget ")[1].split(" ")[0]
    done = run("--out=b", f"--budget={enough}")
    assert done.returncode == 0, done.stderr
    result = json.loads(Path("b/summary.json").read_text())
    assert result["peak"]["measured"] <= result["budget"]["bytes"]


class TestFolders:
    def image(self, path, mode="RGB", size=(16, 16), value=100):
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == "I;16":
            Image.fromarray(np.full(size[::-1], value * 257, np.uint16)).save(path)
        else:
            Image.new("RGB", size, (value, value, value)).convert(mode).save(path)

    def folder(self, classes=("cat", "dog"), each=12):
        for number, name in enumerate(classes):
            for k in range(each):
                self.image(Path("images/train") / name / f"{k}.png", value=60 + 100 * number + k)
        return ["--data=images", "--out=run"]

    def test_a_corrupt_file_is_named(self, options, capsys):
        data = self.folder()
        Path("images/train/cat/3.png").write_bytes(b"\x89PNG\r\n\x1a\nnonsense")
        assert "3.png" in refused(train, [*options, *data], capsys)

    def test_a_truncated_file_is_named(self, options, capsys):
        data = self.folder()
        path = Path("images/train/dog/5.png")
        path.write_bytes(path.read_bytes()[:50])
        assert "5.png" in refused(train, [*options, *data], capsys)

    def test_one_class(self, options, capsys):
        assert "class" in refused(train, [*options, *self.folder(("cat",))], capsys)

    def test_an_empty_class_is_named(self, options, capsys):
        data = self.folder()
        Path("images/train/fish").mkdir()
        assert "fish" in refused(train, [*options, *data], capsys)

    def test_mixed_modes_and_sizes_are_converted(self, options):
        data = self.folder()
        for k, mode in enumerate(["L", "RGBA", "P", "I;16", "CMYK"]):
            suffix = "jpg" if mode == "CMYK" else "png"
            self.image(Path(f"images/train/cat/x{k}.{suffix}"), mode, size=(20 + k, 31))
        assert train([*options, *data, "--image_size=16"]) == 0


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (np.arange(90) % 3 + 1, "0"),
        (np.arange(90) % 3 - 1, "-1"),
        (np.arange(90) % 2 * 2, "0, 2"),
        (np.zeros(90, int), "class"),
        (np.arange(90) / 3, "labels"),
        (np.arange(50) % 3, "50"),
    ],
)
def test_labels_that_are_not_classes(options, capsys, labels, says):
    write_npz("bad.npz", train_labels=labels)
    assert says in refused(train, [*options, "--out=run", "--data=bad.npz"], capsys)


def test_a_last_batch_of_one_image_is_no_error(options):
    write_npz("odd.npz", count=120)
    for count in (33, 34, 35, 49):  # one of them leaves a single image, whatever the batch
        assert train([*options, f"--out=run{count}", "--data=odd.npz", f"--limit-train={count}", "--epochs=1"]) == 0


def test_an_output_folder_that_holds_a_run(options, capsys):
    assert train([*options, "--out=run"]) == 0
    before = Path("run/summary.json").read_bytes()
    assert "already holds a run" in refused(train, [*options, "--out=run"], capsys)
    assert Path("run/summary.json").read_bytes() == before


def test_no_write_permission(options, capsys, monkeypatch):
    Path("locked").mkdir(mode=0o500)
    if os.access("locked", os.W_OK):  # root may write anywhere: play a user who may not
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "locked" in refused(train, [*options, "--out=locked/run"], capsys)


def test_a_plan_for_another_model(options, capsys):
    assert train([*options, "--out=a"]) == 0
    says = refused(train, [*options, "--out=b", "--plan=a/plan.json", "--model=vgg11"], capsys)
    assert "was made for other layers" in says


def test_settings_that_are_no_yaml(options, capsys):
    Path("bad.yaml").write_text("epochs: [")
    assert "bad.yaml" in refused(train, ["--config=bad.yaml"], capsys)
    Path("bad.yaml").write_text("epochs: 3\nspeed: high\n")
    assert "speed" in refused(train, ["--config=bad.yaml"], capsys)


@pytest.mark.parametrize("main", [plan, train])
def test_both_commands_name_the_floor(options, capsys, main):
    says = refused(main, [*options, "--budget=1MB"], capsys)
    assert "floor" in says
    assert "decided by" in says


def test_evaluating_what_is_not_there(workplace, capsys):
    assert "holds no finished run" in refused(evaluate, ["nothing"], capsys)


def test_a_value_that_looks_like_a_flag(options, capsys):
    assert "'-5MB' is not a size" in refused(train, [*options, "--out=run", "--budget", "-5MB"], capsys)


def test_a_refused_run_leaves_no_folder(options, capsys):
    refused(train, [*options, "--budget=1KB"], capsys)
    assert not any(Path("runs").iterdir())


@pytest.mark.parametrize("content", ["{}", "[]", "{", "3"])
def test_a_damaged_summary(options, capsys, content):
    assert train([*options, "--out=run"]) == 0
    Path("run/summary.json").write_text(content)
    assert "summary.json" in refused(evaluate, ["run"], capsys)


def test_resuming_a_finished_run_changes_nothing(options, capsys):
    assert train([*options, "--out=run"]) == 0
    before = Path("run/summary.json").read_bytes()
    assert train(["--out=run", "--resume", "true"]) == 0
    assert "finished already" in capsys.readouterr().out
    assert Path("run/summary.json").read_bytes() == before
