"""A comparison: tables and plots of runs by several methods under several budgets."""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from neuroflux.inputs.arrays import write_json
from neuroflux.planning.memory import format_bytes, parse_bytes
from neuroflux.planning.methods import METHODS
from neuroflux.results.figures import Figure, save_figure
from neuroflux.results.report import table


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    method: str
    budget: str
    seed: int

    @property
    def name(self) -> str:
        """Return the name of its run folder."""
        return f"{self.method}-{self.budget}-seed{self.seed}"

    def folder(self, comparison: Path) -> Path:
        """Return its run folder in the folder of the comparison."""
        return comparison / "runs" / self.name

    def outcome(self, comparison: Path) -> dict[str, Any] | None:
        """Return its summary, or the ``reason`` why it could not run, or None while it is not finished."""
        run = self.folder(comparison)
        for path in (run / "summary.json", run.with_suffix(".refused.json")):
            if path.exists():
                outcome = json.loads(path.read_text(encoding="utf-8"))
                if "reason" in outcome or "wall" in outcome:
                    return outcome
        return None


def one_line(cell: Cell, folder: Path) -> str:
    """Return how a finished cell went, in one line."""
    outcome = cell.outcome(folder) or {"reason": "not finished"}
    if "reason" in outcome:
        return f"{cell.name}: cannot run: {outcome['reason']}"
    return (
        f"{cell.name}: test accuracy {outcome['test_accuracy']:.4f} in {outcome['wall']:.0f} s, "
        f"peak {format_bytes(outcome['peak']['measured'])}"
    )


def time_to(outcome: dict[str, Any], target: float) -> float | None:
    """Return the seconds after which the best exit at hand had at least the test accuracy `target`, or None."""
    return next((p["seconds"] for p in outcome["curve"] if p["test"] is not None and p["test"] >= target), None)


