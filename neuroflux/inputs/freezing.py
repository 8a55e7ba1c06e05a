"""Frozen layers: they keep their weights, and their norms the statistics that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn


def freeze(layers: Iterable[nn.Module]) -> Callable[[], None]:
    """Let no gradient reach the parameters of `layers`, and keep them in eval mode. Returns what undoes it."""
    modules = [module for layer in layers for module in layer.modules()]
    parameters = [(p, p.requires_grad) for module in modules for p in module.parameters(recurse=False)]
    for module in modules:
        module.eval()
    for module in modules:  # `train()` of what contains them would wake norms and dropout
        module.__dict__["train"] = _keep(module)
    for parameter, _ in parameters:
        parameter.requires_grad_(False)

    def undo() -> None:
        for module in modules:
            module.__dict__.pop("train", None)
        for parameter, before in reversed(parameters):
            parameter.requires_grad_(before)

    return undo


def _keep(module: nn.Module) -> Callable[..., nn.Module]:
    return lambda mode=True: module
