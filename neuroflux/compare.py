"""Compare methods under the same budgets: ``python -m neuroflux.compare --methods neuroflux,backprop --budgets 512MB``.

Every run has a process of its own, one after another; runs that are finished are kept when the command is repeated.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml
from tqdm import tqdm

from neuroflux.config import Config, check_choice, parse_with, run_main
from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import write_json
from neuroflux.planning.memory import parse_bytes
from neuroflux.planning.methods import METHODS
from neuroflux.results.comparison import Cell, one_line, write_comparison
from neuroflux.training.opening import open_named_data


@dataclass
class Comparison:
    """What is compared; all other settings are those of ``neuroflux.train`` and hold for every run.

    Args:
        methods: Methods, separated by commas.
        budgets: Budgets, separated by commas.
        seeds: Seeds, separated by commas.
        target: Accuracy whose time is compared (default: what backprop ends with at the same budget).
    """

    methods: str = "neuroflux,backprop"
    budgets: str = "512MB"
    seeds: str = "0"
    target: float | None = None

    def cells(self) -> list[Cell]:
        """Return all runs, in order.

        Raises:
            NeuroFluxError: a method, budget or seed makes no sense.
        """
        methods, budgets, seeds = (_words(text) for text in (self.methods, self.budgets, self.seeds))
        for method in methods:
            check_choice("methods", method, tuple(METHODS))
        for budget in budgets:
            parse_bytes(budget)
        if not all(seed.isdecimal() for seed in seeds):
            raise NeuroFluxError(f"--seeds {self.seeds!r} makes no sense: write whole numbers like 0,1,2")
        return [Cell(m, b, int(s)) for b in budgets for s in seeds for m in methods]


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise NeuroFluxError("--methods, --budgets and --seeds need at least one value each")
    return list(dict.fromkeys(words))


def compare(config: Config, comparison: Comparison, command: str) -> None:
    """Run all cells that are not finished yet, and write tables and plots."""
    cells = comparison.cells()
    data = Path(config.data).stem if "/" in config.data or "." in config.data else config.data
    folder = Path(config.out or Path("comparisons") / f"{config.model.replace(':', '.')}-{data}")
    _open(folder, config)
    open_named_data(config)  # converts the images, so that no run pays for it
    print(f"{len(cells)} runs in {folder}", flush=True)
    with tqdm(cells, unit="run", disable=not sys.stdout.isatty()) as bar:
        for number, cell in enumerate(bar, 1):
            _run(cell, config, folder)
            tqdm.write(f"[{number}/{len(cells)}] {one_line(cell, folder)}")
            sys.stdout.flush()
    print(write_comparison(folder, cells, comparison.target, command))
    print(f"tables and plots: {folder}  (neuroflux dashboard {folder / 'runs'} shows the runs)")


def _open(folder: Path, config: Config) -> None:
    """Make the folder of the comparison, or check that it was made with the same settings."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("out", "debug")}
    path = folder / "settings.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before = yaml.safe_load(path.read_text(encoding="utf-8"))
            changed = [name for name in settings if before.get(name) != settings[name]]
            if changed:
                raise NeuroFluxError(
                    f"{folder} holds a comparison with another --{changed[0]} ({before.get(changed[0])}); "
                    f"use the same settings, or another --out"
                )
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        (folder / "comparison.md").unlink(missing_ok=True)  # of fewer runs, or others
    except OSError as error:
        raise NeuroFluxError(f"cannot write to {folder}: {error.strerror}; choose another --out") from error


def _run(cell: Cell, config: Config, folder: Path) -> None:
    """Train one cell in a process of its own, unless it is finished; what was left of a stopped one goes."""
    run = cell.folder(folder)
    if cell.outcome(folder) is not None:
        return
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    settings = run.with_suffix(".yaml")
    cell_config = replace(config, method=cell.method, budget=cell.budget, seed=cell.seed, out=str(run))
    replace(cell_config, test_each_pass=True, fresh_profile=True, resume=False).save(settings)
    start = time.perf_counter()
    log = run.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "neuroflux.train", f"--config={settings}"]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    if code == 2:
        write_json(run.with_suffix(".refused.json"), {"reason": lines[-1].removeprefix("neuroflux: ")})
    elif code != 0:
        raise NeuroFluxError(f"{cell.name} ended with exit code {code}: {lines[-1][:200]}; see {log}")
    else:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        write_json(run / "summary.json", {**summary, "wall": time.perf_counter() - start})


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments

    def command() -> None:
        config, comparison = parse_with("neuroflux.compare", __doc__, given, Comparison, {"method", "budget", "seed"})
        try:
            compare(config, comparison, shlex.join(["python", "-m", "neuroflux.compare", *given]))
        except KeyboardInterrupt:
            print("\nneuroflux: interrupted; the same command goes on with the runs that are missing", file=sys.stderr)
            raise SystemExit(130) from None

    return run_main(command, given)


if __name__ == "__main__":
    sys.exit(main())
