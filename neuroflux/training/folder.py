"""The run folder: where a run leaves what it made."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from neuroflux.config import Config
from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.arrays import write_json
from neuroflux.inputs.locks import Taken, is_locked, locked

LOCK = ".lock"
# the files that a run goes by, and where their checksums are
_SEALED, _SEALS = ("config.yaml", "plan.json"), Path("checkpoints/seals.json")


def open_folder(config: Config, name: str) -> Path:
    """Return the run folder, made new, or the one to resume.

    Raises:
        NeuroFluxError: it already holds a run, holds none to resume, or cannot be written.
    """
    folder = Path(config.out) if config.out else Path("runs") / name
    if config.resume:
        if not (folder / "config.yaml").is_file():
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


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from training in `folder`; a process that has died, however, keeps no one from it.

    Raises:
        NeuroFluxError: another process trains there.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / LOCK, wait=False))
        except Taken as error:
            raise NeuroFluxError(
                f"another process is training in {folder}: wait for it, or choose another --out"
            ) from error
        except OSError as error:
            raise NeuroFluxError(f"cannot write to the run folder {folder}: {error.strerror}") from error
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "plan.json", "summary.json"))


def seal(folder: Path) -> None:
    """Note the checksums of what a run goes by, so that `check_seals` can tell whether it is still the same."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_json(folder / _SEALS, {name: _checksum(folder / name) for name in _SEALED if (folder / name).is_file()})


def check_seals(folder: Path) -> bool:
    """Return whether the run in `folder` has a plan to go by; before it was made, nothing has been trained.

    Raises:
        NeuroFluxError: settings or plan are not those that the run began with.
    """
    try:
        sealed = json.loads((folder / _SEALS).read_text(encoding="utf-8"))
        if not isinstance(sealed, dict):
            raise ValueError("it is no list of checksums")
    except FileNotFoundError:
        sealed = {}
        if any((folder / "checkpoints").glob("*.pt")):
            raise NeuroFluxError(f"{folder / _SEALS} is missing: start the run again with another --out") from None
    except (OSError, ValueError) as error:
        raise NeuroFluxError(f"{folder / _SEALS} is damaged ({error}): start again with another --out") from error
    for name in _SEALED:
        if name in sealed and _checksum(folder / name) != sealed[name]:
            raise NeuroFluxError(
                f"{folder / name} is not what the run began with: it was edited or is damaged; put it back, or start "
                f"another run (a plan is followed with --plan)"
            )
    return "plan.json" in sealed


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def leave_nothing(folder: Path) -> None:
    """Delete what a run wrote to its folder before it had a plan; a run that has one is kept."""
    if (folder / "plan.json").exists():
        return
    for path in [
        folder / LOCK,
        folder / "config.yaml",
        folder / "metrics.jsonl",
        *folder.glob("events.out.tfevents.*"),
    ]:
        path.unlink(missing_ok=True)
    for name in ("weights", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def leftovers(folder: Path) -> dict[Path, int]:
    """Return what dead runs have left in and below `folder` that no finished run needs, with the bytes it takes.

    These are caches, mapped weights, unfinished files, and the last pass of finished runs. Without its cache, a run is
    still resumed: the cache is then written again. Runs that are being trained are left out, and links not followed.
    """
    found: dict[Path, int] = {}
    for config in sorted(folder.rglob("config.yaml")):
        run = config.parent
        if run.is_symlink() or is_locked(run / LOCK):
            continue
        finished = (run / "summary.json").is_file()
        candidates = [run / "cache", run / "weights", *run.rglob("*.tmp")]
        candidates += [run / "checkpoints" / "pass.pt"] * finished
        for path in candidates:
            inside = any(other in path.parents for other in found)
            if path.exists() and not path.is_symlink() and not inside:
                found[path] = _bytes(path)
    return found


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return sum(file.stat().st_size for file in files)


def remove(paths: list[Path]) -> None:
    """Delete files and folders.

    Raises:
        NeuroFluxError: one cannot be deleted.
    """
    for path in paths:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise NeuroFluxError(f"cannot delete {path}: {error.strerror}") from error
