"""The profile: what each layer with its head costs here, measured by running a few training steps of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from neuroflux.errors import BudgetTooSmall, NeuroFluxError
from neuroflux.inputs.chain import Chain
from neuroflux.planning.heads import AuxiliaryHead
from neuroflux.planning.memory import Meter, format_bytes, is_allocation_failure, set_allocator
from neuroflux.planning.methods import Whole
from neuroflux.planning.residence import Residence
from neuroflux.planning.sizes import count_flops, elements, inner_elements
from neuroflux.planning.step import Exit, ExitTrainer, Recipe

_BATCHES = (4, 16, 64)
# what kept heap memory may take, over mapping each tensor by itself (see set_allocator), before it was measured
_KEPT_HEAP = 2.5
# how much of the budget a profiling step may be expected to take, before anything is known for certain
_CAREFUL = 0.9
# autocast pays for its casts only where low precision is clearly faster
_WORTHWHILE = 0.9


# makes a new head for the layer of that index
MakeHead = Callable[[int], nn.Module]


@dataclass
class LayerProfile:
    """One layer with its head.

    Attributes:
        parameters: the number of weights of the layer and its head.
        resident: bytes held while the layer's block is trained: weights, buffers and optimizer state.
        compact_peak, fast_peak: (fixed, per_image) bytes with either allocator setting (`set_allocator`): a step of b
            images takes fixed + b * per_image over what is resident.
        measured: whether these were measured, or only estimated because no step fits the budget.
        batches, compact_seconds, fast_seconds: seconds of a training step at some batch sizes, with either setting.
        forward_seconds: seconds per image of a forward pass without gradients.
        step_flops: floating-point operations of a training step for one image, everything that runs counted.
    """

    name: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    head_width: int
    parameters: int
    resident: int
    compact_peak: tuple[float, float]
    fast_peak: tuple[float, float]
    measured: bool
    step_flops: float
    batches: list[int] = field(default_factory=list)
    compact_seconds: list[float] = field(default_factory=list)
    fast_seconds: list[float] = field(default_factory=list)
    forward_seconds: float = 0.0

    def step_peak(self, batch: int, compact: bool = True) -> float:
        """Return the bytes over `resident` that a training step of `batch` images takes."""
        fixed, per_image = self.compact_peak if compact else self.fast_peak
        return fixed + per_image * batch

    def step_seconds(self, batch: int, compact: bool = True) -> float:
        """Return the seconds of a training step of `batch` images, on the lines between the measured sizes.

        Outside of them an image takes no less time than at the nearest one.
        """
        times = self.compact_seconds if compact else self.fast_seconds
        sizes = self.batches
        if len(sizes) == 1:
            return times[0] * max(1.0, batch / sizes[0])
        upper = next((k for k in range(1, len(sizes)) if batch <= sizes[k]), len(sizes) - 1)
        slope = max(0.0, (times[upper] - times[upper - 1]) / (sizes[upper] - sizes[upper - 1]))
        line = times[upper - 1] + slope * (batch - sizes[upper - 1])
        nearest = 0 if batch < sizes[0] else upper
        outside = batch < sizes[0] or batch > sizes[-1]
        return max(line, times[nearest] * batch / sizes[nearest]) if outside else line


@dataclass
class Profile:
    """All layers of a chain, and what holds for the whole machine.

    Attributes:
        overhead: bytes that the run holds besides its layers, measured when the profile was done.
        disk_rate: bytes per second that the activation cache is written and read with.
        seconds: how long profiling took.
    """

    layers: list[LayerProfile]
    overhead: int
    precision: str
    channels_last: bool
    disk_rate: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain values for JSON."""
        return asdict(self)


def estimate_peak(chain: Chain, index: int, head: nn.Module) -> tuple[float, float]:
    """Return (fixed, per_image) bytes of a training step from tensor sizes alone, on the safe side.

    Fixed: the largest weight gradient and the copies that convolution kernels make of reordered weights, three times
    the largest weight. Per image: the input and every output of a convolution or norm, and their gradients.
    """
    layer, shape = chain.layers[index], chain.layer_input_shape(index)
    largest = max((parameter.numel() for parameter in [*layer.parameters(), *head.parameters()]), default=0)
    local = 2 * elements(shape) + 2 * inner_elements(layer, shape)
    held = layer.step_elements if isinstance(layer, Whole) else local
    return 4 * 3 * largest, 4 * (held + 2 * inner_elements(head, chain.shapes[index]))


