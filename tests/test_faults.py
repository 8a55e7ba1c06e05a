"""Runs that are broken on purpose, a few times; experiments/faults.py does so a hundred times."""

import random
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness import finish, flip, interrupted, kills, same

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")


@pytest.fixture
def three(options, three_blocks):
    """The options of a run of three blocks, of a few passes each."""
    return [*options, f"--plan={three_blocks}", "--min_gain=0", "--lookahead=9", "--epochs=4"]


def test_a_run_that_is_killed_at_random_ends_as_one_that_was_not(three):
    assert kills(three, 2) > 0


def test_flipped_bits_are_noticed_or_do_no_harm(three):
    draw = random.Random(1)
    finish([*three, "--out=whole"])
    interrupted(three, "stopped", 1)
    files = sorted(path for path in Path("stopped").rglob("*") if path.suffix in (".npy", ".pt", ".json", ".yaml"))
    names = {path.name for path in files}
    assert {"block-1.pt", "pass.pt", "plan.json", "config.yaml", "seals.json", "train.npy"} <= names
    for path in files:
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree("stopped", "run")
        flip("run" / path.relative_to("stopped"), draw)
        code, _, error = finish(["--out=run", "--resume"])
        if code == 2:
            assert any(word in error for word in ("damaged", "cannot read", "was edited"))
        else:
            assert same("whole", "run"), path


@pytest.mark.parametrize("largest", [100, 3000, 20_000])
def test_a_disk_that_is_full_ends_in_one_line_and_the_run_goes_on_later(three, largest):
    finish([*three, "--out=whole"])
    code, said, _ = finish([*three, "--out=run"], largest_file=largest)
    if code == 2:
        more = ["--resume"] if Path("run/config.yaml").exists() else three
        assert finish(["--out=run", *more])[0] == 0
    assert "is not cached" in said or same("whole", "run")
