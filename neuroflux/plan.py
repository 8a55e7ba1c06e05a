"""Profile a model and print the plan for a budget; trains nothing: ``python -m neuroflux.plan --budget 512MB``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from neuroflux.config import Config, run_command
from neuroflux.inputs.arrays import write_json
from neuroflux.results.report import plan_table
from neuroflux.training.pipeline import Run


def plan(config: Config) -> None:
    """Print the plan for `config`; with ``--out FOLDER`` also save it as FOLDER/plan.json, for ``--plan``."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(config, Path(scratch), [])
        try:
            made = run.prepare()
        finally:
            run.close()
    print(plan_table(made))
    if config.out:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        write_json(Path(config.out) / "plan.json", made.to_dict())
        print(f"saved: {Path(config.out) / 'plan.json'}  (follow it with --plan)")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return run_command("neuroflux.plan", __doc__, plan, arguments)


if __name__ == "__main__":
    sys.exit(main())
