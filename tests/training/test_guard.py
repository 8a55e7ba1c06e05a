"""The guard, against a meter that plays a machine."""

import pytest

from neuroflux.errors import BudgetTooSmall, NeuroFluxError
from neuroflux.planning.memory import Meter
from neuroflux.training.guard import Guard, fitting

MB = 10**6


class Machine(Meter):
    """A meter of a step that takes `fixed` + batch * `slope` bytes."""

    what = "made-up memory"

    def __init__(self, fixed, slope):
        super().__init__()
        self.fixed, self.slope, self.batch, self.released = fixed, slope, 0, 0

    def current(self):
        return self.fixed

    def _peak(self):
        return int(self.fixed + self.batch * self.slope)

    def _restart(self):
        self.batch = 0

    def release(self):
        self.released += 1


def run(machine, budget, planned, steps=60, compact=True):
    guard = Guard(machine, budget, planned, 2, compact)
    peaks = []
    for _ in range(steps):
        machine.batch = size = guard.batch
        peaks.append(guard.after_step(size))
    return guard, peaks


def test_a_right_prediction_reaches_the_planned_batch():
    guard, peaks = run(Machine(10 * MB, MB), 100 * MB, 64)
    assert guard.batch == 64
    assert guard.shrunk == 0
    assert max(peaks) <= 100 * MB


@pytest.mark.parametrize("slope", [1.1, 1.5, 2, 3])
def test_a_wrong_prediction_never_crosses_the_budget(slope):
    guard, peaks = run(Machine(10 * MB, slope * MB), 100 * MB, 64)
    assert max(peaks) <= 100 * MB
    assert guard.batch <= 90 / slope
    assert bool(guard.shrunk) == (10 + 64 * slope > 98)


def test_the_budget_is_still_used_after_a_wrong_prediction():
    _, peaks = run(Machine(10 * MB, 1.5 * MB), 100 * MB, 64)
    assert peaks[-1] >= 70 * MB


def test_memory_that_grows_while_training_shrinks_the_batch():
    machine = Machine(10 * MB, MB)
    guard = Guard(machine, 100 * MB, 64, 2, True)
    peaks = []
    for _ in range(60):
        machine.batch = size = guard.batch
        peaks.append(guard.after_step(size))
        machine.fixed += MB  # a leak, or another part of the process
    assert max(peaks) <= 100 * MB
    assert 2 <= guard.batch < 40


def test_kept_memory_is_given_back_before_the_batch_shrinks():
    machine = Machine(10 * MB, 4 * MB)  # 74 MB at the planned batch
    guard = Guard(machine, 100 * MB, 16, 2, False)
    while guard.batch < 16:
        machine.batch = guard.batch
        guard.after_step(guard.batch)
    machine.fixed += 30 * MB
    released = machine.released
    machine.batch = 16
    guard.after_step(16)
    assert guard.batch == 16
    assert machine.released > released
    machine.batch = 16
    guard.after_step(16)
    assert guard.batch < 16


def test_when_not_even_the_smallest_batch_fits_the_error_says_what_would():
    with pytest.raises(BudgetTooSmall, match="use a budget of 113MB") as error:
        run(Machine(110 * MB, MB), 100 * MB, 64)
    assert error.value.floor == 112 * MB


def test_kept_memory_that_creeps_is_noticed_before_it_reaches_the_budget():
    machine = Machine(10 * MB, 4 * MB)
    guard = Guard(machine, 100 * MB, 16, 2, False)
    peaks = []
    for _ in range(30):
        machine.batch = size = guard.batch
        before = machine.released
        peaks.append(guard.after_step(size))
        if machine.released > before:
            machine.fixed = 10 * MB
        elif not guard._compact:
            machine.fixed += 4 * MB
    assert max(peaks) <= 100 * MB
    assert guard.batch == 16


def test_the_peak_of_a_pause_is_not_taken_for_that_of_a_step():
    machine = Machine(10 * MB, MB)
    guard = Guard(machine, 100 * MB, 16, 2, True)
    with guard.paused():
        machine.batch = 85
    machine.batch = 4
    assert guard.after_step(4) == 14 * MB
    assert machine.highest == 95 * MB


def test_a_batch_that_was_halved_by_others_grows_back():
    machine = Machine(10 * MB, MB)
    guard, _ = run(machine, 100 * MB, 64)
    guard.failed(64)
    assert guard.batch == 32
    sizes = []
    for _ in range(60):
        machine.batch = size = guard.batch
        guard.after_step(size)
        sizes.append(size)
    assert sizes[0] == 32
    assert sizes[-1] == 64
    assert (guard.failures, guard.shrunk) == (1, 0)


def test_the_more_often_memory_lacks_the_longer_the_batch_stays_small():
    machine = Machine(10 * MB, MB)
    guard, _ = run(machine, 100 * MB, 64)

    def steps_until_it_grows():
        guard.failed(guard.batch)
        size, steps = guard.batch, 0
        while guard.batch == size:
            machine.batch = size
            guard.after_step(size)
            steps += 1
        return steps

    first, second = steps_until_it_grows(), steps_until_it_grows()
    assert second > first


def test_without_memory_for_the_smallest_batch_it_says_what_to_do():
    guard, _ = run(Machine(10 * MB, MB), 100 * MB, 64)
    with pytest.raises(NeuroFluxError, match=r"no memory left for a batch of 3 images.*--resume"):
        guard.failed(3)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory")]
)
def test_work_is_tried_with_half_the_batch_where_memory_lacks(error):
    tried = []

    def work(batch):
        tried.append(batch)
        if batch > 5:
            raise error
        return "done"

    assert fitting(work, 40, Machine(0, 0)) == "done"
    assert tried == [40, 20, 10, 5]


def test_work_that_fits_with_no_batch_says_so_and_other_errors_pass():
    def lacking(batch):
        raise MemoryError

    def broken(batch):
        raise RuntimeError("no such kernel")

    with pytest.raises(NeuroFluxError, match="no memory left for a single image"):
        fitting(lacking, 4, Machine(0, 0))
    with pytest.raises(RuntimeError, match="no such kernel"):
        fitting(broken, 4, Machine(0, 0))
