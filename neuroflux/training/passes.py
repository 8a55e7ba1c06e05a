"""The passes of a block: what they have brought so far, and all that the next one depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from neuroflux.training.checkpoint import BlockResult
from neuroflux.training.guard import Guard


@dataclass
class Passes:
    """What is known of a block in training; `state` and `restore` let it go on after any pass as if nothing was.

    Attributes:
        seed: for order and random changes of the images, and for dropout.
        waited, reading: seconds that training waited for data, and that data were read for beside it.
        restarts: how often it had to go back to an earlier pass, since losses were no longer finite.
    """

    planned: int
    seed: int
    guard: Guard
    result: BlockResult = field(init=False)
    generator: torch.Generator = field(init=False)
    waited: float = 0.0
    reading: float = 0.0
    restarts: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start from nothing: no pass has been made."""
        self.result = BlockResult([], self.planned, 0, [])
        self.waited = self.reading = 0.0
        self.generator = torch.Generator().manual_seed(self.seed)
        torch.manual_seed(self.seed)  # dropout

    def state(self) -> dict[str, Any]:
        """Return all of this as tensors and plain values."""
        return {
            "guard": self.guard.state(),
            "generator": self.generator.get_state(),
            "random": _random_state(),
            "result": json.dumps(asdict(self.result)),
            "waited": self.waited,
            "reading": self.reading,
            "restarts": self.restarts,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.guard.restore(state["guard"])
        self.generator.set_state(state["generator"])
        _set_random_state(state["random"])
        self.result = BlockResult(**json.loads(state["result"]))
        self.waited, self.reading, self.restarts = state["waited"], state["reading"], state["restarts"]


def _random_state() -> list[torch.Tensor]:
    """Return the states of the generators that dropout draws from: the CPU's, and those of CUDA devices."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1:])
