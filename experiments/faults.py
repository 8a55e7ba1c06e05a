"""Nothing lost: runs that are killed, whose disk is full, and whose files are damaged, a hundred times each.

    python experiments/faults.py --kills 100 --flips 100 --limits 20

Every run is a small one (three blocks), in processes of their own. Writes faults.json beside itself. The short version
of the same runs with the tests: tests/test_faults.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from neuroflux.inputs.arrays import write_json
from neuroflux.plan import main as plan
from tests.conftest import TINY_MODEL, write_npz
from tests.harness import finish, flip, interrupted, kills, same


def prepare() -> list[str]:
    """Put data, a model and a plan of three blocks into the current folder; return the options of a run."""
    Path("mine.py").write_text(TINY_MODEL, encoding="utf-8")
    sys.path.insert(0, ".")
    write_npz("data.npz")
    options = ["--data=data.npz", "--model=mine:make", "--data_root=root", "--budget=200MB", "--precision=fp32"]
    options += ["--batch_limit=16", "--threads=2", "--epochs=4"]
    assert plan([*options, "--out=planned"]) == 0
    path = Path("planned/plan.json")
    values = json.loads(path.read_text(encoding="utf-8"))
    bounds = [(0, 0), (1, 2), (3, 3)]
    values["blocks"] = [{**values["blocks"][0], "first": a, "last": b, "cache_bytes": 10**6} for a, b in bounds]
    write_json(path, values)
    return [*options, f"--plan={path}", "--min_gain=0", "--lookahead=9"]


def flips(options: list[str], count: int) -> dict[str, int]:
    """Flip bits of caches, checkpoints and plans of a stopped run; return how often it was refused or made good."""
    draw = random.Random(1)
    interrupted(options, "stopped", 1)
    files = sorted(path for path in Path("stopped").rglob("*") if path.suffix in (".npy", ".pt", ".json", ".yaml"))
    seen = {"refused in one line": 0, "ended as the run that was not damaged": 0}
    for _ in range(count):
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree("stopped", "run")
        path = draw.choice(files)
        flip("run" / path.relative_to("stopped"), draw)
        code, _, _ = finish(["--out=run", "--resume"])
        if code:
            seen["refused in one line"] += 1
        else:
            assert same("whole", "run"), path
            seen["ended as the run that was not damaged"] += 1
    return seen


def limits(options: list[str], count: int) -> dict[str, int]:
    """Run with files that may not grow beyond a limit; return how that ended, and go on without the limit."""
    seen = {"ended in one line, and as it should when resumed": 0, "ended without caches": 0, "ended as it should": 0}
    for number in range(count):
        shutil.rmtree("run", ignore_errors=True)
        largest = int(50 * 1.6**number)
        code, said, _ = finish([*options, "--out=run"], largest_file=largest)
        if code:
            finish(["--out=run", *(["--resume"] if Path("run/config.yaml").exists() else options)])
        cached = "is not cached" not in said
        assert not cached or same("whole", "run"), largest
        seen[list(seen)[0 if code else 2 if cached else 1]] += 1
    return seen


def main() -> None:
    """Break runs as often as asked, and write down what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="runs that are killed at random")
    parser.add_argument("--flips", type=int, default=100, help="bits that are flipped")
    parser.add_argument("--limits", type=int, default=20, help="limits on the size of files")
    given = parser.parse_args()
    result = Path(__file__).resolve().with_suffix(".json")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        options = prepare()
        killed = kills(options, given.kills)
        print(f"{given.kills} runs were killed {killed} times and all ended as the one that was not", flush=True)
        flipped = flips(options, given.flips)
        print(f"{given.flips} flipped bits: {flipped}", flush=True)
        limited = limits(options, given.limits)
        print(f"{given.limits} limits on files: {limited}", flush=True)
        os.chdir(result.parent)
    runs = {"runs": given.kills, "kills": killed}
    write_json(result, {"killed": runs, "flipped bits": flipped, "limits on files": limited})


if __name__ == "__main__":
    main()
