"""The guard: watches the measured peak of every step and keeps the batch at what the budget allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from neuroflux.errors import BudgetTooSmall, NeuroFluxError
from neuroflux.planning.memory import FAST_SHARE, Meter, format_bytes, is_allocation_failure, set_allocator

T = TypeVar("T")

# a peak within this share of the budget counts as pressure: the next step may take a little more than this one
_SLACK = 0.02
# steps until a batch that was halved since the system had no memory may grow, at the first time; then twice as many
_PATIENCE = 10
# how much more than measured one more image may take while the batch grows
_DOUBT = 1.1


class Guard:
    """Chooses the size of the next batch of a block.

    A block starts with a quarter of its planned batch and grows as long as what was measured says that the next size
    fits, so a wrong prediction is found out before the budget is crossed. When a step comes too close to the budget,
    freed memory is given back first, and then the batch shrinks.

    Other processes may take memory away, so that an allocation fails within the budget: the batch is then halved, and
    grows back after some steps.

    Attributes:
        batch: the size of the next batch.
        shrunk: how often the planned batch had to be reduced.
        failures: how often the system had no memory for a step.
    """

    def __init__(self, meter: Meter, budget: int, planned: int, smallest: int, compact: bool) -> None:
        self._meter, self._budget = meter, budget
        self._smallest = smallest
        self._target = max(planned, smallest)
        self._compact = compact
        self.batch = max(smallest, self._target // 4)
        self.shrunk = self.failures = 0
        self._wait = 0  # steps until the batch may grow again
        set_allocator(compact)
        meter.release()
        meter.reset()
        # what a batch of no images takes: until two sizes were measured, all the rest is taken to grow with the batch
        self._measured = {0: meter.current()}

    def state(self) -> dict[str, Any]:
        """Return what the guard goes on from, as plain values."""
        names = ("_target", "_compact", "batch", "shrunk", "failures", "_wait", "_measured")
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
        elif self._wait:
            self._wait -= 1
        elif self.batch < self._target and size == self.batch:
            room = int((self._limit - peak) / self._bytes_per_image(size))
            self.batch = min(self._target, 2 * size, size + room)
            if room == 0:  # it cannot grow any more
                self._target = size
                self.shrunk += 1
        return peak

    def failed(self, size: int) -> None:
        """Give memory back and halve the batch: the system had none left for a step of `size` images.

        Raises:
            NeuroFluxError: that is the smallest batch.
        """
        if size < 2 * self._smallest:
            raise NeuroFluxError(
                f"the system has no memory left for a batch of {size} images, though it is within the budget of "
                f"{format_bytes(self._budget)}: other processes have taken it, or a limit is set; free some, and go on "
                f"with --resume"
            )
        self.failures += 1
        self._wait = _PATIENCE * 2 ** min(self.failures, 6)
        self.batch = size // 2
        self._compact = True
        set_allocator(compact=True)
        self._meter.release()
        self._meter.reset()

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


def fitting(work: Callable[[int], T], batch: int, meter: Meter) -> T:
    """Return `work(batch)`, or of half the batch as often as the system has no memory for it.

    Raises:
        NeuroFluxError: it has none for a single image.
    """
    while True:
        try:
            return work(batch)
        except (RuntimeError, MemoryError) as error:
            if not is_allocation_failure(error):
                raise
        if batch == 1:
            raise NeuroFluxError(
                "the system has no memory left for a single image: other processes have taken it, or a limit is set; "
                "free some, and go on with --resume"
            )
        batch //= 2
        meter.release()
