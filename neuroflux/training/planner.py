"""The planner of a run: which spans, what they cost here, and the plan that follows, or the one that the user gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from neuroflux.config import Config
from neuroflux.errors import BudgetTooSmall, NeuroFluxError
from neuroflux.inputs.chain import Chain
from neuroflux.planning.heads import head_width, make_head
from neuroflux.planning.memory import Meter
from neuroflux.planning.methods import METHODS
from neuroflux.planning.partitioner import GOOD_BATCH, Job, Plan, make_plan, plans_for
from neuroflux.planning.profiler import Profile, Profiler, touch_code
from neuroflux.planning.profiles import fingerprint, load_profile, save_profile
from neuroflux.planning.spans import equal_spans, longest_spans
from neuroflux.planning.step import Recipe
from neuroflux.training.cache import measure_disk
from neuroflux.training.opening import Inputs

# tensor sizes say less than what a step takes: the longest spans are tried for these shares of the budget in turn
_SPAN_SHARES = (0.9, 0.6, 0.4, 0.2)

# shares of the budget for which it is said what they would buy
_OTHER_BUDGETS = (0.5, 0.75, 1.5, 2.0)


class Planner:
    """Makes the plan of one run.

    Attributes:
        chain: what is trained, once there is a plan: the model's chain, layers joined to spans.
        recipe: how steps compute, once there is a profile: with the precision that is fastest here.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        recipe: Recipe,
        meter: Meter,
        device: torch.device,
        folder: Path,
        preparation: int,
        note: Callable[[str], None],
    ) -> None:
        """`preparation` are the bytes that opening the inputs took; `note` is told what the user should know."""
        self._config, self._inputs, self.recipe, self._asked = config, inputs, recipe, recipe
        self._meter, self._device, self._folder = meter, device, folder
        self._preparation, self._note = preparation, note
        self._method = METHODS[config.method]
        self.chain = inputs.chain
        self._basis: tuple[Profile, Job] | None = None

    @property
    def frozen(self) -> int:
        """Return how many layers of the plan are frozen: none where they are part of the one that holds all."""
        return 0 if self._method.whole or self._method.one_block else self._config.freeze

    def _head(self, chain: Chain, index: int) -> nn.Module:
        kind = self._method.head or self._config.head
        width = head_width(chain, index, kind)
        return make_head(chain, index, self._inputs.classes, width, self._config.seed, kind)

    def plan(self) -> Plan:
        """Return the plan with the longest spans that fit the budget with a good batch, or with the shortest."""
        *choices, last = self._span_choices()
        for spans in choices:
            try:
                plan = self._plan_with(spans)
            except BudgetTooSmall:
                continue
            if self._is_good(plan):
                return plan
        return self._plan_with(last)

    def _span_choices(self) -> list[list[int]]:
        """Return what `Config.gradient_span` allows, the longest spans first."""
        chain, wanted = self._inputs.chain, self._config.gradient_span
        frozen, count = self._config.freeze, len(chain.layers)
        if self._method.whole:
            return [[count]]
        if wanted != "auto":
            return [[1] * frozen + equal_spans(count - frozen, 1 if wanted == "layer" else int(wanted))]
        room = self._config.budget_bytes - self._meter.current()
        found = [[1] * frozen + longest_spans(chain, room * s, self.recipe.states, frozen) for s in _SPAN_SHARES]
        return [spans for k, spans in enumerate([*found, [1] * count]) if spans not in found[:k]]

    def _plan_with(self, spans: list[int]) -> Plan:
        """Return the plan for layers of these `spans`, in the precision that is asked for, or that suits the budget.

        Low precision is faster, but autocast keeps a copy of the weights: where that leaves room for no good batch,
        fp32 may have it.
        """
        self.chain = self._method.chain(self._inputs.chain, spans, self._config.compression)
        if self._config.precision != "auto":
            return self._plan_in(spans, choose_precision=False)
        found: list[tuple[Plan, tuple[Profile, Job] | None]] = []
        for choose in (True, False):
            try:
                plan = self._plan_in(spans, choose)
            except BudgetTooSmall:
                if not found and (not choose or self.recipe.precision == "fp32"):
                    raise
            else:
                found.append((plan, self._basis))
                if plan.precision == "fp32" or self._is_good(plan):
                    break
        plan, self._basis = max(found, key=lambda pair: (min(b.batch for b in pair[0].blocks), -pair[0].seconds))
        return plan

    def _plan_in(self, spans: list[int], choose_precision: bool) -> Plan:
        self.recipe = self._asked
        self._basis = self.profile(self.chain, choose_precision), self.job(spans)
        return make_plan(*self._basis, self._config.partitioner)

    def _is_good(self, plan: Plan) -> bool:
        return all(block.batch >= min(GOOD_BATCH, self._config.batch_limit) for block in plan.blocks)

    def other_budgets(self) -> list[tuple[int, Plan | None]]:
        """Return what other budgets would buy by the same profile: (bytes, the plan, or None below the floor)."""
        return plans_for(*self._basis, self._config.partitioner, _OTHER_BUDGETS) if self._basis else []

    def job(self, spans: list[int]) -> Job:
        """Return what a plan for layers of these `spans` is made for."""
        config = self._config
        return Job(
            model=self._inputs.name,
            budget=config.budget_bytes,
            batch_limit=config.batch_limit,
            epochs=config.epochs,
            train_images=len(self._inputs.data.train),
            val_images=len(self._inputs.data.val),
            preparation=self._preparation,
            method=config.method,
            one_block=self._method.one_block,
            stagger=0 if self._method.one_block else config.stagger,
            spans=spans,
            views=config.cache_views,
            feature_bytes=config.cache_dtype_bytes,
            frozen=self.frozen,
            disk_limit=int(shutil.disk_usage(self._folder).free * 0.9),
        )

    def profile(self, chain: Chain, choose_precision: bool) -> Profile:
        """Return what the layers of `chain` cost: what an earlier run with these settings measured, or measured now."""
        config, model = self._config, self._inputs.chain
        with self._meter.reading_files():  # code is mapped from its file when it first runs
            touch_code(self.recipe, self._device)
        settings = [config.budget_bytes, config.batch_limit, config.precision, config.head, str(self.recipe)]
        settings += [self._inputs.classes, choose_precision]
        name = fingerprint(chain, self._device, method=config.method, settings=settings)
        path = Path(config.data_root).expanduser() / "profiles" / f"{name}.json"
        if not config.fresh_profile and (known := load_profile(path, chain)) is not None:
            self.recipe = replace(self.recipe, precision=known.precision, channels_last=known.channels_last)
            self._note(f"planned from the profile of an earlier run; --fresh_profile measures again ({path})")
            return known
        profiler = Profiler(self._meter, self._device, config.budget_bytes, config.batch_limit, self._inputs.classes)
        if choose_precision:
            middle = make_head(model, len(model.layers) // 2, self._inputs.classes, 16, config.seed)
            self.recipe = profiler.choose_precision(model, middle, self.recipe)
        rate = measure_disk(self._folder)
        profile = profiler.profile(chain, partial(self._head, chain), self.recipe, disk_rate=rate)
        save_profile(profile, path)
        return profile

    def follow(self, path: Path) -> Plan:
        """Return the plan in the file `path`, which must fit the model."""
        try:
            plan = Plan.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise NeuroFluxError(f"cannot read the plan {path}: {error}") from error
        if plan.method != self._config.method:
            raise NeuroFluxError(f"the plan {path} is for --method {plan.method}, not {self._config.method}")
        layers = len(self._inputs.chain.layers)
        if sum(plan.spans) == layers:
            self.chain = self._method.chain(self._inputs.chain, plan.spans, self._config.compression)
        if sum(plan.spans) != layers or plan.layers != self.chain.names:
            raise NeuroFluxError(
                f"the plan {path} was made for other layers ({sum(plan.spans)}, {plan.layers[0]}..) than "
                f"{self._inputs.name} has ({layers}, {self._inputs.chain.names[0]}..); "
                f"make it with the same --model and --data"
            )
        if any(block.first < self.frozen <= block.last for block in plan.blocks):
            raise NeuroFluxError(f"the plan {path} has no block that ends after the {self.frozen} layers of --freeze")
        return plan
