"""The clock of a run: how long it takes, phase by phase, over interruptions too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts the seconds of a run.

    Attributes:
        seconds: of each phase.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun, self._uncounted, self._before = time.perf_counter(), 0.0, 0.0

    @property
    def elapsed(self) -> float:
        """Return the seconds since the run began, without those that only served to watch it."""
        return time.perf_counter() - self._begun - self._uncounted

    def continue_from(self, before: float) -> None:
        """Let `elapsed` include the seconds that the run had taken `before` it was interrupted."""
        self._begun -= max(0.0, before - self._before)
        self._before = before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block of code to the phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the block of code."""
        start = time.perf_counter()
        yield
        self._uncounted += time.perf_counter() - start
