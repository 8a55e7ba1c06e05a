"""The same runs from Python: for people who bring their own model and data set."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from neuroflux.config import Config
from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.chain import trace_chain
from neuroflux.inputs.datasets import from_torch
from neuroflux.inputs.models import build_model, build_on_disk, input_channels, rest_on_disk
from neuroflux.planning.partitioner import Plan
from neuroflux.results.progress import Progress
from neuroflux.results.report import write_report
from neuroflux.results.tracking import Tracking
from neuroflux.training.exits import StreamlinedModel, load
from neuroflux.training.folder import held, open_folder
from neuroflux.training.opening import Inputs
from neuroflux.training.pipeline import Run

__all__ = ["Result", "fit", "load", "make_plan"]


@dataclass
class Result:
    """What `fit` returns: the streamlined model, the plan it was trained by, and all that the report says."""

    model: StreamlinedModel
    plan: Plan
    summary: dict[str, Any]
    folder: Path


def fit(
    model: nn.Module | str,
    train: Dataset[Any],
    val: Dataset[Any] | None = None,
    *,
    budget: str | int = "512MB",
    test: Dataset[Any] | None = None,
    classes: list[str] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Train `model` on `train` within `budget` and return the streamlined model.

    Args:
        model: any CNN that can be traced, as an object or by a name that ``--model`` knows. The weights of an object
            are trained in place.
        train: gives (image, label): images (C, H, W), uint8 or float as your own transforms make them; labels are
            integers from 0. Random transforms are drawn anew in every pass of the first block.
        val: chooses the exit; without it, a tenth of `train` is held out.
        budget: as on the command line.
        test: measured once, at the end.
        classes: names of the classes.
        settings: any field of `neuroflux.config.Config`, such as ``epochs=10, seed=1, out="runs/mine"``.

    Raises:
        NeuroFluxError: something is wrong that you can mend; the message says what.
        BudgetTooSmall: the budget is below the floor of this model on this data; the error's `floor` says how much.
    """
    config = _config(model, budget, settings)
    folder = open_folder(config, f"{_name(model)}-{config.method}-{config.budget_bytes // 10**6}MB")
    with held(folder):
        config.save(folder / "config.yaml")
        observers = [Tracking(folder), *([Progress(config.budget_bytes)] if progress else [])]
        run = Run(config, folder, list(observers))
        try:
            plan = run.prepare(_opener(model, train, val, test, classes))
            summary = run.train()
            write_report(folder)
        finally:
            for observer in observers:
                observer.close()
            run.close()
    streamlined = load(folder / "model.pt", model if isinstance(model, nn.Module) else None)
    return Result(streamlined, plan, summary, folder)


def make_plan(
    model: nn.Module | str,
    train: Dataset[Any],
    val: Dataset[Any] | None = None,
    *,
    budget: str | int = "512MB",
    classes: list[str] | None = None,
    **settings: Any,
) -> Plan:
    """Return the plan that `fit` with the same arguments would follow; trains nothing."""
    config = _config(model, budget, settings)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(config, Path(scratch), [])
        try:
            return run.prepare(_opener(model, train, val, None, classes))
        finally:
            run.close()


def _config(model: nn.Module | str, budget: str | int, settings: dict[str, Any]) -> Config:
    try:
        config = Config(budget=str(budget), data="(from Python)", model=_name(model), **settings)
    except TypeError as error:
        raise NeuroFluxError(f"{str(error).replace('Config.__init__()', 'neuroflux')}; see neuroflux.config") from error
    config.check()
    return config


def _name(model: nn.Module | str) -> str:
    return model if isinstance(model, str) else type(model).__name__


def _opener(
    model: nn.Module | str,
    train: Dataset[Any],
    val: Dataset[Any] | None,
    test: Dataset[Any] | None,
    classes: list[str] | None,
) -> Callable[[Config, Path], Inputs]:
    """Return what opens the user's own objects as the inputs of a run."""

    def open_objects(config: Config, scratch: Path) -> Inputs:
        data = from_torch(train, val, test, seed=config.seed, classes=classes)
        size, grey = data.shape[1], data.shape[0]
        if isinstance(model, str):
            channels = input_channels(model, size, grey)
            built = build_on_disk(
                lambda: build_model(model, num_classes=len(data.classes), in_channels=channels, image_size=size),
                scratch / "weights",
            )
        else:
            channels, built = grey, rest_on_disk(model, scratch / "weights")
        chain = trace_chain(built, (channels, *data.shape[1:]))
        return Inputs(data, built, chain, channels, model if isinstance(model, str) else "", raw=data.raw)

    return open_objects
