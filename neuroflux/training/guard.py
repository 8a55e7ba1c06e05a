"""The guard: watches the measured peak of every step and keeps the batch at what the budget allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuroflux.errors import BudgetTooSmall
from neuroflux.planning.memory import FAST_SHARE, Meter, format_bytes, set_allocator

# a peak within this share of the budget counts as pressure: the next step may take a little more than this one
_SLACK = 0.02
# how much more than measured one more image may take while the batch grows
_DOUBT = 1.1


class Guard:
    """Chooses the size of the next batch of a block.

    A block starts with a quarter of its planned batch and grows as long as what was measured says that the next size
    fits, so a wrong prediction is found out before the budget is crossed. When a step comes too close to the budget,
    freed memory is given back first, and then the batch shrinks.

    Attributes:
        batch: the size of the next batch.
        shrunk: how often the planned batch had to be reduced.
    """

    def __init__(self, meter: Meter, budget: int, planned: int, smallest: int, compact: bool) -> None:
        self._meter, self._budget = meter, budget
        self._smallest = smallest
        self._target = max(planned, smallest)
        self._compact = compact
        self.batch = max(smallest, self._target // 4)
        self.shrunk = 0
        set_allocator(compact)
        meter.release()
        meter.reset()
        # what a batch of no images takes: until two sizes were measured, all the rest is taken to grow with the batch
        self._measured = {0: meter.current()}

    def state(self) -> dict[str, Any]:
        """Return what the guard goes on from, as plain values."""
        names = ("_target", "_compact", "batch", "shrunk", "_measured")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned: with the same batch, as if there had been no interruption."""
        for name, value in state.items():
            setattr(self, name, value)
        set_allocator(self._compact)

    @property
    def _limit(self) -> int:
        """Return the bytes from which on a step counts as too close to the budget."""
        return int(self._budget * ((1 - _SLACK) if self._compact else FAST_SHARE))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold no more memory than needed while something else than training steps runs, such as evaluation."""
        set_allocator(compact=True)
        self._meter.release()
        try:
            yield
        finally:
            self._meter.release()
            self._meter.reset()
            set_allocator(self._compact)

    def after_step(self, size: int) -> int:
        """Measure the step of `size` images that has just ended, choose the next size and return the step's peak.

        Raises:
            BudgetTooSmall: the smallest batch takes more than the budget.
        """
        peak = self._meter.peak()
        self._meter.reset()
        self._measured[size] = max(peak, self._measured.get(size, 0))
        if peak > self._limit:
            self._relieve(peak, size)
        elif self.batch < self._target and size == self.batch:
            room = int((self._limit - peak) / self._bytes_per_image(size))
            self.batch = min(self._target, 2 * size, size + room)
            if room == 0:  # it cannot grow any more
                self._target = size
                self.shrunk += 1
        return peak

    def _bytes_per_image(self, size: int) -> float:
        """Return what one more image than `size` may take, from this size and the next smaller one measured."""
        smaller = max(other for other in self._measured if other < size)
        slope = (self._measured[size] - self._measured[smaller]) / (size - smaller)
        return max(1.0, slope * _DOUBT)

    def _relieve(self, peak: int, size: int) -> None:
        """Make the next step take less than this one."""
        if not self._compact:
            self._compact = True
            set_allocator(compact=True)
            del self._measured[size]
        elif size > self._smallest:
            excess = int((peak - self._limit) / self._bytes_per_image(size))
            self.batch = self._target = max(self._smallest, min(size - 1 - excess, int(size * 0.9)))
            self.shrunk += 1
        elif peak > self._budget:
            raise BudgetTooSmall(
                f"a batch of {size} images takes {format_bytes(peak)}, over the budget of "
                f"{format_bytes(self._budget)}; use a budget of {-(-peak // 10**6) + 1}MB or more",
                peak,
                "",
            )
        self._meter.release()
        self._meter.reset()