@dataclass
class Profiler:
    """Measures layers with their heads on `device`, within `budget` bytes of `meter`.

    A step is only run when what is known of smaller ones says that it fits; a layer whose smallest step may not fit
    is estimated from tensor sizes instead (`LayerProfile.measured` is then false). Weights are left as they were:
    what is trained meanwhile is a copy.
    """

    meter: Meter
    device: torch.device
    budget: int
    batch_limit: int
    classes: int

    def profile(self, chain: Chain, make_head: MakeHead, recipe: Recipe, *, disk_rate: float) -> Profile:
        """Measure every layer of `chain` with its head."""
        start = time.perf_counter()
        layers = [self._profile_layer(chain, make_head(index), index, recipe) for index in range(len(chain.layers))]
        set_allocator(compact=True)
        self.meter.release()
        overhead = max(0, self.meter.current())
        seconds = time.perf_counter() - start
        return Profile(layers, overhead, recipe.precision, recipe.channels_last, disk_rate, seconds)

    def choose_precision(self, chain: Chain, head: nn.Module, recipe: Recipe) -> Recipe:
        """Return `recipe` with the precision and memory format that are fastest here.

        They are measured on the middle layer of `chain` with `head`. fp32 in PyTorch's default format is kept unless
        another combination saves at least a tenth of the time, or where not even a small batch fits the budget for
        certain.
        """
        index = len(chain.layers) // 2
        layer = _describe(chain, index, head, recipe)
        batch = min(8, self.batch_limit)
        if layer.step_peak(batch) > self.budget * _CAREFUL - self.meter.current() - layer.resident:
            return recipe
        low = ("bf16",) if self.device.type == "cpu" else ("bf16", "fp16")
        candidates = [replace(recipe, precision=p, channels_last=c) for p in ("fp32", *low) for c in (False, True)]
        times = {}
        for candidate in candidates:
            with _Bench(self, Exit(chain.layers[index], head), layer.input_shape, candidate) as bench:
                times[candidate] = bench.seconds(batch, 4)
        fastest = min(candidates, key=times.__getitem__)
        return fastest if times[fastest] < _WORTHWHILE * times[candidates[0]] else candidates[0]

    def _profile_layer(self, chain: Chain, head: nn.Module, index: int, recipe: Recipe) -> LayerProfile:
        """Return the profile of one layer, its peak and time measured where a step fits the budget."""
        profile = _describe(chain, index, head, recipe)
        self.meter.release()
        room = self.budget * _CAREFUL - self.meter.current() - profile.resident
        sizes = sorted({min(size, self.batch_limit) for size in _BATCHES})
        if profile.step_peak(sizes[0]) > room:
            sizes = [2, *sizes]
        estimate = profile.compact_peak
        points: list[tuple[int, float]] = []
        kept: list[tuple[int, float]] = []
        with _Bench(self, Exit(chain.layers[index], head), profile.input_shape, recipe) as bench:
            while sizes:
                size = sizes.pop(0)
                if profile.step_peak(size) > room:
                    if not points or size // 2 <= points[-1][0]:
                        break
                    sizes = [size // 2, size, *sizes]  # what the smaller step takes may show that this one fits
                    continue
                try:
                    if not points:
                        self.meter.reset()
                        profile.step_flops = bench.flops(size) / size
                        self._check(profile.name)  # kernels take more when they run for the first time
                    peak, compact = bench.measure(size, compact=True)
                    fast, fast_peak = compact, None
                    if profile.step_peak(size, compact=False) <= room:
                        fast_peak, fast = bench.measure(size, compact=False)
                    profile.forward_seconds = bench.forward_seconds(size) / size
                except (RuntimeError, MemoryError) as error:
                    if not is_allocation_failure(error):
                        raise
                    # other processes have the memory: what is known of smaller sizes has to do
                    sizes = self._smaller(size, profile.name) if not points else []
                    continue
                points.append((size, peak))
                if fast_peak is not None:
                    kept.append((size, fast_peak))
                profile.batches.append(size)
                profile.compact_seconds.append(compact)
                profile.fast_seconds.append(min(fast, compact))
                profile.compact_peak = _fit(points, estimate[1])
                profile.fast_peak = _fit(kept, estimate[1]) if len(kept) > 1 else _scaled(profile.compact_peak)
        profile.measured = bool(points)
        _smooth(profile)
        return profile

    def _smaller(self, size: int, name: str) -> list[int]:
        """Return what to try where the system has no memory for a step of `size` images of layer `name`."""
        if size == 2:
            raise NeuroFluxError(
                f"the system has no memory left to train {name} with 2 images: other processes have taken it, or a "
                f"limit is set; free some and start again"
            )
        return [2]

    def _check(self, name: str) -> None:
        """Raise BudgetTooSmall where the first step of layer `name` took more than the budget."""
        if (peak := self.meter.peak()) > self.budget:
            raise BudgetTooSmall(
                f"the first step of {name} took {format_bytes(peak)}, over the budget of {format_bytes(self.budget)}; "
                f"use --budget {-(-int(peak * 1.1) // 10**6)}MB or more",
                peak,
                name,
            )


def _smooth(profile: LayerProfile) -> None:
    """Let no measured batch be slower for an image than a smaller one: where it seems so, the clock was disturbed."""
    for times in (profile.compact_seconds, profile.fast_seconds):
        for k in range(1, len(times)):
            times[k] = min(times[k], times[k - 1] * profile.batches[k] / profile.batches[k - 1])


def _scaled(line: tuple[float, float]) -> tuple[float, float]:
    """Return what kept heap memory may take where `line` is known for memory that is given back."""
    return line[0] * _KEPT_HEAP, line[1] * _KEPT_HEAP


def _describe(chain: Chain, index: int, head: nn.Module, recipe: Recipe) -> LayerProfile:
    """Return what is known of a layer without running it."""
    layer = chain.layers[index]
    estimate = estimate_peak(chain, index, head)
    parameters = [*layer.parameters(), *head.parameters()]
    buffers = [*layer.buffers(), *head.buffers()]
    weights = sum(p.numel() * p.element_size() for p in parameters)
    state = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad) * recipe.states
    return LayerProfile(
        name=chain.names[index],
        input_shape=chain.layer_input_shape(index),
        output_shape=chain.shapes[index],
        head_width=getattr(head, "width", 0),
        parameters=sum(p.numel() for p in parameters),
        resident=weights + state + sum(b.numel() * b.element_size() for b in buffers),
        compact_peak=estimate,
        fast_peak=_scaled(estimate),
        measured=False,
        step_flops=3.0 * (count_flops(layer, chain.layer_input_shape(index)) + count_flops(head, chain.shapes[index])),
    )


