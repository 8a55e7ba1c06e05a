"""Trained weights to start from: a file of tensors, the folder of an earlier run, or torchvision's own weights."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.models import torchvision_name

# what trainers put before a model's own names: NeuroFlux, DistributedDataParallel, torch.compile, Lightning and timm
_PREFIXES = (r"layers\.\d+\.", r"module\.", r"_orig_mod\.", r"model\.", r"(net|network|backbone|encoder)\.")
# where they keep the tensors
_KEYS = ("state_dict", "model_state_dict", "model", "weights")
_LISTED = 6


@dataclass(frozen=True)
class Loaded:
    """What became of the tensors of a model that was to start from trained ones.

    Attributes:
        source: where they came from.
        loaded: the names of the model's tensors that have new values.
        missing: those of which the source has none; `unfit`: those of which it has one of another shape, with shapes.
        unused: the names in the source that the model does not have.
    """

    source: str
    loaded: list[str]
    missing: list[str]
    unfit: list[str]
    unused: list[str]

    def __str__(self) -> str:
        total = len(self.loaded) + len(self.missing) + len(self.unfit)
        text = f"started from {self.source}: {len(self.loaded)} of {total} tensors"
        for what, names in (("of another shape", self.unfit), ("missing", self.missing), ("not used", self.unused)):
            if names:
                more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
                text += f"; {what}: {', '.join(names[:_LISTED])}{more}"
        return text


def load_weights(model: nn.Module, source: str, name: str) -> Loaded:
    """Copy the tensors of `source` into those of `model` that have the same name and shape; the others are kept.

    Args:
        source: a file that `torch.save` wrote (of tensors; the usual wrappings are understood), the folder of a run,
            or ``torchvision:WEIGHTS``, such as ``torchvision:DEFAULT`` for the model `name`, or
            ``torchvision:ResNet18_Weights.IMAGENET1K_V1``; these are downloaded once.
        name: the name of `model`, as `build_model` knows it.

    Raises:
        NeuroFluxError: there is no such source, it cannot be read, or not one tensor fits.
    """
    path = _download(source, name) if source.startswith("torchvision:") else Path(source).expanduser()
    if not path.exists():
        raise NeuroFluxError(f"--init {source}: there is no such file or folder")
    found = _tensors(read_tensors(path / "model.pt" if path.is_dir() else path), source)
    wanted = {key: tensor for key, tensor in model.state_dict(keep_vars=True).items() if tensor.is_floating_point()}
    found = _renamed(found, wanted)
    loaded, missing, unfit = [], [], []
    with torch.no_grad():
        for key, tensor in wanted.items():
            if key not in found:
                missing.append(key)
            elif found[key].shape != tensor.shape:
                unfit.append(f"{key} ({_size(found[key])} there, {_size(tensor)} here)")
            else:
                tensor.copy_(found[key])
                loaded.append(key)
    if not loaded:
        raise NeuroFluxError(
            f"--init {source}: none of its {len(found)} tensors ({', '.join(list(found)[:3])}, ...) fits {name}, whose "
            f"tensors are {', '.join(list(wanted)[:3])}, ...; give weights of the same model"
        )
    unused = [key for key in found if key not in wanted and found[key].is_floating_point()]
    return Loaded(source, loaded, missing, unfit, unused)


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the dictionary of tensors and plain values in the file `path`; its tensors stay mapped, not copied.

    Raises:
        NeuroFluxError: it is missing, damaged, or holds anything else (such as pickled code, which is never run).
    """
    if not path.is_file():
        raise NeuroFluxError(f"there is no file {path}; has the run finished?")
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:  # torch itself does not look at checksums
                raise ValueError(damaged)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise NeuroFluxError(
            f"cannot read {path}: it is damaged, or holds more than tensors and plain values ({type(error).__name__}); "
            f"files older than torch 1.6 must be saved again"
        ) from error
    if not isinstance(content, dict):
        raise NeuroFluxError(f"{path} is not a NeuroFlux file")
    return content


def _tensors(content: dict[str, Any], source: str) -> dict[str, torch.Tensor]:
    """Return the tensors by name, out of what they may be wrapped in."""
    for key in _KEYS:
        if isinstance(content.get(key), Mapping):
            content = dict(content[key])
    tensors = {str(key): value for key, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise NeuroFluxError(f"--init {source}: it holds no tensors by name; save model.state_dict()")
    return tensors


def _renamed(found: dict[str, torch.Tensor], wanted: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return `found` without the prefixes that hide the names in `wanted`."""

    def matches(tensors: Mapping[str, object]) -> int:
        return sum(key in wanted for key in tensors)

    candidates = [found]
    for _ in range(2):  # Lightning around DistributedDataParallel
        candidates += [{re.sub(f"^{p}", "", key): v for key, v in c.items()} for c in candidates for p in _PREFIXES]
    return max(candidates, key=matches)


def _size(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "1"


def _download(source: str, name: str) -> Path:
    """Return the file of torchvision's weights `source`, downloaded where it is not there yet."""
    wanted = source.removeprefix("torchvision:")
    try:
        if "." in wanted:
            weights = torchvision.models.get_weight(wanted)
        else:
            weights = torchvision.models.get_model_weights(torchvision_name(name))[wanted]
    except (ValueError, KeyError, NeuroFluxError) as error:
        raise NeuroFluxError(
            f"--init {source}: torchvision has no such weights for {name}; write torchvision:DEFAULT, or a full name "
            f"such as torchvision:ResNet18_Weights.IMAGENET1K_V1"
        ) from error
    path = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rsplit("/", 1)[-1]
    if not path.exists():
        digest = re.search(r"-([0-9a-f]{8,})\.", path.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(weights.url, str(path), digest.group(1) if digest else None, progress=False)
        except (URLError, OSError, RuntimeError) as error:
            raise NeuroFluxError(
                f"--init {source}: cannot download {weights.url} ({error}); put the file there by hand: {path}"
            ) from error
    return path
