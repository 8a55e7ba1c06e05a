"""Memory: what the plan predicts, what the run measures itself, and what an observer sees from outside.

    python experiments/memory.py --data cifar10.npz --budgets 64MB,96MB,128MB,256MB,512MB

Writes memory.json and memory.md beside itself. Options after ``--`` go to neuroflux.train (more passes, all images).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from observer import growth

from neuroflux.results.comparison import machine
from neuroflux.results.report import table


def measure(method: str, budget: str, given: argparse.Namespace) -> dict[str, object]:
    """Return the three numbers for one run, or why it could not run."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", "neuroflux.train", f"--budget={budget}", f"--method={method}", f"--out={out}"]
        command += [f"--model={given.model}", f"--data={given.data}", f"--limit_train={given.limit_train}"]
        command += [f"--epochs={given.epochs}", "--lookahead=99", *given.more]
        with tempfile.TemporaryFile("w+") as errors:
            code, seen = growth(command, stdout=subprocess.DEVNULL, stderr=errors)
            errors.seek(0)
            reason = errors.read().strip().splitlines()
        if code:
            return {"method": method, "budget": budget, "observer": seen, "reason": reason[-1] if reason else "?"}
        summary = json.loads((out / "summary.json").read_text())
    return {
        "method": method,
        "budget": budget,
        "predicted": summary["peak"]["predicted"],
        "own": summary["peak"]["measured"],
        "observer": seen,
        "planned_blocks": summary["planned_blocks"],
        "blocks": [[b["first"] + 1, b["first"] + len(b["accuracies"])] for b in summary["blocks"]],
        "batches": [b["batch"] for b in summary["blocks"]],
        "allocator": ["compact" if b["compact"] else "fast" for b in summary["blocks"]],
        "epoch_seconds": [b["epoch_seconds"] for b in summary["blocks"]],
        "test_accuracy": summary["test_accuracy"],
        "parameters": summary["parameters"]["model"],
    }


def row(run: dict[str, object]) -> list[str]:
    """Return one line of the table."""
    if "reason" in run:
        return [str(run["method"]), str(run["budget"]), "cannot run", "", _mb(run["observer"]), "", "", ""]
    layers = " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in run["blocks"])  # type: ignore[attr-defined]
    return [
        str(run["method"]),
        str(run["budget"]),
        _mb(run["predicted"]),
        _mb(run["own"]),
        _mb(run["observer"]),
        f"{layers} (of {run['planned_blocks']} planned)",
        " ".join(map(str, run["batches"])),  # type: ignore[call-overload]
        " ".join(f"{sum(s) / len(s):.0f}" for s in run["epoch_seconds"]),  # type: ignore[attr-defined]
    ]


def _mb(value: object) -> str:
    return f"{float(value) / 1e6:.1f}"  # type: ignore[arg-type]


def main() -> None:
    """Run all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--methods", default="neuroflux")
    parser.add_argument("--budgets", default="64MB,96MB,128MB,256MB,512MB")
    parser.add_argument("--limit_train", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--name", default="memory", help="of the files that are written")
    given, more = parser.parse_known_args()
    given.more = [word for word in more if word != "--"]
    runs = []
    for method in given.methods.split(","):
        for budget in given.budgets.split(","):
            runs.append(measure(method, budget, given))
            print(json.dumps(runs[-1]), flush=True)
    command = "python " + shlex.join(["experiments/memory.py", *sys.argv[1:]])
    here = Path(__file__).parent
    (here / f"{given.name}.json").write_text(
        json.dumps({"command": command, "machine": machine(), "runs": runs}, indent=1) + "\n"
    )
    header = ["method", "budget", "predicted MB", "own MB", "observer MB", "layers by block", "batches", "s/pass"]
    reasons = [f"- {run['method']}, {run['budget']}: {run['reason']}" for run in runs if "reason" in run]
    text = [f"`{command}` on {machine()}; seconds are those of an observed run, about twice those of a free one", ""]
    (here / f"{given.name}.md").write_text(
        "\n".join([*text, table(header, [row(r) for r in runs]), "", *reasons]) + "\n"
    )


if __name__ == "__main__":
    main()