class Comparison:
    """The outcomes of all cells of one comparison; each figure and table is one method."""

    def __init__(self, folder: Path, cells: list[Cell], target: float | None) -> None:
        self.outcomes = {cell: cell.outcome(folder) or {"reason": "not finished"} for cell in cells}
        self.methods = list(dict.fromkeys(cell.method for cell in cells))
        self.budgets = sorted({cell.budget for cell in cells}, key=parse_bytes)
        self._target = target

    def runs(self, method: str, budget: str) -> list[dict[str, Any]]:
        """Return the summaries of the runs that ended well, one for each seed."""
        return [
            outcome
            for cell, outcome in self.outcomes.items()
            if (cell.method, cell.budget) == (method, budget) and "reason" not in outcome
        ]

    def reason(self, method: str, budget: str) -> str:
        """Return why `method` cannot run in `budget`."""
        reasons = [o.get("reason", "") for c, o in self.outcomes.items() if (c.method, c.budget) == (method, budget)]
        return next((reason for reason in reasons if reason), "")

    def target(self, budget: str) -> float | None:
        """Return the accuracy whose time is compared: as asked, or backprop's last, at least budget where it runs."""
        if self._target is not None:
            return self._target
        larger = [b for b in self.budgets if parse_bytes(b) >= parse_bytes(budget)]
        for candidate in larger:
            if runs := self.runs("backprop", candidate):
                return statistics.mean(run["test_accuracy"] for run in runs)
        return None

    # --- tables ---

    def to_rows(self) -> list[dict[str, Any]]:
        """Return every run as plain values."""
        rows = []
        for cell, outcome in self.outcomes.items():
            row: dict[str, Any] = {"method": cell.method, "budget": cell.budget, "seed": cell.seed}
            if "reason" in outcome:
                rows.append({**row, "reason": outcome["reason"]})
                continue
            target = self.target(cell.budget)
            rows.append(
                {
                    **row,
                    "test_accuracy": outcome["test_accuracy"],
                    "last_exit_val": outcome["exits"][-1],
                    "chosen": outcome["chosen"],
                    "seconds": outcome["wall"],
                    "target": target,
                    "seconds_to_target": time_to(outcome, target) if target is not None else None,
                    "peak": outcome["peak"],
                    "blocks": [[b["first"], b["last"], b["batch"]] for b in outcome["blocks"]],
                    "parameters": outcome["parameters"]["model"],
                    "images_per_second": outcome["images_per_second"]["model"],
                    "curve": outcome["curve"],
                }
            )
        return rows

    def tables(self) -> str:
        """Return one Markdown table for each budget."""
        return "\n\n".join(self._table(budget) for budget in self.budgets)

    def _table(self, budget: str) -> str:
        target = self.target(budget)
        heading = f"### {budget}" + (f" (time to test accuracy {target:.3f})" if target is not None else "")
        base = self._seconds("backprop", budget, target)
        rows, notes = [], []
        for method in self.methods:
            runs = self.runs(method, budget)
            if not runs:
                rows.append([method, "cannot run", "", "", "", "", "", ""])
                notes.append(f"- {method}: {self.reason(method, budget)}")
                continue
            seconds = self._seconds(method, budget, target)
            sooner = f" ({base / seconds:.1f}x)" if base and seconds and method != "backprop" else ""
            rows.append(
                [
                    method,
                    _spread([run["test_accuracy"] for run in runs], ".3f"),
                    _spread([run["wall"] for run in runs], ".0f"),
                    (f"{seconds:.0f}{sooner}" if seconds is not None else "not reached") if target is not None else "",
                    format_bytes(max(run["peak"]["measured"] for run in runs)),
                    " ".join(str(block["batch"]) for block in runs[0]["blocks"]),
                    f"{_median([run['parameters']['model'] for run in runs]):,.0f}",
                    f"{_median([run['images_per_second']['model'] for run in runs]):.0f}",
                ]
            )
        header = ["method", "test accuracy", "seconds", "seconds to target", "peak", "batch", "parameters", "images/s"]
        return "\n".join([heading, "", table(header, rows), *(["", *notes] if notes else [])])

    def _seconds(self, method: str, budget: str, target: float | None) -> float | None:
        """Return the median seconds to `target`, None where not most runs reach it."""
        if target is None:
            return None
        times = [time_to(run, target) for run in self.runs(method, budget)]
        reached = [seconds for seconds in times if seconds is not None]
        return _median(reached) if reached and len(reached) * 2 > len(times) else None

    # --- plots ---

    def accuracy_over_time(self) -> Figure:
        """Return test accuracy against seconds since the start of the run, one panel for each budget."""
        figure = Figure(figsize=(4.2 * len(self.budgets) + 1, 3.8), layout="constrained")
        axes = figure.subplots(1, len(self.budgets), sharey=True, squeeze=False)[0]
        for budget, axis in zip(self.budgets, axes, strict=True):
            for number, method in enumerate(self.methods):
                for k, run in enumerate(self.runs(method, budget)):
                    points = [(p["seconds"], p["test"]) for p in run["curve"] if p["test"] is not None]
                    axis.plot(
                        *zip(*points, strict=True), _MARKERS[number % 6], c=f"C{number}", label="_" * (k > 0) + method
                    )
                if not self.runs(method, budget):
                    axis.plot([], [], "x", c=f"C{number}", label=f"{method}: cannot run")
            axis.set(title=budget, xlabel="seconds, everything included")
            axis.grid(alpha=0.3)
            axis.legend(fontsize="small", loc="lower right")
        axes[0].set_ylabel("test accuracy of the best exit so far")
        return figure

    def time_to_target(self) -> Figure:
        """Return the seconds to the target accuracy against the budget, on log scales; crosses cannot run."""
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axis = figure.subplots()
        known = [s for m in self.methods for b in self.budgets if (s := self._seconds(m, b, self.target(b)))]
        top = max(known, default=1.0) * 1.6
        for number, method in enumerate(self.methods):
            points = [(parse_bytes(b) / 1e6, self._seconds(method, b, self.target(b))) for b in self.budgets]
            reached = [(b, s) for b, s in points if s is not None]
            axis.plot(
                [b for b, _ in reached], [s for _, s in reached], _MARKERS[number % 6], c=f"C{number}", label=method
            )
            missing = [b for b, s in points if s is None]
            axis.plot(missing, [top * 1.12**number] * len(missing), "x", c=f"C{number}")
        axis.axhspan(top * 0.9, top * 1.12 ** len(self.methods), color="0.92", zorder=0)
        axis.text(0.01, 0.98, "cannot run, or not reached", transform=axis.transAxes, va="top", fontsize="small")
        axis.set(xscale="log", yscale="log", xlabel="budget (MB)", ylabel="seconds to backprop's final accuracy")
        _budget_ticks(axis, self.budgets)
        axis.legend(fontsize="small")
        return figure

    def peak_memory(self) -> Figure:
        """Return the measured peak against the budget."""
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axis = figure.subplots()
        sizes = [parse_bytes(budget) / 1e6 for budget in self.budgets]
        axis.plot(sizes, sizes, "k--", lw=1, label="the budget")
        for number, method in enumerate(self.methods):
            points = [
                (size, max(run["peak"]["measured"] for run in runs) / 1e6)
                for size, budget in zip(sizes, self.budgets, strict=True)
                if (runs := self.runs(method, budget))
            ]
            axis.plot(
                [x for x, _ in points], [y for _, y in points], _MARKERS[number % 6], c=f"C{number}", label=method
            )
        axis.set(xscale="log", yscale="log", xlabel="budget (MB)", ylabel="measured peak (MB)")
        _budget_ticks(axis, self.budgets)
        axis.legend(fontsize="small")
        return figure

    def final_models(self) -> Figure:
        """Return parameters and inference throughput of the models that the methods end with, at the largest budget."""
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        budget = self.budgets[-1]
        methods = [method for method in self.methods if self.runs(method, budget)]
        colours = [f"C{self.methods.index(method)}" for method in methods]
        parameters = [_median([r["parameters"]["model"] for r in self.runs(m, budget)]) / 1e6 for m in methods]
        rates = [_median([r["images_per_second"]["model"] for r in self.runs(m, budget)]) for m in methods]
        left.bars = left.barh(methods, parameters, color=colours)
        left.bar_label(left.bars, fmt="%.2f")
        left.set(xlabel="million parameters", title=f"model of the {budget} run")
        right.bar_label(right.barh(methods, rates, color=colours), fmt="%.0f")
        right.set(xlabel="images/s at inference", yticklabels=[])
        for axis in (left, right):
            axis.invert_yaxis()
            axis.margins(x=0.15)
        return figure


