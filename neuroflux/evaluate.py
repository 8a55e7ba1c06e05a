"""Measure a finished run's model on its test images again: ``python -m neuroflux.evaluate runs/x``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from neuroflux.config import Config, one_line_errors
from neuroflux.errors import NeuroFluxError
from neuroflux.results.report import read_summary
from neuroflux.training.evaluation import accuracy
from neuroflux.training.exits import load
from neuroflux.training.opening import open_named_data


def evaluate(folder: Path) -> None:
    """Print the test accuracy of the model in `folder` beside the one that its report gives."""
    summary = read_summary(folder)
    config = Config.from_yaml(folder / "config.yaml")
    device = torch.device(summary["evaluated_on"])
    model = load(folder).to(device)
    data = open_named_data(config)
    if data.test is None:
        raise NeuroFluxError(f"the data set {config.data} has no test images")
    measured = accuracy(model, data.test, int(summary["eval_batch"]), device)
    right, count = round(measured * len(data.test)), len(data.test)
    print(f"test accuracy {measured:.4f} ({right} of {count} images); the report says {summary['test_accuracy']:.4f}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="neuroflux.evaluate", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run folder")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(arguments)
    return one_line_errors(lambda: evaluate(given.folder), given.debug)


if __name__ == "__main__":
    sys.exit(main())
