"""The summary: all that a finished run has to say, as plain values for ``summary.json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from neuroflux.config import Config
from neuroflux.inputs.datasets import Data
from neuroflux.planning.memory import Meter
from neuroflux.planning.partitioner import Plan
from neuroflux.training.checkpoint import BlockResult


def summarise(
    config: Config,
    data: Data,
    plan: Plan,
    meter: Meter,
    results: list[BlockResult],
    tuned: BlockResult | None,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Return what is known of a run once its blocks are trained: settings, memory, blocks, exits and times.

    Args:
        tuned: how fine-tuning went.
        seconds: of each phase of the run.
    """
    return {
        "budget": {"asked": config.budget, "bytes": config.budget_bytes},
        "peak": {
            "predicted": plan.peak,
            "measured": max([meter.highest, *(result.peak for result in results)]),
            "what": meter.what,
        },
        "method": config.method,
        "frozen": config.freeze,
        "data": data.name,
        "images": {"train": len(data.train), "val": len(data.val), "test": len(data.test or [])},
        "layers": plan.layers,
        "head_widths": plan.head_widths,
        "blocks": [
            {
                **asdict(block),
                **asdict(result),
                "planned_batch": block.batch,
                "gigaflops": _rates(plan.layer_flops[block.first :], result, len(data.train)),
            }
            for block, result in zip(plan.blocks, results, strict=False)
        ],
        "planned_blocks": len(plan.blocks),
        "exits": [accuracy for result in results for accuracy in result.accuracies],
        "finetuned": asdict(tuned) if tuned else None,
        "curve": _curve([*results, *([tuned] if tuned else [])]),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "precision": plan.precision,
        "channels_last": plan.channels_last,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seed": config.seed,
    }


def _rates(flops: list[float], result: BlockResult, images: int) -> list[float]:
    """Return the achieved 10^9 floating-point operations a second of each layer that was trained."""
    layers = result.parts.get("layers", [])
    return [flops[k] * images / taken / 1e9 if taken else 0.0 for k, taken in enumerate(layers)]


def _curve(results: list[BlockResult]) -> list[dict[str, Any]]:
    """Return, after every pass, the accuracy of the best exit so far (by validation) and when that was.

    Each has ``seconds`` and ``passes`` since the start, ``val``, and ``test`` where each pass was tested.
    """
    points: list[dict[str, Any]] = []
    best: tuple[float, float | None] = (0.0, None)  # of finished blocks
    for result in results:
        here = best
        for point in result.curve:
            index = max(range(len(point["val"])), key=point["val"].__getitem__)
            here = (point["val"][index], point["test"][index] if "test" in point else None)
            val, test = max(best, here, key=lambda pair: pair[0])
            points.append({"seconds": point["seconds"], "passes": len(points) + 1, "val": val, "test": test})
        best = max(best, here, key=lambda pair: pair[0])
    return points
