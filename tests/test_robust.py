"""Runs that meet trouble: damage, full disks, lost memory, spoilt numbers, other processes."""

import errno
import fcntl
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import neuroflux
from neuroflux.clean import main as clean
from neuroflux.train import main as train
from neuroflux.training.block import Block
from tests.test_bad_input import refused
from tests.test_train import assert_same, summary


@pytest.fixture
def fixed(options, three_blocks):
    """The options of a run of three blocks that always plans the same."""
    return [*options, f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9"]


def damage(path, place=-1000):
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("when", ["in the first pass", "later", "while the next cache is written"])
def test_a_cache_that_is_damaged_while_it_is_used_is_written_again(fixed, monkeypatch, capsys, when):
    from neuroflux.training import pipeline

    assert train([*fixed, "--out=whole"]) == 0
    done, original, write = [], Block.train_batch, pipeline.write_level

    def hit():
        if not done:
            damage(Path("run/cache/level-1/train.npy"), 300)
            done.append(True)

    def train_batch(self, *rest):
        second = next(self.exits[0].layer.parameters()).shape[1] == 8
        if second and not when.startswith("while") and self.passes == (when == "later"):
            hit()
        return original(self, *rest)

    def write_level(path, *rest):
        if path.parent.name == "level-2" and when.startswith("while"):
            hit()
        return write(path, *rest)

    monkeypatch.setattr(Block, "train_batch", train_batch)
    monkeypatch.setattr(pipeline, "write_level", write_level)
    capsys.readouterr()
    assert train([*fixed, "--out=run"]) == 0
    assert done
    assert "the cache is written again" in capsys.readouterr().out
    assert_same("whole", "run")


def test_a_cache_of_other_weights_is_not_used(fixed, monkeypatch, capsys):
    from neuroflux.training.pipeline import Run

    assert train([*fixed, "--out=whole"]) == 0
    original = Run._train_block
    for folder, seed in (("run", 0), ("other", 1)):
        with monkeypatch.context() as patch:

            def stop(self, number, *rest):
                if number == 3:
                    raise KeyboardInterrupt
                return original(self, number, *rest)

            patch.setattr(Run, "_train_block", stop)
            with pytest.raises(SystemExit):
                train([*fixed, f"--out={folder}", f"--seed={seed}"])
    for name in ("train.npy", "train.json"):
        Path("run/cache/level-2", name).write_bytes(Path("other/cache/level-2", name).read_bytes())
    capsys.readouterr()
    assert train(["--out=run", "--resume"]) == 0
    assert "is written again" in capsys.readouterr().out
    assert_same("whole", "run")


def test_a_full_disk_costs_the_cache_and_not_the_run(fixed, monkeypatch, capsys):
    import neuroflux.inputs.arrays as arrays

    class FullDisk:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            if len(data) > 256:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data)

    original = arrays.ArrayWriter.__enter__

    def enter(self):
        original(self)
        if "cache" in self.path.parts:
            self._file = FullDisk(self._file)
        return self

    monkeypatch.setattr(arrays.ArrayWriter, "__enter__", enter)
    assert train([*fixed, "--out=run"]) == 0
    said = capsys.readouterr().out
    assert "No space left on device; free space there; so block 1 is not cached" in said
    assert len(summary("run")["blocks"]) == 3
    assert not Path("run/cache").exists()
    assert not list(Path("run").rglob("*.tmp"))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_it_goes_on_later(fixed, monkeypatch, capsys):
    from neuroflux.training import checkpoint

    assert train([*fixed, "--out=whole"]) == 0
    calls, original = [], torch.save

    def save(content, path, *rest):
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half of it")
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")
        original(content, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", save)
        assert "free space there" in refused(train, [*fixed, "--out=run"], capsys)
    assert not list(Path("run").rglob("*.tmp"))
    assert train(["--out=run", "--resume"]) == 0
    assert_same("whole", "run")


def test_memory_that_others_take_for_a_while_costs_time_and_nothing_else(fixed, monkeypatch, capsys):
    original, steps = Block.train_batch, []

    def train_batch(self, level, rows, labels, generator):
        steps.append(len(labels))
        if 4 <= len(steps) <= 6 and len(labels) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return original(self, level, rows, labels, generator)

    monkeypatch.setattr(Block, "train_batch", train_batch)
    assert train([*fixed, "--out=run", "--epochs=4"]) == 0
    assert "the system had no memory for a step" in capsys.readouterr().out
    assert summary("run")["blocks"][0]["failures"] > 0
    assert "in halves" in Path("run/report.md").read_text()
    assert summary("run")["test_accuracy"] > 0.6


@pytest.mark.parametrize("what", ["_cache", "accuracies", "predictions", "throughput"])
def test_memory_that_lacks_in_any_phase_halves_the_batch(fixed, monkeypatch, what):
    import neuroflux.training.pipeline as pipeline

    failed = []

    def scarce(function, place):
        def call(*values):
            if values[place] > 5:
                failed.append(values[place])
                raise MemoryError
            return function(*values)

        return call

    if what == "accuracies":
        monkeypatch.setattr(Block, "accuracies", scarce(Block.accuracies, 2))
    elif what == "_cache":
        monkeypatch.setattr(pipeline, "write_level", scarce(pipeline.write_level, 3))
    else:
        monkeypatch.setattr(pipeline, what, scarce(getattr(pipeline, what), 2))
    assert train([*fixed, "--out=run"]) == 0
    assert failed


def test_profiling_goes_by_what_it_can_measure_where_memory_lacks(options, monkeypatch):
    from neuroflux.planning.profiler import _Bench

    original = _Bench.measure

    def measure(self, size, compact):
        if size > 2:
            raise MemoryError
        return original(self, size, compact)

    monkeypatch.setattr(_Bench, "measure", measure)
    assert train([*options, "--out=run"]) == 0


def tensors(count=60):
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    return torch.randn(count, 3, 12, 12, generator=draw) + labels.view(-1, 1, 1, 1), labels


def net():
    import mine

    return mine.make(3)


def test_an_image_that_is_not_a_number_is_skipped_and_reported(workplace):
    images, labels = tensors()
    images[7] = float("nan")
    settings = {"budget": "200MB", "epochs": 3, "batch_limit": 8, "out": "run", "data_root": "root"}
    result = neuroflux.fit(
        net(), TensorDataset(images, labels), progress=False, val=TensorDataset(*tensors(30)), **settings
    )
    assert result.summary["blocks"][0]["skipped"] >= 3
    assert result.summary["val_accuracy"] > 0.6
    assert all(torch.isfinite(p).all() for p in result.model.parameters())
    assert "their loss was not finite" in (result.folder / "report.md").read_text()


def test_a_run_that_diverges_goes_back_and_ends_well(options, monkeypatch, capsys):
    original, spoilt = Block.train_batch, []

    def train_batch(self, *rest):
        if not spoilt and self.passes == 2:
            spoilt.append(True)
            with torch.no_grad():
                next(self.exits[0].layer.parameters()).fill_(float("nan"))
        return original(self, *rest)

    monkeypatch.setattr(Block, "train_batch", train_batch)
    assert train([*options, "--out=run", "--epochs=6", "--batch_limit=4"]) == 0
    assert "going back to the last good state" in capsys.readouterr().out
    result = summary("run")
    assert result["blocks"][0]["restarts"] == 1
    assert result["test_accuracy"] > 0.6


def test_a_run_that_always_diverges_says_what_to_do(options, capsys, monkeypatch):
    original = Block.train_batch

    def train_batch(self, *rest):
        with torch.no_grad():
            next(self.exits[0].layer.parameters()).fill_(float("nan"))
        return original(self, *rest)

    monkeypatch.setattr(Block, "train_batch", train_batch)
    assert "lower --lr" in refused(train, [*options, "--out=run", "--epochs=6", "--batch_limit=4"], capsys)


class TestTwoProcesses:
    def test_a_folder_that_another_process_trains_in_is_refused(self, options, capsys):
        Path("run").mkdir()
        with open("run/.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert "another process is training in run" in refused(train, [*options, "--out=run"], capsys)

    def test_the_lock_of_a_dead_process_is_no_hindrance(self, options):
        Path("run").mkdir()
        Path("run/.lock").touch()
        assert train([*options, "--out=run"]) == 0
        assert not Path("run/.lock").exists()


class TestClean:
    def leave(self, options):
        """Make a finished run with leftovers, a run that is being trained, and one that was killed."""
        assert train([*options, "--out=runs/a"]) == 0
        for name in ("b", "c"):
            Path(f"runs/{name}/cache/level-1").mkdir(parents=True)
            Path(f"runs/{name}/config.yaml").touch()
            Path(f"runs/{name}/cache/level-1/train.npy").write_bytes(b"x" * 5000)
        Path("runs/a/checkpoints/pass.pt").write_bytes(b"x" * 3000)
        Path("runs/c/model.pt.tmp").write_bytes(b"x" * 2000)

    def test_leftovers_of_dead_runs_are_listed_and_deleted_when_asked(self, options, capsys):
        self.leave(options)
        with open("runs/b/.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            capsys.readouterr()
            assert clean([]) == 0
            said = capsys.readouterr().out
            assert "10.0 kB in 3 leftovers" in said
            assert "runs/b" not in said
            assert Path("runs/c/cache").exists()
            assert clean(["runs", "--delete"]) == 0
            assert Path("runs/b/cache").exists()
        assert not Path("runs/c/cache").exists()
        assert not Path("runs/a/checkpoints/pass.pt").exists()
        assert neuroflux.load("runs/a")
        capsys.readouterr()

    def test_links_are_not_followed(self, options, tmp_path):
        self.leave(options)
        target = tmp_path / "precious"
        target.mkdir()
        (target / "file").touch()
        Path("runs/a/cache").symlink_to(target)
        assert clean(["runs", "--delete"]) == 0
        assert (target / "file").exists()

    def test_a_missing_folder(self, workplace, capsys):
        assert "there is no folder nowhere" in refused(clean, ["nowhere"], capsys)
