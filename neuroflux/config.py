"""What a user may set: one typed configuration, the same names on the command line, in YAML and in Python."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jsonargparse
import torch
import yaml

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import write_text
from neuroflux.planning.losses import LOSSES
from neuroflux.planning.memory import parse_bytes
from neuroflux.planning.methods import METHODS, Method

CHOICES = {
    "method": tuple(METHODS),
    "compression": ("int8", "bf16"),
    "head": ("conv", "auglocal"),
    "local_loss": tuple(LOSSES),
    "partitioner": ("exact", "greedy"),
    "optimizer": ("sgd", "adamw"),
    "cache_dtype": ("fp16", "bf16", "fp32", "int8"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "augment": ("auto", "none", "crop", "flip+crop"),
}


@dataclass
class Config:
    """Settings of a run.

    Args:
        budget: Memory that training may use on the device: 512MB, 512MiB, 1.5GB, 0.5g or plain bytes.
        model: vgg11|13|16|19, resnet18|34 (small-image form below 96 pixels), any CNN of torchvision by name, one of
            timm's as timm:NAME, or your own package.module:factory.
        data: digits (embedded), a torchvision data set by name (cifar10, mnist, ...), an image folder, or an .npz file.
        data_root: Folder for downloaded and converted data sets.
        image_size: Side of the square images that a folder's images are brought to (default: theirs, or their median).
        init: Trained weights to start from: a file of tensors, the folder of an earlier run, or torchvision:DEFAULT (or
            torchvision:ResNet18_Weights.IMAGENET1K_V1, ...); matched by name and shape.
        freeze: So many first layers keep their weights; what they put out is cached once.
        method: How to train: neuroflux, or to compare with it backprop, accumulate (gradients added up over batches
            that fit), checkpoint (activations computed again), compressed (activations kept in fewer bits), local
            (classic local learning).
        compression: What --method compressed keeps activations in.
        gradient_span: How many consecutive layers learn together from one head: layer (each from its own), a number,
            or auto, as many as the budget allows; with a budget for everything that is backpropagation.
        head: What layers learn from: conv (one small convolution, as wide as suits the layer), or auglocal (a few, like
            the layers to come).
        epochs: Passes over the training images that every layer learns for.
        stagger: A layer of a block begins so many passes after the one before it, and thus learns from features that
            are no longer new; 0 starts all at once.
        cache_views: How many randomly changed views of every training image a cache holds; more cost disk and the time
            to write them, and blocks then learn from more than one form of an image. 0 caches nothing: every pass runs
            newly changed images through the finished layers.
        cache_dtype: What cached features are kept as: int8 takes half the disk of fp16 and bf16, fp32 twice as much.
        batch_limit: Largest batch size that a plan may use; for --method accumulate, the images of one update.
        lr: Highest learning rate for batches of 32; larger and smaller batches scale it by the square root (default:
            one that suits the method and the optimizer).
        optimizer: sgd (with Nesterov momentum) or adamw.
        weight_decay: Weight decay of convolution and linear weights.
        local_loss: What layers learn by: pred (cross-entropy), sim (features as alike as their labels are), or predsim
            (both).
        label_smoothing: Label smoothing of the local losses.
        augment: Random changes of training images; auto is what suits the data set.
        precision: What to compute in; auto measures which is faster here.
        partitioner: How layers are grouped into blocks: exact (least predicted time) or greedy (the paper's rule).
        finetune: Passes in which the chosen model is trained end to end at the end, where the budget allows it; undone
            where that does not raise its validation accuracy.
        tolerance: The shallowest exit within this much of the best validation accuracy becomes the model.
        min_gain: Training stops when a block improves the best validation accuracy by less than this.
        lookahead: Deeper layers of a block begin only up to this many beyond the best exit; a large number trains all.
        seed: Seed of everything random.
        device: auto, cpu, cuda, cuda:1, ...
        threads: CPU threads to compute with (default: all cores).
        plan: A plan.json to follow instead of making one.
        out: Run folder (default: runs/MODEL-DATA-BUDGET).
        resume: Go on with the run in the run folder, after its last finished pass.
        limit_train: Use only so many training images.
        limit_val: Use only so many validation images.
        limit_test: Use only so many test images.
        test_each_pass: Measure test accuracy after every pass too, with the clock stopped; nothing is chosen by it.
        fresh_profile: Measure the layers again, rather than plan from what an earlier run with the same settings
            measured.
        profile_trace: Record a few steps of every block in the run folder's trace/, for chrome://tracing; its buffers
            count as memory of the run.
        debug: Show the traceback of an error.
    """

    budget: str = "512MB"
    model: str = "vgg11"
    data: str = "digits"
    data_root: str = "~/.cache/neuroflux"
    image_size: int | None = None
    init: str | None = None
    freeze: int = 0
    method: str = "neuroflux"
    compression: str = "int8"
    gradient_span: str = "layer"
    head: str = "conv"
    epochs: int = 5
    stagger: int = 1
    cache_views: int = 1
    cache_dtype: str = "fp16"
    batch_limit: int = 64
    lr: float | None = None
    optimizer: str = "sgd"
    weight_decay: float = 5e-4
    local_loss: str = "pred"
    label_smoothing: float = 0.0
    augment: str = "auto"
    precision: str = "auto"
    partitioner: str = "exact"
    finetune: int = 0
    tolerance: float = 0.005
    min_gain: float = 0.005
    lookahead: int = 3
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    plan: str | None = None
    out: str | None = None
    resume: bool = False
    limit_train: int | None = None
    limit_val: int | None = None
    limit_test: int | None = None
    test_each_pass: bool = False
    fresh_profile: bool = False
    profile_trace: bool = False
    debug: bool = False

    def check(self) -> None:
        """Raise NeuroFluxError for the first value that makes no sense, saying which do."""
        parse_bytes(self.budget)
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        at_least = {
            "epochs": 1,
            "batch_limit": 2,
            "threads": 1,
            "image_size": 8,
            "seed": 0,
            "lookahead": 0,
            "stagger": 0,
            "cache_views": 0,
            "freeze": 0,
            "finetune": 0,
        }
        at_least |= {"limit_train": 2, "limit_val": 1, "limit_test": 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise NeuroFluxError(f"--{name} {value} is too small: it must be at least {least}")
        at_most = {
            "seed": 10**9,
            "image_size": 4096,
            "threads": 4 * (os.cpu_count() or 1),
            "stagger": 1000,
            "cache_views": 1000,
        }
        for name, most in at_most.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise NeuroFluxError(f"--{name} {value} is too large: it must be at most {most}")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise NeuroFluxError(f"--lr {self.lr} makes no sense: it must be above 0")
        if self.gradient_span not in ("layer", "auto") and not (
            str(self.gradient_span).isascii() and str(self.gradient_span).isdecimal() and int(self.gradient_span) > 0
        ):
            raise NeuroFluxError(
                f"--gradient_span {self.gradient_span!r} makes no sense: write layer, auto or a number of layers"
            )
        for name in ("weight_decay", "label_smoothing", "tolerance", "min_gain"):
            if not 0 <= getattr(self, name) < 1:
                raise NeuroFluxError(f"--{name} {getattr(self, name)} makes no sense: it must be in [0, 1)")
        self.torch_device()

    def highest_lr(self, method: Method, share: float) -> float:
        """Return the highest learning rate for batches of 32: as set, or `share` of the one that suits `method`."""
        return method.lr[self.optimizer] * share if self.lr is None else self.lr

    @property
    def budget_bytes(self) -> int:
        """Return the budget in bytes."""
        return parse_bytes(self.budget)

    @property
    def cache_dtype_bytes(self) -> int:
        """Return the bytes that a number of a cached feature takes."""
        return {"int8": 1, "fp32": 4}.get(self.cache_dtype, 2)

    def torch_device(self) -> torch.device:
        """Return the device that `device` names; ``auto`` is the accelerator where there is one."""
        if self.device == "auto":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            return accelerator if accelerator is not None else torch.device("cpu")
        try:
            device = torch.device(self.device)
            if device.type != "cpu":
                torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise NeuroFluxError(f"--device {self.device!r} cannot be used here: {reason}") from error
        return device

    def save(self, path: Path) -> None:
        """Write the settings as YAML that ``--config`` reads."""
        write_text(path, yaml.safe_dump(asdict(self), sort_keys=False))

    @classmethod
    def from_yaml(cls, path: Path) -> Config:
        """Return the settings in the YAML file `path`.

        Raises:
            NeuroFluxError: the file is missing, not YAML, or has a setting that does not exist.
        """
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            config = cls(**values)
        except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
            raise NeuroFluxError(f"cannot read the settings in {path}: {' '.join(str(error).split())}") from error
        config.check()
        return config


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise NeuroFluxError unless `value`, given for ``--name``, is one of `allowed`; the nearest is suggested."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise NeuroFluxError(f"--{name} {value!r} is none of {', '.join(allowed)}{hint}")


# what the system refuses and the user can mend: a full, read-only or foreign disk
_OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_SWITCHES = {field.name for field in fields(Config) if field.type == "bool"}


class _Parser(jsonargparse.ArgumentParser):
    """Reports a bad command line in one line."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        text = " ".join(str(message).split())
        raise NeuroFluxError(f"{text[:300]}{_nearest_flag(text)}; --help lists all settings")


def _nearest_flag(message: str) -> str:
    """Return a hint at the setting that an unknown flag in `message` is nearest to."""
    words = [word.split("=")[0].lstrip("-") for word in message.replace(",", " ").split() if word.startswith("--")]
    names = [field.name for field in fields(Config)]
    for word in words:
        near = difflib.get_close_matches(word.replace("-", "_"), names, n=1)
        if word.replace("-", "_") not in names and near:
            return f"; did you mean --{near[0]}?"
    return ""


def parse(prog: str, description: str | None, arguments: list[str]) -> Config:
    """Return the configuration that the command line `arguments` gives; dashes in names count as underscores."""
    return parse_with(prog, description, arguments, None, set())[0]


def parse_with(
    prog: str, description: str | None, arguments: list[str], more: type[Any] | None, without: set[str]
) -> tuple[Config, Any]:
    """Return the configuration and an instance of the dataclass `more` of further settings.

    Args:
        without: settings of `Config` that this command does not take.
    """
    parser = _Parser(prog=prog, description=description, default_env=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of these settings")
    if more is not None:
        parser.add_class_arguments(more)
    parser.add_class_arguments(Config, skip=without)
    switches = _SWITCHES | {field.name for field in fields(more or Config) if field.type == "bool"}
    given = [_underscored(word, switches) for word in _joined(arguments, switches)]
    _check_files(given)
    values = parser.parse_args(given).as_dict()
    values.pop("config", None)
    names = {field.name for field in fields(more)} if more is not None else set()
    further = more(**{name: values.pop(name) for name in names}) if more is not None else None
    config = Config(**values)
    config.check()
    return config, further


def _check_files(words: list[str]) -> None:
    """Raise NeuroFluxError for a ``--config`` file that is missing or not YAML, naming it."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--config" or word.startswith("--config="):
            path = Path(word.partition("=")[2] or following)
            try:
                yaml.safe_load(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError) as error:
                raise NeuroFluxError(f"cannot read the settings in {path}: {' '.join(str(error).split())}") from error


def _joined(words: list[str], switches: set[str]) -> list[str]:
    """Return ``--flag value`` as one word where the value looks like a flag, or follows a switch."""
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        switch = before.startswith("--") and "=" not in before and before[2:].replace("-", "_") in switches
        if (switch and word.lower() in ("true", "false")) or (
            before.startswith("--") and "=" not in before and word[:1] == "-" and word[1:2].isdigit()
        ):
            joined[-1] = f"{before}={word}"
        else:
            joined.append(word)
    return joined


def _underscored(word: str, switches: set[str]) -> str:
    """Return ``--batch-limit=3`` as ``--batch_limit=3`` and the switch ``--resume`` as ``--resume=true``."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    flag = flag.replace("-", "_")
    if not equals and flag in switches:
        return f"--{flag}=true"
    return f"--{flag}{equals}{value}"


def one_line_errors(main: Callable[[], None], debug: bool) -> int:
    """Return the exit code of `main`: 0, or 2 with one line on stderr for an error that the user can mend."""
    try:
        main()
    except NeuroFluxError as error:
        if debug:
            raise
        print(f"neuroflux: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if debug or error.errno not in _OUTSIDE:
            raise
        place = f"{error.filename}: " if error.filename else ""
        print(f"neuroflux: {place}{error.strerror}; mend that (a run goes on with --resume)", file=sys.stderr)
        return 2
    return 0


def run_main(command: Callable[[], None], arguments: list[str]) -> int:
    """Run `command`, whose command line was `arguments`, and return the exit code."""
    return one_line_errors(command, "--debug" in arguments)


def run_command(
    prog: str, description: str | None, command: Callable[[Config], None], arguments: list[str] | None = None
) -> int:
    """Read the command line, run `command` with it, and return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_main(lambda: command(parse(prog, description, given)), given)
