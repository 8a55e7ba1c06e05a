"""Train a CNN inside a memory budget: ``python -m neuroflux.train --budget 512MB``."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

from neuroflux.config import Config, run_command
from neuroflux.errors import NeuroFluxError
from neuroflux.results.progress import Progress
from neuroflux.results.report import read_summary, render, write_report
from neuroflux.results.trace import Trace
from neuroflux.results.tracking import Tracking
from neuroflux.training.folder import check_seals, held, leave_nothing, open_folder, seal
from neuroflux.training.observer import Observer
from neuroflux.training.pipeline import Run


def train(config: Config) -> None:
    """Train as `config` says, and leave all that came of it in the run folder."""
    data = Path(config.data).stem if "/" in config.data or "." in config.data else config.data
    config.resume = config.resume or _asked_to_resume(config.out)
    folder = open_folder(config, f"{config.model.replace(':', '.')}-{data}-{config.method}-{config.budget}")
    with held(folder):
        _train_in(folder, config)


def _asked_to_resume(out: str | None) -> bool:
    """Return whether someone at a terminal, asked about the run in `out` that is not finished, wants to go on."""
    folder = Path(out or "")
    unfinished = (folder / "config.yaml").is_file() and not (folder / "summary.json").exists()
    if not (out and unfinished and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(f"{folder} holds a run that is not finished. Go on with it? [Y/n] ").strip().lower() in (
            "",
            "y",
            "yes",
        )
    except EOFError:
        return False


def _train_in(folder: Path, config: Config) -> None:
    if config.resume:
        config = _resumed(config, folder)
    else:
        config.save(folder / "config.yaml")
        seal(folder)
    if config.resume and (folder / "summary.json").is_file():
        write_report(folder)
        print(f"{folder} is finished already:\n\n{render(read_summary(folder))}")
        return
    print(f"run folder: {folder}", flush=True)
    print(f"budget: {config.budget} = {config.budget_bytes:,} bytes", flush=True)
    observers: list[Observer] = [Tracking(folder), Progress(config.budget_bytes)]
    if config.profile_trace:
        observers.append(Trace(folder))
    run = Run(config, folder, observers)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        run.prepare()
        run.train()
        write_report(folder)
        print(f"model, report and TensorBoard events: {folder}  (tensorboard --logdir {folder.parent})")
    except NeuroFluxError:
        _close(observers)
        leave_nothing(folder)
        raise
    except KeyboardInterrupt as stop:
        _close(observers)
        how, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"\nneuroflux: {how}; {run.kept()}; continue with --resume --out {folder}", file=sys.stderr)
        raise SystemExit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        _close(observers)
        run.close()


class Terminated(KeyboardInterrupt):
    """SIGTERM: what batch schedulers and services send before they kill."""


def _terminated(*_: object) -> None:
    raise Terminated


def _of_thread(trouble: threading.ExceptHookArgs, shown: Any = threading.excepthook) -> None:
    """Keep quiet about the disk: TensorBoard's writer raises what its thread met again where it is used."""
    if not issubclass(trouble.exc_type, OSError):
        shown(trouble)


def _close(observers: list[Observer]) -> None:
    for observer in observers:
        observer.close()


def _resumed(config: Config, folder: Path) -> Config:
    """Return the settings of the run in `folder`, following its plan where it has one."""
    planned = check_seals(folder)
    saved = Config.from_yaml(folder / "config.yaml")
    saved.out, saved.resume, saved.debug = str(folder), True, config.debug
    saved.plan = str(folder / "plan.json") if planned else saved.plan
    return saved


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    threading.excepthook = _of_thread
    return run_command("neuroflux.train", __doc__, train, arguments)


if __name__ == "__main__":
    sys.exit(main())
