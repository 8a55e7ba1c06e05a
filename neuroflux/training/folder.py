"""The run folder: where a run leaves what it made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from neuroflux.config import Config
from neuroflux.errors import NeuroFluxError


def open_folder(config: Config, name: str) -> Path:
    """Return the run folder, made new, or the one to resume.

    Raises:
        NeuroFluxError: it already holds a run, holds none to resume, or cannot be written.
    """
    folder = Path(config.out) if config.out else Path("runs") / name
    if config.resume:
        if not (folder / "plan.json").is_file():
            raise NeuroFluxError(f"{folder} holds no run to resume: name its folder with --out, or leave --resume out")
        return folder
    if not config.out:
        tries = (folder, *(folder.with_name(f"{folder.name}-{k}") for k in range(2, 10_000)))
        folder = next(path for path in tries if not _holds_run(path))
    elif _holds_run(folder):
        raise NeuroFluxError(f"{folder} already holds a run: add --resume to go on with it, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise NeuroFluxError(
            f"cannot write to the run folder {folder}: {error.strerror}; choose another --out"
        ) from error
    return folder


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "plan.json", "summary.json"))


def leave_nothing(folder: Path) -> None:
    """Delete what a run wrote to its folder before it had a plan; a run that has one is kept."""
    if (folder / "plan.json").exists():
        return
    for path in [folder / "config.yaml", folder / "metrics.jsonl", *folder.glob("events.out.tfevents.*")]:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "weights", ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
