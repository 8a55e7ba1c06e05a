"""One training step of one exit: what the profiler measures is exactly what a block repeats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuroflux.planning.losses import LOSSES

# fp16 gradients below 2^-24 are lost: the loss is scaled up, and gradients back down before they are applied
_FP16_SCALE = 1024.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = tuple(_DTYPES)


@dataclass(frozen=True)
class Recipe:
    """How a step computes and updates; the same for every layer of a run.

    Attributes:
        optimizer: ``sgd`` (with Nesterov momentum 0.9) or ``adamw``.
        lr: the highest learning rate; the schedule scales it.
        precision: ``fp32``, ``bf16`` or ``fp16``: what autocast computes in.
        channels_last: the memory format of feature maps and weights.
        local_loss: what layers learn by (see `losses`).
        accumulate: how many images' gradients are added up for one update, or 0 to update after every batch.
    """

    optimizer: str = "sgd"
    lr: float = 0.05
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    local_loss: str = "pred"
    precision: str = "fp32"
    channels_last: bool = False
    accumulate: int = 0

    @property
    def memory_format(self) -> torch.memory_format:
        """Return the memory format of feature maps and weights."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def states(self) -> int:
        """Return how many tensors of a parameter's size are kept for it: optimizer state, and a gradient that lasts."""
        return {"sgd": 1, "adamw": 2}[self.optimizer] + bool(self.accumulate)

    def make_optimizer(self, parameter: nn.Parameter, scale: float = 1.0) -> torch.optim.Optimizer:
        """Return an optimizer for one parameter; norms and biases (fewer than two dimensions) do not decay.

        The fused kernels update in one pass and without temporaries of the parameter's size.
        """
        decay = self.weight_decay if parameter.ndim > 1 else 0.0
        if self.optimizer == "adamw":
            return torch.optim.AdamW([parameter], lr=self.lr * scale, weight_decay=decay, fused=True)
        return torch.optim.SGD(
            [parameter], lr=self.lr * scale, momentum=0.9, nesterov=True, weight_decay=decay, fused=True
        )

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context in which forward passes run."""
        return torch.autocast(device.type, _DTYPES[self.precision], enabled=self.precision != "fp32")


class _Optimizers:
    """An optimizer for each of `parameters`."""

    def __init__(self, parameters: list[nn.Parameter], recipe: Recipe) -> None:
        self._scale = _FP16_SCALE if recipe.precision == "fp16" else 1.0
        self._base = recipe.lr
        self._optimizers = [recipe.make_optimizer(parameter) for parameter in parameters]

    def set_rate(self, factor: float) -> None:
        """Set the learning rate to `factor` times the recipe's."""
        for optimizer in self._optimizers:
            optimizer.param_groups[0]["lr"] = self._base * factor

    def state(self) -> list[dict[str, Any]]:
        """Return what the optimizers have gathered, as tensors and plain values; `flush` must have been called."""
        return [dict(optimizer.state_dict()["state"]) for optimizer in self._optimizers]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from what `state` returned."""
        for optimizer, gathered in zip(self._optimizers, state, strict=True):
            copies = {
                key: {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
                for key, values in gathered.items()
            }
            optimizer.load_state_dict({"state": copies, "param_groups": optimizer.state_dict()["param_groups"]})


class ParameterwiseOptimizer(_Optimizers):
    """Applies and frees each parameter's gradient as soon as it is complete, during the backward pass.

    Only one gradient of the module exists at a time, and none outlives the step.
    """

    def __init__(self, parameters: list[nn.Parameter], recipe: Recipe) -> None:
        super().__init__(parameters, recipe)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(optimizer))
            for parameter, optimizer in zip(parameters, self._optimizers, strict=True)
        ]

    def _hook(self, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
        def apply(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and self._scale != 1.0:
                gradient.div_(self._scale)
                if not torch.isfinite(gradient).all():  # fp16 overflowed: leave this update out
                    parameter.grad = None
                    return
            optimizer.step()
            parameter.grad = None

        return apply

    def backward(self, loss: torch.Tensor, images: int) -> None:
        """Compute, apply and free the gradients of `loss`, the mean over `images`."""
        (loss * self._scale if self._scale != 1.0 else loss).backward()

    def flush(self) -> None:
        """Apply gradients that still wait to be applied: none do."""

    def close(self) -> None:
        """Detach from the parameters and free the optimizer state."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._optimizers = [], []


class AccumulatingOptimizer(_Optimizers):
    """Adds up the gradients of several batches and applies their mean after `Recipe.accumulate` images."""

    def __init__(self, parameters: list[nn.Parameter], recipe: Recipe) -> None:
        super().__init__(parameters, recipe)
        self._wanted, self._images = recipe.accumulate, 0
        self._parameters = parameters

    def backward(self, loss: torch.Tensor, images: int) -> None:
        """Add the gradients of `loss`, the mean over `images`, and apply them when there are enough."""
        (loss * (self._scale * images / self._wanted)).backward()
        self._images += images
        if self._images >= self._wanted:
            self.flush()

    def flush(self) -> None:
        """Apply the gradients that were added up, and free them."""
        if not self._images:
            return
        factor = self._wanted / (self._images * self._scale)
        for parameter, optimizer in zip(self._parameters, self._optimizers, strict=True):
            if parameter.grad is None:
                continue
            if factor != 1.0:
                parameter.grad.mul_(factor)
            if self._scale == 1.0 or torch.isfinite(parameter.grad).all():
                optimizer.step()
            parameter.grad = None
        self._images = 0

    def close(self) -> None:
        """Free gradients and optimizer state."""
        for parameter in self._parameters:
            parameter.grad = None
        self._optimizers = []


class Exit(nn.Module):
    """A layer together with its head: maps features (N, C, H, W) to (output features, class scores)."""

    def __init__(self, layer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = head

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.layer(features)
        return output, self.head(output)


class ExitTrainer:
    """Trains one exit, which is on `device`, from its local loss; no gradient leaves it."""

    def __init__(self, exit: Exit, recipe: Recipe, device: torch.device) -> None:
        self.exit = exit
        self.recipe = recipe
        self.device = device
        exit.train()
        kind = AccumulatingOptimizer if recipe.accumulate else ParameterwiseOptimizer
        self.optimizer: ParameterwiseOptimizer | AccumulatingOptimizer = kind(
            [p for p in exit.parameters() if p.requires_grad], recipe
        )
        # the statistics of norms change in the forward pass, before it is known whether the loss is finite
        self._statistics = [(buffer, buffer.clone()) for buffer in exit.buffers()]

    def step(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on one batch: features (N, C, H, W), labels (N,). Where the loss is not finite, nothing is changed.

        Returns:
            The detached output features (N, C', H', W') and the loss (scalar).
        """
        for buffer, before in self._statistics:
            before.copy_(buffer)
        with self.recipe.autocast(self.device):
            output = self.exit.layer(features)
            loss = LOSSES[self.recipe.local_loss](self.exit.head, output, labels, self.recipe.label_smoothing)
        if math.isfinite(loss.item()):
            self.optimizer.backward(loss, len(labels))
        else:
            for buffer, before in self._statistics:
                buffer.copy_(before)
        return output.detach(), loss.detach()

    def discard(self) -> None:
        """Drop what a step that could not be finished has left: gradients, and the statistics of norms."""
        self.exit.zero_grad()
        for buffer, before in self._statistics:
            buffer.copy_(before)

    def close(self) -> None:
        """Free gradients and optimizer state."""
        self.optimizer.close()
