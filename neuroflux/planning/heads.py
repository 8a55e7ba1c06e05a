"""Auxiliary heads: the small classifier on a layer's output, and how wide it is."""

from __future__ import annotations

import torch
from torch import nn

# a head looks at a map of at most this many rows and columns, and classifies what it pools to half of that
_MAP = 4
_MIN_WIDTH, _MAX_WIDTH = 16, 128


class AuxiliaryHead(nn.Module):
    """Pool, conv, norm, ReLU, pool, linear: maps a layer's output (N, C, H, W) to class scores (N, classes).

    The head first pools to 4x4: its cost then depends on the layer's channels alone, so it never decides how large a
    batch fits. `width` is the number of conv filters.
    """

    def __init__(self, channels: int, size: tuple[int, int], classes: int, width: int) -> None:
        super().__init__()
        self.width = width
        inner = (min(_MAP, size[0]), min(_MAP, size[1]))
        outer = (min(_MAP // 2, size[0]), min(_MAP // 2, size[1]))
        kernel = 3 if min(inner) > 2 else 1  # on a 2x2 map most taps of a 3x3 kernel would see padding only
        self.shrink = nn.AdaptiveAvgPool2d(inner) if inner != tuple(size) else nn.Identity()
        self.conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.AdaptiveAvgPool2d(outer) if outer != inner else nn.Identity()
        self.linear = nn.Linear(width * outer[0] * outer[1], classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scores = torch.relu_(self.norm(self.conv(self.shrink(features))))
        return self.linear(self.pool(scores).flatten(1))


def adaptive_width(channels: int, layer_parameters: int) -> int:
    """Return the number of filters for the head of a layer with `channels` outputs and `layer_parameters` weights.

    Wider layers get wider heads, as in NeuroFlux (arXiv 2402.14139, section 4): a fixed width, 256 in classic local
    learning, costs most where a layer is small. The width is a power of two near half the channels, between 16 and
    128, and halved while the head's conv would have more weights than half of the layer it serves.
    """
    width = _MIN_WIDTH
    while width * 2 <= min(_MAX_WIDTH, channels):
        width *= 2
    while width > _MIN_WIDTH and width * channels * 9 > max(layer_parameters, 1) and channels > 64:
        width //= 2
    return width
