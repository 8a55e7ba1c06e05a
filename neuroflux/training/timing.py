"""Timing: which part of a training step takes how long."""

from __future__ import annotations

import time

import torch

from neuroflux.planning.profiler import synchronize

# an accelerator works on after a call returns; waiting for it costs time, so only one step in so many is timed
_EVERY = 20


class Timing:
    """Adds up the seconds of the parts of training steps: the laps between `begin` and each `lap`.

    >>> timing = Timing(torch.device("cpu"))
    >>> timing.begin(64)
    >>> timing.lap("inputs")
    >>> timing.images["inputs"]
    64

    Attributes:
        seconds: of each part, in the steps that were timed.
        images: how many images these steps had.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._on = False
        self._images = 0
        self._last = 0.0
        self.seconds: dict[str, float] = {}
        self.images: dict[str, int] = {}

    def begin(self, images: int) -> None:
        """A step of `images` images begins."""
        self._on = self._device.type == "cpu" or self._step % _EVERY == 0
        self._step += 1
        self._images = images
        if self._on:
            synchronize(self._device)
            self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """`part` of the step has ended."""
        if not self._on:
            return
        synchronize(self._device)
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self.images[part] = self.images.get(part, 0) + self._images
        self._last = now

    def per_image(self, part: str) -> float:
        """Return the seconds that `part` takes for one image."""
        return self.seconds.get(part, 0.0) / max(1, self.images.get(part, 0))
