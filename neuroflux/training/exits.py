"""Exits: which one becomes the streamlined model, and that model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.chain import trace_chain
from neuroflux.inputs.models import build_model
from neuroflux.inputs.preprocess import Preprocess
from neuroflux.inputs.weights import read_tensors
from neuroflux.planning.heads import make_head

FORMAT = 1


def choose_exit(accuracies: list[float], tolerance: float) -> int:
    """Return the index of the shallowest exit whose validation accuracy is within `tolerance` of the best."""
    best = max(accuracies)
    return next(index for index, accuracy in enumerate(accuracies) if accuracy >= best - tolerance)


def layers_worth_training(accuracies: list[float], lookahead: int) -> int:
    """Return how many layers of a block should learn, given the `accuracies` of the exits that do ([] at the start).

    Depth grows only where it pays: up to `lookahead` layers beyond the best exit, since a deep exit learns later than
    a shallow one, and further when one of them becomes the best.
    """
    best = accuracies.index(max(accuracies)) if accuracies else 1
    return best + 1 + lookahead


@dataclass
class Description:
    """All that is needed to build a streamlined model again, in plain values.

    Attributes:
        model: the name that `build_model` knows, or "" where the model came as an object from Python.
        layers: how many layers of the chain are kept; `width` is the filters of the head on the last of them, which
            is of the kind `head`, and where that looks ahead, stands for layers with the output shapes `ahead`.
        shape: of the images, (channels, height, width); `channels` is how many the first layer takes.
        mean, std: per image channel, in units of 0..255.
        raw: whether float images come prepared by the user's own transforms.
        temperature: what scores are divided by, so that their softmax says how likely a class is (see `calibration`).
    """

    model: str
    layers: int
    width: int
    classes: list[str]
    shape: list[int]
    channels: int
    mean: list[float]
    std: list[float]
    raw: bool = False
    head: str = "conv"
    ahead: list[list[int]] = field(default_factory=list)
    temperature: float = 1.0


class StreamlinedModel(nn.Module):
    """The first layers of a model and the head on the last of them: what the user takes away.

    Takes images (N, C, H, W), uint8 (0..255) or float (0..1); returns class scores (N, classes).

    >>> model = neuroflux.load("runs/x")                              # doctest: +SKIP
    >>> model.classes[model(images).argmax(1)[0]]                     # doctest: +SKIP
    """

    def __init__(self, layers: Sequence[nn.Module], head: nn.Module, description: Description) -> None:
        super().__init__()
        self.description = description
        self.preprocess = Preprocess(description.mean, description.std, description.channels, description.raw)
        self.layers = nn.ModuleList(layers)
        self.head = head

    @property
    def classes(self) -> list[str]:
        """Return the class names, in the order of the scores."""
        return self.description.classes

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.preprocess(images)
        for layer in self.layers:
            features = layer(features)
        return self.head(features) / self.description.temperature

    def save(self, path: Path) -> None:
        """Write the model to `path`: tensors and plain values only, no pickled code."""
        state = {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}
        temporary = path.with_name(path.name + ".tmp")
        torch.save({"format": FORMAT, "description": asdict(self.description), "weights": state}, temporary)
        temporary.replace(path)


def load(path: str | Path, model: nn.Module | None = None) -> StreamlinedModel:
    """Return the streamlined model of the run folder or ``model.pt`` file at `path`, ready to predict.

    Args:
        model: a new instance of the full model, needed only where it was passed to `neuroflux.fit` as an object and
            so has no name to build it from.

    Raises:
        NeuroFluxError: there is no such file, or it is not a model that this version reads.
    """
    path = Path(path)
    path = path / "model.pt" if path.is_dir() else path
    content = read_tensors(path)
    if content.get("format") != FORMAT:
        raise NeuroFluxError(f"{path} has format {content.get('format')!r}; this version reads format {FORMAT}")
    try:
        description = Description(**content["description"])
        weights = content["weights"]
        shape = (description.channels, description.shape[1], description.shape[2])
        classes = len(description.classes)
    except (KeyError, TypeError, IndexError) as error:
        raise NeuroFluxError(f"{path} is not a NeuroFlux model: {error}") from error
    if model is None:
        if not description.model:
            raise NeuroFluxError(f"{path} holds a model without a name: pass it as neuroflux.load(path, model=...)")
        with torch.device("meta"):  # no memory for the layers that are cut off, nor for weights that are read anyway
            model = build_model(description.model, num_classes=classes, in_channels=shape[0], image_size=shape[1])
    chain = trace_chain(model, shape)
    if not 1 <= description.layers <= len(chain.layers):
        raise NeuroFluxError(f"{path} wants {description.layers} layers of a model that has {len(chain.layers)}")
    try:
        index, kind = description.layers - 1, description.head
        head = make_head(chain, index, classes, description.width, 0, kind, description.ahead)
    except (ValueError, TypeError, RuntimeError) as error:
        raise NeuroFluxError(f"{path} describes a head that cannot be built: {error}") from error
    streamlined = StreamlinedModel(list(chain.layers[: description.layers]), head, description)
    try:
        streamlined.load_state_dict(weights, assign=True)
    except (RuntimeError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[-1].strip()
        name = description.model or "the model"
        raise NeuroFluxError(f"the weights in {path} do not fit {name}: {reason}") from error
    return streamlined.eval()
