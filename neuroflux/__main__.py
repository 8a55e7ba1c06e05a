"""The ``neuroflux`` program: ``neuroflux train`` is ``python -m neuroflux.train``, and so on."""

from __future__ import annotations

import difflib
import importlib
import sys

COMMANDS = {
    "train": "train a CNN inside a memory budget",
    "plan": "profile a model and print the plan for a budget",
    "compare": "train by several methods under several budgets, and draw the difference",
    "dashboard": "show runs in TensorBoard",
    "evaluate": "measure a finished run's model on its test images again",
    "clean": "list what dead runs have left on the disk, and delete it",
}


def main() -> int:
    """Hand the rest of the command line to the command that it names, and return its exit code."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        return int(importlib.import_module(f"neuroflux.{name}").main())
    usage = "usage: neuroflux COMMAND [--help]\n\n" + "\n".join(f"  {key:10} {text}" for key, text in COMMANDS.items())
    if name in ("-h", "--help"):
        print(usage)
        return 0
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
    print(f"neuroflux: unknown command {name!r}; {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
