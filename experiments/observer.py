"""Runs a command and says how much anonymous memory it took over a bare import, seen from outside the process.

    python experiments/observer.py -- python -m neuroflux.train --budget 512MB

Every sample adds up Pss_Anon of /proc/PID/smaps_rollup over the process and its children. Sampling holds the process
up (a run is about twice as slow at 100 samples a second), so times are taken in other runs. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

# what growth is counted over: what an import of everything and one small convolution take
BASELINE = (
    "import neuroflux.train, torch; "
    "torch.nn.functional.conv2d(torch.randn(2, 3, 8, 8, requires_grad=True), "
    "torch.randn(4, 3, 3, 3, requires_grad=True)).sum().backward()"
)


def anonymous(process: psutil.Process) -> int:
    """Return the bytes of anonymous memory of `process` and its descendants, shared pages counted once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            for line in Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1]) * 1024
        except (OSError, psutil.NoSuchProcess):
            continue
    return total


def watch(command: list[str], interval: float = 0.01, **options: object) -> tuple[int, int]:
    """Run `command` and return its exit code and its peak in bytes."""
    peak = 0
    child = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    process = psutil.Process(child.pid)
    while child.poll() is None:
        try:
            peak = max(peak, anonymous(process))
        except psutil.NoSuchProcess:
            break
        time.sleep(interval)
    return child.wait(), peak


def growth(command: list[str], interval: float = 0.01, **options: object) -> tuple[int, int]:
    """Run `command` and return its exit code and how much more it took than a bare import, in bytes."""
    _, baseline = watch([sys.executable, "-c", BASELINE], interval)
    code, peak = watch(command, interval, **options)
    return code, peak - baseline


def main() -> None:
    """Run the command that follows ``--`` and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=float, default=0.01, help="seconds between samples")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    code, taken = growth(command, given.interval)
    print(json.dumps({"exit_code": code, "growth_MB": round(taken / 1e6, 1)}))
    sys.exit(code)


if __name__ == "__main__":
    main()
