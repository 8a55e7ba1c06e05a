"""Arrays on disk: written once in order, then read row by row, without ever being held in memory.

The data set (level 0) and every activation cache are such arrays. A file is an ordinary ``.npy`` file
(``numpy.load(path, mmap_mode="r")`` opens it) with a checksum of every row behind the rows, accompanied by
``<name>.json``: shape, dtype, the checksum of the checksums, and what made it. Rows are checked whenever they are read,
with ``pread`` and not through a mapping: a mapping would grow the resident size of the process with every page it
touches, and a truncated file would end the process with SIGBUS instead of an error.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from neuroflux.errors import NeuroFluxError


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees either the old file or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path`, as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


class DamagedArray(NeuroFluxError):
    """An array on disk is not what was written."""


class DiskFull(NeuroFluxError):
    """An array could not be written, mostly since the disk is full."""


class ArrayWriter:
    """Write an array of known row shape and unknown length, in order, and publish it atomically.

    >>> with ArrayWriter(path, (3, 32, 32), np.uint8) as writer:      # doctest: +SKIP
    ...     writer.append(images)                                     # (n, 3, 32, 32)

    Leaving the block normally publishes the file and its manifest; an exception removes what was written.

    Args:
        origin: what the rows were made from, for `ArrayFile.origin`.
    """

    # the header is padded to this many bytes, so that it can be rewritten in place when the length is known
    HEADER = 256

    def __init__(self, path: str | Path, row_shape: tuple[int, ...], dtype: Any, origin: str = "") -> None:
        self.path = Path(path)
        self.origin = origin
        self.row_shape = tuple(int(size) for size in row_shape)
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._checksums = bytearray()
        self._temporary = self.path.with_name(self.path.name + ".tmp")

    def __enter__(self) -> ArrayWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._temporary, "wb")
        self._file.write(b"\0" * self.HEADER)
        return self

    def append(self, rows: np.ndarray) -> None:
        """Add `rows`, of shape (n, *row_shape); they are converted to the file's dtype."""
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"rows of shape {rows.shape[1:]} in an array of rows {self.row_shape}")
        data = np.ascontiguousarray(rows, dtype=self.dtype)
        self._checksums += _checksums(data)
        try:
            self._file.write(data.data.cast("B") if data.size else b"")
        except OSError as error:
            raise DiskFull(f"cannot write {self._temporary}: {error.strerror}; free space there") from error
        self.rows += len(rows)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._file.write(self._checksums)
            self._file.seek(0)
            self._file.write(self._header())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            self._discard()
            raise DiskFull(f"cannot write {self._temporary}: {error.strerror}; free space there") from error
        os.replace(self._temporary, self.path)
        manifest = {"shape": [self.rows, *self.row_shape], "dtype": self.dtype.name, "origin": self.origin}
        try:
            write_json(self.path.with_suffix(".json"), {**manifest, "crc32": zlib.crc32(self._checksums)})
        except OSError as error:
            raise DiskFull(f"cannot write {self.path}: {error.strerror}; free space there") from error

    def _discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # what could not be written before cannot be written now
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _header(self) -> bytes:
        """Return a version 1.0 .npy header of exactly HEADER bytes (see numpy.lib.format)."""
        fields = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row_shape)}
        text = repr(fields).encode("latin1")
        body = text + b" " * (self.HEADER - 11 - len(text)) + b"\n"
        return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def _checksums(rows: np.ndarray) -> bytes:
    """Return the CRC-32 of each of `rows`, four bytes each."""
    if not rows.size:
        return b"\0\0\0\0" * len(rows)
    flat = rows.reshape(len(rows), -1).view(np.uint8)
    return np.fromiter((zlib.crc32(row.data) for row in flat), "<u4", len(rows)).tobytes()


class ArrayFile:
    """An array on disk that was published by `ArrayWriter`; reads only the rows asked for.

    Attributes:
        origin: what the rows were made from, as the writer was told.

    Raises DamagedArray when the file or its manifest is missing, damaged or does not fit the other.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            manifest = json.loads(self.path.with_suffix(".json").read_text(encoding="utf-8"))
            self.shape: tuple[int, ...] = tuple(int(size) for size in manifest["shape"])
            self.dtype = np.dtype(manifest["dtype"])
            self.crc32 = int(manifest["crc32"])
            self.origin = str(manifest["origin"])
            if min(self.shape) < 0:
                raise ValueError(f"a shape of {self.shape}")
            self._fd = os.open(self.path, os.O_RDONLY)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedArray(f"cannot open the array {self.path}: {error}; delete it and start again") from error
        self._row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
        expected = ArrayWriter.HEADER + (self._row_bytes + 4) * self.shape[0]
        actual = os.fstat(self._fd).st_size
        if actual != expected:
            self.close()
            raise DamagedArray(f"{self.path} has {actual} bytes instead of {expected}; delete it and start again")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the array's data on disk."""
        return self._row_bytes * len(self)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows at `indices` (n,), in that order, as a new array (n, *row_shape).

        Raises:
            DamagedArray: a row is not what was written.
        """
        rows = np.empty((len(indices), *self.shape[1:]), self.dtype)
        if rows.size == 0:
            return rows
        view = rows.reshape(len(rows), -1).view(np.uint8).data
        start = 0
        while start < len(indices):  # neighbours on disk are read in one call
            stop = start + 1
            while stop < len(indices) and indices[stop] == indices[stop - 1] + 1:
                stop += 1
            offset = ArrayWriter.HEADER + int(indices[start]) * self._row_bytes
            got = os.preadv(self._fd, [view[start:stop]], offset)
            if got != (stop - start) * self._row_bytes:
                raise DamagedArray(f"{self.path} ended early at row {int(indices[start])}; delete it and start again")
            if _checksums(rows[start:stop]) != self._written(int(indices[start]), stop - start):
                raise DamagedArray(f"{self.path} is damaged near row {int(indices[start])}; delete it and start again")
            start = stop
        return rows

    def _written(self, first: int, count: int) -> bytes:
        """Return the checksums that `count` rows from `first` on were written with."""
        return os.pread(self._fd, 4 * count, ArrayWriter.HEADER + self._row_bytes * len(self) + 4 * first)

    def intact(self) -> bool:
        """Return whether all rows are what was written (reads the whole file)."""
        if zlib.crc32(self._written(0, len(self))) != self.crc32:
            return False
        at_once = max(1, (1 << 20) // max(1, self._row_bytes))
        try:
            for start in range(0, len(self), at_once):
                self.read(np.arange(start, min(start + at_once, len(self))))
        except DamagedArray:
            return False
        return True

    def close(self) -> None:
        """Close the file; reading after that is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()
