"""The data: opens a named set, a folder or an .npz, converts it once to uint8 arrays on disk, and splits it.

No set is ever held in memory: converting streams a few MB at a time into ``root/stores/``, where the next run finds
the images again. Splits are row numbers over those arrays, so holding images out or limiting a split copies nothing.
The test images never depend on the seed, so runs with different seeds are judged on the same images.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import itertools
import json
import mmap
import os
import pickle
import re
import shutil
import statistics
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
import torchvision.datasets
from PIL import Image, ImageOps
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, Subset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.datasets.utils import check_integrity

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import ArrayFile, ArrayWriter, write_json
from neuroflux.inputs.locks import locked

CHUNK = 4 << 20  # bytes of images that are in memory at once while converting
STORE_VERSION = 2  # raise it when what is written changes, so that old stores are not reused
VAL_SHARE = 0.1
VAL_MOST = 5000
STATISTICS_IMAGES = 10_000

Chunks = Iterator[tuple[np.ndarray, np.ndarray]]  # uint8 images (n, C, H, W) and their int64 labels (n,)


class Split:
    """Images, on disk or in a torch data set, with their labels in memory.

    Attributes:
        labels: the classes of the images, int64 (n,).
    """

    def __init__(self, images: ArrayFile | Dataset[Any], labels: np.ndarray, rows: np.ndarray | None = None) -> None:
        self.labels = np.asarray(labels, np.int64)
        self._images = images
        self._rows = np.arange(len(self.labels)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices: np.ndarray) -> torch.Tensor:
        """Return the images at `indices` (n,), in that order: (n, C, H, W).

        They are uint8 when they come from a store; a torch data set's uint8 stays uint8, its floats become float32.
        Raises NeuroFluxError when the file is damaged or the data set gives something else than equal-sized images.
        """
        rows = self._rows[indices]
        if isinstance(self._images, ArrayFile):
            return torch.from_numpy(self._images.read(rows))
        images = [_item_image(self._images, int(row)) for row in rows]
        for row, image in zip(rows, images, strict=True):
            if image.shape != images[0].shape or image.dtype != images[0].dtype:
                raise NeuroFluxError(
                    f"item {row} of the data set is {tuple(image.shape)} {image.dtype}, others are "
                    f"{tuple(images[0].shape)} {images[0].dtype}; make all images alike in its transform"
                )
        return torch.stack(images)

    def subset(self, indices: np.ndarray) -> Split:
        """Return the split of the items at `indices`; no image is copied."""
        return Split(self._images, self.labels[indices], self._rows[indices])


@dataclass(frozen=True)
class Data:
    """A classification data set, split.

    Attributes:
        name: what to call it.
        classes: the class names; label i is `classes[i]`.
        shape: (C, H, W) of every image.
        mean, std: per channel, in the units of the images (0..255 for uint8; 0 and 1 for a user's own floats).
        augment: what keeps an image's meaning: 'none', 'crop' or 'flip+crop' (see `augment`).
        train, val, test: disjoint splits; `test` is None only where the Python API was given none.
        raw: whether the images are floats that the user's own transforms prepared.
    """

    name: str
    classes: list[str]
    shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]
    augment: str
    train: Split
    val: Split
    test: Split | None
    raw: bool = False


def open_data(
    name: str,
    *,
    root: Path,
    seed: int = 0,
    image_size: int | None = None,
    limit_train: int | None = None,
    limit_val: int | None = None,
    limit_test: int | None = None,
    budget: int | None = None,
) -> Data:
    """Open the data set `name`, converting it first when `root` does not hold it yet.

    Args:
        name: 'digits', a torchvision set such as 'cifar10', a folder of class folders (optionally inside `train/`,
            `val/` and `test/`), or an `.npz` with train_images, train_labels and optionally val_* and test_*.
        root: where downloads and converted stores live.
        seed: chooses the validation images that are held out and the images that limits keep.
        image_size: height and width in pixels to convert to; None keeps the set's own.
        limit_train, limit_val, limit_test: use this many images, each class in proportion.
        budget: bytes that converting may use.

    Raises NeuroFluxError when the set is unknown, missing, damaged, badly labelled or cannot be stored.
    """
    limits = {"limit_train": limit_train, "limit_val": limit_val, "limit_test": limit_test}
    for option, value, least in [
        ("seed", seed, 0),
        ("image_size", image_size, 8),
        *((k, v, 1) for k, v in limits.items()),
    ]:
        if value is not None and value < least:
            raise NeuroFluxError(f"{option} is {value}; it must be at least {least}")
    root = Path(root).expanduser()
    source = _find_source(name, root, image_size, budget)
    store = _obtain_store(source, root)
    train, val, test = store.splits["train"], store.splits.get("val"), store.splits.get("test")
    available = len(train)
    if test is None:
        train, test = _hold_out_test(train, source)
    if val is None:
        count = _val_count(available, len(train), len(store.classes), limit_train, limit_val)
        train, val = _hold_out(train, count, np.random.default_rng((seed, 1)), source.name)
    return Data(
        name=source.name,
        classes=store.classes,
        shape=store.shape,
        mean=store.mean,
        std=store.std,
        augment=source.augment,
        train=_limited(train, limit_train, np.random.default_rng((seed, 2))),
        val=_limited(val, limit_val, np.random.default_rng((seed, 3))),
        test=_limited(test, limit_test, np.random.default_rng(4)),
    )


def from_torch(
    train: Dataset[Any],
    val: Dataset[Any] | None = None,
    test: Dataset[Any] | None = None,
    *,
    seed: int = 0,
    classes: list[str] | None = None,
) -> Data:
    """Use map-style torch data sets that give (image tensor (C, H, W), int label); images are read on the fly.

    Float images are used as they are (mean 0, std 1); uint8 images get the mean and std of a sample. Nothing is
    augmented: that is the data sets' own business. Without `val`, 10 % of `train` is held out, with its augmentation.
    Raises NeuroFluxError when an item is not such a pair or the labels are not 0..C-1 with each one in `train`.
    """
    everything = _torch_split(train, "train")
    count = _check_train_labels(everything.labels, "the training data set")
    names = classes if classes is not None else _own_classes(train, count)
    if len(names) != count:
        raise NeuroFluxError(f"{len(names)} class names for {count} classes; give one name for each label")
    if val is None:
        held = _val_count(len(everything), len(everything), count, None, None)
        kept, val_split = _hold_out(everything, held, np.random.default_rng((seed, 1)), "the training data set")
    else:
        kept, val_split = everything, _torch_split(val, "val")
    test_split = None if test is None else _torch_split(test, "test")
    _check_other_labels(val_split.labels, count, "the val data set")
    if test_split is not None:
        _check_other_labels(test_split.labels, count, "the test data set")
    first = kept.read(np.array([0]))
    channels = first.shape[1]
    mean, std = [0.0] * channels, [1.0] * channels
    raw = first.dtype != torch.uint8
    if not raw:
        mean, std = _mean_std(kept, STATISTICS_IMAGES // 10)  # the user's transforms may be slow
    shape = cast("tuple[int, int, int]", tuple(first.shape[1:]))
    name = type(train).__name__.lower()
    return Data(name, list(names), shape, mean, std, "none", kept, val_split, test_split, raw)


def augment(images: torch.Tensor, how: str, generator: torch.Generator) -> torch.Tensor:
    """Return randomly changed `images` (n, C, H, W), of the same shape and dtype.

    'flip' in `how` mirrors each image with probability 1/2; 'crop' pads each with zeros by an eighth of its side and
    cuts the original size out at a random place. The same state of `generator` gives the same result.
    """
    n, _, height, width = images.shape

    def draw(high: int) -> torch.Tensor:
        return torch.randint(high, (n,), generator=generator, device=generator.device).to(images.device)

    if "flip" in how:
        images = torch.where(draw(2).bool()[:, None, None, None], images.flip(3), images)
    if "crop" in how:
        down, right = height // 8, width // 8
        padded = functional.pad(images, (right, right, down, down))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (n, C, y, x, H, W)
        images = windows[torch.arange(n, device=images.device), :, draw(2 * down + 1), draw(2 * right + 1)]
    return images


# --- choosing images ---------------------------------------------------------------------------------------------


def _stratified(labels: np.ndarray, count: int, rng: np.random.Generator, leave: int = 0) -> np.ndarray:
    """Return `count` sorted indices, each class in proportion and none absent; `leave` stay behind in each class."""
    _, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    most = np.maximum(sizes - leave, 0)
    count = min(count, int(most.sum()))
    ideal = count * sizes / max(1, len(labels))
    quota = np.clip(np.floor(ideal).astype(np.int64), np.minimum(1, most), most)
    while quota.sum() < count:
        quota[np.argmax(np.where(quota < most, ideal - quota, -np.inf))] += 1
    while quota.sum() > count:
        quota[np.argmax(np.where(quota > 0, quota - ideal, -np.inf))] -= 1
    order = rng.permutation(len(labels))
    order = order[np.argsort(inverse[order], kind="stable")]  # by class, shuffled within it
    starts = np.cumsum(sizes) - sizes
    return np.sort(np.concatenate([order[at : at + n] for at, n in zip(starts, quota, strict=True)]))


def _hold_out(split: Split, count: int, rng: np.random.Generator, where: str) -> tuple[Split, Split]:
    """Return `split` without `count` stratified images, and those images."""
    held = _stratified(split.labels, count, rng, leave=1)
    if len(held) == 0:
        raise NeuroFluxError(
            f"{where} has only {len(split)} training images, too few to hold some out; add images of each class"
        )
    kept = np.setdiff1d(np.arange(len(split)), held, assume_unique=True)
    return split.subset(kept), split.subset(held)


def _hold_out_test(train: Split, source: _Source) -> tuple[Split, Split]:
    """Hold the test images out of `train`: the same ones whatever the seed of the run."""
    count = max(round(source.test_share * len(train)), len(np.unique(train.labels)))
    return _hold_out(train, count, np.random.default_rng(0), source.name)


def _val_count(total: int, left: int, classes: int, limit_train: int | None, limit_val: int | None) -> int:
    """Return how many of the `left` of `total` training images to hold out for validation."""
    usual = min(round(VAL_SHARE * total), VAL_MOST)
    if limit_train is None:
        spare, wanted = usual, limit_val or usual
    else:
        spare, wanted = max(usual, left - limit_train), limit_val or min(max(limit_train // 10, 100), VAL_MOST)
    return max(min(wanted, spare), classes)


def _limited(split: Split, limit: int | None, rng: np.random.Generator) -> Split:
    if limit is None or limit >= len(split):
        return split
    return split.subset(_stratified(split.labels, limit, rng))


# --- checking labels ---------------------------------------------------------------------------------------------


def _check_train_labels(labels: np.ndarray, where: str) -> int:
    """Return the number of classes C; raise NeuroFluxError unless the labels are 0..C-1, C > 1, each one present."""
    found = np.unique(labels)
    if len(found) < 2 or not np.array_equal(found, np.arange(len(found))):
        raise NeuroFluxError(
            f"the training labels of {where} are {_listed(found)}; "
            "they must be 0, 1, ... without gaps, and at least two: renumber the classes"
        )
    return len(found)


def _check_other_labels(labels: np.ndarray, classes: int, where: str) -> None:
    strange = np.unique(labels[(labels < 0) | (labels >= classes)])
    if len(strange):
        raise NeuroFluxError(
            f"{where} has the labels {_listed(strange)}, which the training images lack (0 to {classes - 1}); "
            "remove those images or add the classes to the training images"
        )


def _listed(values: Iterable[Any]) -> str:
    texts = [str(value) for value in values]
    return ", ".join(texts) if len(texts) <= 12 else f"{', '.join(texts[:6])}, ..., {', '.join(texts[-3:])}"


# --- the store ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contents:
    """What a source holds: its class names (None: numbers will do) and, for each split it has, its images."""

    classes: list[str] | None
    parts: dict[str, Chunks]


@dataclass(frozen=True)
class _Source:
    """A data set before conversion; two sources with equal `identity` convert to the same store."""

    name: str
    identity: list[Any]
    augment: str
    read: Callable[[], _Contents]
    test_share: float = 0.1


@dataclass(frozen=True)
class _Store:
    classes: list[str]
    shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]
    splits: dict[str, Split]


def _obtain_store(source: _Source, root: Path) -> _Store:
    """Return the store of `source` under `root`, converting the images when it is absent, incomplete or damaged."""
    digest = hashlib.sha256(json.dumps([STORE_VERSION, *source.identity]).encode()).hexdigest()
    folder = root / "stores" / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', source.name)}-{digest[:12]}"
    store = _open_store(folder)
    if store is not None:
        return store
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock"), wait=True):  # two runs that start together convert once
            store = _open_store(folder)
            if store is None:
                if folder.exists():
                    shutil.rmtree(folder)
                try:
                    _convert(source, folder)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                store = _open_store(folder)
    except OSError as error:
        raise NeuroFluxError(
            f"cannot convert {source.name} into {folder}: {error}; free space there or choose another data root"
        ) from error
    if store is None:
        raise NeuroFluxError(f"the store {folder} cannot be read back; check the disk")
    return store


def _open_store(folder: Path) -> _Store | None:
    """Return the store in `folder`, or None when it is not there, not complete or damaged."""
    try:
        info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
        splits = {}
        for part in info["parts"]:
            images = ArrayFile(folder / f"{part}_images.npy")
            labels = np.load(folder / f"{part}_labels.npy", allow_pickle=False)
            if labels.shape != (len(images),):
                return None
            splits[part] = Split(images, labels)
        shape = cast("tuple[int, int, int]", tuple(info["shape"]))
        return _Store(info["classes"], shape, info["mean"], info["std"], splits)
    except (OSError, EOFError, ValueError, KeyError, TypeError, NeuroFluxError):
        return None


def _convert(source: _Source, folder: Path) -> None:
    """Write the images of `source` into `folder`; info.json comes last and marks the store complete."""
    contents = source.read()
    shape: tuple[int, ...] | None = None
    classes = 0
    for part in sorted(contents.parts, key=["train", "val", "test"].index):
        part_shape, labels = _write_part(folder, part, contents.parts[part], f"{source.name} ({part})")
        if shape is None:
            shape, classes = part_shape, _check_train_labels(labels, source.name)
        elif part_shape != shape:
            raise NeuroFluxError(
                f"the {part} images of {source.name} are {part_shape}, its train images {shape}; make them equal"
            )
        _check_other_labels(labels, classes, f"{source.name} ({part})")
        np.save(folder / f"{part}_labels.npy", labels)
    names = contents.classes or [str(label) for label in range(classes)]
    if len(names) != classes:
        raise NeuroFluxError(f"{source.name} has {len(names)} class names for {classes} classes; give each label one")
    train = Split(ArrayFile(folder / "train_images.npy"), np.load(folder / "train_labels.npy"))
    if "test" not in contents.parts:
        train, _ = _hold_out_test(train, source)  # the test images must not leak into the mean
    mean, std = _mean_std(train, STATISTICS_IMAGES)
    info = {"classes": names, "shape": shape, "mean": mean, "std": std, "parts": list(contents.parts)}
    write_json(folder / "info.json", info)


def _write_part(folder: Path, part: str, chunks: Chunks, where: str) -> tuple[tuple[int, ...], np.ndarray]:
    """Write one split's images and return their shape (C, H, W) and labels (n,)."""
    first = next(chunks, None)
    if first is None:
        raise NeuroFluxError(f"{where} has no images; add some or remove the split")
    shape = first[0].shape[1:]
    labels = []
    with ArrayWriter(folder / f"{part}_images.npy", shape, np.uint8) as writer:
        for images, targets in itertools.chain([first], chunks):
            writer.append(images)
            labels.append(targets)
    return shape, np.concatenate(labels).astype(np.int64)


def _mean_std(split: Split, most: int) -> tuple[list[float], list[float]]:
    """Return each channel's mean and standard deviation over at most `most` images spread evenly over `split`."""
    chosen = np.unique(np.linspace(0, len(split) - 1, min(most, len(split))).astype(np.int64))
    shape = split.read(chosen[:1]).shape
    total, squares = np.zeros(shape[1]), np.zeros(shape[1])
    # as float32 an image takes four times its bytes, twice
    for some in _pieces(len(chosen), 8 * shape.numel()):
        images = split.read(chosen[some]).numpy().astype(np.float32)
        total += images.sum(axis=(0, 2, 3), dtype=np.float64)
        squares += np.square(images).sum(axis=(0, 2, 3), dtype=np.float64)
    pixels = len(chosen) * shape[2] * shape[3]
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 0))
    return mean.tolist(), np.where(std < 1e-3, 1.0, std).tolist()  # a constant channel must not be divided by zero


