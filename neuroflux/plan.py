"""Profile a model and print the plan for a budget; trains nothing: ``python -m neuroflux.plan --budget 512MB``."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from neuroflux.config import Config, parse_with, run_main
from neuroflux.inputs.arrays import write_json
from neuroflux.results.report import budgets_table, plan_table
from neuroflux.training.pipeline import Run


@dataclass
class Output:
    """How the plan is shown.

    Args:
        json: Print nothing but the plan, as JSON for programs; all sizes are bytes, all times seconds.
    """

    json: bool = False


def plan(config: Config, output: Output) -> None:
    """Print the plan for `config`; with ``--out FOLDER`` also save it as FOLDER/plan.json, for ``--plan``."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(config, Path(scratch), [])
        try:
            made = run.prepare()
            others = run.other_budgets()
        finally:
            run.close()
    if output.json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        print(plan_table(made))
        if others:
            print(f"\nwhat other budgets would buy:\n{budgets_table(made, others)}")
    if config.out:
        Path(config.out).mkdir(parents=True, exist_ok=True)
        write_json(Path(config.out) / "plan.json", made.to_dict())
        print(f"saved: {Path(config.out) / 'plan.json'}  (follow it with --plan)", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_main(lambda: plan(*parse_with("neuroflux.plan", __doc__, given, Output, set())), given)


if __name__ == "__main__":
    sys.exit(main())
