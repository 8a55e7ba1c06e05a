"""Levels: what a block is fed with. Level 0 is the data set; level k holds the outputs of block k.

Those are cached on disk, or made anew from the images whenever they are read.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from neuroflux.inputs.arrays import ArrayFile, ArrayWriter, DamagedArray, DiskFull
from neuroflux.inputs.datasets import Split, augment
from neuroflux.inputs.preprocess import Preprocess
from neuroflux.training.storage import Storage


class Level(Protocol):
    """The inputs of one block for one split: labels (n,), and rows that are read by index and made into features.

    Attributes:
        views: how many stored rows there are of every image; `view` (0 .. views - 1) is the one that is read.
    """

    labels: np.ndarray
    views: int
    view: int

    def read(self, indices: np.ndarray) -> torch.Tensor:
        """Return the stored rows at `indices`; runs beside training, in a thread of its own."""
        ...

    def features(self, rows: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Return `rows` as float features (N, C, H, W) on the device, augmented when `generator` is given."""
        ...


class ImageLevel:
    """Level 0: the images themselves."""

    def __init__(self, split: Split, preprocess: Preprocess, augmentation: str, device: torch.device) -> None:
        self.labels = split.labels
        self.views, self.view = 1, 0
        self._split, self._preprocess, self._augmentation, self._device = split, preprocess, augmentation, device

    def read(self, indices: np.ndarray) -> torch.Tensor:
        return self._split.read(indices)

    def features(self, rows: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        if generator is not None:
            rows = augment(rows, self._augmentation, generator)
        return self._preprocess(rows.to(self._device, non_blocking=True))


class CachedLevel:
    """Level k: one view or several of every image, as the finished blocks before it put them out, view after view."""

    def __init__(self, path: Path, labels: np.ndarray, storage: Storage, flip: bool, device: torch.device) -> None:
        self.labels = labels
        self.array = ArrayFile(path)
        self.views, self.view = max(1, len(self.array) // max(1, len(labels))), 0
        if len(self.array) != self.views * len(labels):
            raise DamagedArray(f"{path} holds {len(self.array)} images instead of {len(labels)}; delete it")
        if self.array.shape[1:] != storage.row_shape or self.array.dtype != storage.dtype:
            raise DamagedArray(f"{path} holds features of another kind than {storage.kind}; delete it")
        self._storage, self._flip, self._device = storage, flip, device

    def read(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self.array.read(indices + self.view * len(self.labels)))

    def features(self, rows: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        features = self._storage.decode(rows.to(self._device, non_blocking=True))
        if generator is not None and self._flip and features.ndim == 4:
            # the features of a mirrored image are nearly its mirrored features
            chosen = (torch.rand(len(rows), generator=generator) < 0.5).to(self._device)
            features[chosen] = features[chosen].flip(3)
        return features


class ForwardLevel:
    """Level k without a cache: the images, which the finished layers make into features whenever they are read.

    Every pass then sees every image changed anew, as the first block does; it costs a forward pass each time.
    """

    def __init__(self, images: ImageLevel, forward: Callable[[torch.Tensor], torch.Tensor], batch: int) -> None:
        """`forward` maps image features to the outputs of block k; it is given at most `batch` images at a time."""
        self.labels = images.labels
        self.views, self.view = 1, 0
        self._images, self._forward, self._batch = images, forward, batch

    def read(self, indices: np.ndarray) -> torch.Tensor:
        return self._images.read(indices)

    def features(self, rows: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        images = self._images.features(rows, generator)
        first = self._forward(images[: self._batch]).float()
        if len(first) == len(images):
            return first
        features = first.new_empty((len(images), *first.shape[1:]))
        features[: len(first)] = first
        for start in range(len(first), len(images), self._batch):
            features[start : start + self._batch] = self._forward(images[start : start + self._batch])
        return features


class Batches:
    """Reads batches of a level ahead of their use, in one thread.

    Args:
        order: indices (n,) in the order in which they are used.
        size: asked for the size of each batch just before it is read, with the place in `order` where it starts.
        smallest: a last batch with fewer images is left out (batch norm cannot train on a single image).
    """

    def __init__(self, level: Level, order: np.ndarray, size: Callable[[int], int], smallest: int = 1) -> None:
        self._level, self._order, self._size, self._smallest = level, order, size, smallest
        self.waited = 0.0  # seconds that training waited for data
        self.reading = 0.0  # seconds that data were read for, beside training

    def __iter__(self) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Yield (rows, their indices)."""
        requests: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        answers: queue.SimpleQueue[torch.Tensor | BaseException] = queue.SimpleQueue()

        def work() -> None:
            while (indices := requests.get()) is not None:
                begun = time.perf_counter()
                try:
                    answers.put(self._level.read(indices))
                except BaseException as error:  # it is raised again where the batch is used
                    answers.put(error)
                self.reading += time.perf_counter() - begun

        thread = threading.Thread(target=work, name="read-ahead", daemon=True)
        thread.start()
        try:
            start = 0
            pending = self._next(start)
            if len(pending):
                requests.put(pending)
            while len(pending):
                begun = time.perf_counter()
                rows = answers.get()
                self.waited += time.perf_counter() - begun
                if isinstance(rows, BaseException):
                    raise rows
                start += len(pending)
                following = self._next(start)
                if len(following):
                    requests.put(following)
                current, pending = pending, following
                yield rows, current
                del rows
        finally:
            requests.put(None)
            thread.join()

    def _next(self, start: int) -> np.ndarray:
        indices = self._order[start : start + self._size(start)]
        return indices if len(indices) >= self._smallest else indices[:0]


def write_level(
    path: Path,
    level: Level,
    forward: Callable[[torch.Tensor], torch.Tensor],
    batch: int,
    storage: Storage,
    views: int = 1,
    generator: torch.Generator | None = None,
    origin: str = "",
) -> None:
    """Write the outputs of `forward` over all rows of `level` to the array `path`, as `storage` says.

    Of several `views`, each comes from one that `level` holds, or is an image changed at random by `generator`. What
    the rows are made from is kept with them as their `origin`.
    """
    changed = generator if views > 1 and level.views == 1 else None
    with ArrayWriter(path, storage.row_shape, storage.dtype, origin) as writer:
        for view in range(views):
            level.view = view % level.views
            for rows, _ in Batches(level, np.arange(len(level.labels)), lambda _: batch):
                writer.append(storage.encode(forward(level.features(rows, changed))))


def check_disk(folder: Path, needed: int) -> None:
    """Raise DiskFull unless the disk of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"the activation caches need {needed / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are free; "
            f"free space, choose another --out, or raise --budget (fewer blocks need less cache)"
        )


def measure_disk(folder: Path, size: int = 4_000_000) -> float:
    """Return the bytes per second that arrays are written and read with in `folder`, by writing `size` bytes."""
    piece = np.zeros((64, 2000), np.float16)
    count = max(1, size // piece.nbytes)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "rate.npy"
        start = time.perf_counter()
        with ArrayWriter(path, (2000,), np.float16) as writer:
            for _ in range(count):
                writer.append(piece)
        array = ArrayFile(path)
        for k in range(count):
            array.read(np.arange(64) + 64 * k)
        return 2 * count * piece.nbytes / (time.perf_counter() - start)
