"""Methods: NeuroFlux and what it is compared with, as different ways of cutting the same chain into what learns.

Backpropagation is a chain of one layer, trained by the model's own classifier. All methods then go the same way
through profile, plan, guard, data and steps, so that each has what the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from neuroflux.inputs.chain import Chain
from neuroflux.planning.packing import packed_activations
from neuroflux.planning.sizes import elements, inner_elements


def held_elements(boundary: int, inner: Sequence[int]) -> float:
    """Return the elements that a step through layers with `inner` elements holds for one image, their input counted."""
    return float(boundary + sum(inner) + 2 * max(inner))


class Whole(nn.Sequential):
    """The layers of a chain as one layer, through which gradients flow.

    Attributes:
        step_elements: the elements that a training step holds for one image at most, from shapes alone.
    """

    def __init__(self, layers: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]]) -> None:
        """`shapes` are those of the input and of every layer's output, for one image."""
        super().__init__(*layers)
        self.inner = [inner_elements(layer, shape) for layer, shape in zip(layers, shapes, strict=False)]
        self.boundaries = [elements(shape) for shape in shapes[:-1]]
        self.step_elements = held_elements(self.boundaries[0], self.inner)


class Checkpointed(Whole):
    """Keeps only the inputs of segments, and runs a segment's forward again when its gradients are computed.

    The segments are those that hold the least. "Training Deep Nets with Sublinear Memory Cost" (Chen et al. 2016),
    through `torch.utils.checkpoint`. Norms count every image once, as in plain backpropagation.
    """

    def __init__(self, layers: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(layers, shapes)
        self.segments = min(self._candidates(), key=self._held)
        self.step_elements = self._held(self.segments)

    def _candidates(self) -> list[list[int]]:
        """Return ways to cut, each as the first layers of the segments: grow a segment while it is below a limit."""
        limits = {sum(self.inner[i:j]) for i in range(len(self.inner)) for j in range(i + 1, len(self.inner) + 1)}
        found = []
        for limit in sorted(limits):
            if limit < max(self.inner):
                continue
            starts, held = [0], 0
            for index, inner in enumerate(self.inner):
                if held + inner > limit:
                    starts.append(index)
                    held = 0
                held += inner
            found.append(starts)
        return found

    def _held(self, starts: list[int]) -> float:
        ends = [*starts[1:], len(self.inner)]
        largest = max(sum(self.inner[start:end]) for start, end in zip(starts, ends, strict=True))
        return float(sum(self.boundaries[start] for start in starts) + largest + 2 * max(self.inner))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        layers = list(self)
        for start, end in zip(self.segments, [*self.segments[1:], len(layers)], strict=True):
            segment = nn.Sequential(*layers[start:end])
            if end == len(layers) or not torch.is_grad_enabled():  # its activations are needed at once
                input = segment(input)
            else:
                held = _NormsHeld(segment)
                input = checkpoint(segment, input, use_reentrant=False, context_fn=partial(_contexts, held))
        return input


def _contexts(held: _NormsHeld) -> tuple[AbstractContextManager[None], _NormsHeld]:
    """Return what is entered for the first forward pass of a segment, and for the second."""
    return nullcontext(), held


class _NormsHeld:
    """While it is entered, a second forward pass leaves the running statistics of norms as the first one made them."""

    def __init__(self, module: nn.Module) -> None:
        self._norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]

    def __enter__(self) -> None:
        self._momenta = [norm.momentum for norm in self._norms]
        counts = [norm.num_batches_tracked for norm in self._norms]
        self._counts = [None if count is None else count.clone() for count in counts]
        for norm in self._norms:
            norm.momentum = 0.0

    def __exit__(self, *_: object) -> None:
        for norm, momentum, count in zip(self._norms, self._momenta, self._counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)


class Compressed(Whole):
    """Keeps activations as ``bf16`` or ``int8`` until the backward pass needs them."""

    def __init__(self, layers: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]], kind: str) -> None:
        super().__init__(layers, shapes)
        self.kind = kind
        self.step_elements = sum(self.inner) / {"bf16": 2, "int8": 4}[kind] + 3 * max(self.inner)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(input)
        with packed_activations(self.parameters(), self.kind):
            return super().forward(input)


@dataclass(frozen=True)
class Method:
    """One way to train a chain.

    Attributes:
        about: what it is, in a few words.
        lr: the highest learning rate for 32 images, for each optimizer.
        whole: the kind of layer that the chain becomes, or None where every layer learns by itself.
        one_block: whether all layers are trained side by side, whatever that takes.
        head: the kind of head on every layer (see `heads.make_head`), or "" for the one that is asked for.
        accumulate: whether gradients of several batches are added up, to those of `Config.batch_limit` images.
    """

    about: str
    lr: dict[str, float]
    whole: type[Whole] | None = None
    one_block: bool = False
    head: str = ""
    accumulate: bool = False

    def chain(self, chain: Chain, spans: list[int], compression: str) -> Chain:
        """Return the chain that is trained: `spans[k]` consecutive layers of `chain` as its layer k."""
        if self.whole is Compressed:
            return join(chain, spans, partial(Compressed, kind=compression))
        return join(chain, spans, self.whole or Whole)


def join(chain: Chain, spans: list[int], kind: Callable[..., Whole] = Whole) -> Chain:
    """Return `chain` with `spans[k]` consecutive layers as layer k: gradients flow through all of a span to one head.

    Several layers become one of `kind`, and so does a single one of another kind than `Whole`.
    """
    layers: list[nn.Module] = []
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    first = 0
    for span in spans:
        last = first + span - 1
        if span == 1 and kind is Whole:
            layers.append(chain.layers[first])
            names.append(chain.names[first])
        else:
            inside = [chain.layer_input_shape(index) for index in range(first, last + 2)]
            layers.append(kind(chain.layers[first : last + 1], inside))
            names.append(f"{chain.names[first]}..{chain.names[last]}")
        shapes.append(chain.shapes[last])
        first = last + 1
    return replace(chain, layers=layers, names=names, shapes=shapes)


_LOCAL = {"sgd": 0.05, "adamw": 0.002}
_GLOBAL = {"sgd": 0.015, "adamw": 0.0007}

METHODS = {
    "neuroflux": Method("a loss on every layer, block after block from caches", _LOCAL),
    "backprop": Method("backpropagation through the whole model", _GLOBAL, Whole),
    "accumulate": Method("backpropagation, gradients added up over small batches", _GLOBAL, Whole, accumulate=True),
    "checkpoint": Method("backpropagation, activations computed again", _GLOBAL, Checkpointed),
    "compressed": Method("backpropagation, activations kept in fewer bits", _GLOBAL, Compressed),
    "local": Method("classic local learning: 256 filters on every layer, one block", _LOCAL, None, True, "classic"),
}