def _fit(points: list[tuple[int, float]], expected: float) -> tuple[float, float]:
    """Return (fixed, per_image) of the line over the measured (batch, bytes).

    The slope is that of the two largest batches; the line lies on or above every point, since what it predicts must
    not be passed. One point alone says nothing of the slope, which is then `expected`, from tensor sizes.
    """
    slope = expected
    if len(points) > 1:
        (small, low), (large, high) = points[-2:]
        slope = max(0.0, (high - low) / (large - small))
    return max(0.0, max(peak - slope * size for size, peak in points)), slope


class _Bench:
    """Runs training steps of a copy of one exit and measures them."""

    def __init__(self, profiler: Profiler, exit: Exit, input_shape: tuple[int, ...], recipe: Recipe) -> None:
        self._profiler, self._exit, self._shape, self._recipe = profiler, exit, input_shape, recipe
        self._residence = Residence([exit], profiler.device, recipe.memory_format)

    def __enter__(self) -> _Bench:
        self._residence.fetch()
        self._trainer = ExitTrainer(self._exit, self._recipe, self._profiler.device)
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.close()
        self._residence.drop()

    def _batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.rand(size, *self._shape, device=self._profiler.device)
        labels = torch.arange(size, device=self._profiler.device) % self._profiler.classes
        return features.contiguous(memory_format=self._recipe.memory_format), labels

    def seconds(self, size: int, times: int) -> float:
        """Return the seconds of a step of `size` images, the best of `times`."""
        features, labels = self._batch(size)
        best = float("inf")
        for _ in range(times):
            start = time.perf_counter()
            self._trainer.step(features, labels)
            synchronize(self._profiler.device)
            best = min(best, time.perf_counter() - start)
        return best

    def flops(self, size: int) -> int:
        """Return the floating-point operations that a step of `size` images takes, forward and backward."""
        with FlopCounterMode(display=False) as counter:
            self._trainer.step(*self._batch(size))
        return counter.get_total_flops()

    def measure(self, size: int, compact: bool) -> tuple[float, float]:
        """Return the bytes that a step takes over what is resident, and its seconds, with either allocator setting."""
        meter = self._profiler.meter
        set_allocator(compact=True)
        if compact:
            self._trainer.step(*self._batch(size))  # makes the optimizer's state and compiles kernels
        meter.release()
        before = meter.current()
        set_allocator(compact)
        meter.reset()
        seconds = self.seconds(size, 1 if compact else 3)
        peak = max(0, meter.peak() - before)
        set_allocator(compact=True)
        meter.release()
        return peak, seconds

    def forward_seconds(self, size: int) -> float:
        """Return the seconds of a forward pass without gradients."""
        features, _ = self._batch(size)
        self._exit.eval()
        with torch.no_grad(), self._recipe.autocast(self._profiler.device):
            start = time.perf_counter()
            self._exit(features)
            synchronize(self._profiler.device)
        self._exit.train()
        return time.perf_counter() - start


def touch_code(recipe: Recipe, device: torch.device) -> None:
    """Run one training step of a tiny exit, whose tensors take a few kilobytes, and drop it."""
    layer = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    exit = Exit(layer, AuxiliaryHead(8, (8, 8), 2, 8)).to(device)
    trainer = ExitTrainer(exit, recipe, device)
    trainer.step(torch.rand(4, 3, 16, 16, device=device), torch.zeros(4, dtype=torch.long, device=device))
    trainer.close()


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done what was asked of it, so that a clock tells the truth."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
