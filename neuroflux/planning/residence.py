"""Where weights live: in a mapped file while they rest, on the device while their block is trained."""

from __future__ import annotations

import torch
from torch import nn


class Residence:
    """Brings the tensors of some modules to the device and back to where they rest.

    A model's parameters rest in mapped files (`neuroflux.inputs.models.build_on_disk`), which the kernel can drop from
    memory at any time; what is trained is a copy of them on the device.
    """

    def __init__(self, modules: list[nn.Module], device: torch.device, memory_format: torch.memory_format) -> None:
        self.device = device
        self.memory_format = memory_format
        tensors = [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._resting: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors, each counted once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def fetch(self) -> None:
        """Put a copy of every tensor on the device."""
        self._resting = [tensor.data for tensor in self._tensors]
        for tensor in self._tensors:
            memory_format = self.memory_format if tensor.ndim == 4 else torch.contiguous_format
            copy = torch.empty_like(tensor.data, device=self.device, memory_format=memory_format)
            tensor.data = copy.copy_(tensor.data)

    def store(self) -> None:
        """Write the tensors back to where they rest and free the copies on the device."""
        for tensor, resting in zip(self._tensors, self._resting, strict=True):
            resting.copy_(tensor.data)
            tensor.data = resting
        self._resting = []

    def drop(self) -> None:
        """Free the copies on the device without writing them back."""
        for tensor, resting in zip(self._tensors, self._resting, strict=True):
            tensor.data = resting
        self._resting = []
