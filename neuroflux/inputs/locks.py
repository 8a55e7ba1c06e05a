"""Locks between processes; the system lets go of the lock of a process that has died, however it died."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Taken(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold the lock of the file `path`, which is made where it is missing.

    Raises:
        Taken: another process holds it, unless it is to `wait` for that.
        OSError: the file cannot be opened.
    """
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise Taken(str(path)) from error
        yield


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of the file `path`."""
    if not path.exists():
        return False
    try:
        with locked(path, wait=False):
            return False
    except Taken:
        return True
