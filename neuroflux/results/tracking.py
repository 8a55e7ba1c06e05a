"""What a run leaves for later: TensorBoard events and ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from neuroflux.inputs.chain import Chain
from neuroflux.inputs.datasets import Data
from neuroflux.planning.memory import format_bytes
from neuroflux.planning.partitioner import BlockPlan, Plan
from neuroflux.results.figures import confusion_figure, mistakes_figure, pixels, plan_figure
from neuroflux.results.graph import chain_graph
from neuroflux.results.report import plan_table, render
from neuroflux.training.block import Progress
from neuroflux.training.checkpoint import BlockResult
from neuroflux.training.observer import Observer

_LAYOUT = {
    "memory": {"peak against budget (MB)": ["Multiline", ["memory/peak MB", "memory/budget MB"]]},
    "learning": {
        "accuracy of every exit": ["Multiline", ["accuracy/exit-.*"]],
        "loss of every layer": ["Multiline", ["loss/layer-.*"]],
    },
}
# drawing a figure takes some megabytes, which count: it is left out in budgets below this
_FIGURES = 40_000_000
# scalars of single steps are written at most this often, in seconds
_INTERVAL = 1.0


class Tracking(Observer):
    """Writes to the run folder: ``metrics.jsonl`` (a line per pass) and TensorBoard events.

    Scalars are laid out so that runs overlay: ``loss/layer-03``, ``accuracy/exit-03``, ``memory/peak MB``,
    ``speed/images per second``; their step is the number of images trained on since the start of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder), max_queue=20, flush_secs=10)
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._images, self._seen = 0, 0  # trained on in finished passes, and in this one
        self._written = 0.0
        self._start = time.monotonic()
        self._first = 0
        self._budget = 0
        self._mark = (0.0, 0)  # time and images of the last scalar

    def opened(self, chain: Chain) -> None:
        event = Event(graph_def=chain_graph(chain).SerializeToString())
        self._writer._get_file_writer().add_event(event)

    def planned(self, plan: Plan) -> None:
        self._budget = plan.budget
        self._writer.add_text("plan", plan_table(plan).replace("\n|", "\n\n|", 1))
        if self._budget >= _FIGURES:
            self._writer.add_image("plan", pixels(plan_figure(plan)), dataformats="HWC")
        self._writer.add_custom_scalars(_LAYOUT)

    def block_started(self, number: int, block: BlockPlan) -> None:
        self._first = block.first
        self._mark = (time.monotonic(), 0)

    def stepped(self, number: int, epoch: int, progress: Progress) -> None:
        now = time.monotonic()
        self._seen = progress.images
        if now - self._written < _INTERVAL:
            return
        self._written = now
        step = self._images + progress.images
        for offset, loss in enumerate(progress.losses):
            if not math.isnan(loss):
                self._writer.add_scalar(f"loss/layer-{self._first + offset + 1:02d}", loss, step)
        self._writer.add_scalar("memory/peak MB", progress.peak / 1e6, step)
        self._writer.add_scalar("memory/budget MB", self._budget / 1e6, step)
        self._writer.add_scalar("training/batch", progress.batch, step)
        self._writer.add_scalar("training/block", number, step)
        since, images = self._mark
        if now > since and progress.images > images:
            self._writer.add_scalar("speed/images per second", (progress.images - images) / (now - since), step)
        self._mark = (now, progress.images)

    def epoch_ended(
        self, number: int, epoch: int, accuracies: list[float], losses: list[float], seconds: float
    ) -> None:
        self._images += self._seen
        self._mark = (time.monotonic(), 0)
        for offset, accuracy in enumerate(accuracies):
            self._writer.add_scalar(f"accuracy/exit-{self._first + offset + 1:02d}", accuracy, self._images)
        self._writer.add_scalar("accuracy/best exit", max(accuracies), self._images)
        self._log(
            event="pass",
            block=number,
            epoch=epoch,
            accuracies=accuracies,
            losses=[None if math.isnan(loss) else loss for loss in losses],
            epoch_seconds=round(seconds, 3),
        )

    def block_ended(self, number: int, result: BlockResult) -> None:
        self._writer.add_scalar("memory/peak of block MB", result.peak / 1e6, number)
        parts = result.parts
        whole = sum(parts["layers"]) + parts["inputs"] + parts["waiting"]
        moving = (parts["inputs"] + parts["waiting"]) / whole if whole else 0.0
        self._writer.add_scalar("speed/share of time moving data", moving, self._images)
        self._log(event="block", block=number, accuracies=result.accuracies, batch=result.batch, peak=result.peak)

    def note(self, text: str) -> None:
        self._log(event="note", text=text)

    def tested(self, data: Data, predicted: np.ndarray) -> None:
        if self._budget < _FIGURES:
            return
        self._writer.add_image("test/confusion matrix", pixels(confusion_figure(data, predicted)), dataformats="HWC")
        mistakes = mistakes_figure(data, predicted)
        if mistakes is not None:
            self._writer.add_image("test/some mistakes", pixels(mistakes), dataformats="HWC")

    def finished(self, summary: dict[str, Any]) -> None:
        self._writer.add_text("report", render(summary))
        for k, accuracy in enumerate(summary["exits"], 1):
            self._writer.add_scalar("by depth/accuracy", accuracy, k)
        for block in summary["blocks"]:
            measured = zip(block["parts"]["layers"], block["gigaflops"], strict=True)
            for k, (seconds, speed) in enumerate(measured, block["first"] + 1):
                self._writer.add_scalar("by depth/seconds per pass", seconds, k)
                self._writer.add_scalar("by depth/GFLOP per second", speed, k)
        self._add_hparams(summary)
        peak = format_bytes(summary["peak"]["measured"])
        self._log(event="end", test_accuracy=summary["test_accuracy"], peak=peak, chosen=summary["chosen"])

    def _add_hparams(self, summary: dict[str, Any]) -> None:
        """Put the run into the table of the HParams tab."""
        settings = {name: summary[name] for name in ("model", "data", "method", "seed", "precision")}
        settings["budget MB"] = summary["budget"]["bytes"] / 1e6
        settings["batch"] = summary["blocks"][0]["batch"]
        settings["train images"] = summary["images"]["train"]
        metrics = {
            "final/test accuracy": summary["test_accuracy"] or 0.0,
            "final/validation accuracy": summary["val_accuracy"],
            "final/seconds": summary["elapsed"],
            "final/peak MB": summary["peak"]["measured"] / 1e6,
            "final/million parameters": summary["parameters"]["model"] / 1e6,
            "final/inference images per second": summary["images_per_second"]["model"],
        }
        for event in hparams(settings, metrics):
            self._writer._get_file_writer().add_summary(event)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, 0)

    def _log(self, **values: Any) -> None:
        values = {"seconds": round(time.monotonic() - self._start, 3), **values}
        self._metrics.write(json.dumps(values) + "\n")

    def close(self) -> None:
        for file in (self._writer, self._metrics):
            with suppress(OSError):  # the disk is full: a run does not end for that
                file.close()
