"""Auxiliary heads: the small classifier on a layer's output, and how wide it is."""

from __future__ import annotations

import torch
from torch import nn

from neuroflux.inputs.chain import Chain

# a head looks at a map of at most this many rows and columns, and classifies what it pools to half of that
_MAP = 4
_MIN_WIDTH, _MAX_WIDTH = 16, 128
_CLASSIC_WIDTH = 256


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

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the head's conv makes of a layer's output."""
        return self.conv(self.shrink(features))

    def classify(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the class scores for what `embed` returned."""
        return self.linear(self.pool(torch.relu_(self.norm(embedded))).flatten(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(self.embed(features))


class ClassicHead(nn.Module):
    """The head of classic local learning: a conv over the whole map, norm, ReLU, pool to 2x2, linear.

    As in "Greedy Layerwise Learning Can Scale to ImageNet" (Belilovsky et al. 2019, section 3), with one hidden conv.
    """

    def __init__(self, channels: int, size: tuple[int, int], classes: int, width: int) -> None:
        super().__init__()
        self.width = width
        outer = (min(2, size[0]), min(2, size[1]))
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.AdaptiveAvgPool2d(outer)
        self.linear = nn.Linear(width * outer[0] * outer[1], classes)

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the head's conv makes of a layer's output."""
        return self.conv(features)

    def classify(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the class scores for what `embed` returned."""
        return self.linear(self.pool(torch.relu_(self.norm(embedded))).flatten(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(self.embed(features))


HEADS = {"adaptive": AuxiliaryHead, "classic": ClassicHead}


def head_width(chain: Chain, index: int, kind: str) -> int:
    """Return the number of filters of the head of layer `index`; 0 for the last, which has the model's classifier."""
    if index == len(chain.layers) - 1:
        return 0
    if kind == "classic":
        return _CLASSIC_WIDTH
    return adaptive_width(chain.shapes[index][0], sum(p.numel() for p in chain.layers[index].parameters()))


def make_head(chain: Chain, index: int, classes: int, width: int, seed: int, kind: str = "adaptive") -> nn.Module:
    """Return the head of layer `index`: the model's own classifier for the last one, else a new head of that kind.

    Heads are initialised from `seed` alone, whatever was drawn before.
    """
    if index == len(chain.layers) - 1:
        return chain.classifier
    channels, height, columns = chain.shapes[index]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1000 + index)
        return HEADS[kind](channels, (height, columns), classes, width)


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
