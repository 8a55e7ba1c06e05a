"""Sizes: what a module puts out and computes for one image, found from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_BATCH = 2


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor of `shape`."""
    product = 1
    for size in shape:
        product *= size
    return product


def inner_elements(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the number of elements that all modules without children in `module` put out for one image."""
    total = 0

    def count(leaf: nn.Module, args: Any, output: Any) -> None:
        nonlocal total
        if isinstance(output, torch.Tensor):
            total += output[0].numel()

    _run_on_meta(module, input_shape, count)
    return total


def count_flops(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return the floating-point operations of a forward pass of `module` for one image (a multiply-add counts two)."""
    with FlopCounterMode(display=False) as counter:
        _run_on_meta(module, input_shape, None)
    return counter.get_total_flops() // _BATCH


def _run_on_meta(module: nn.Module, input_shape: tuple[int, ...], hook: Callable[..., None] | None) -> None:
    """Run `module` in eval mode without storage, calling `hook` after every module without children."""
    training = module.training
    leaves = [leaf for leaf in module.modules() if not list(leaf.children())] if hook is not None else []
    handles = [leaf.register_forward_hook(hook) for leaf in leaves]  # type: ignore[arg-type]
    state = {name: tensor.to("meta") for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    try:
        with torch.no_grad():
            torch.func.functional_call(module.eval(), state, (torch.empty(_BATCH, *input_shape, device="meta"),))
    finally:
        module.train(training)
        for handle in handles:
            handle.remove()
