"""What a finished model is worth: accuracy, size and speed."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from neuroflux.inputs.datasets import Split
from neuroflux.planning.profiler import synchronize
from neuroflux.training.cache import Batches


@torch.no_grad()
def predictions(model: nn.Module, split: Split, batch: int, device: torch.device) -> np.ndarray:
    """Return the class (n,) that `model` gives each image of `split`."""
    model.eval()
    predicted = np.zeros(len(split), np.int64)
    for rows, indices in Batches(_Rows(split), np.arange(len(split)), lambda _: batch):
        predicted[indices] = model(rows.to(device)).argmax(1).cpu().numpy()
    return predicted


@torch.no_grad()
def scores(
    model: nn.Module, split: Split, batch: int, device: torch.device, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores (n, classes) of `model` for the first images of `split`, and their labels (n,).

    As many images are taken as have `most` scores together.
    """
    model.eval()
    found: list[torch.Tensor] = []
    for rows, _ in Batches(_Rows(split), np.arange(len(split)), lambda _: batch):
        found.append(model(rows.to(device)).float().cpu())
        if len(found) * found[0].numel() >= most:
            break
    together = torch.cat(found)
    return together, torch.from_numpy(split.labels[: len(together)])


def accuracy(model: nn.Module, split: Split, batch: int, device: torch.device) -> float:
    """Return the share of the images of `split` that `model` classifies rightly."""
    return float((predictions(model, split, batch, device) == split.labels).mean())


class _Rows:
    """A split as a level whose features are its stored images."""

    def __init__(self, split: Split) -> None:
        self.labels, self.read = split.labels, split.read
        self.views, self.view = 1, 0

    def features(self, rows: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        return rows


@torch.no_grad()
def throughput(models: list[nn.Module], shape: tuple[int, ...], batch: int, device: torch.device) -> list[float]:
    """Return the images per second of each of `models` at inference, the median of five turns taken alternately."""
    images = torch.randint(0, 256, (batch, *shape), dtype=torch.uint8, device=device)
    times: list[list[float]] = [[] for _ in models]
    for _ in range(6):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model(images)
            synchronize(device)
            taken.append(time.perf_counter() - start)
    return [batch / float(np.median(taken[1:])) for taken in times]


def count_parameters(model: nn.Module) -> int:
    """Return the number of weights of `model`, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
