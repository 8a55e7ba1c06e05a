"""Time to accuracy against budget: NeuroFlux and the baselines on CIFAR-10, tables and plots.

    python experiments/time_to_accuracy.py --data cifar10.npz                      # all methods: hours on two cores
    python experiments/time_to_accuracy.py --data cifar10.npz --limit_train 4000
    python experiments/time_to_accuracy.py --data cifar10.npz --epochs 15 --methods neuroflux,backprop --budgets 512MB
    python experiments/time_to_accuracy.py --data cifar10.npz --budgets 80MB,96MB,128MB,160MB --name below-the-floor
    python experiments/time_to_accuracy.py --data cifar10.npz --full               # all images, 30 passes

It calls neuroflux.compare, and keeps its tables, plots and numbers in a folder beside itself. Interrupted, it goes on
when it is called again. The command that was run stands in comparison.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from neuroflux.compare import main as compare


def main() -> int:
    """Run the comparison and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--methods", default="neuroflux,backprop,checkpoint,accumulate,compressed,local")
    parser.add_argument("--budgets", default="128MB,192MB,256MB,512MB")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", default="5")
    parser.add_argument("--limit_train", default="10000")
    parser.add_argument("--limit_test", default="2000")
    parser.add_argument("--full", action="store_true", help="all images, 30 passes, three seeds")
    parser.add_argument("--name", help="of the folder that is kept (default: model, data and passes)")
    parser.add_argument("--scratch", type=Path, default=Path("comparisons"), help="where the runs themselves go")
    given, more = parser.parse_known_args()
    if given.full:
        given.seeds, given.epochs, given.limit_train, given.limit_test = "0,1,2", "30", None, None
    name = given.name or f"{given.model}-cifar10-{given.epochs}-passes"
    settings = ["methods", "budgets", "seeds", "data", "model", "epochs", "limit_train", "limit_test"]
    arguments = [f"--{key}={getattr(given, key)}" for key in settings if getattr(given, key) is not None]
    code = compare([*arguments, *more, f"--out={given.scratch / name}"])
    if code == 0:
        kept = Path(__file__).parent / name
        kept.mkdir(exist_ok=True)
        for pattern in ("*.json", "*.md", "*.png"):
            for path in (given.scratch / name).glob(pattern):
                shutil.copy(path, kept)
    return code


if __name__ == "__main__":
    sys.exit(main())
