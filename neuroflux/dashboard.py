"""Show runs in TensorBoard and print its address: ``python -m neuroflux.dashboard runs``."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from tensorboard import program

from neuroflux.config import run_main
from neuroflux.errors import NeuroFluxError


def serve(folder: Path, port: int, host: str) -> str:
    """Start TensorBoard on the runs in `folder` and return its address.

    Raises:
        NeuroFluxError: there are no runs in `folder`, or the port is taken.
    """
    if not any(folder.rglob("events.out.tfevents.*")):
        raise NeuroFluxError(f"{folder} holds no TensorBoard events; train with --out {folder}/NAME first")
    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(folder), "--port", str(port), "--host", host])
    try:
        return str(server.launch())
    except program.TensorBoardServerException as error:
        raise NeuroFluxError(f"cannot start TensorBoard on port {port}: {error.msg}; choose another --port") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="neuroflux.dashboard", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs"), help="run folder, or a folder of them")
    parser.add_argument("--port", type=int, default=6006, help="0: any that is free")
    parser.add_argument("--host", default="localhost", help="0.0.0.0 to be seen from other machines")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(arguments)

    def command() -> None:
        print(f"TensorBoard: {serve(given.folder, given.port, given.host)}  (Ctrl-C ends it)", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()

    return run_main(command, ["--debug"] * given.debug)


if __name__ == "__main__":
    sys.exit(main())
