"""Breaks runs on purpose: kills them, fills their disk, flips bits of their files."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

import neuroflux

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(neuroflux.__file__).parents[1]), "."])}


def start(arguments, largest_file=None):
    """Start ``neuroflux.train`` in the current folder, in which no file may grow beyond `largest_file` bytes."""

    def limit():
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    command = [sys.executable, "-m", "neuroflux.train", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, preexec_fn=limit, **pipes)


def finish(arguments, largest_file=None):
    """Run ``neuroflux.train`` to its end; return its exit code and what it printed to stdout and stderr."""
    process = start(arguments, largest_file)
    out, error = process.communicate(timeout=600)
    assert "Traceback" not in error, error
    assert process.returncode in (0, 2), (process.returncode, error)
    if process.returncode == 2:
        assert len(error.strip().splitlines()) == 1, error
    return process.returncode, out, error


def outcome(folder):
    """Return the weights of a finished run's model, and the accuracies of its exits."""
    content = torch.load(Path(folder) / "model.pt", weights_only=True)
    return content["weights"], json.loads((Path(folder) / "summary.json").read_text())["exits"]


def same(first, second):
    """Return whether two runs ended alike, to the last bit."""
    (weights, exits), (others, other_exits) = outcome(first), outcome(second)
    return (
        exits == other_exits
        and weights.keys() == others.keys()
        and all(torch.equal(weights[name], others[name]) for name in weights)
    )


def finished_blocks(folder):
    """Return how many blocks of the run in `folder` are finished."""
    return len(list((Path(folder) / "checkpoints").glob("block-*.pt")))


def killed_at_random(arguments, folder, seconds, draw):
    """Kill a run of `arguments` after up to `seconds`, again and again, until it is through; return the kills.

    No finished block may be trained again. It is never killed more than five times.
    """
    kills = 0
    while True:
        begun = (Path(folder) / "config.yaml").exists()
        before = finished_blocks(folder)
        process = start([f"--out={folder}", "--resume"] if begun else [*arguments, f"--out={folder}"])
        try:
            out, error = process.communicate(timeout=draw.uniform(0.5, seconds) if kills < 5 else 600)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            out, error = process.communicate()
            kills += 1
        else:
            assert process.returncode == 0, error
        for number in range(1, before + 1):
            assert f"block {number}/" not in out, f"block {number} was finished and is trained again"
        if process.returncode == 0:
            return kills


def flip(path, draw):
    """Flip one bit of the file `path`; return its place."""
    content = bytearray(Path(path).read_bytes())
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    Path(path).write_bytes(content)
    return place


def time_of(work):
    """Return the seconds that `work()` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def kills(arguments, count, seed=0):
    """Check that `count` runs killed at random all end as the one that was not; return how often they were killed."""
    draw, total = random.Random(seed), 0
    seconds = time_of(lambda: finish([*arguments, "--out=whole"]))
    for number in range(count):
        total += killed_at_random(arguments, f"killed-{number}", seconds, draw)
        assert same("whole", f"killed-{number}"), number
    return total


def interrupted(arguments, folder, blocks):
    """Leave a run in `folder` that was killed in block `blocks` + 1, after its first pass."""
    process = start([*arguments, f"--out={folder}"])
    assert process.stdout is not None
    for line in process.stdout:
        if f"block {blocks + 1}/" in line and "pass 1/" in line:
            while not (Path(folder) / "checkpoints" / "pass.pt").exists():
                time.sleep(0.001)
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