def _pieces(count: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices that cut `count` rows into pieces of at most CHUNK bytes."""
    rows = max(1, CHUNK // row_bytes)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _resized(chunks: Chunks, size: int | None) -> Chunks:
    """Yield `chunks` with square images of `size` pixels: the centre square, scaled."""
    for images, labels in chunks:
        _, channels, height, width = images.shape
        if size is None or (height, width) == (size, size):
            yield images, labels
            continue
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        for some in _pieces(len(images), channels * max(height * width, size * size)):
            square = torch.from_numpy(images[some, :, top : top + side, left : left + side].copy())
            scaled = functional.interpolate(square, (size, size), mode="bilinear", antialias=True)
            yield scaled.numpy(), labels[some]


# --- finding the source ------------------------------------------------------------------------------------------


def _find_source(name: str, root: Path, size: int | None, budget: int | None) -> _Source:
    known = name.lower().replace("-", "_")
    if known == "digits":
        return _Source("digits", ["digits", size], "none", lambda: _read_digits(size or 32), test_share=0.2)
    if known in TORCHVISION:
        entry = TORCHVISION[known]
        identity = ["torchvision", known, str(root.resolve()), size]
        return _Source(known, identity, entry.augment, lambda: entry.read(entry, root, size, budget))
    path = Path(name).expanduser()
    looks_like_path = name.endswith(".npz") or "/" in name or os.sep in name or name in (".", "..")
    if path.is_dir():
        try:
            return _folder_source(path, size)
        except OSError as error:
            raise NeuroFluxError(f"cannot list the images in {path}: {error}; check its permissions") from error
    if path.is_file() and path.suffix == ".npz":
        status = path.stat()
        identity = ["npz", str(path.resolve()), status.st_size, status.st_mtime_ns, size]
        return _Source(path.stem, identity, "flip+crop", lambda: _read_npz(path, size))
    if path.is_file():
        raise NeuroFluxError(f"{path} is neither a folder of images nor an .npz file; give one of these")
    if looks_like_path:
        raise NeuroFluxError(f"there is no folder or file {path}; check the path")
    everything = ["digits", *TORCHVISION]
    close = difflib.get_close_matches(known, everything, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(everything)}."
    raise NeuroFluxError(f"unknown data set '{name}': {hint} The path of an image folder or of an .npz works too")


def _read_digits(size: int) -> _Contents:
    from sklearn.datasets import load_digits  # here, as it costs memory that other data sets need not pay

    digits = load_digits()
    images = np.round(digits.images[:, None] * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    return _Contents(None, {"train": _resized(iter([(images, labels)]), size)})


# --- .npz files --------------------------------------------------------------------------------------------------


def _read_npz(path: Path, size: int | None) -> _Contents:
    """Read an .npz in the layout of MedMNIST, member by member and piece by piece."""
    with _archive(path) as archive:
        found = {entry.removesuffix(".npy") for entry in archive.namelist()}
        parts: dict[str, Chunks] = {}
        for part in ("train", "val", "test"):
            keys = {f"{part}_images", f"{part}_labels"}
            if part != "train" and not keys & found:
                continue
            if missing := sorted(keys - found):
                raise NeuroFluxError(
                    f"{path} has no {' and no '.join(missing)}, only {_listed(sorted(found)) or 'nothing'}; "
                    "it must hold train_images and train_labels, and may hold val_* and test_*"
                )
            labels = _npz_labels(archive, part, path)
            if part == "train":
                classes = _check_train_labels(labels, str(path))
            _check_other_labels(labels, classes, f"{path} ({part})")
            parts[part] = _resized(_npz_images(path, part, labels), size)
        names = _npz_class_names(archive, path) if "class_names" in found else None
    return _Contents(names, parts)


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file, and say in one line what is wrong when it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    # zipfile raises RuntimeError, or a subclass, for an encrypted or unusually compressed member
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        raise NeuroFluxError(
            f"{path} is damaged or not an .npz file ({error}); write it again with numpy.savez"
        ) from error


@contextmanager
def _member(
    archive: zipfile.ZipFile, key: str, path: Path
) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]]:
    """Open one array of an .npz after its header: (file, shape, dtype). Objects are refused: they run code."""
    with archive.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        if dtype.hasobject or (fortran and len(shape) > 1):
            what = "Python objects" if dtype.hasobject else "an array in Fortran order"
            raise NeuroFluxError(f"{key} in {path} holds {what}; save a plain array (numpy.ascontiguousarray)")
        promised = file.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize
        if promised != archive.getinfo(f"{key}.npy").file_size:
            raise NeuroFluxError(f"{key} in {path} is cut short or damaged; write the file again with numpy.savez")
        yield file, shape, dtype


def _npz_labels(archive: zipfile.ZipFile, part: str, path: Path) -> np.ndarray:
    """Return the labels of `part`, int64 (n,), having compared their number to that of the images."""
    with _member(archive, f"{part}_images", path) as (_, image_shape, dtype):
        if dtype != np.uint8:
            raise NeuroFluxError(f"{part}_images in {path} is {dtype}; it must be uint8, with values from 0 to 255")
        if (
            len(image_shape) not in (3, 4)
            or (len(image_shape) == 4 and image_shape[3] not in (1, 3))
            or 0 in image_shape
        ):
            raise NeuroFluxError(
                f"{part}_images in {path} is {image_shape}; it must be (N, H, W), (N, H, W, 1) or (N, H, W, 3)"
            )
    with _member(archive, f"{part}_labels", path) as (file, shape, dtype):
        if dtype.kind not in "iu" or len(shape) not in (1, 2) or shape[1:] not in ((), (1,)):
            raise NeuroFluxError(
                f"{part}_labels in {path} is {dtype} {shape}; it must be integers, one label per image"
            )
        if shape[0] != image_shape[0]:
            raise NeuroFluxError(
                f"{path} has {image_shape[0]} {part}_images but {shape[0]} {part}_labels; make them equal"
            )
        return np.frombuffer(file.read(), dtype).astype(np.int64)


def _npz_class_names(archive: zipfile.ZipFile, path: Path) -> list[str]:
    with _member(archive, "class_names", path) as (file, shape, dtype):
        if dtype.kind != "U" or len(shape) != 1:
            raise NeuroFluxError(f"class_names in {path} is {dtype} {shape}; it must be a list of texts")
        return [str(name) for name in np.frombuffer(file.read(), dtype)]


def _npz_images(path: Path, part: str, labels: np.ndarray) -> Chunks:
    with _archive(path) as archive, _member(archive, f"{part}_images", path) as (file, shape, _):
        row = (*shape[1:], 1) if len(shape) == 3 else shape[1:]
        row_bytes = int(np.prod(row))
        for some in _pieces(shape[0], row_bytes):
            rows = some.stop - some.start
            data = file.read(rows * row_bytes)
            if len(data) != rows * row_bytes:
                raise NeuroFluxError(f"{part}_images in {path} is cut short; write the file again with numpy.savez")
            yield np.frombuffer(data, np.uint8).reshape(rows, *row).transpose(0, 3, 1, 2), labels[some]


# --- image folders -----------------------------------------------------------------------------------------------

# Pillow would start an external program for some other formats, whatever the file's extension says
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
_LAYOUT = "expected <folder>/<class>/<images>, or <folder>/train/<class>/<images> with val/ and test/ beside train/"
_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, TypeError, LookupError, struct.error, zlib.error)


def _folder_source(folder: Path, size: int | None) -> _Source:
    if (folder / "train").is_dir():
        parts = {part: folder / part for part in ("train", "val", "test") if (folder / part).is_dir()}
    else:
        parts = {"train": folder}
    classes = _class_names(parts["train"])
    if "train" not in classes and {"val", "test"} & set(classes):
        raise NeuroFluxError(f"{folder} has val/ or test/ but no train/; {_LAYOUT}")
    if not classes:
        raise NeuroFluxError(f"{parts['train']} has no class folders; {_LAYOUT}")
    if len(classes) == 1:
        raise NeuroFluxError(f"{parts['train']} has only one class, '{classes[0]}'; two are needed: {_LAYOUT}")
    for part, place in parts.items():
        if strange := sorted(set(_class_names(place)) - set(classes)):
            raise NeuroFluxError(
                f"{place} has the class '{strange[0]}', which train/ lacks; remove it or add it to train/"
            )
        if not _class_names(place):
            raise NeuroFluxError(f"{place} has no class folders; add them or remove {part}/")
    digest = hashlib.sha256()
    for part, place in parts.items():
        for path, _ in _image_files(place, classes):
            status = path.stat()
            digest.update(f"{part}/{path.relative_to(place)}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    identity = ["folder", str(folder.resolve()), digest.hexdigest(), size]
    return _Source(folder.resolve().name, identity, "flip+crop", lambda: _read_folder(parts, classes, size))


def _class_names(place: Path) -> list[str]:
    """Return the names of the class folders in `place`, sorted; links that lead out of it are refused."""
    names = sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for name in names:
        if not (place / name).resolve().is_relative_to(place.resolve()):
            raise NeuroFluxError(f"the class folder {place / name} is a link to another place; move the images into it")
    return names


def _image_files(place: Path, classes: list[str]) -> Iterator[tuple[Path, int]]:
    """Yield each image file with its label, class by class, so that no list of all the files is ever needed."""
    present = set(_class_names(place))
    for label, name in enumerate(classes):
        if name not in present:
            continue
        empty = True
        for folder, inner, files in os.walk(place / name):
            inner.sort()
            for file in sorted(files):
                if file.lower().endswith(IMG_EXTENSIONS):
                    empty = False
                    yield Path(folder, file), label
        if empty:
            raise NeuroFluxError(f"the class folder {place / name} has no images; add some or remove it")


def _read_folder(parts: dict[str, Path], classes: list[str], size: int | None) -> _Contents:
    """Decode the images of a folder; a first pass over the headers finds whether they are grey, and their size."""
    sizes: Counter[tuple[int, int]] = Counter()
    grey = True
    for place in parts.values():
        for path, _ in _image_files(place, classes):
            with _opened(path) as image:
                sizes[image.size] += 1
                grey = grey and _is_grey(image)
    side = size or _common_side(sizes)

    def pixels(place: Path) -> Iterator[tuple[np.ndarray, int]]:
        for path, label in _image_files(place, classes):
            with _opened(path) as image:
                decoded = _pixels(image, side, grey)
            yield decoded, label

    return _Contents(classes, {part: _batched(pixels(place)) for part, place in parts.items()})


def _common_side(sizes: Counter[tuple[int, int]]) -> int:
    """Return the side for images of these sizes: their own when all are one small square, else near the median."""
    if len(sizes) == 1:
        width, height = next(iter(sizes))
        if width == height <= 256:
            return width
    sides = Counter[int]()
    for (width, height), count in sizes.items():
        sides[min(width, height)] += count
    median = statistics.median(sides.elements())
    return min(max(32 * round(median / 32), 32), 224)


def _batched(items: Iterator[tuple[np.ndarray, int]]) -> Chunks:
    """Stack single images (C, H, W) and labels into chunks."""
    for first, label in items:
        more = itertools.islice(items, max(0, CHUNK // first.nbytes - 1))
        images, labels = zip((first, label), *more, strict=True)
        yield np.stack(images), np.array(labels, np.int64)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image file; what goes wrong while it is open is reported with its name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise NeuroFluxError(f"{path} has too many pixels to be decoded safely; shrink or remove it") from error
    except _DAMAGED as error:
        raise NeuroFluxError(f"cannot read the image {path} ({error}); repair or remove it") from error


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


def _pixels(image: Image.Image, size: int, grey: bool) -> np.ndarray:
    """Return the upright image's centre square, scaled, as uint8 (C, size, size) with C = 1 if `grey` else 3."""
    image.draft("RGB", (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size, and memory
    ImageOps.exif_transpose(image, in_place=True)
    image = _eight_bit(image).convert("L" if grey else "RGB")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    scaled = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    pixels = np.asarray(scaled, np.uint8)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Return `image` with 8 bits a channel and transparent parts over black."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int32)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("more than 16 bits a pixel")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))  # Pillow's own conversion clips at 255
    if image.mode == "F":
        raise ValueError("floating-point pixels")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        black = Image.new("RGB", image.size)
        black.paste(layer, mask=layer.getchannel("A"))
        return black
    return image


# --- torchvision's data sets -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Torchvision:
    """How to get one of torchvision's sets: its class, what reads it, and the arguments that choose each split."""

    cls: str
    augment: str
    read: Callable[[_Torchvision, Path, int | None, int | None], _Contents]
    splits: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"train": {"train": True}, "test": {"train": False}}
    )
    size: int = 0  # the side to convert to when the images have no common one

    @property
    def type(self) -> Any:
        return getattr(torchvision.datasets, self.cls)

    def bare(self, root: Path, **attributes: Any) -> Any:
        """Return the data set with its files downloaded but not read: its `__init__` would hold every image."""
        dataset = self.type.__new__(self.type)
        vars(dataset).update(attributes, root=str(root))
        with self.downloading(root):
            dataset.download()
        return dataset

    @contextmanager
    def downloading(self, root: Path) -> Iterator[None]:
        try:
            root.mkdir(parents=True, exist_ok=True)
            yield
        except (OSError, RuntimeError, EOFError, ImportError, zipfile.BadZipFile) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise NeuroFluxError(
                f"{self.cls} is not complete under {root} and could not be downloaded ({reason}); run once with "
                f"internet access, or put the files there as torchvision.datasets.{self.cls} lays them out"
            ) from error


class _Inert:
    """Stands for every class that a CIFAR pickle names, so that reading it runs no foreign code; keeps its state."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> Any:
        return _Inert


def _read_cifar(entry: _Torchvision, root: Path, size: int | None, _budget: int | None) -> _Contents:
    dataset = entry.bare(root)
    folder = root / dataset.base_folder

    def checked(name: str, md5: str) -> Path:
        if not check_integrity(folder / name, md5):
            raise NeuroFluxError(f"{folder / name} is missing or damaged; delete {folder} and start again")
        return folder / name

    with open(checked(dataset.meta["filename"], dataset.meta["md5"]), "rb") as file:
        names = _InertUnpickler(file, encoding="latin1").load()[dataset.meta["key"]]
    files = {"train": dataset.train_list, "test": dataset.test_list}
    return _Contents(
        [str(name) for name in names],
        {
            part: _resized(itertools.chain.from_iterable(_cifar_batch(checked(*file)) for file in batches), size)
            for part, batches in files.items()
        },
    )


def _cifar_batch(path: Path) -> Chunks:
    """Yield the images of one batch file: a pickle of a dict, written by Python 2, whose pixels are one long string.

    Unpickling it whole takes up to 460 MB (CIFAR-100). So the string is located and mapped, and only what surrounds
    it is unpickled.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        opcode, length = _longest_string(mapped, path)
        start = opcode + 5
        rest = mapped[:opcode] + b"U\0" + mapped[start + length :]  # an empty string in its place
    batch = _InertUnpickler(io.BytesIO(rest), encoding="latin1").load()
    labels = np.array(batch["labels"] if "labels" in batch else batch["fine_labels"], np.int64)
    order: Literal["C", "F"] = "F" if batch["data"].state[3] else "C"
    pixels = np.memmap(path, np.uint8, "r", start, (length // 3072, 3072), order)
    for some in _pieces(len(pixels), 3072):
        yield np.array(pixels[some]).reshape(-1, 3, 32, 32), labels[some]


def _longest_string(mapped: mmap.mmap, path: Path) -> tuple[int, int]:
    """Return where the opcode (BINSTRING, then a length of 4 bytes) of the pixels is, and the pixels' length."""
    for found in re.finditer(rb"T(?=(.{4}))", mapped, re.DOTALL):
        length = int.from_bytes(found[1], "little")
        if length % 3072 == 0 and 0.9 * len(mapped) < length < len(mapped) - found.start():
            return found.start(), length
    raise NeuroFluxError(f"{path} is not a CIFAR batch file; delete it and start again")


def _read_mnist(entry: _Torchvision, root: Path, size: int | None, _budget: int | None) -> _Contents:
    """Read the idx files of the MNIST family."""
    parts = {}
    for part, arguments in entry.splits.items():
        dataset = entry.bare(root, **arguments)
        stem = "train" if arguments["train"] else "t10k"
        if entry.cls == "EMNIST":
            stem = f"emnist-{arguments['split']}-{part}"
        folder = Path(dataset.raw_folder)
        parts[part] = _resized(
            _idx_chunks(folder / f"{stem}-images-idx3-ubyte", folder / f"{stem}-labels-idx1-ubyte"), size
        )
    if entry.cls == "EMNIST":
        return _Contents(list(entry.type.classes_split_dict["balanced"]), parts)
    return _Contents(list(entry.type.classes), parts)


def _idx_chunks(images: Path, labels: Path) -> Chunks:
    with open(images, "rb") as image_file, open(labels, "rb") as label_file:
        count, height, width = _idx_shape(image_file, images, 3)
        if _idx_shape(label_file, labels, 1) != (count,):
            raise NeuroFluxError(f"{images} and {labels} differ in length; delete both and start again")
        for some in _pieces(count, height * width):
            rows = some.stop - some.start
            pixels = np.frombuffer(image_file.read(rows * height * width), np.uint8)
            targets = np.frombuffer(label_file.read(rows), np.uint8)
            yield pixels.reshape(rows, 1, height, width), targets.astype(np.int64)


def _idx_shape(file: IO[bytes], path: Path, rank: int) -> tuple[int, ...]:
    """Read the header of an idx file of bytes and return its shape, having compared it to the file's size."""
    header = file.read(4 + 4 * rank)
    magic, *shape = struct.unpack(f">{1 + rank}I", header) if len(header) == 4 + 4 * rank else (0,)
    if magic != 0x0800 + rank or len(header) + int(np.prod(shape, dtype=object)) != path.stat().st_size:
        raise NeuroFluxError(f"{path} is damaged or not an idx file; delete it and start again")
    return tuple(shape)


def _read_stl10(entry: _Torchvision, root: Path, size: int | None, _budget: int | None) -> _Contents:
    folder = root / entry.bare(root).base_folder

    def chunks(part: str) -> Chunks:
        labels = np.fromfile(folder / f"{part}_y.bin", np.uint8).astype(np.int64) - 1
        with open(folder / f"{part}_X.bin", "rb") as file:
            for some in _pieces(len(labels), 3 * 96 * 96):
                rows = some.stop - some.start
                pixels = np.frombuffer(file.read(rows * 3 * 96 * 96), np.uint8)
                yield pixels.reshape(rows, 3, 96, 96).transpose(0, 1, 3, 2), labels[some]  # stored column by column

    names = (folder / "class_names.txt").read_text(encoding="utf-8").split()
    return _Contents(names, {part: _resized(chunks(part), size) for part in entry.splits})


def _read_svhn(entry: _Torchvision, root: Path, size: int | None, budget: int | None) -> _Contents:
    """Read the .mat files of SVHN, which only load whole; refuse when that does not fit `budget`."""
    largest = 0
    for part in entry.splits:
        url, filename, md5 = entry.type.split_list[part]
        entry.bare(root, split=part, url=url, filename=filename, file_md5=md5)
        largest = max(largest, (root / filename).stat().st_size)
    if budget is not None and 2.5 * largest > budget:
        need = int(2.5 * largest / 1e6) + 1
        raise NeuroFluxError(
            f"converting SVHN takes about {need} MB of memory once, more than the budget of {budget / 1e6:.0f} MB; "
            f"run once with --budget {need}MB or more: the converted images are then reused"
        )

    def chunks(part: str) -> Chunks:
        with entry.downloading(root):
            dataset = entry.type(str(root), split=part)
        for some in _pieces(len(dataset.labels), 3 * 32 * 32):
            yield dataset.data[some], dataset.labels[some]

    return _Contents(None, {part: _resized(chunks(part), size) for part in entry.splits})


def _read_items(entry: _Torchvision, root: Path, size: int | None, _budget: int | None) -> _Contents:
    """Read a set that keeps only file names in memory and decodes each image when it is asked for."""
    with entry.downloading(root):
        sets = {part: entry.type(str(root), download=True, **given) for part, given in entry.splits.items()}
    names = [name if isinstance(name, str) else name[0] for name in getattr(sets["train"], "classes", [])]

    def pixels(dataset: Any) -> Iterator[tuple[np.ndarray, int]]:
        for index in range(len(dataset)):
            try:
                image, label = dataset[index]
                decoded = _pixels(image, size or entry.size, grey=False)
            except _DAMAGED as error:
                raise NeuroFluxError(f"cannot read image {index} of {entry.cls} under {root} ({error})") from error
            yield decoded, int(label)

    return _Contents(names or None, {part: _batched(pixels(dataset)) for part, dataset in sets.items()})


def _parts(**splits: str) -> dict[str, dict[str, Any]]:
    return {part: {"split": split} for part, split in splits.items()}


_EMNIST = {"train": {"train": True, "split": "balanced"}, "test": {"train": False, "split": "balanced"}}
_TRAIN_TEST = _parts(train="train", test="test")
_THREE = _parts(train="train", val="val", test="test")

TORCHVISION = {
    "cifar10": _Torchvision("CIFAR10", "flip+crop", _read_cifar),
    "cifar100": _Torchvision("CIFAR100", "flip+crop", _read_cifar),
    "mnist": _Torchvision("MNIST", "crop", _read_mnist),
    "fashion_mnist": _Torchvision("FashionMNIST", "flip+crop", _read_mnist),
    "kmnist": _Torchvision("KMNIST", "crop", _read_mnist),
    "emnist": _Torchvision("EMNIST", "crop", _read_mnist, _EMNIST),
    "svhn": _Torchvision("SVHN", "crop", _read_svhn, _TRAIN_TEST),
    "stl10": _Torchvision("STL10", "flip+crop", _read_stl10, _TRAIN_TEST),
    "gtsrb": _Torchvision("GTSRB", "crop", _read_items, _TRAIN_TEST, 32),
    "eurosat": _Torchvision("EuroSAT", "flip+crop", _read_items, {"train": {}}, 64),
    "flowers102": _Torchvision("Flowers102", "flip+crop", _read_items, _THREE, 224),
    "food101": _Torchvision("Food101", "flip+crop", _read_items, _TRAIN_TEST, 224),
    "oxford_iiit_pet": _Torchvision(
        "OxfordIIITPet", "flip+crop", _read_items, _parts(train="trainval", test="test"), 224
    ),
    "imagenette": _Torchvision(
        "Imagenette",
        "flip+crop",
        _read_items,
        {"train": {"split": "train", "size": "160px"}, "test": {"split": "val", "size": "160px"}},
        160,
    ),
    "dtd": _Torchvision("DTD", "flip+crop", _read_items, _THREE, 224),
    "fgvc_aircraft": _Torchvision("FGVCAircraft", "flip+crop", _read_items, _THREE, 224),
}


# --- torch data sets ---------------------------------------------------------------------------------------------


def _item_image(dataset: Any, row: int) -> torch.Tensor:
    """Return the image (C, H, W) of one item, as uint8 or float32."""
    item = dataset[row]
    image = item[0] if isinstance(item, tuple | list) and len(item) == 2 else item
    if image is item or not isinstance(image, torch.Tensor) or image.ndim != 3:
        what = (
            f"{type(image).__name__} {tuple(image.shape)}" if isinstance(image, torch.Tensor) else type(image).__name__
        )
        raise NeuroFluxError(
            f"item {row} of the data set gives {what}; it must give (image tensor (C, H, W), label): "
            "add torchvision.transforms.ToTensor() to its transform"
        )
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise NeuroFluxError(f"item {row} of the data set is {image.dtype}; images must be uint8 or float")
    return image.float()


def _torch_split(dataset: Dataset[Any], which: str) -> Split:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise NeuroFluxError(f"the {which} data set has no length; give a map-style one (__len__ and __getitem__)")
    labels = _torch_labels(dataset, which)
    if len(labels) == 0:
        raise NeuroFluxError(f"the {which} data set is empty; give it some images")
    return Split(dataset, labels)


def _torch_labels(dataset: Any, which: str) -> np.ndarray:
    """Return the labels (n,) of a torch data set, without decoding its images where it lists them."""
    if isinstance(dataset, Subset):
        return _torch_labels(dataset.dataset, which)[np.asarray(dataset.indices, np.int64)]
    listed = None
    if getattr(dataset, "target_transform", None) is None:  # it would change the labels that are listed
        listed = next(
            (x for x in (getattr(dataset, key, None) for key in ("targets", "labels")) if x is not None), None
        )
        if listed is None and len(getattr(dataset, "tensors", ())) > 1:
            listed = dataset.tensors[1]
    if listed is None:
        listed = [dataset[row][1] for row in range(len(dataset))]
    labels = np.asarray(listed)
    if labels.shape != (len(dataset),) or (labels.size and labels.dtype.kind not in "iu"):
        raise NeuroFluxError(
            f"the labels of the {which} data set are {labels.dtype} {labels.shape}; they must be one integer per image"
        )
    return labels.astype(np.int64)


def _own_classes(dataset: Any, count: int) -> list[str]:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    usable = isinstance(names, list | tuple) and len(names) == count
    return [str(name) for name in names] if usable and names else [str(label) for label in range(count)]
