"""What comes into a run: the data set, and the model cut into a chain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from neuroflux.config import Config
from neuroflux.inputs.chain import Chain, trace_chain
from neuroflux.inputs.datasets import Data, open_data
from neuroflux.inputs.models import build_model, build_on_disk, input_channels


@dataclass
class Inputs:
    """What comes in: the data, and the model cut into a chain, its weights resting on disk.

    Attributes:
        channels: what the model's first layer takes.
        raw: whether the data's float images come prepared (`Preprocess`).
    """

    data: Data
    model: nn.Module
    chain: Chain
    channels: int
    name: str
    raw: bool = False

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return len(self.data.classes)


def open_named_data(config: Config) -> Data:
    """Return the data set that `config` names, split as it says."""
    return open_data(
        config.data,
        root=Path(config.data_root).expanduser(),
        seed=config.seed,
        image_size=config.image_size,
        limit_train=config.limit_train,
        limit_val=config.limit_val,
        limit_test=config.limit_test,
        budget=config.budget_bytes,
    )


def open_inputs(config: Config, scratch: Path) -> Inputs:
    """Return the data and the model that `config` names; weights are put into mapped files below `scratch`."""
    data = open_named_data(config)
    size = data.shape[1]
    channels = input_channels(config.model, size, data.shape[0])

    def build() -> nn.Module:
        torch.manual_seed(config.seed)
        return build_model(config.model, num_classes=len(data.classes), in_channels=channels, image_size=size)

    model = build_on_disk(build, scratch / "weights")
    chain = trace_chain(model, (channels, *data.shape[1:]))
    return Inputs(data, model, chain, channels, config.model)
