"""The run: from a configuration to a streamlined model, one step after the other.

config -> data -> model -> chain -> profile -> plan -> for each block: train, cache -> exit -> streamlined model
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from neuroflux.config import Config
from neuroflux.errors import BudgetTooSmall, NeuroFluxError
from neuroflux.inputs.arrays import ArrayFile, DamagedArray, DiskFull, write_json
from neuroflux.inputs.datasets import Split
from neuroflux.inputs.freezing import freeze
from neuroflux.inputs.preprocess import Preprocess
from neuroflux.inputs.weights import load_weights, read_tensors
from neuroflux.planning.heads import layers_ahead, make_head
from neuroflux.planning.memory import Meter, format_bytes, make_meter, set_allocator
from neuroflux.planning.methods import METHODS, join
from neuroflux.planning.partitioner import FORWARD_BATCH, BlockPlan, Plan, make_plan
from neuroflux.planning.residence import Residence
from neuroflux.planning.spans import rate_share
from neuroflux.planning.step import Exit, Recipe
from neuroflux.training.block import SMALLEST_BATCH, Block, Diverged, Progress, train_epoch
from neuroflux.training.cache import CachedLevel, ForwardLevel, ImageLevel, Level, check_disk, write_level
from neuroflux.training.calibration import calibration_error, fit_temperature
from neuroflux.training.checkpoint import BlockResult, Checkpoints
from neuroflux.training.clock import Clock
from neuroflux.training.evaluation import count_parameters, predictions, scores, throughput
from neuroflux.training.exits import Description, StreamlinedModel, choose_exit, layers_worth_training
from neuroflux.training.folder import seal
from neuroflux.training.guard import Guard, fitting
from neuroflux.training.observer import Observer
from neuroflux.training.opening import Inputs, open_inputs
from neuroflux.training.passes import Passes
from neuroflux.training.planner import Planner
from neuroflux.training.storage import Storage
from neuroflux.training.summary import summarise

# the batch for which the learning rate is meant (see Config.lr)
_RATE_BATCH = 32
# what is learned already is only to be adapted: this share of the learning rate that training would begin with
_FINETUNE_SHARE = 0.3
# where losses are no longer finite, a block goes back to its last good state so often, at this share of the rate
_RESTARTS, _RESTART_RATE = 3, 0.25
# scores that a temperature is fitted to, at most
_CALIBRATED = 500_000


T = TypeVar("T")
# a level of the activation cache, by split: train, val, and test where each pass is tested
Levels = dict[str, Level]


class Run:
    """One run in one folder. `observers` are told what happens; see `Observer`."""

    def __init__(self, config: Config, folder: Path, observers: list[Observer]) -> None:
        self.config, self.folder, self._observers = config, folder, observers
        self.method = METHODS[config.method]
        self._head_kind = self.method.head or config.head
        self._clock = Clock()
        self.device = config.torch_device()
        if config.threads:
            torch.set_num_threads(config.threads)
        set_allocator(compact=True)
        self.meter: Meter = make_meter(self.device, config.budget_bytes)
        self._unfreeze: Callable[[], None] = lambda: None
        self._new = True  # until this process has trained
        self._finished: Residence | None = None  # the layers that `ForwardLevel`s run through
        self.recipe = Recipe(
            optimizer=config.optimizer,
            lr=config.highest_lr(self.method, 1.0),
            weight_decay=config.weight_decay,
            label_smoothing=config.label_smoothing,
            local_loss=config.local_loss,
            precision="fp32" if config.precision == "auto" else config.precision,
            accumulate=config.batch_limit if self.method.accumulate else 0,
        )

    def _tell(self, event: str, *values: Any) -> None:
        for observer in [*self._observers]:
            try:
                getattr(observer, event)(*values)
            except OSError as error:  # a full disk must not cost the run for want of a curve
                self._observers.remove(observer)
                self._note(f"nothing more is written by {type(observer).__name__}: {error.strerror or error}")

    def _note(self, text: str) -> None:
        self._tell("note", text)

    @contextmanager
    def _phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Say that the phase `name` begins, and add the seconds of the block of code to it."""
        self._tell("phase", name, detail)
        with self._clock.phase(name):
            yield

    def kept(self) -> str:
        """Return what of the run is safe on disk, in words."""
        checkpoints = Checkpoints(self.folder / "checkpoints")
        done = len(checkpoints.results())
        try:
            state = checkpoints.last_pass(done + 1)
        except NeuroFluxError:
            state = None
        blocks = f"{done} finished block{'s' * (done != 1)}" if done else ""
        passes = f"block {done + 1} up to pass {state['weights']['passes']}" if state else ""
        return (
            f"kept: {' and '.join(filter(None, (blocks, passes)))}" if blocks or passes else "no pass was finished yet"
        )

    def close(self) -> None:
        """Delete what only served the run: the mapped weights, and the cache of a run that has finished."""
        self._drop_finished()
        self._unfreeze()
        self.__dict__.pop("inputs", None)
        shutil.rmtree(self.folder / "weights", ignore_errors=True)

    # --- before training ---

    def prepare(self, make_inputs: Callable[[Config, Path], Inputs] = open_inputs) -> Plan:
        """Open data and model, and return the plan: the one that the configuration names, or a new one."""
        with self._phase("data", self.config.data):
            self.inputs = make_inputs(self.config, self.folder)
            self.meter.reset()
            tensors = [*self.inputs.model.parameters(), *self.inputs.model.buffers()]
            mapped = sum(t.numel() * t.element_size() for t in tensors) if self.device.type == "cpu" else 0
            if self.config.init:
                self._note(str(load_weights(self.inputs.model, self.config.init, self.inputs.name)))
            layers, frozen = self.inputs.chain.layers, self.config.freeze
            if frozen >= len(layers):
                raise NeuroFluxError(f"--freeze {frozen} leaves nothing to train: the model has {len(layers)} layers")
            self._unfreeze = freeze(layers[:frozen])
            # the weights were written to mapped files, which the meter cannot tell from a peak while they are new
            preparation = self.meter.highest = max(0, self.meter.highest - mapped)
            self.augmentation = self.inputs.data.augment if self.config.augment == "auto" else self.config.augment
        self._tell("opened", self.inputs.chain)
        self._planner = Planner(
            self.config, self.inputs, self.recipe, self.meter, self.device, self.folder, preparation, self._note
        )
        if self.config.plan:
            self.plan = self._planner.follow(Path(self.config.plan))
        else:
            with self._phase("profile", f"{len(self.inputs.chain.layers)} layers"):
                self.plan = self._planner.plan()
        self.chain = self._planner.chain
        self.recipe = replace(self.recipe, precision=self.plan.precision, channels_last=self.plan.channels_last)
        self._planner.recipe = self.recipe
        write_json(self.folder / "plan.json", self.plan.to_dict())
        seal(self.folder)
        self._tell("planned", self.plan)
        return self.plan

    def other_budgets(self) -> list[tuple[int, Plan | None]]:
        """Return what less and more budget would buy, once there is a plan that was made and not given."""
        return self._planner.other_budgets()

    # --- training ---

    def train(self) -> dict[str, Any]:
        """Train block after block, choose the exit, and return the summary that ``summary.json`` then holds."""
        check_disk(self.folder, self.plan.disk)
        checkpoints = Checkpoints(self.folder / "checkpoints")
        results = checkpoints.results()
        if checkpoints.damaged:
            self._note(f"{checkpoints.damaged}; block {len(results) + 1} is trained again")
        levels: Levels = self._resume(results, checkpoints) if results else dict(self._images())
        stopped = self._over(results)
        for number in range(len(results) + 1, len(self.plan.blocks) + 1):
            if stopped:
                break
            planned = self.plan.blocks[number - 1]
            self._tell("block_started", number, planned)
            block, result, levels = self._block(number, planned, levels, results, checkpoints)
            results.append(result)
            checkpoints.save(block.exits, results)
            stopped = self._over(results)
            if not stopped and number < len(self.plan.blocks):
                levels = self._next_levels(block, results, levels)
            self._tell("block_ended", number, result)
            del block
            if stopped and number < len(self.plan.blocks):
                self._note(f"block {number} brought too little to go deeper: done")
        summary = self._finish(results, checkpoints)
        self._tell("finished", summary)
        return summary

    def _rated(self, batch: int, span: int) -> Recipe:
        """Return the recipe with the learning rate that suits batches of `batch` images and spans of `span` layers."""
        images = self.recipe.accumulate or batch
        everything = span == len(self.inputs.chain.layers)
        method = METHODS["backprop"] if everything else self.method
        share = 1.0 if everything else rate_share(span)
        return replace(self.recipe, lr=self.config.highest_lr(method, share) * (images / _RATE_BATCH) ** 0.5)

    def _exits(self, block: BlockPlan) -> list[Exit]:
        def head(index: int) -> nn.Module:
            width, seed = self.plan.head_widths[index], self.config.seed
            return make_head(self.chain, index, self.inputs.classes, width, seed, self._head_kind)

        return [Exit(self.chain.layers[k], head(k)) for k in range(block.first, block.last + 1)]

    def _depth(self, block: Block, accuracies: list[float]) -> int:
        """Return how many layers of `block` should have begun to learn, given the `accuracies` of those that have."""
        if self.method.one_block:
            return len(self.chain.layers)
        worth, begun = layers_worth_training(accuracies, self.config.lookahead), len(block.exits)
        if not self.config.stagger:
            return worth
        return min(worth, begun + 1) if block.passes % self.config.stagger == 0 else begun

    def _block(
        self, number: int, planned: BlockPlan, levels: Levels, results: list[BlockResult], checkpoints: Checkpoints
    ) -> tuple[Block, BlockResult, Levels]:
        """Train block `number` and return it, how that went, and its inputs: `levels`, or what replaced them."""
        span = max(self.plan.spans[planned.first : planned.last + 1])
        while True:
            block = Block(self._exits(planned), self._rated(planned.batch, span), self.device, self.config.epochs)
            try:
                with block.on_device():
                    if planned.last < self._planner.frozen:
                        return block, self._skip(planned), levels
                    return block, self._train_block(number, block, planned, levels, checkpoints), levels
            except DamagedArray as error:
                if not isinstance(levels["train"], CachedLevel):
                    raise
                self._note(f"{error}: the cache is written again")
                levels = self._rewritten(results)

    def _train_block(
        self, number: int, block: Block, planned: BlockPlan, levels: Levels, checkpoints: Checkpoints
    ) -> BlockResult:
        """Train one block for all its epochs and return how it went; its weights are then back at rest.

        After each pass all that the next one depends on is saved; where that is at hand, training goes on from there.
        """
        guard = Guard(self.meter, self.config.budget_bytes, planned.batch, SMALLEST_BATCH, planned.compact)
        passes = Passes(planned.batch, self.config.seed * 1000 + number, guard)
        with block.training():
            self._begin(number, block, passes, checkpoints)
            while block.passes < block.last_pass:
                try:
                    self._make_pass(number, block, passes, levels)
                except Diverged as error:
                    self._restart(error, number, block, passes, checkpoints)
                    continue
                block.start(self._depth(block, passes.result.accuracies))
                if block.passes < block.last_pass:
                    checkpoints.save_pass(number, {"weights": block.state(), **passes.state()})
        result = passes.result
        if guard.shrunk:
            self._note(f"block {number}: the batch was reduced to {guard.batch} to stay within the budget")
        if guard.failures:
            self._note(f"block {number}: the system had no memory for a step {guard.failures} times")
        if block.skipped:
            self._note(f"block {number}: {block.skipped} steps were skipped, their loss was not finite")
        result.batch = guard.batch
        result.failures, result.skipped, result.restarts = guard.failures, block.skipped, passes.restarts
        images = len(levels["train"].labels)
        result.parts = {
            "inputs": images * block.timing.per_image("inputs"),
            "waiting": passes.waited / block.passes,
            "reading": passes.reading / block.passes,
            "layers": [images * block.timing.per_image(str(k)) for k in range(len(block.exits))],
        }
        return result

    def _begin(self, number: int, block: Block, passes: Passes, checkpoints: Checkpoints) -> None:
        """Let `block` go on after its last pass that was saved, or begin."""
        if (saved := self._last_pass(number, checkpoints)) is None:
            passes.begin()
            block.start(self._depth(block, []))
            return
        block.restore(saved["weights"])
        passes.restore(saved)
        if self._new:
            self._clock.continue_from(passes.result.curve[-1]["seconds"])
        self._note(f"block {number} goes on after pass {block.passes}")

    def _restart(self, error: Diverged, number: int, block: Block, passes: Passes, checkpoints: Checkpoints) -> None:
        """Let `block` go on from its last good state at a lower rate.

        Raises:
            NeuroFluxError: that has been tried often enough.
        """
        restarts, caution = passes.restarts + 1, block.caution * _RESTART_RATE
        if restarts > _RESTARTS:
            raise NeuroFluxError(
                f"{error}, and again after {_RESTARTS} new starts at lower rates; lower --lr, and look at the images"
            ) from error
        self._note(f"{error}: going back to the last good state, at {_RESTART_RATE:g} of the rate")
        block.restart()
        self._begin(number, block, passes, checkpoints)
        passes.restarts, block.caution = restarts, caution

    def _make_pass(self, number: int, block: Block, passes: Passes, levels: Levels) -> None:
        """Make one pass over the training images, and measure the exits."""
        self._new = False
        result, guard = passes.result, passes.guard
        with self._phase("train", f"block {number}"):
            start = time.perf_counter()
            losses, images = np.zeros(len(block.exits)), np.zeros(len(block.exits))
            for progress in train_epoch(block, levels["train"], guard, passes.generator):
                finite = np.isfinite(progress.losses)  # not of layers that have finished, nor of skipped steps
                losses += np.where(finite, progress.losses, 0.0) * progress.batch
                images += finite * progress.batch
                result.peak = max(result.peak, progress.peak)
                self._tell("stepped", number, block.passes + 1, progress)
            passes.waited, passes.reading = passes.waited + progress.waited, passes.reading + progress.reading
            result.epoch_seconds.append(time.perf_counter() - start)
        with guard.paused():
            self._evaluate(result, block, levels, guard.batch, progress)
        means = [float(loss / count) if count else math.nan for loss, count in zip(losses, images, strict=True)]
        self._tell("epoch_ended", number, block.passes, result.accuracies, means, result.epoch_seconds[-1])

    def _last_pass(self, number: int, checkpoints: Checkpoints) -> dict[str, Any] | None:
        """Return what training block `number` goes on from; a damaged file costs no more than the block's passes."""
        try:
            return checkpoints.last_pass(number)
        except NeuroFluxError as error:
            self._note(f"{error}; block {number} starts again")
            return None

    def _evaluate(self, result: BlockResult, block: Block, levels: Levels, batch: int, progress: Progress) -> None:
        """Add the accuracies of the exits of `block` after a pass to `result`."""
        with self._phase("evaluate"):
            result.accuracies = self._fitting(lambda size: block.accuracies(levels["val"], size), batch)
        point: dict[str, Any] = {"seconds": self._clock.elapsed, "images": progress.images, "val": result.accuracies}
        if "test" in levels:
            with self._clock.stopped():
                point["test"] = self._fitting(lambda size: block.accuracies(levels["test"], size), batch)
        result.curve.append(point)
        result.peak = max(result.peak, self.meter.peak())

    def _fitting(self, work: Callable[[int], T], batch: int) -> T:
        """Return `work(batch)`, or of half the batch as often as the system has no memory for it."""
        return fitting(work, batch, self.meter)

    def _skip(self, planned: BlockPlan) -> BlockResult:
        """Return the result of a block of frozen layers, whose exits learn nothing."""
        layers = planned.last - planned.first + 1
        parts = {"inputs": 0.0, "waiting": 0.0, "reading": 0.0, "layers": [0.0] * layers}
        return BlockResult([0.0] * layers, planned.batch, 0, [], parts)

    def _over(self, results: list[BlockResult]) -> bool:
        """Return whether deeper layers are not worth training: the last block needed not all of its own, or failed."""
        if not results or self.plan.blocks[len(results) - 1].last < self._planner.frozen:
            return False
        planned = self.plan.blocks[len(results) - 1]
        if len(results[-1].accuracies) <= planned.last - planned.first:
            return True
        before = max((max(result.accuracies) for result in results[:-1]), default=0.0)
        return max(results[-1].accuracies) < before + self.config.min_gain

    # --- levels ---

    def _images(self) -> dict[str, ImageLevel]:
        """Return level 0 of the images."""
        return {name: self._image_level(split) for name, split in self._splits().items()}

    def _splits(self) -> dict[str, Split]:
        data = self.inputs.data
        splits = {"train": data.train, "val": data.val}
        if self.config.test_each_pass and data.test is not None:
            splits["test"] = data.test
        return splits

    def _image_level(self, split: Split) -> ImageLevel:
        data = self.inputs.data
        preprocess = Preprocess(data.mean, data.std, self.inputs.channels, self.inputs.raw).to(self.device)
        return ImageLevel(split, preprocess, self.augmentation, self.device)

    def _next_levels(self, block: Block, results: list[BlockResult], levels: Levels) -> Levels:
        """Return the level that `block`, the last one of `results`, puts out for its inputs `levels`."""
        if not self.config.cache_views:
            return self._forwarded(results)
        try:
            with block.on_device():
                return self._cache(len(results), block, results[-1].batch, levels)
        except DamagedArray as error:
            if len(results) == 1:
                raise
            self._note(f"{error}: the cache is written again")
            return self._rewritten(results)
        except DiskFull as error:
            return self._without_cache(error, results)

    def _cache(self, number: int, block: Block, batch: int, levels: Levels) -> Levels:
        """Write the outputs of block `number` over all splits, drop the level before, and return the new one."""
        folder = self.folder / "cache" / f"level-{number}"
        planned = self.plan.blocks[number - 1]
        storage, origin = self._storage(number), self._origin(number)
        set_allocator(compact=True)
        self.meter.release()
        check_disk(self.folder, planned.cache_bytes)
        for name, level in levels.items():
            views = self.config.cache_views if name == "train" else 1

            def write(size: int, name: str = name, level: Level = level, views: int = views) -> None:
                generator = torch.Generator().manual_seed(self.config.seed * 1000 + number)
                path = folder / f"{name}.npy"
                write_level(path, level, block.features, size, storage, views, generator, origin)

            with self._clock.stopped() if name == "test" else self._phase("cache", f"block {number}"):
                self._fitting(write, batch)
        self.meter.peak()
        shutil.rmtree(self.folder / "cache" / f"level-{number - 1}", ignore_errors=True)
        return self._cached(number)

    def _storage(self, number: int) -> Storage:
        """Return what the outputs of block `number` are kept as."""
        return Storage(self.config.cache_dtype, self.chain.shapes[self.plan.blocks[number - 1].last])

    def _origin(self, number: int) -> str:
        """Return a fingerprint of what level `number` is made from: weights, images, and how they are changed."""
        data, config = self.inputs.data, self.config
        digest = hashlib.sha256()
        for split in self._splits().values():
            digest.update(np.ascontiguousarray(split.labels).tobytes())
        settings = [data.name, data.shape, data.mean, data.std, self.augmentation, config.cache_views, config.seed]
        settings.append(config.cache_dtype)
        digest.update(json.dumps(settings).encode())
        checkpoints = Checkpoints(self.folder / "checkpoints")
        for finished in range(1, number + 1):
            digest.update(checkpoints.digest(finished))
        return digest.hexdigest()

    def _rewritten(self, results: list[BlockResult]) -> Levels:
        """Return the level that comes after `results`, written anew from the images on."""
        levels: Levels = dict(self._images())
        try:
            for number, (planned, result) in enumerate(zip(self.plan.blocks, results, strict=False), 1):
                block = Block(self._exits(planned), self.recipe, self.device)
                with block.on_device():
                    levels = self._cache(number, block, result.batch, levels)
        except DiskFull as error:
            return self._without_cache(error, results)
        return levels

    def _without_cache(self, error: DiskFull, results: list[BlockResult]) -> Levels:
        """Return the level that comes after `results`, for which the disk has no room."""
        self._note(f"{error}; so block {len(results)} is not cached: its outputs are computed anew in every pass")
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        return self._forwarded(results)

    def _cached(self, number: int) -> Levels:
        """Return level `number` from its cache."""
        folder, flip = self.folder / "cache" / f"level-{number}", "flip" in self.augmentation
        return {
            name: CachedLevel(folder / f"{name}.npy", split.labels, self._storage(number), flip, self.device)
            for name, split in self._splits().items()
        }

    def _forwarded(self, results: list[BlockResult]) -> Levels:
        """Return the level that the next block reads, made from the images by all layers of the finished blocks."""
        self._drop_finished()
        last = self.plan.blocks[len(results) - 1].last
        layers = [layer.eval() for layer in self.chain.layers[: last + 1]]
        if self.device.type == "cpu":  # which reads weights from the mapped files where they rest
            with self.meter.reading_files():
                for layer in layers:
                    for weights in layer.parameters():
                        weights.sum()
        else:
            self._finished = Residence(layers, self.device, self.recipe.memory_format)
            self._finished.fetch()

        @torch.no_grad()
        def forward(features: torch.Tensor) -> torch.Tensor:
            features = features.contiguous(memory_format=self.recipe.memory_format)
            with self.recipe.autocast(self.device):
                for layer in layers:
                    features = layer(features)
            return features

        batch = min([FORWARD_BATCH, *(result.batch for result in results)])
        return {name: ForwardLevel(level, forward, batch) for name, level in self._images().items()}

    def _drop_finished(self) -> None:
        """Free what the finished layers hold on the device; their weights rest as before."""
        if self._finished is not None:
            self._finished.drop()
        self._finished = None

    def _resume(self, results: list[BlockResult], checkpoints: Checkpoints) -> Levels:
        """Load the finished blocks and return the level that the next one reads, rebuilt where it is not intact."""
        blocks = self.plan.blocks[: len(results)]
        for number, (planned, result) in enumerate(zip(blocks, results, strict=True), 1):
            checkpoints.load(number, self._exits(planned)[: len(result.accuracies)])
        self._clock.continue_from(next((r.curve[-1]["seconds"] for r in reversed(results) if r.curve), 0.0))
        self._note(f"{len(results)} of {len(self.plan.blocks)} blocks were finished before")
        if len(results) == len(self.plan.blocks) or self._over(results):
            return dict(self._images())
        if not self.config.cache_views:
            return self._forwarded(results)
        with self._phase("cache", "check"):
            intact = self._intact(len(results))
        if intact:
            return self._cached(len(results))
        self._note(f"the cache of block {len(results)} is missing or damaged: it is written again")
        return self._rewritten(results)

    def _intact(self, number: int) -> bool:
        folder = self.folder / "cache" / f"level-{number}"
        origin = self._origin(number)
        try:
            arrays = [ArrayFile(folder / f"{name}.npy") for name in self._splits()]
        except DamagedArray:
            return False
        return all(array.origin == origin and array.intact() for array in arrays)

    # --- the end ---

    def _finish(self, results: list[BlockResult], checkpoints: Checkpoints) -> dict[str, Any]:
        """Choose the exit, save and test the streamlined model, and write the summary."""
        self._drop_finished()
        set_allocator(compact=True)
        self.meter.release()
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        accuracies = [accuracy for result in results for accuracy in result.accuracies]
        chosen = choose_exit(accuracies, self.config.tolerance)
        number = next(k for k, block in enumerate(self.plan.blocks, 1) if block.first <= chosen <= block.last)
        batch = min(result.batch for result in results[:number])
        model, full = self._streamlined(chosen, number, results[number - 1], checkpoints)
        accuracy = accuracies[chosen]
        tuned = self._finetune(model, accuracy, chosen, checkpoints) if self.config.finetune else None
        if tuned is not None:
            accuracy = max(accuracy, tuned.accuracies[0])
        device = self._ready(model, full)
        calibrated = self._calibrate(model, batch, device)
        model.save(self.folder / "model.pt")
        measured = self._measure(model, full, batch, device)
        summary = {
            "model": self.inputs.name or type(self.inputs.model).__name__,
            **summarise(self.config, self.inputs.data, self.plan, self.meter, results, tuned, self._clock.seconds),
            "chosen": chosen,
            "val_accuracy": accuracy,
            "calibration": calibrated,
            **measured,
            "eval_batch": batch,
            "parameters": {"model": count_parameters(model), "full": count_parameters(full)},
            "device": str(self.device),
            "elapsed": self._clock.elapsed,
        }
        write_json(self.folder / "summary.json", summary)
        checkpoints.forget_pass()
        return summary

    def _finetune(
        self, model: StreamlinedModel, accuracy: float, chosen: int, checkpoints: Checkpoints
    ) -> BlockResult | None:
        """Train all of `model` end to end, where the budget allows it, and return how that went.

        Where its validation accuracy does not rise above `accuracy`, the weights are put back to what they were.
        """
        count, chain = len(model.layers), self.inputs.chain
        part = replace(chain, layers=list(model.layers), names=chain.names[:count], shapes=chain.shapes[:count])
        whole = join(replace(part, classifier=model.head), [count])
        job = replace(self._planner.job([count]), one_block=True, epochs=self.config.finetune, stagger=0, frozen=0)
        with self._phase("profile", "the chosen layers together"):
            try:
                (planned,) = make_plan(self._planner.profile(whole, choose_precision=False), job).blocks
            except BudgetTooSmall as error:
                self._note(f"not fine-tuned: that takes {format_bytes(error.floor)} or more")
                return None
        number = len(self.plan.blocks) + 1
        planned = replace(planned, first=chosen, last=chosen)
        recipe = self._rated(planned.batch, count)
        block = Block(
            [Exit(whole.layers[0], model.head)],
            replace(recipe, lr=recipe.lr * _FINETUNE_SHARE, local_loss="pred"),
            self.device,
            self.config.finetune,
        )
        model.save(self.folder / "model.pt")
        self._tell("block_started", number, planned)
        with block.on_device():
            result = self._train_block(number, block, planned, dict(self._images()), checkpoints)
        set_allocator(compact=True)
        self.meter.release()
        if result.accuracies[0] <= accuracy:
            model.load_state_dict(read_tensors(self.folder / "model.pt")["weights"])
            self._note("fine-tuning brought nothing: the weights are those from before")
        self._tell("block_ended", number, result)
        return result

    def _streamlined(
        self, chosen: int, number: int, result: BlockResult, checkpoints: Checkpoints
    ) -> tuple[StreamlinedModel, StreamlinedModel]:
        """Return the model that ends with exit `chosen`, which is in block `number`, and the full model."""
        planned = self.plan.blocks[number - 1]
        exits = self._exits(planned)[: len(result.accuracies)]
        checkpoints.load(number, exits)
        data, layers = self.inputs.data, list(self.inputs.chain.layers)
        description = Description(
            model=self.inputs.name,
            layers=sum(self.plan.spans[: chosen + 1]),
            width=self.plan.head_widths[chosen],
            classes=list(data.classes),
            shape=list(data.shape),
            channels=self.inputs.channels,
            mean=data.mean,
            std=data.std,
            raw=self.inputs.raw,
            head=self._head_kind,
            ahead=layers_ahead(self.chain, chosen) if self._head_kind == "auglocal" else [],
        )
        model = StreamlinedModel(layers[: description.layers], exits[chosen - planned.first].head, description)
        return model, StreamlinedModel(layers, self.inputs.chain.classifier, description)

    def _ready(self, model: StreamlinedModel, full: StreamlinedModel) -> torch.device:
        """Put both models where they are measured, ready to predict, and return that device."""
        with self.meter.reading_files():  # later, the weights could not be told from a peak
            for weights in full.parameters():
                weights.sum()
        device = self._evaluation_device(full)
        model.eval().to(device)
        full.eval().to(device)
        return device

    def _calibrate(self, model: StreamlinedModel, batch: int, device: torch.device) -> dict[str, float]:
        """Give `model` the temperature that suits the validation images, and return what that does."""
        with self._phase("evaluate"):
            val = self.inputs.data.val
            found, labels = self._fitting(lambda size: scores(model, val, size, device, _CALIBRATED), batch)
            temperature = fit_temperature(found, labels)
            model.description.temperature = temperature
            return {
                "temperature": temperature,
                "error": calibration_error(found / temperature, labels),
                "error_before": calibration_error(found, labels),
            }

    def _measure(
        self, model: StreamlinedModel, full: StreamlinedModel, batch: int, device: torch.device
    ) -> dict[str, Any]:
        """Return the accuracy of `model` on the test images, and how fast it is beside the `full` one."""
        data, test = self.inputs.data, None
        with self._phase("evaluate", "test"):
            if data.test is not None:
                tested = data.test
                predicted = self._fitting(lambda size: predictions(model, tested, size, device), batch)
                test = float((predicted == data.test.labels).mean())
                self._tell("tested", data, predicted)
            rates = self._fitting(lambda size: throughput([model, full], data.shape, size, device), batch)
        self.meter.peak()
        return {
            "test_accuracy": test,
            "images_per_second": {"model": rates[0], "full": rates[1]},
            "evaluated_on": str(device),
        }

    def _evaluation_device(self, full: nn.Module) -> torch.device:
        """Return where the finished model is measured: the CPU where the full one would not fit the device's budget."""
        weights = sum(p.numel() * p.element_size() for p in full.parameters())
        steps = max(block.peak for block in self.plan.blocks)
        return self.device if weights + steps <= self.config.budget_bytes else torch.device("cpu")
