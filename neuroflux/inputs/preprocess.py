"""From stored pixels to what the first layer sees."""

from __future__ import annotations

import torch
from torch import nn


class Preprocess(nn.Module):
    """Normalises images (N, C, H, W), and repeats grey ones when the model wants more channels.

    uint8 images are taken as they are, 0..255; float images are taken to lie in 0..1 and are scaled to that range,
    unless `raw` says that they come prepared (a user's own data set with its own transforms).

    Args:
        mean, std: per channel, in units of 0..255.
        channels: how many the model takes.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: list[float], std: list[float], channels: int, raw: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1), persistent=False)
        self.channels = channels
        self.raw = raw

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = images.float() if images.dtype == torch.uint8 or self.raw else images.float() * 255.0
        values = (values - self.mean).div_(self.std)
        return values if values.shape[1] == self.channels else values.expand(-1, self.channels, -1, -1).contiguous()
