"""Models by name: small-image VGGs and ResNets, torchvision's CNNs, or a factory of the user's own.

>>> model = build_model("vgg16", num_classes=10, in_channels=3, image_size=32)           # doctest: +SKIP
>>> model = build_on_disk(lambda: build_model("vgg16", num_classes=10, in_channels=3, image_size=32), Path("weights"))
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import tempfile
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torchvision.models.vgg import cfgs as VGG_CONFIGS

from neuroflux.errors import NeuroFluxError

# at this image size and above, a small-form name means torchvision's own model
LARGE_IMAGE = 96
SMALL_VGG = {"vgg11": "A", "vgg13": "B", "vgg16": "D", "vgg19": "E"}
SMALL_RESNET = ("resnet18", "resnet34")
_TIMM = "timm:"
# torchvision's classification models that are not CNNs
TRANSFORMERS = ("vit_", "swin_", "maxvit_")


def build_model(name: str, *, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a new model that maps images (n, c, image_size, image_size) to scores (n, num_classes).

    c is `input_channels(name, image_size, in_channels)`: `in_channels`, or 3 where the model takes nothing else.

    Args:
        name: one of
            vgg11, vgg13, vgg16, vgg19, resnet18, resnet34: their small-image (CIFAR) form where `image_size` < 96,
            otherwise torchvision's (VGG with batch norm);
            the name of another torchvision CNN, or `torchvision:NAME`, which always means torchvision's own;
            `timm:NAME`: one of timm's, where that is installed;
            `package.module:factory`: your own, found from the current folder too. It is called with `num_classes`,
            and with `in_channels` and `image_size` if it has parameters of these names.
        num_classes: number of scores per image.
        in_channels: channels of the images, such as 1 (grey) or 3.
        image_size: height and width of the images, in pixels.

    Raises:
        NeuroFluxError: unknown name, not a CNN, channels the model cannot take, or a factory that fails.
    """
    for argument, value in (("num_classes", num_classes), ("in_channels", in_channels), ("image_size", image_size)):
        if value < 1:
            raise NeuroFluxError(f"model {name}: {argument} is {value}; it must be at least 1")
    input_channels(name, image_size, in_channels)  # refuses what the model cannot take
    if _is_users(name):
        return _build_users(name, num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    if name.startswith(_TIMM):
        return _build_timm(name, num_classes, in_channels)
    if image_size < LARGE_IMAGE and name in SMALL_VGG:
        return _small_vgg(SMALL_VGG[name], num_classes, in_channels, image_size)
    if image_size < LARGE_IMAGE and name in SMALL_RESNET:
        return _small_resnet(name, num_classes, in_channels)
    own_name = torchvision_name(name)
    # auxiliary classifiers are backpropagation's own remedy; a chain has a head on every layer
    options = {"aux_logits": False, "init_weights": False} if own_name in ("googlenet", "inception_v3") else {}
    return torchvision.models.get_model(own_name, weights=None, num_classes=num_classes, **options)


def input_channels(name: str, image_size: int, in_channels: int) -> int:
    """Return how many channels the model that `build_model` makes takes: `in_channels`, or 3.

    Where this is 3 and the images are grey (`in_channels` 1), repeat their channel three times.

    Raises:
        NeuroFluxError: unknown name, or the model takes only 3 channels and the images have neither 1 nor 3.
    """
    if _is_users(name):
        native = "in_channels" in _signature(name, _load_factory(name)).parameters
        remedy = "give the factory an in_channels parameter"
    elif name.startswith(_TIMM):
        return in_channels
    else:
        torchvision_name(name)
        native = image_size < LARGE_IMAGE and (name in SMALL_VGG or name in SMALL_RESNET)
        remedy = "use a factory of your own (package.module:factory)"
    if native:
        return in_channels
    if in_channels not in (1, 3):
        raise NeuroFluxError(f"model {name} takes images of 3 channels, these have {in_channels}; {remedy}")
    return 3


def build_on_disk(build: Callable[[], nn.Module], path: Path) -> nn.Module:
    """Return `build()`, with its parameters and floating-point buffers in mapped files in the folder `path`.

    Each tensor is moved as it is registered, so that the model's own initialisation runs in the file: anonymous
    memory holds about one tensor at a time, never the model. Parameters keep their identity, so tied ones stay tied.
    The files have no name any more when this returns (the model keeps them open, and they go with it), so nothing is
    left to clean up. `path` should be on a real disk: what tmpfs holds is memory. Not safe beside another thread that
    builds a module at the same time.

    Raises:
        NeuroFluxError: `path` cannot be written or is full; and whatever `build` raises.
    """
    _make_folder(path)

    def move(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            _move_to_file(tensor, path)

    handles = [register_module_parameter_registration_hook(move), register_module_buffer_registration_hook(move)]
    try:
        model = build()
    finally:
        for handle in handles:
            handle.remove()
    # what was given new data after its registration: `.half()`, `p.data = ...`, deepcopy
    return rest_on_disk(model, path)


def rest_on_disk(model: nn.Module, path: Path) -> nn.Module:
    """Return `model`, its parameters and floating-point buffers moved into mapped files as `build_on_disk` does.

    The tensors keep their identity; their values and the rest of the model are as before.

    Raises:
        NeuroFluxError: `path` cannot be written or is full.
    """
    _make_folder(path)
    for tensor in [*model.parameters(), *model.buffers()]:
        _move_to_file(tensor, path)
    return model


def describe_failure(error: BaseException) -> str:
    """Return `Type: message (file.py:line)` in one line; the place is the deepest frame outside torch and NeuroFlux."""
    message = " ".join(str(error).split())
    if len(message) > 300:
        message = message[:297] + "..."
    packages = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)), "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(packages)]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{place}"


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NeuroFluxError(
            f"cannot make the folder {path} for the model's weights: {error.strerror}; choose another folder"
        ) from error


