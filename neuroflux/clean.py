"""List what dead runs have left on the disk, and delete it: ``python -m neuroflux.clean runs --delete``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from neuroflux.config import one_line_errors
from neuroflux.errors import NeuroFluxError
from neuroflux.planning.memory import format_bytes
from neuroflux.training.folder import leftovers, remove


def clean(folder: Path, delete: bool) -> None:
    """Print the leftovers in `folder`, and `delete` them."""
    if not folder.is_dir():
        raise NeuroFluxError(f"there is no folder {folder}; name the one that holds the runs")
    found = leftovers(folder)
    for path, size in found.items():
        print(f"{format_bytes(size):>10}  {path}")
    total = f"{format_bytes(sum(found.values()))} in {len(found)} leftovers of runs that are not being trained"
    if not found:
        print(f"{folder}: nothing is left over")
    elif delete:
        remove(list(found))
        print(f"deleted: {total}")
    else:
        print(f"{total}; --delete removes them (unfinished runs can still be resumed)")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="neuroflux.clean", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="what holds the runs (default: runs)"
    )
    parser.add_argument("--delete", action="store_true", help="delete what is listed")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(arguments)
    return one_line_errors(lambda: clean(given.folder, given.delete), given.debug)


if __name__ == "__main__":
    sys.exit(main())
