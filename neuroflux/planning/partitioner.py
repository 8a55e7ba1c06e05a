"""The partition: which layers are trained together, and with which batch size, under the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from neuroflux.errors import BudgetTooSmall, NeuroFluxError
from neuroflux.planning.memory import FAST_SHARE, format_bytes
from neuroflux.planning.profiler import LayerProfile, Profile
from neuroflux.planning.sizes import elements
from neuroflux.planning.step import PRECISIONS

# batches that a plan may use; between powers of two, one step more keeps less of the budget unused
_GRID = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# larger batches only slow convergence: the smallest within this share of the best throughput is taken
_ENOUGH = 0.97
# smaller batches are noisy for batch norm, and are taken only where this one does not fit
GOOD_BATCH = 16
# what kept heap memory takes in a block of several layers, over the most that one of them alone takes
_KEPT_SHARE = 1.15
# the paper's threshold: a layer joins a block while its largest batch is within this share of the block's
# (arXiv 2402.14139, section 5)
GREEDY_THRESHOLD = 0.4
_GREEDY_STEP = 1.02
# the floor moves a little from one measurement to the next: this much more than it is sure to be enough
_SURE = 1.1
# predictions are kept this far below the budget: a share for what is unlike the profile, bytes for what does not scale
_MARGIN_SHARE, _MARGIN_BYTES = 0.04, 4_000_000
# batches in memory at once while one is trained on: being read, and waiting
READ_AHEAD = 2
# images that run through finished layers at once, at most; a forward pass takes no more than training half as many
FORWARD_BATCH = 16
# what a plan that was edited may ask for at most
_LARGEST_BATCH, _WIDEST = 65_536, 4096
_START_UP = 0.3  # seconds: a block's weights, optimizer and first, smaller steps


@dataclass
class BlockPlan:
    """Consecutive layers `first`..`last` (inclusive, from 0), trained together with one batch size.

    Attributes:
        compact: whether each tensor is mapped by itself (less memory, slower; see `memory.set_allocator`).
        peak: predicted bytes at most.
        passes: over the training set, at most: as many as every layer learns for, and until the last one has begun.
        epoch_seconds: predicted seconds of one pass in which all layers learn.
        seconds: predicted seconds to train it, if all its layers are.
        cache_bytes: what its outputs take on disk.
        cache_seconds: predicted seconds to write them.
    """

    first: int
    last: int
    batch: int
    compact: bool
    peak: int
    passes: int
    epoch_seconds: float
    seconds: float
    cache_bytes: int
    cache_seconds: float


@dataclass
class Plan:
    """What will be done, and what it is predicted to cost; a JSON file that a person can read and edit.

    Attributes:
        budget, peak, floor: bytes; `floor` is the smallest budget that this model can be trained in.
        floor_layer: what decides the floor, mostly a layer.
        seconds: predicted seconds to train all blocks, and to write and read their caches.
        disk: bytes of activation caches that exist at once, at most.
        layers: the names of the layers that learn, and `head_widths` the filters of their heads.
        spans: how many of the model's own layers each of them holds (see `spans`).
        layer_flops: floating-point operations of a training step of each layer, for one image.
    """

    model: str
    method: str
    budget: int
    peak: int
    floor: int
    floor_layer: str
    partitioner: str
    precision: str
    channels_last: bool
    batch_limit: int
    epochs: int
    seconds: float
    disk: int
    layers: list[str]
    spans: list[int]
    head_widths: list[int]
    layer_flops: list[float]
    blocks: list[BlockPlan]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Plan:
        """Return the plan that `values` (from JSON) describes.

        Raises:
            NeuroFluxError: a field is missing, unknown or of the wrong kind, or the blocks leave a layer out.
        """
        plan = _record(cls, values, "plan")
        plan.blocks = [_record(BlockPlan, block, f"block {k + 1}") for k, block in enumerate(plan.blocks)]
        expected = 0
        for number, block in enumerate(plan.blocks, 1):
            if block.first != expected or not block.first <= block.last < len(plan.layers):
                raise NeuroFluxError(
                    f"plan: block {number} covers layers {block.first}..{block.last}, but should start at {expected} "
                    f"and end before {len(plan.layers)}; blocks follow each other without gaps"
                )
            if not 2 <= block.batch <= _LARGEST_BATCH:
                raise NeuroFluxError(
                    f"plan: block {number} has batch {block.batch}; it must be from 2 to {_LARGEST_BATCH}"
                )
            expected = block.last + 1
        for name in ("spans", "head_widths", "layer_flops"):
            if len(getattr(plan, name)) != len(plan.layers):
                raise NeuroFluxError(f"plan: {len(getattr(plan, name))} {name} for {len(plan.layers)} layers")
        if min(plan.spans, default=1) < 1:
            raise NeuroFluxError("plan: a span of 0 layers makes no sense: at least 1")
        if plan.precision not in PRECISIONS:
            raise NeuroFluxError(f"plan: precision {plan.precision!r} is none of {', '.join(PRECISIONS)}")
        if max(plan.head_widths, default=0) > _WIDEST:
            raise NeuroFluxError(f"plan: a head width of {max(plan.head_widths)} is too large: at most {_WIDEST}")
        if not plan.blocks:
            raise NeuroFluxError("plan: it has no blocks")
        return plan


def _record(kind: type, values: Any, where: str) -> Any:
    """Return an instance of the dataclass `kind` from JSON `values`, every field checked."""
    if not isinstance(values, dict):
        raise NeuroFluxError(f"{where}: expected an object with named fields, found {type(values).__name__}")
    names = {field.name: str(field.type) for field in fields(kind)}
    for name in names.keys() - values.keys():
        raise NeuroFluxError(f"{where}: the field {name!r} is missing")
    for name in values.keys() - names.keys():
        raise NeuroFluxError(f"{where}: unknown field {name!r}")
    checks: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    for name, annotation in names.items():
        value = values[name]
        inner = annotation.removeprefix("list[").removesuffix("]")
        if annotation.startswith("list[") and not isinstance(value, list):
            raise NeuroFluxError(f"{where}: the field {name!r} must be a list")
        for item in value if annotation.startswith("list[") else [value]:
            allowed = checks.get(inner)
            if allowed and (not isinstance(item, allowed) or (isinstance(item, bool) and bool not in allowed)):
                raise NeuroFluxError(f"{where}: the field {name!r} must be of type {annotation}, found {item!r}")
            if isinstance(item, (int, float)) and not 0 <= item < float("inf"):
                raise NeuroFluxError(f"{where}: the field {name!r} must be a number from 0, found {item!r}")
    return kind(**values)


@dataclass(frozen=True)
class Job:
    """What a plan is made for: how many images, how often, and within what.

    Attributes:
        preparation: bytes that opening the data and the model took at most; no budget can be smaller.
        method: how the chain is trained (see `methods`); with `one_block` all its layers are one block.
        stagger: the passes after which the next layer of a block begins.
        spans: how many of the model's own layers each layer holds; empty for one each.
        views: how many views of every training image a cache holds; 0 for no cache: images run through the finished
            layers again in every pass.
        feature_bytes: what each number of a cached feature takes.
        frozen: so many first layers only run forward, once: they are a block of their own.
    """

    model: str
    budget: int
    batch_limit: int
    epochs: int
    train_images: int
    val_images: int
    disk_limit: int | None = None
    preparation: int = 0
    method: str = "neuroflux"
    one_block: bool = False
    stagger: int = 0
    spans: Sequence[int] = ()
    views: int = 1
    feature_bytes: int = 2
    frozen: int = 0


class Partitioner:
    """Predicts what blocks cost and chooses the cut points; `profile` says what the layers cost."""

    def __init__(self, profile: Profile, job: Job) -> None:
        self.profile, self.job = profile, job
        self._layers = profile.layers
        grid = [size for size in _GRID if size < job.batch_limit] + [max(2, job.batch_limit)]
        self._grid = sorted({min(size, max(2, job.train_images)) for size in grid})

    # --- what a block costs ---

    def peak(self, first: int, last: int, batch: int, compact: bool = True) -> int:
        """Return the predicted bytes of training layers `first`..`last` with `batch` images."""
        layers = self._layers[first : last + 1]
        waiting = READ_AHEAD * batch * self._input_bytes(first)
        resident = sum(layer.resident for layer in layers)
        step = max(layer.step_peak(batch, compact) for layer in layers)
        if not compact and len(layers) > 1:
            step *= _KEPT_SHARE
        tensors = resident + waiting + max(step, self._forward_peak(first, batch))
        return int((self.profile.overhead + tensors) * (1 + _MARGIN_SHARE) + _MARGIN_BYTES)

    def _forward_peak(self, first: int, batch: int) -> float:
        """Return the bytes that `batch` images take on their way through the finished layers before `first`."""
        if self.job.views or not first:
            return 0.0
        half = max(1, min(batch, FORWARD_BATCH) // 2)
        features = 4 * batch * elements(self._layers[first].input_shape)
        return features + max(layer.step_peak(half) for layer in self._layers[:first])

    def plan_block(self, first: int, last: int, budget: int) -> BlockPlan | None:
        """Return the block of layers `first`..`last` with its best batch, or None when none fits `budget`.

        Best is the smallest that comes close to the highest throughput, not the largest that fits. Small means memory
        here, so that what more budget adds comes last: it is taken only where it is faster than all that was there.
        """
        good = min(GOOD_BATCH, self._grid[-1])
        options = [
            (peak, self._step_seconds(first, last, batch, compact) / batch, batch, compact)
            for batch in self._grid
            for compact in ((False, True) if batch >= good else (True,))
            if (peak := self.peak(first, last, batch, compact)) <= budget * (1 if compact else FAST_SHARE)
        ]
        options = [option for option in options if option[2] >= good] or options
        if not options:
            return None
        best = min(seconds for _, seconds, _, _ in options)
        _, _, batch, compact = min(option for option in options if option[1] <= best / _ENOUGH)
        return self._describe(first, last, batch, compact)

    def _describe(self, first: int, last: int, batch: int, compact: bool) -> BlockPlan:
        job = self.job
        per_image = self._step_seconds(first, last, batch, compact) / batch
        forward = sum(layer.forward_seconds for layer in self._layers[first : last + 1])
        read = self._input_bytes(first) / self.profile.disk_rate
        if not job.views:
            read += sum(layer.forward_seconds for layer in self._layers[:first])
        cache = 0 if last == len(self._layers) - 1 else job.feature_bytes * elements(self._layers[last].output_shape)
        cache = cache if job.views else 0
        images = job.train_images + job.val_images
        cached = job.views * job.train_images + job.val_images
        passes = job.epochs + job.stagger * (last - first)
        # layers that have finished run forward until the last one has
        finished = job.stagger * sum(
            (last - index) * self._layers[index].forward_seconds for index in range(first, last + 1)
        )
        return BlockPlan(
            first=first,
            last=last,
            batch=batch,
            compact=compact,
            peak=self.peak(first, last, batch, compact),
            passes=passes,
            epoch_seconds=job.train_images * (per_image + read) + job.val_images * (forward + read),
            seconds=job.train_images * (job.epochs * per_image + finished)
            + passes * (images * read + job.val_images * forward),
            cache_bytes=cache * cached,
            cache_seconds=cached * (forward + read + cache / self.profile.disk_rate) if cache else 0.0,
        )

    def _step_seconds(self, first: int, last: int, batch: int, compact: bool) -> float:
        return sum(layer.step_seconds(batch, compact) for layer in self._layers[first : last + 1])

    def _input_bytes(self, first: int) -> int:
        """Return the bytes of one image as block `first` reads it: uint8 pixels, or cached features."""
        if first == 0 or not self.job.views:
            return elements(self._layers[0].input_shape)
        return elements(self._layers[first].input_shape) * self.job.feature_bytes

    def cost(self, block: BlockPlan) -> float:
        """Return the predicted seconds of training `block` and caching its outputs."""
        return _START_UP + block.seconds + block.cache_seconds

    # --- which blocks ---

    def blocks(self, rule: str) -> list[BlockPlan]:
        """Return the blocks by the rule ``exact`` or ``greedy``, or the one block of a method that has only one."""
        if self.job.one_block:
            block = self.plan_block(0, len(self._layers) - 1, self.job.budget)
            return [block] if block is not None else []
        return self.greedy() if rule == "greedy" else self.exact()

    def floor(self) -> tuple[int, str]:
        """Return the smallest budget in bytes that every layer can be trained in, and what decides it."""
        if self.job.one_block:
            last = len(self._layers) - 1
            return max(self.job.preparation, self.peak(0, last, self._grid[0])), "all layers side by side"
        peaks = [self.peak(index, index, self._grid[0]) for index in range(len(self._layers))]
        if self.job.frozen:
            peaks[0] = self.peak(0, self.job.frozen - 1, self._grid[0])
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        if self.job.preparation > peaks[worst]:
            return self.job.preparation, "(opening the data and the model)"
        if len(peaks) == 1:
            return peaks[0], f"all of {self._layers[0].name}"
        return peaks[worst], f"layer {self._layers[worst].name}"

    def exact(self) -> list[BlockPlan]:
        """Return the blocks with the least predicted time: dynamic programming over the cut points."""
        count, frozen = len(self._layers), self.job.frozen
        best: list[tuple[float, list[BlockPlan]]] = [(float("inf"), []) for _ in range(count + 1)]
        if (start_from := self._frozen(self.job.budget)) is None:
            return []
        best[frozen] = (0.0, start_from)
        for end in range(frozen + 1, count + 1):
            for start in range(frozen, end):
                block = self.plan_block(start, end - 1, self.job.budget)
                if block is None or not self._fits_disk(best[start][1], block):
                    continue
                seconds = best[start][0] + self.cost(block)
                if seconds < best[end][0]:
                    best[end] = (seconds, [*best[start][1], block])
        return best[count][1]

    def _frozen(self, budget: int) -> list[BlockPlan] | None:
        """Return the block of the layers that keep their weights, only cached; none, or None where it does not fit."""
        if not self.job.frozen:
            return []
        block = self.plan_block(0, self.job.frozen - 1, budget)
        return None if block is None else [replace(block, passes=0, epoch_seconds=0.0, seconds=0.0)]

    def greedy(self) -> list[BlockPlan]:
        """Return the blocks that the paper's rule gives, at the budget or the part of it with the least time.

        The rule alone can turn a larger budget into a slower plan, since a block that may grow grows; so it is also
        applied to smaller budgets, at fixed steps from the floor up.
        """
        budget, _ = self.floor()
        budgets = []
        while budget <= self.job.budget:
            budgets.append(budget)
            budget = int(budget * _GREEDY_STEP) + 1
        plans = [blocks for budget in budgets if (blocks := self._greedy(budget))]
        return min(plans, key=lambda blocks: sum(map(self.cost, blocks)), default=[])

    def _greedy(self, budget: int) -> list[BlockPlan]:
        """Return the blocks of the paper's rule: a block grows while its batch stays near its first layer's."""
        blocks, first = self._frozen(budget), self.job.frozen
        if blocks is None:
            return []
        while first < len(self._layers):
            largest = self._largest(first, first, budget)
            if largest is None:
                return []
            last = first
            while last + 1 < len(self._layers):
                alone, joined = self._largest(last + 1, last + 1, budget), self._largest(first, last + 1, budget)
                if alone is None or joined is None:
                    break
                if abs(alone - largest) > GREEDY_THRESHOLD * largest or joined < (1 - GREEDY_THRESHOLD) * largest:
                    break
                last += 1
            block = self.plan_block(first, last, budget)
            if block is None or not self._fits_disk(blocks, block):
                return []
            blocks.append(block)
            first = last + 1
        return blocks

    def _largest(self, first: int, last: int, budget: int) -> int | None:
        """Return the largest batch that fits `budget`, at most the limit."""
        return max((batch for batch in self._grid if self.peak(first, last, batch) <= budget), default=None)

    def _fits_disk(self, blocks: list[BlockPlan], block: BlockPlan) -> bool:
        before = blocks[-1].cache_bytes if blocks else 0
        return self.job.disk_limit is None or before + block.cache_bytes <= self.job.disk_limit


def make_plan(profile: Profile, job: Job, partitioner: str = "exact") -> Plan:
    """Return the plan for `job` by the rule `partitioner` (``exact`` or ``greedy``).

    Raises:
        BudgetTooSmall: not even the smallest batch of every single layer fits the budget.
        NeuroFluxError: the caches that are needed do not fit the disk.
    """
    rule = Partitioner(profile, job)
    floor, layer = rule.floor()
    if floor > job.budget:
        raise BudgetTooSmall(
            f"the budget of {format_bytes(job.budget)} is below the floor of {format_bytes(floor)} for {job.model} "
            f"with --method {job.method}, decided by {layer}; "
            f"use --budget {-(-int(floor * _SURE) // 10**6)}MB or more, or a smaller model",
            floor,
            layer,
        )
    blocks = rule.blocks(partitioner)
    if not blocks:
        raise NeuroFluxError(
            f"the activation caches do not fit the {format_bytes(job.disk_limit or 0)} that are free on the disk "
            f"of the run folder; free space, choose another --out, or raise --budget"
        )
    return assemble(profile, job, blocks, partitioner, floor, layer)


def plans_for(profile: Profile, job: Job, partitioner: str, shares: Sequence[float]) -> list[tuple[int, Plan | None]]:
    """Return what these `shares` of the job's budget would buy: (bytes, the plan, or None where there is none)."""
    found: list[tuple[int, Plan | None]] = []
    for share in shares:
        budget = int(job.budget * share)
        try:
            found.append((budget, make_plan(profile, replace(job, budget=budget), partitioner)))
        except NeuroFluxError:
            found.append((budget, None))
    return found


def assemble(
    profile: Profile, job: Job, blocks: list[BlockPlan], partitioner: str, floor: int, floor_layer: str
) -> Plan:
    """Return the plan that consists of `blocks`, with the sums that follow from them."""
    rule = Partitioner(profile, job)
    pairs = zip([0] + [block.cache_bytes for block in blocks], [block.cache_bytes for block in blocks], strict=False)
    return Plan(
        model=job.model,
        method=job.method,
        budget=job.budget,
        peak=max(block.peak for block in blocks),
        floor=floor,
        floor_layer=floor_layer,
        partitioner=partitioner,
        precision=profile.precision,
        channels_last=profile.channels_last,
        batch_limit=job.batch_limit,
        epochs=job.epochs,
        seconds=sum(map(rule.cost, blocks)),
        disk=max(before + after for before, after in pairs),
        layers=[layer.name for layer in profile.layers],
        spans=list(job.spans) or [1] * len(profile.layers),
        head_widths=[layer.head_width for layer in profile.layers],
        layer_flops=[layer.step_flops for layer in profile.layers],
        blocks=blocks,
    )


__all__ = ["BlockPlan", "Job", "LayerProfile", "Partitioner", "Plan", "make_plan"]