def _move_to_file(tensor: Tensor, folder: Path) -> None:
    """Put the values of a floating-point CPU tensor into a mapped file; leave other tensors as they are."""
    if (
        is_lazy(tensor)
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or not (tensor.is_floating_point() or tensor.is_complex())
        or tensor.numel() == 0
        or tensor.untyped_storage().filename is not None
    ):
        return
    nbytes = tensor.numel() * tensor.element_size()
    try:
        descriptor, file = tempfile.mkstemp(dir=folder, suffix=".weights")
        try:
            _reserve(descriptor, nbytes)
            storage: Any = torch.UntypedStorage.from_file(file, shared=True, nbytes=nbytes)
        finally:
            os.close(descriptor)
            os.unlink(file)
    except OSError as error:
        raise NeuroFluxError(
            f"no space for the model's weights in {folder}: {error.strerror} (a tensor of {nbytes / 1e6:.1f} MB); "
            "free some disk or choose another folder"
        ) from error
    strides = torch.empty_like(tensor, device="meta").stride()  # dense, in the tensor's own memory format
    with torch.no_grad():
        mapped = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size(), strides)
        mapped.copy_(tensor)
        tensor.data = mapped


def _reserve(descriptor: int, nbytes: int) -> None:
    """Take `nbytes` of disk: a mapping of a sparse file on a full disk ends the process (SIGBUS), not with an error."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:  # macOS
        for start in range(0, nbytes, 1 << 20):
            os.write(descriptor, bytes(min(1 << 20, nbytes - start)))


def _small_vgg(config: str, num_classes: int, in_channels: int, image_size: int) -> nn.Sequential:
    features: list[nn.Module] = []
    channels, size = in_channels, image_size
    for entry in VGG_CONFIGS[config]:
        if isinstance(entry, int):
            conv = nn.Conv2d(channels, entry, 3, padding=1, bias=False)  # the norm has the bias
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            features += [conv, nn.BatchNorm2d(entry), nn.ReLU(inplace=True)]
            channels = entry
        elif size > 1:
            features.append(nn.MaxPool2d(2))
            size //= 2
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Linear(channels, num_classes),
        )
    )


def _small_resnet(name: str, num_classes: int, in_channels: int) -> nn.Module:
    model = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    model.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


def torchvision_name(name: str) -> str:
    """Return torchvision's own name for `name`: `vgg16` (large) -> `vgg16_bn`, `torchvision:vgg16` -> `vgg16`."""
    models = torchvision.models.list_models(module=torchvision.models)
    own_name = name.removeprefix("torchvision:")
    if own_name not in models:
        cnns = [model for model in models if not model.startswith(TRANSFORMERS)]
        hint = _nearest(own_name, cnns) or "; such as vgg16, resnet18, mobilenet_v2"
        raise NeuroFluxError(f"unknown model {name!r}{hint}; your own model is package.module:factory")
    if own_name.startswith(TRANSFORMERS):
        raise NeuroFluxError(f"{name} is a vision transformer and NeuroFlux trains CNNs; try convnext_tiny or resnet50")
    return f"{name}_bn" if name in SMALL_VGG else own_name


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), candidates, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _is_users(name: str) -> bool:
    return ":" in name and not name.startswith(("torchvision:", _TIMM))


