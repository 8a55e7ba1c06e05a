"""Progress on the terminal: bars for people, plain lines for everything else."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from tqdm import tqdm

from neuroflux.planning.memory import format_bytes
from neuroflux.planning.partitioner import BlockPlan, Plan
from neuroflux.results.report import plan_table, render
from neuroflux.training.block import Progress as Step
from neuroflux.training.observer import Observer


class Progress(Observer):
    """Shows a run as it goes. At a terminal every block has a bar; elsewhere every pass is one line."""

    def __init__(self, budget: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._budget = budget
        self._bar: tqdm[Any] | None = None
        self._plan: Plan | None = None
        self._highest, self._passes, self._layers = 0, 0, 0
        self._started = 0.0

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(text, file=self._stream, flush=True)

    def phase(self, name: str, detail: str = "") -> None:
        if name in ("data", "profile") or (name == "evaluate" and detail):
            self._close_bar()
            self._print(f"{name}: {detail}")

    def planned(self, plan: Plan) -> None:
        self._plan = plan
        self._print(plan_table(plan))

    def block_started(self, number: int, block: BlockPlan) -> None:
        self._close_bar()
        self._highest, self._started, self._passes = 0, time.monotonic(), 0
        self._layers = block.last - block.first + 1

    def stepped(self, number: int, epoch: int, progress: Step) -> None:
        assert self._plan is not None
        self._highest, self._passes = max(self._highest, progress.peak), progress.passes
        if not self._stream.isatty():
            return
        if self._bar is None:
            total = progress.total * progress.passes
            title = self._title(number)
            self._bar = tqdm(total=total, desc=title, unit="img", file=self._stream, dynamic_ncols=True, leave=True)
        self._bar.total = progress.total * progress.passes
        memory = f"{format_bytes(self._highest)} of {format_bytes(self._budget)}"
        loss = f"{progress.losses[-1]:.3f}"
        self._bar.set_postfix(epoch=epoch, batch=progress.batch, loss=loss, peak=memory, refresh=False)
        self._bar.update((epoch - 1) * progress.total + progress.images - self._bar.n)

    def epoch_ended(
        self, number: int, epoch: int, accuracies: list[float], losses: list[float], seconds: float
    ) -> None:
        assert self._plan is not None
        done = f"{self._title(number)} pass {epoch}/{self._passes}"
        left = (time.monotonic() - self._started) / epoch * (self._passes - epoch)
        self._print(
            f"{done}: {seconds:.1f} s, loss {losses[-1]:.3f}, validation accuracy by exit "
            f"{' '.join(f'{accuracy:.3f}' for accuracy in accuracies)}, peak {format_bytes(self._highest)}, "
            f"{left:.0f} s left{' or more' if len(accuracies) < self._layers else ''}"
        )

    def _title(self, number: int) -> str:
        """Return what is being trained; what comes after the last block is the chosen model."""
        assert self._plan is not None
        count = len(self._plan.blocks)
        return f"block {number}/{count}" if number <= count else "fine-tuning"

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def finished(self, summary: dict[str, Any]) -> None:
        self._close_bar()
        self._print("\n" + render(summary))

    def close(self) -> None:
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
