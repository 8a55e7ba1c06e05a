"""Traces: what the processor does in a few steps of every block, for Chrome's or Perfetto's viewer."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile, schedule

from neuroflux.planning.partitioner import BlockPlan
from neuroflux.training.block import Progress
from neuroflux.training.checkpoint import BlockResult
from neuroflux.training.observer import Observer

# steps left out while the batch grows to its planned size, one to warm the profiler up, and steps recorded
_WAIT, _WARM_UP, _ACTIVE = 6, 1, 3


class Trace(Observer):
    """Writes ``trace/block-K.json`` to the run folder; open it at chrome://tracing or ui.perfetto.dev."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trace"
        self._profiler: profile | None = None

    def block_started(self, number: int, block: BlockPlan) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"block-{number}.json"
        self._profiler = profile(
            schedule=schedule(wait=_WAIT, warmup=_WARM_UP, active=_ACTIVE, repeat=1),
            on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
        )
        self._profiler.start()

    def stepped(self, number: int, epoch: int, progress: Progress) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def block_ended(self, number: int, result: BlockResult) -> None:
        self.close()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
