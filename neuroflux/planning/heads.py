"""Auxiliary heads: the small classifier on a layer's output, how wide it is, and how deep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from neuroflux.inputs.chain import Chain

# a head looks at a map of at most this many rows and columns, and classifies what it pools to half of that
_MAP = 4
_MIN_WIDTH, _MAX_WIDTH = 16, 128
_CLASSIC_WIDTH = 256
# a head that looks ahead stands for at most so many layers to come
_AHEAD = 3


class Head(nn.Module):
    """Maps a layer's output (N, C, H, W) to class scores (N, classes): `classify` what `embed` makes of it.

    Attributes:
        width: the number of conv filters, or the most that one of several convs has.
    """

    width: int
    norm: nn.BatchNorm2d
    pool: nn.Module
    linear: nn.Linear

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the head's last conv makes of a layer's output."""
        raise NotImplementedError

    def classify(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the class scores for what `embed` returned."""
        return self.linear(self.pool(torch.relu_(self.norm(embedded))).flatten(1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(self.embed(features))


class AuxiliaryHead(Head):
    """Pool, conv, norm, ReLU, pool, linear.

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
        return self.conv(self.shrink(features))


class ClassicHead(Head):
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
        return self.conv(features)


class LookaheadHead(Head):
    """A conv for each of a few layers to come, as wide as they are and on maps as small, then pool and linear.

    After "Scaling Supervised Local Learning with Augmented Auxiliary Networks" (AugLocal, Ma et al., ICLR 2024,
    section 3): a layer that is trained by something like the rest of the net keeps what the rest will need.

    Args:
        ahead: output shapes (C, H, W) of the layers that it stands for, in their order; see `layers_ahead`.
        width: no conv has more filters.
    """

    def __init__(self, channels: int, ahead: Sequence[Sequence[int]], classes: int, width: int) -> None:
        super().__init__()
        self.width = width
        parts: list[nn.Module] = []
        for filters, height, columns in ahead:
            filters = min(filters, width)
            if parts:
                parts += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            parts += [nn.AdaptiveAvgPool2d((height, columns))]
            parts += [nn.Conv2d(channels, filters, 3 if min(height, columns) > 2 else 1, padding="same", bias=False)]
            channels = filters
        self.convs = nn.Sequential(*parts)
        self.norm = nn.BatchNorm2d(channels)
        outer = (min(2, ahead[-1][1]), min(2, ahead[-1][2]))
        self.pool = nn.AdaptiveAvgPool2d(outer)
        self.linear = nn.Linear(channels * outer[0] * outer[1], classes)

    def embed(self, features: torch.Tensor) -> torch.Tensor:
        return self.convs(features)


KINDS = ("conv", "auglocal", "classic")


def head_width(chain: Chain, index: int, kind: str) -> int:
    """Return the number of filters of the head of layer `index`; 0 for the last, which has the model's classifier."""
    if index == len(chain.layers) - 1:
        return 0
    if kind in ("classic", "auglocal"):
        return _CLASSIC_WIDTH
    return adaptive_width(chain.shapes[index][0], sum(p.numel() for p in chain.layers[index].parameters()))


def layers_ahead(chain: Chain, index: int) -> list[list[int]]:
    """Return the output shapes of a few layers after `index`, evenly chosen, the last one among them.

    As many as the depth that is left allows: from three at the first layer down to one before the last.
    """
    left = len(chain.layers) - 1 - index
    count = max(1, min(left, round(_AHEAD * left / max(1, len(chain.layers) - 1))))
    chosen = [index + -(-left * (k + 1) // count) for k in range(count)] if left else []
    return [list(chain.shapes[k]) for k in chosen if len(chain.shapes[k]) == 3] or [list(chain.shapes[index])]


def make_head(
    chain: Chain,
    index: int,
    classes: int,
    width: int,
    seed: int,
    kind: str = "conv",
    ahead: Sequence[Sequence[int]] = (),
) -> nn.Module:
    """Return the head of layer `index`: the model's own classifier for the last one, else a new head of that kind.

    Heads are initialised from `seed` alone, whatever was drawn before.

    Args:
        ahead: what `layers_ahead` says, unless given: for heads of the kind ``auglocal``.
    """
    if index == len(chain.layers) - 1:
        return chain.classifier
    channels, height, columns = chain.shapes[index]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed * 1000 + index)
        if kind == "auglocal":
            return LookaheadHead(channels, ahead or layers_ahead(chain, index), classes, width)
        return (ClassicHead if kind == "classic" else AuxiliaryHead)(channels, (height, columns), classes, width)


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
