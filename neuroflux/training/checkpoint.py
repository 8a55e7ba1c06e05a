"""Checkpoints: what a run has finished, so that it can go on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import write_json
from neuroflux.inputs.weights import read_tensors


@dataclass
class BlockResult:
    """A finished block.

    Attributes:
        accuracies: the validation accuracy of each of its exits.
        batch: the batch size it ended with.
        peak: the most bytes measured while it was trained and cached.
        epoch_seconds: of every pass, without validation.
        parts: seconds that a pass over all images spends on average in each part: ``inputs`` (to augment, normalise
            and copy them to the device), ``waiting`` (for data), ``reading`` (from disk, beside training), and each
            layer in ``layers``.
        curve: after every pass, the ``seconds`` since the run began, the ``images`` trained on by then, and the
            accuracies of the block's exits on the validation and, where measured, the test images.
    """

    accuracies: list[float]
    batch: int
    peak: int
    epoch_seconds: list[float]
    parts: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)


class Checkpoints:
    """The folder ``checkpoints/`` of a run: weights of each finished block, ``state.json``, and of the last pass."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def results(self) -> list[BlockResult]:
        """Return the finished blocks, in order.

        Raises:
            NeuroFluxError: the state cannot be read.
        """
        path = self.folder / "state.json"
        if not path.exists():
            return []
        try:
            return [BlockResult(**result) for result in json.loads(path.read_text(encoding="utf-8"))["blocks"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise NeuroFluxError(
                f"cannot read {path}: it is damaged ({type(error).__name__}); start the run again with another --out"
            ) from error

    def save(self, modules: Sequence[nn.Module], results: list[BlockResult]) -> None:
        """Publish the weights of the block that `results` ends with; `modules` are its exits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write({str(k): dict(module.state_dict()) for k, module in enumerate(modules)}, self._path(len(results)))
        write_json(self.folder / "state.json", {"blocks": [asdict(result) for result in results]})
        self.forget_pass()

    def save_pass(self, number: int, state: dict[str, Any]) -> None:
        """Publish the `state` (tensors and plain values) of block `number` (from 1) after a pass."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write({"block": number, **state}, self._pass)

    def last_pass(self, number: int) -> dict[str, Any] | None:
        """Return the last state that was saved of block `number`, or None where there is none."""
        if not self._pass.exists():
            return None
        state = read_tensors(self._pass)
        return state if state.get("block") == number else None

    def forget_pass(self) -> None:
        """Delete the state of the last pass."""
        self._pass.unlink(missing_ok=True)

    def load(self, number: int, modules: Sequence[nn.Module]) -> None:
        """Copy the weights of finished block `number` (from 1) into `modules`, its exits."""
        try:
            content: dict[str, Any] = read_tensors(self._path(number))
        except NeuroFluxError as error:
            raise NeuroFluxError(f"{error}; start the run again with another --out") from error
        try:
            for key, module in enumerate(modules):
                module.load_state_dict(content[str(key)])
        except (KeyError, RuntimeError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise NeuroFluxError(f"{self._path(number)} does not fit the model: {reason}") from error

    @property
    def _pass(self) -> Path:
        return self.folder / "pass.pt"

    def _path(self, number: int) -> Path:
        return self.folder / f"block-{number}.pt"


def _write(content: dict[str, Any], path: Path) -> None:
    """Write `content` to `path` so that the file there is always whole: the one before, or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        torch.save(content, temporary)  # to a path: to an open file it would copy every tensor
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise NeuroFluxError(f"cannot write {path}: {str(error).splitlines()[0]}; free space there") from error
