"""Ablation: what views, spans, losses and recipe parts bring and cost, one change at a time.

    python experiments/ablation.py --data cifar10.npz --name vgg11-15-passes --model vgg11 --epochs 15 --seeds 0,1,2

Every row is the command that stands in it; backpropagation at a budget for everything is the last one. Writes
ablation-NAME.json and .md beside itself; rows that are in the JSON already are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from neuroflux.results.comparison import machine
from neuroflux.results.report import table

ANEW = "--cache_views=0"
ROWS = {
    "one cached view": [],
    "3 cached views": ["--cache_views=3"],
    "images anew in every pass": [ANEW],
    "anew, spans of 2": [ANEW, "--gradient_span=2"],
    "anew, spans of 3": [ANEW, "--gradient_span=3"],
    "anew, longest spans": [ANEW, "--gradient_span=auto"],
    "anew, heads that look ahead": [ANEW, "--head=auglocal"],
    "anew, predsim": [ANEW, "--local_loss=predsim"],
    "anew, sim": [ANEW, "--local_loss=sim"],
    "anew, label smoothing 0.1": [ANEW, "--label_smoothing=0.1"],
    "anew, all layers start at once": [ANEW, "--stagger=0"],
    "anew, spans of 2, 2 passes end to end": [ANEW, "--gradient_span=2", "--finetune=2"],
    "one cached view, fp32": ["--cache_dtype=fp32"],
    "one cached view, int8": ["--cache_dtype=int8"],
    "backprop": ["--method=backprop"],
}


def run(more: list[str], given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train once and return what the table needs."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        budget = given.backprop_budget if "--method=backprop" in more else given.budget

        options = [f"--budget={budget}", f"--model={given.model}", f"--data={given.data}", f"--seed={seed}"]
        options += [
            f"--limit_train={given.limit_train}",
            f"--epochs={given.epochs}",
            f"--out={out}",
            *more,
            *given.more,
        ]
        begun = time.perf_counter()
        command = [sys.executable, "-m", "neuroflux.train", *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((out / "summary.json").read_text())
        plan = json.loads((out / "plan.json").read_text())
    return {
        "options": [*more, f"--budget={budget}"],
        "seed": seed,
        "test": summary["test_accuracy"],
        "val": summary["val_accuracy"],
        "last": summary["exits"][-1],
        "seconds": time.perf_counter() - begun,
        "peak": summary["peak"]["measured"],
        "disk": plan["disk"],
        "blocks": len(summary["blocks"]),
        "parameters": summary["parameters"]["model"],
    }


def row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return one line of the table: means over seeds, and the spread of the accuracy."""

    def mean(key: str) -> float:
        return statistics.mean(float(run[key]) for run in runs)

    tests = [run["test"] for run in runs]
    spread = f" ± {statistics.stdev(tests):.3f}" if len(tests) > 1 else ""
    return [
        name,
        f"{mean('test'):.3f}{spread}",
        f"{mean('last'):.3f}",
        f"{mean('seconds'):.0f}",
        f"{max(run['peak'] for run in runs) / 1e6:.0f}",
        f"{mean('disk') / 1e6:.0f}",
        " ".join(str(run["blocks"]) for run in runs),
        f"{mean('parameters'):,.0f}",
        f"`{' '.join(runs[0]['options'])}`",
    ]


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", default="vgg11")
    parser.add_argument("--budget", default="256MB")
    parser.add_argument("--backprop_budget", default="4GB")
    parser.add_argument("--limit_train", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rows", default=",".join(map(str, range(len(ROWS)))), help="numbers of rows, from 0")
    given, more = parser.parse_known_args()
    given.more = [word for word in more if word != "--"]
    path = Path(__file__).parent / f"ablation-{given.name}.json"
    kept = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "rows": {}}
    for seed in map(int, given.seeds.split(",")):
        for number in map(int, given.rows.split(",")):
            name = list(ROWS)[number]
            runs = kept["rows"].setdefault(name, [])
            if all(done["seed"] != seed for done in runs):
                runs.append(run(ROWS[name], given, seed))
                print(name, runs[-1], flush=True)
            names = ("name", "model", "limit_train", "epochs", "budget")
            settings = " ".join(f"--{name} {getattr(given, name)}" for name in names)
            kept["command"] = f"python experiments/ablation.py --data cifar10.npz {settings}"
            path.write_text(json.dumps(kept, indent=1) + "\n")
    header = [
        "",
        "test accuracy",
        "last exit (validation)",
        "seconds",
        "peak MB",
        "disk MB",
        "blocks",
        "parameters",
        "",
    ]
    rows = [row(name, kept["rows"][name]) for name in ROWS if kept["rows"].get(name)]
    text = f"`{kept['command']}` on {kept['machine']}\n\n{table(header, rows)}\n"
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