_MARKERS = ("o-", "s-", "^-", "D-", "v-", "P-")


def _budget_ticks(axis: Any, budgets: list[str]) -> None:
    axis.set_xticks([parse_bytes(budget) / 1e6 for budget in budgets], budgets)
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _median(values: list[float]) -> float:
    return float(statistics.median(values))


def _spread(values: list[float], form: str) -> str:
    """Return the mean of `values`, with the standard deviation where there are several."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form)} ({len(values)} seeds)"


def write_comparison(folder: Path, cells: list[Cell], target: float | None, command: str) -> str:
    """Write ``comparison.json``, ``comparison.md`` and the plots to `folder`, and return the tables."""
    comparison = Comparison(folder, cells, target)
    write_json(folder / "comparison.json", {"command": command, "machine": machine(), "runs": comparison.to_rows()})
    by_budget = ("time_to_target", "peak_memory") if len(comparison.budgets) > 1 else ()
    names = ("accuracy_over_time", *by_budget, "final_models")
    for name in names:
        save_figure(getattr(comparison, name)(), folder / f"{name}.png")
    tables = comparison.tables()
    about = "\n".join(f"- {method}: {METHODS[method].about}" for method in comparison.methods)
    plots = "\n\n".join(f"![{name}]({name}.png)" for name in names)
    text = f"# Comparison\n\n`{command}`\n\non {machine()}\n\n{about}\n\n{tables}\n\n{plots}\n"
    (folder / "comparison.md").write_text(text, encoding="utf-8")
    return tables


def machine() -> str:
    """Return what the runs ran on, in words."""
    device = torch.accelerator.current_accelerator(check_available=True)
    name = f", {torch.cuda.get_device_name()}" if device is not None and device.type == "cuda" else ""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    return f"{model}, {torch.get_num_threads()} threads{name}, torch {torch.__version__}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
