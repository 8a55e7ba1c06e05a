"""A block: consecutive layers that learn one beside the other, each from the loss of its own head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neuroflux.errors import NeuroFluxError
from neuroflux.planning.memory import is_allocation_failure
from neuroflux.planning.residence import Residence
from neuroflux.planning.step import Exit, ExitTrainer, Recipe
from neuroflux.training.cache import Batches, Level
from neuroflux.training.guard import Guard
from neuroflux.training.timing import Timing

# the learning rate rises over this share of a layer's training and then falls along half a cosine
_WARM_UP = 0.15
# batch norm cannot train on one image when a map has a single pixel
SMALLEST_BATCH = 2
# a loss that is not finite: the step is skipped and the layer's rate multiplied by this, down to the least share
_CAUTION, _LEAST_CAUTION = 0.5, 1 / 64
# so many such steps in a row mean that the weights themselves are spoilt
_HOPELESS = 8


class Diverged(NeuroFluxError):
    """The losses of a block stay infinite or undefined."""


@dataclass
class Progress:
    """What an observer is told after every step.

    Attributes:
        images, total: images trained on in this epoch, and in a whole one.
        losses: the local loss of every layer of the block that has begun; nan for those that have finished, and for
            steps that were skipped.
        passes: how many passes the layers that have begun take in all.
        peak: the bytes that the step took at most.
        waited: seconds that this epoch has waited for data.
        reading: seconds that data were read for, beside training.
    """

    images: int
    total: int
    batch: int
    losses: list[float]
    peak: int
    waited: float
    reading: float
    passes: int


def rate(progress: float) -> float:
    """Return the learning rate as a share of the highest one, `progress` (0..1) into the training of a layer."""
    if progress < _WARM_UP:
        return max(progress, 0.005) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))


@dataclass
class _Learner:
    """A layer that has begun to learn, in pass `start` of its block; `trainer` is None once it has finished.

    Its rate is multiplied by `caution`, which falls below 1 where losses were not finite.
    """

    trainer: ExitTrainer | None
    start: int
    caution: float = 1.0


class Block:
    """Trains layers that follow each other; only inside `training` do they hold gradients and optimizer state.

    Every layer learns for `epochs` passes over the data, from when it is started. One that has finished only runs
    forward, as it will in the model.

    Attributes:
        exits: the layers that have begun, each with its head. Those of the plan that lie deeper wait until `start`.
        passes: how many passes have been made.
        timing: seconds of the parts of a training step: ``inputs``, and each layer by its place in the block.
        skipped: how many steps changed nothing in some layer, whose loss was not finite.
        caution: all rates are multiplied by this.
    """

    def __init__(self, exits: list[Exit], recipe: Recipe, device: torch.device, epochs: int = 1) -> None:
        self.exits, self.recipe, self.device = exits, recipe, device
        self.passes = 0
        self._epochs = epochs
        self._planned = exits
        self._residence = Residence([*exits], device, recipe.memory_format)
        self._learners: list[_Learner] = []
        self.timing = Timing(device)
        self.skipped, self.caution = 0, 1.0
        self._in_a_row = 0

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep a copy of the block's weights on the device, and write it back to where they rest at the end.

        Where that end is an error, they rest as they were.
        """
        self._residence.fetch()
        try:
            yield
        except BaseException:
            self._residence.drop()
            raise
        self._residence.store()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Let layers learn that are started inside; the weights must be on the device."""
        self.exits = []
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        for learner in self._learners:
            if learner.trainer is not None:
                learner.trainer.close()
        self._learners = []

    def restart(self) -> None:
        """Go back, inside `training`, to the weights that rest, with no layer started."""
        self._close()
        self.exits, self.passes, self._in_a_row = [], 0, 0
        self._residence.drop()
        self._residence.fetch()

    def start(self, count: int) -> None:
        """Let the first `count` layers learn, or all that there are; those that have begun go on."""
        for exit in self._planned[len(self.exits) : count]:
            self._learners.append(_Learner(ExitTrainer(exit, self.recipe, self.device), self.passes))
        self.exits = self._planned[: max(count, len(self.exits))]

    def state(self) -> dict[str, Any]:
        """Return all that training goes on from after a pass, as tensors and plain values."""
        return {
            "passes": self.passes,
            "exits": [dict(exit.state_dict()) for exit in self.exits],
            "starts": [learner.start for learner in self._learners],
            "cautions": [learner.caution for learner in self._learners],
            "caution": self.caution,
            "skipped": self.skipped,
            "optimizers": [learner.trainer and learner.trainer.optimizer.state() for learner in self._learners],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, inside `training`, with no layer started yet."""
        self.start(len(state["exits"]))
        self.passes, self.caution, self.skipped = state["passes"], state["caution"], state["skipped"]
        for exit, weights in zip(self.exits, state["exits"], strict=True):
            exit.load_state_dict(weights)
        parts = zip(self._learners, self.exits, state["starts"], state["cautions"], state["optimizers"], strict=True)
        for learner, exit, start, caution, gathered in parts:
            learner.start, learner.caution = start, caution
            if gathered is not None and learner.trainer is not None:
                learner.trainer.optimizer.restore(gathered)
            else:
                self._finish(learner, exit)

    @staticmethod
    def _finish(learner: _Learner, exit: Exit) -> None:
        """Let a layer learn no more."""
        if learner.trainer is not None:
            learner.trainer.close()
        learner.trainer = None
        exit.eval()

    @property
    def last_pass(self) -> int:
        """Return the pass after which all layers that have begun are finished."""
        return max((learner.start + self._epochs for learner in self._learners), default=0)

    @property
    def learning(self) -> list[int]:
        """Return the places of the layers that are learning."""
        return [place for place, learner in enumerate(self._learners) if learner.trainer is not None]

    def set_time(self, share: float) -> None:
        """Set the learning rate of every layer to what suits it after `share` (0..1) of this pass."""
        for learner in self._learners:
            if learner.trainer is not None:
                progress = (self.passes + share - learner.start) / self._epochs
                learner.trainer.optimizer.set_rate(rate(progress) * learner.caution * self.caution)

    def end_pass(self) -> None:
        """Apply gradients that wait for more of their kind (`Recipe.accumulate`), and finish layers that are done."""
        self.passes += 1
        for learner, exit in zip(self._learners, self.exits, strict=True):
            if learner.trainer is None:
                continue
            learner.trainer.optimizer.flush()
            if self.passes - learner.start >= self._epochs:
                self._finish(learner, exit)

    def train_batch(
        self, level: Level, rows: torch.Tensor, labels: torch.Tensor, generator: torch.Generator
    ) -> list[float]:
        """Train on one batch: stored `rows` of `level`, labels (N,). Returns the loss of each layer.

        A layer's graph is gone before the next layer runs, so the block's peak is that of its largest layer. A layer
        whose loss is not finite is left as it is, and is more careful from then on.

        Raises:
            Diverged: that happens again and again.
        """
        self.timing.begin(len(labels))
        features = self.input(level, rows, generator)
        labels = labels.to(self.device)
        self.timing.lap("inputs")
        losses = []
        for number, learner in enumerate(self._learners):
            if learner.trainer is not None:
                features, loss = learner.trainer.step(features, labels)
            else:
                with torch.no_grad(), self.recipe.autocast(self.device):
                    features, loss = (
                        self.exits[number].layer(features),
                        labels.new_tensor(math.nan, dtype=torch.float32),
                    )
            losses.append(loss)
            self.timing.lap(str(number))
        found = torch.stack(losses).tolist()
        self._watch(found)
        return found

    def _watch(self, losses: list[float]) -> None:
        """Lower the rate of layers whose loss is not finite, and count the steps in which there are some."""
        bad = [place for place in self.learning if not math.isfinite(losses[place])]
        self._in_a_row = self._in_a_row + 1 if bad else 0
        self.skipped += bool(bad)
        for place in bad:
            self._learners[place].caution = max(_LEAST_CAUTION, self._learners[place].caution * _CAUTION)
        if self._in_a_row >= _HOPELESS:
            raise Diverged(
                f"the loss of layer {bad[0] + 1} of the block was {losses[bad[0]]} in {self._in_a_row} steps in a row"
            )

    def discard(self) -> None:
        """Drop what a step that could not be finished has left."""
        for learner in self._learners:
            if learner.trainer is not None:
                learner.trainer.discard()

    @torch.no_grad()
    def features(self, features: torch.Tensor) -> torch.Tensor:
        """Return the block's output for its input features, in eval mode."""
        with self.recipe.autocast(self.device):
            for exit in self.exits:
                features = exit.layer.eval()(features)
        return features

    @torch.no_grad()
    def accuracies(self, level: Level, batch: int) -> list[float]:
        """Return the accuracy of every exit on `level`."""
        right = torch.zeros(len(self.exits), dtype=torch.long, device=self.device)
        for exit in self.exits:
            exit.eval()
        for rows, indices in Batches(level, np.arange(len(level.labels)), lambda _: batch):
            features = self.input(level, rows, None)
            labels = torch.from_numpy(level.labels[indices]).to(self.device)
            with self.recipe.autocast(self.device):
                for number, exit in enumerate(self.exits):
                    features, scores = exit(features)
                    right[number] += (scores.argmax(1) == labels).sum()
        for learner in self._learners:
            if learner.trainer is not None:
                learner.trainer.exit.train()
        return [int(count) / max(1, len(level.labels)) for count in right]

    def input(self, level: Level, rows: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Return stored `rows` as features in the memory format of the recipe."""
        features = level.features(rows, generator)
        return features.contiguous(memory_format=self.recipe.memory_format) if features.ndim == 4 else features


def train_epoch(block: Block, level: Level, guard: Guard, generator: torch.Generator) -> Iterator[Progress]:
    """Make one pass over `level` and say after every step how it went.

    A batch for which the system has no memory is taken in halves.

    Raises:
        Diverged: losses are no longer finite.
        BudgetTooSmall: not even the smallest batch fits.
        NeuroFluxError: the system has no memory for the smallest batch.
    """
    total = len(level.labels)
    level.view = block.passes % level.views
    order = torch.randperm(total, generator=generator).numpy()
    together = block.recipe.accumulate or total

    def size(start: int) -> int:
        return min(guard.batch, together - start % together)

    batches = Batches(level, order, size, SMALLEST_BATCH)
    done = 0
    for rows, indices in batches:
        pieces = [(rows, torch.from_numpy(level.labels[indices]))]
        del rows
        while pieces:
            rows, labels = pieces.pop()
            block.set_time(done / total)
            try:
                losses = block.train_batch(level, rows, labels, generator)
            except (RuntimeError, MemoryError) as error:
                if not is_allocation_failure(error):
                    raise
                losses = []
            if not losses:  # here, what the error held is gone
                block.discard()
                guard.failed(len(labels))
                half = len(labels) // 2
                pieces += [(rows[half:], labels[half:]), (rows[:half], labels[:half])]
                continue
            del rows
            done += len(labels)
            peak = guard.after_step(len(labels))
            yield Progress(done, total, len(labels), losses, peak, batches.waited, batches.reading, block.last_pass)
    block.end_pass()
