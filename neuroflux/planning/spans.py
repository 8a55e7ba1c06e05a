"""Gradient spans: how many consecutive layers learn together, from the one head at the end of the span."""

from __future__ import annotations

from collections.abc import Sequence

from neuroflux.inputs.chain import Chain
from neuroflux.planning.methods import held_elements
from neuroflux.planning.sizes import elements, inner_elements

# what the longest spans are made to fit: a batch that batch norm and gradients are good with
_BATCH = 16


def equal_spans(layers: int, length: int) -> list[int]:
    """Return spans of `length` layers for a chain of `layers`; the last one takes what is left."""
    length = min(length, layers)
    return [min(length, layers - first) for first in range(0, layers, length)]


def longest_spans(chain: Chain, room: float, states: int, start: int = 0) -> list[int]:
    """Return spans from layer `start` on, as long as `room` bytes allow by tensor sizes; each is at least one layer.

    A span needs its weights and `states` tensors of their size for the optimizer, what one step of 16 images holds,
    and the largest gradient with the copies that kernels make of reordered weights. With `room` for everything there
    is one span: backpropagation.
    """
    inner = [inner_elements(layer, chain.layer_input_shape(k)) for k, layer in enumerate(chain.layers)]
    weights = [[parameter.numel() for parameter in layer.parameters()] for layer in chain.layers]
    spans: list[int] = []
    first = start
    for index in range(start, len(chain.layers)):
        span = slice(first, index + 1)
        boundary = elements(chain.layer_input_shape(first))
        if index > first and _bytes(boundary, inner[span], weights[span], states) > room:
            spans.append(index - first)
            first = index
    return [*spans, len(chain.layers) - first]


def _bytes(boundary: int, inner: Sequence[int], weights: Sequence[Sequence[int]], states: int) -> float:
    numbers = [count for layer in weights for count in layer]
    return 4 * (_BATCH * held_elements(boundary, inner) + (1 + states) * sum(numbers) + 3 * max(numbers, default=0))


def rate_share(span: int) -> float:
    """Return the share of a single layer's learning rate that suits a span of several.

    The best rates measured for VGG-16 are 0.05 for its layers alone and 0.015 for all 13 together: 13**-0.5 between.
    """
    return float(span**-0.5)
