"""Arrays on disk: written once in order, then read row by row, without ever being held in memory.

The data set (level 0) and every activation cache are such arrays. A file is an ordinary ``.npy`` file
(``numpy.load(path, mmap_mode="r")`` opens it), accompanied by ``<name>.json``: shape, dtype, checksum. Rows are read
with ``pread`` and not through a mapping: a mapping would grow the resident size of the process with every page it
touches, and a truncated file would end the process with SIGBUS instead of an error.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from neuroflux.errors import NeuroFluxError


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` so that a reader sees either the old file or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class ArrayWriter:
    """Write an array of known row shape and unknown length, in order, and publish it atomically.

    >>> with ArrayWriter(path, (3, 32, 32), np.uint8) as writer:      # doctest: +SKIP
    ...     writer.append(images)                                     # (n, 3, 32, 32)

    Leaving the block normally publishes the file and its manifest; an exception removes what was written.
    """

    # the header is padded to this many bytes, so that it can be rewritten in place when the length is known
    HEADER = 256

    def __init__(self, path: str | Path, row_shape: tuple[int, ...], dtype: Any) -> None:
        self.path = Path(path)
        self.row_shape = tuple(int(size) for size in row_shape)
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._crc = 0
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
        view = data.data.cast("B") if data.size else memoryview(b"")
        self._crc = zlib.crc32(view, self._crc)
        try:
            self._file.write(view)
        except OSError as error:
            raise NeuroFluxError(f"cannot write {self._temporary}: {error.strerror}; free space there") from error
        self.rows += len(rows)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.seek(0)
                self._file.write(self._header())
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise NeuroFluxError(f"cannot write {self._temporary}: {error.strerror}; free space there") from error
        finally:
            self._file.close()
            if kind is not None:
                self._temporary.unlink(missing_ok=True)
        if kind is None:
            os.replace(self._temporary, self.path)
            manifest = {"shape": [self.rows, *self.row_shape], "dtype": self.dtype.name, "crc32": self._crc}
            write_json(self.path.with_suffix(".json"), manifest)

    def _header(self) -> bytes:
        """Return a version 1.0 .npy header of exactly HEADER bytes (see numpy.lib.format)."""
        fields = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.row_shape)}
        text = repr(fields).encode("latin1")
        body = text + b" " * (self.HEADER - 11 - len(text)) + b"\n"
        return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


class ArrayFile:
    """An array on disk that was published by `ArrayWriter`; reads only the rows asked for.

    Raises NeuroFluxError when the file or its manifest is missing, damaged or does not fit the other.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            manifest = json.loads(self.path.with_suffix(".json").read_text(encoding="utf-8"))
            self.shape: tuple[int, ...] = tuple(int(size) for size in manifest["shape"])
            self.dtype = np.dtype(manifest["dtype"])
            self.crc32 = int(manifest["crc32"])
            self._fd = os.open(self.path, os.O_RDONLY)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NeuroFluxError(f"cannot open the array {self.path}: {error}; delete it and start again") from error
        self._row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
        expected = ArrayWriter.HEADER + self._row_bytes * self.shape[0]
        actual = os.fstat(self._fd).st_size
        if actual != expected:
            self.close()
            raise NeuroFluxError(f"{self.path} has {actual} bytes instead of {expected}; delete it and start again")

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the array's data on disk."""
        return self._row_bytes * len(self)

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows at `indices` (n,), in that order, as a new array (n, *row_shape)."""
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
                raise NeuroFluxError(f"{self.path} ended early at row {int(indices[start])}; delete it and start again")
            start = stop
        return rows

    def intact(self) -> bool:
        """Return whether the data on disk has the checksum it was written with (reads the whole file)."""
        crc, offset = 0, ArrayWriter.HEADER
        while chunk := os.pread(self._fd, 1 << 20, offset):
            crc = zlib.crc32(chunk, crc)
            offset += len(chunk)
        return crc == self.crc32

    def close(self) -> None:
        """Close the file; reading after that is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()
