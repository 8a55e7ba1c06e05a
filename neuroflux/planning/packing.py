"""Packing: keeps the activations that a backward pass needs in fewer bits."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# smaller tensors (statistics, scores) are left as they are
_SMALLEST = 1024
_LEVELS = 255


@dataclass
class _Packed:
    """A packed tensor: `values` * `scale` + `lowest`, of `dtype`."""

    values: torch.Tensor
    dtype: torch.dtype
    scale: torch.Tensor | None = None
    lowest: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        restored = self.values.to(self.dtype)
        if self.scale is not None and self.lowest is not None:
            restored.mul_(self.scale).add_(self.lowest)
        return restored


def pack(tensor: torch.Tensor, kind: str) -> _Packed:
    """Return `tensor` with ``bf16`` or ``int8`` values (256 even steps between the least and largest of each image).

    Integers, such as the places that max pooling remembers, keep their value in 32 bits.
    """
    if not tensor.is_floating_point():
        return _Packed(tensor.to(torch.int32), tensor.dtype)
    if kind == "bf16":
        return _Packed(tensor.to(torch.bfloat16), tensor.dtype)
    rest = tuple(range(1, tensor.ndim))
    lowest, highest = tensor.amin(rest, keepdim=True), tensor.amax(rest, keepdim=True)
    scale = ((highest - lowest) / _LEVELS).clamp_min_(torch.finfo(tensor.dtype).tiny)
    # zero stays zero, so that what ReLU has shut stays shut
    return _Packed(tensor.sub(lowest).div_(scale).round_().to(torch.uint8), tensor.dtype, scale, lowest)


@contextmanager
def packed_activations(parameters: Iterable[torch.nn.Parameter], kind: str) -> Iterator[None]:
    """Pack what the forward pass inside saves for its backward pass; `parameters` are left as they are.

    A tensor that several operations save is packed once. After "Less Memory Means Smaller GPUs: Backpropagation with
    Compressed Activations" (2024), with values spread evenly over each image's own range.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Packed]]] = {}

    def pack_saved(tensor: torch.Tensor) -> torch.Tensor | _Packed:
        storage = tensor.untyped_storage()
        plain = not tensor.is_floating_point() and tensor.dtype != torch.int64
        if plain or tensor.numel() < _SMALLEST or tensor.ndim < 2 or storage.data_ptr() in weights:
            return tensor
        key = (storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key in known:
            source, packed = known[key][0], known[key][1]()
            if packed is not None and not source.expired():  # else another tensor lies there now
                return packed
        result = pack(tensor, kind)
        known[key] = (StorageWeakRef(storage), weakref.ref(result))
        return result

    def unpack_saved(saved: torch.Tensor | _Packed) -> torch.Tensor:
        return saved.unpack() if isinstance(saved, _Packed) else saved

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack_saved, unpack_saved):
            yield
    finally:
        known.clear()