def _build_timm(name: str, num_classes: int, in_channels: int) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise NeuroFluxError(f"model {name}: timm is not installed: pip install 'neuroflux[timm]'") from error
    own_name = name.removeprefix(_TIMM)
    if own_name not in (known := timm.list_models()):
        raise NeuroFluxError(f"unknown model {name!r}{_nearest(own_name, known) or '; timm.list_models() names all'}")
    try:
        model: nn.Module = timm.create_model(own_name, num_classes=num_classes, in_chans=in_channels)
    except Exception as error:
        raise NeuroFluxError(f"model {name}: timm cannot build it: {describe_failure(error)}") from error
    return model


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _load_factory(name: str) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    try:
        with _current_folder_on_path():
            importlib.invalidate_caches()
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise NeuroFluxError(
                f"model {name}: there is no module {error.name!r} in {os.getcwd()} or among the installed packages"
            ) from error
        raise NeuroFluxError(f"model {name}: importing {module_name} failed: {describe_failure(error)}") from error
    except (Exception, SystemExit) as error:
        raise NeuroFluxError(f"model {name}: importing {module_name!r} failed: {describe_failure(error)}") from error
    factory = getattr(module, attribute, None)
    if factory is None:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = _nearest(attribute, callables) or (f"; it has {', '.join(callables[:5])}" if callables else "")
        raise NeuroFluxError(f"model {name}: the module {module_name} has no {attribute!r}{hint}")
    if not callable(factory):
        raise NeuroFluxError(f"model {name}: {attribute} is a {type(factory).__name__}, not a function or a class")
    return factory


def _signature(name: str, factory: Callable[..., object]) -> inspect.Signature:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError) as error:
        raise NeuroFluxError(f"model {name}: cannot read the factory's parameters; write it as a function") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if "num_classes" not in signature.parameters and not takes_any:
        raise NeuroFluxError(f"model {name}: the factory must take num_classes; it takes {signature}")
    return signature


def _build_users(name: str, **arguments: int) -> nn.Module:
    factory = _load_factory(name)
    accepted = _signature(name, factory).parameters
    arguments = {key: value for key, value in arguments.items() if key == "num_classes" or key in accepted}
    try:
        with _current_folder_on_path():
            model = factory(**arguments)
    except NeuroFluxError:
        raise
    except (Exception, SystemExit) as error:
        raise NeuroFluxError(f"model {name}: the factory failed: {describe_failure(error)}") from error
    if not isinstance(model, nn.Module):
        raise NeuroFluxError(f"model {name}: the factory returned a {type(model).__name__}, not a torch.nn.Module")
    if any(is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        raise NeuroFluxError(f"model {name}: it has lazy layers (nn.Lazy...); give their sizes instead")
    return model
