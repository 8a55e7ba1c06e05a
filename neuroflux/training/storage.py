"""Storage: what cached features are kept as on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from neuroflux.planning.packing import pack

_NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": np.int16, "int8": np.uint8}
_LARGEST_FP16 = 65504.0
_SCALES = 8  # bytes before the values of an int8 row: what they are multiplied by, and what is added


class Storage:
    """Turns features (N, C, H, W) or (N, C) into rows of an array, and back.

    ``int8`` keeps 256 even steps between the least and largest value of each image; numpy has no ``bf16``, so that is
    kept as integers with the same bits.

    >>> storage = Storage("int8", (2, 1, 1))
    >>> storage.decode(torch.from_numpy(storage.encode(torch.tensor([[[[1.0]], [[3.0]]]])))).flatten()
    tensor([1., 3.])
    """

    def __init__(self, kind: str, shape: Sequence[int]) -> None:
        """`kind` is ``fp32``, ``fp16``, ``bf16`` or ``int8``."""
        self.kind, self.shape = kind, tuple(shape)
        self.dtype = np.dtype(_NUMPY[kind])
        self.row_shape = (_SCALES + math.prod(self.shape),) if kind == "int8" else self.shape

    def encode(self, features: torch.Tensor) -> np.ndarray:
        """Return the rows (N, ...) that stand for `features`; what a format cannot hold is its largest value."""
        features = features.float()
        if self.kind == "fp32":
            return features.cpu().contiguous().numpy()
        if self.kind == "fp16":
            features = features.clamp(-_LARGEST_FP16, _LARGEST_FP16)
            return features.to(torch.float16).cpu().contiguous().numpy()
        if self.kind == "bf16":
            return features.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy()
        packed = pack(features, "int8")
        assert packed.scale is not None
        assert packed.lowest is not None
        count = len(features)
        parts = [packed.scale, packed.lowest, packed.values]
        return np.concatenate([p.cpu().contiguous().numpy().reshape(count, -1).view(np.uint8) for p in parts], 1)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the float features (N, C, H, W) that `rows` stand for, on the device where these are."""
        if self.kind == "bf16":
            return rows.view(torch.bfloat16).float()
        if self.kind != "int8":
            return rows.float()
        scale, lowest = rows[:, :_SCALES].contiguous().view(torch.float32).T
        each = (-1, *[1] * len(self.shape))
        features = rows[:, _SCALES:].float().view(-1, *self.shape)
        return features.mul_(scale.view(each)).add_(lowest.view(each))
