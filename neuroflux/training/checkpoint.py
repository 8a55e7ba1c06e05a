"""Checkpoints: what a run has finished, so that it can go on from there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuroflux.errors import NeuroFluxError
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
        failures: how often the system had no memory for a step, so that it was made in halves.
        skipped: the steps that changed nothing in some layer, whose loss was not finite.
        restarts: how often training went back to the last good state, since losses stayed so.
    """

    accuracies: list[float]
    batch: int
    peak: int
    epoch_seconds: list[float]
    parts: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    failures: int = 0
    skipped: int = 0
    restarts: int = 0


class Checkpoints:
    """The folder ``checkpoints/`` of a run: each finished block, with how it went, and the last pass.

    Attributes:
        damaged: what is wrong with the first block file that `results` could not read, or "".
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged = ""

    def results(self) -> list[BlockResult]:
        """Return the finished blocks, in order, up to the first whose file is missing or damaged."""
        results: list[BlockResult] = []
        while (path := self._path(len(results) + 1)).exists():
            try:
                results.append(BlockResult(**json.loads(read_tensors(path)["result"])))
            except (NeuroFluxError, ValueError, KeyError, TypeError) as error:
                self.damaged = str(error)
                break
        return results

    def save(self, modules: Sequence[nn.Module], results: list[BlockResult]) -> None:
        """Publish the weights of the block that `results` ends with; `modules` are its exits."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {str(k): dict(module.state_dict()) for k, module in enumerate(modules)}
        _write({"result": json.dumps(asdict(results[-1])), **content}, self._path(len(results)))
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
        content = read_tensors(self._path(number))
        try:
            for key, module in enumerate(modules):
                module.load_state_dict(content[str(key)])
        except (KeyError, RuntimeError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise NeuroFluxError(f"{self._path(number)} does not fit the model: {reason}") from error

    def digest(self, number: int) -> bytes:
        """Return a checksum of the file of finished block `number`."""
        digest = hashlib.sha256()
        with self._path(number).open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return digest.digest()

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
