"""The memory budget: bytes as people write them, and meters that see what an outside observer sees."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from neuroflux.errors import NeuroFluxError

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that `text` means: ``512MB``, ``512MiB``, ``1.5GB``, ``0.5g`` or plain bytes.

    MB is 10^6 bytes and MiB is 2^20.

    Raises:
        NeuroFluxError: `text` is not a size, or not a positive one.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or (match[3] and not match[2]):
        raise NeuroFluxError(f"budget {str(text)!r} is not a size: write it like 512MB, 512MiB, 1.5GB or plain bytes")
    prefix = match[2].lower()
    power = "bkmgt".index(prefix or "b")
    unit = 1024**power if match[3] else _UNITS[prefix]
    size = int(float(match[1]) * unit)
    if size <= 0:
        raise NeuroFluxError(f"budget {str(text)!r} is not a positive size: write it like 512MB")
    return size


def format_bytes(size: float) -> str:
    """Return `size` in bytes as a person reads it, in units of 1000: ``512.0 MB``."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


class Meter(ABC):
    """Measures the bytes that a run has taken from the device, over what the process had before it.

    Attributes:
        what: what is counted, for reports.
        highest: the most that was seen since the meter was made, in bytes.
    """

    what: str

    def __init__(self) -> None:
        self.highest = 0

    @abstractmethod
    def current(self) -> int:
        """Return the bytes taken now."""

    @abstractmethod
    def _peak(self) -> int:
        """Return the most bytes taken since the last `reset`."""

    @abstractmethod
    def _restart(self) -> None:
        """Forget the peak."""

    @abstractmethod
    def release(self) -> None:
        """Give memory that is free but still held back to the device."""

    def peak(self) -> int:
        """Return the most bytes taken since the last `reset`."""
        peak = self._peak()
        self.highest = max(self.highest, peak)
        return peak

    def reset(self) -> None:
        """Start a new peak; what was seen until now stays in `highest`."""
        self.peak()
        self._restart()

    @contextmanager
    def reading_files(self) -> Iterator[None]:
        """Leave out of the peak what happens inside: only mapped files are read, which do not count."""
        self.reset()
        yield
        self._restart()


class CpuMeter(Meter):
    """The growth of anonymous memory over the process at the time the meter was made, children included.

    The kernel keeps the peak of the resident size (``VmHWM``), which a write to ``clear_refs`` restarts, so no peak
    between two readings is missed. File pages are in that peak: those resident at the last restart are subtracted,
    and those that came since are not, which errs on the safe side.
    """

    what = "anonymous memory (growth)"

    def __init__(self) -> None:
        super().__init__()
        self._status = Path("/proc/self/status")
        self._linux = self._status.exists() and Path("/proc/self/clear_refs").exists()
        self._process = psutil.Process()
        self._files = 0
        self._sampled = 0
        self.release()
        self.baseline = self._anonymous()
        self._restart()

    def _fields(self) -> dict[str, int]:
        """Return RssAnon, RssFile, RssShmem and VmHWM of this process in bytes."""
        fields = {}
        for line in self._status.read_text().splitlines():
            if line.startswith(("RssAnon", "RssFile", "RssShmem", "VmHWM")):
                name, value = line.split(":")
                fields[name] = int(value.split()[0]) * 1024
        return fields

    def _children(self) -> int:
        """Return the anonymous memory of the living descendants in bytes, pages shared with a parent counted once."""
        total = 0
        if not any(task.read_text().strip() for task in Path("/proc/self/task").glob("*/children")):
            return 0
        for child in self._process.children(recursive=True):
            try:
                for line in Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss_Anon:"):
                        total += int(line.split()[1]) * 1024
            except OSError:
                continue  # it has ended
        return total

    def _anonymous(self) -> int:
        if self._linux:
            return self._fields()["RssAnon"] + self._children()
        return int(self._process.memory_full_info().uss)

    def current(self) -> int:
        taken = self._anonymous() - self.baseline
        self._sampled = max(self._sampled, taken)
        return taken

    def _peak(self) -> int:
        if not self._linux:
            self.current()
            return self._sampled
        own = self._fields()["VmHWM"] - self._files
        return own + self._children() - self.baseline

    def _restart(self) -> None:
        self._sampled = 0
        if self._linux:
            Path("/proc/self/clear_refs").write_text("5")
            fields = self._fields()
            self._files = fields["RssFile"] + fields["RssShmem"]

    def release(self) -> None:
        gc.collect()
        trim_heap()


class AcceleratorMeter(Meter):
    """The memory that the caching allocator of an accelerator has reserved; the allocator refuses to pass `cap`."""

    what = "reserved device memory"

    def __init__(self, device: torch.device, cap: int) -> None:
        super().__init__()
        self.device = device
        torch.accelerator.empty_cache()
        self.baseline = torch.accelerator.memory_reserved(device)
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (self.baseline + cap) / total), device)
        self._restart()

    def current(self) -> int:
        return torch.accelerator.memory_reserved(self.device) - self.baseline

    def _peak(self) -> int:
        return torch.accelerator.max_memory_reserved(self.device) - self.baseline

    def _restart(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def release(self) -> None:
        gc.collect()
        torch.accelerator.empty_cache()


# what the CPU allocator, oneDNN and the C++ library say when the system gives them no memory
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "could not create a memory")


def is_allocation_failure(error: BaseException) -> bool:
    """Return whether `error` says that memory could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY)


def make_meter(device: torch.device, budget: int) -> Meter:
    """Return the meter for `device`; on an accelerator the allocator is capped at `budget` bytes."""
    gc.freeze()  # what was imported is no garbage: collections, which follow every release, need not look at it
    if device.type == "cpu":
        warm_up()
        return CpuMeter()
    return AcceleratorMeter(device, budget)


def warm_up() -> None:
    """Run one small conv forward and backward, which is part of the baseline that growth is counted from."""
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    torch.nn.functional.conv2d(image, weight).sum().backward()


# --- the C library's allocator -------------------------------------------------------------------------------------

# kept memory is not reused perfectly, and may still grow after many steps: it must fit within this share of a budget
FAST_SHARE = 0.85

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_GLIBC = _LIBC is not None and hasattr(_LIBC, "mallopt") and hasattr(_LIBC, "malloc_trim")


def set_allocator(compact: bool) -> None:
    """Tell the C library what to do with freed memory (glibc only; elsewhere this does nothing).

    Compact: every tensor is mapped by itself and unmapped when freed, so that the process holds just what its tensors
    hold; each new tensor costs page faults. Otherwise freed memory is kept for the next step, which is faster (by about
    a third for VGG-16 at 32x32) and holds more (by about a half). What was kept before this is called with `compact`
    stays with the heap until it is trimmed, and is used first.
    """
    if not _GLIBC or _LIBC is None:
        return
    _LIBC.mallopt(_M_ARENA_MAX, 1)
    _LIBC.mallopt(_M_MMAP_THRESHOLD, 64 * 1024 if compact else 32 * 1024 * 1024)
    _LIBC.mallopt(_M_TRIM_THRESHOLD, 64 * 1024 if compact else 1024 * 1024 * 1024)


def trim_heap() -> None:
    """Return free memory at the end of and inside the C library's heap to the system (glibc only)."""
    if _GLIBC and _LIBC is not None:
        _LIBC.malloc_trim(0)
