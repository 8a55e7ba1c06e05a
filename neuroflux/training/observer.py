"""What training tells whoever watches it; training itself knows nothing of progress bars or TensorBoard."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuroflux.inputs.chain import Chain
from neuroflux.inputs.datasets import Data
from neuroflux.planning.partitioner import BlockPlan, Plan
from neuroflux.training.block import Progress
from neuroflux.training.checkpoint import BlockResult


class Observer:
    """Does nothing; watchers override what they care for. Blocks and epochs count from 1."""

    def phase(self, name: str, detail: str = "") -> None:
        """A part of the run begins: data, profile, plan, train, cache, evaluate."""

    def opened(self, chain: Chain) -> None:
        """The model is cut into `chain`."""

    def planned(self, plan: Plan) -> None:
        """The plan is made."""

    def block_started(self, number: int, block: BlockPlan) -> None:
        """Block `number` is about to be trained."""

    def stepped(self, number: int, epoch: int, progress: Progress) -> None:
        """A step of block `number` has ended."""

    def epoch_ended(
        self, number: int, epoch: int, accuracies: list[float], losses: list[float], seconds: float
    ) -> None:
        """A pass of block `number` has ended, and its exits were evaluated."""

    def block_ended(self, number: int, result: BlockResult) -> None:
        """Block `number` is finished and safe on disk."""

    def tested(self, data: Data, predicted: np.ndarray) -> None:
        """The streamlined model gave the test images of `data` the classes `predicted` (n,)."""

    def note(self, text: str) -> None:
        """Something happened that the user should know."""

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is over; `summary` is what ``summary.json`` holds."""

    def close(self) -> None:
        """The run is over or has failed."""
