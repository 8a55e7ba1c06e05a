"""The report: what a run did and what came out of it, in words and tables that a person understands at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from neuroflux.errors import NeuroFluxError
from neuroflux.planning.memory import format_bytes
from neuroflux.planning.partitioner import Plan

_MOVING = {
    "inputs": "augment, normalise, copy to the device",
    "waiting": "wait for data",
    "reading": "read data (beside training)",
}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table whose columns are aligned, so that it also reads well on a terminal."""
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    title = "| " + " | ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)) + " |"
    return "\n".join([title, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines])


def plan_table(plan: Plan) -> str:
    """Return the plan as a title and a table of its blocks."""
    rows = []
    for number, block in enumerate(plan.blocks, 1):
        layers = f"{block.first + 1}-{block.last + 1}" if block.last > block.first else f"{block.first + 1}"
        widths = plan.head_widths[block.first : block.last + 1]
        rows.append(
            [
                str(number),
                f"{layers} ({plan.layers[block.first]} .. {plan.layers[block.last]})",
                " ".join(str(width or "own") for width in widths),
                str(block.batch),
                "compact" if block.compact else "fast",
                format_bytes(block.peak),
                f"{block.epoch_seconds:.1f}" if block.passes else "frozen",
                format_bytes(block.cache_bytes) if block.cache_bytes else "-",
            ]
        )
    count = len(plan.blocks)
    title = (
        f"plan: {plan.model}, {len(plan.layers)} layer{'s' * (len(plan.layers) != 1)} "
        f"in {count} block{'s' * (count != 1)}; "
        f"budget {format_bytes(plan.budget)}, predicted peak {format_bytes(plan.peak)}, "
        f"floor {format_bytes(plan.floor)} ({plan.floor_layer}); "
        f"{plan.precision}{' channels-last' if plan.channels_last else ''}; at most {_duration(plan.seconds)}; "
        f"disk {format_bytes(plan.disk)}"
    )
    header = ["block", "layers", "head widths", "batch", "allocator", "peak", "s/pass", "cache"]
    return title + "\n" + table(header, rows)


def budgets_table(plan: Plan, others: list[tuple[int, Plan | None]]) -> str:
    """Return what other budgets than that of `plan` would buy, by the same profile."""
    rows = []
    for budget, other in sorted([*others, (plan.budget, plan)], key=lambda pair: pair[0]):
        if other is None:
            rows.append([format_bytes(budget), "below the floor", "", "", ""])
            continue
        batches = " ".join(str(block.batch) for block in other.blocks)
        rows.append(
            [
                format_bytes(budget),
                _duration(other.seconds),
                batches,
                format_bytes(other.peak),
                format_bytes(other.disk),
            ]
        )
    return table(["budget", "time at most", "batch of each block", "predicted peak", "disk"], rows)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def render(summary: dict[str, Any]) -> str:
    """Return the report of a finished run as Markdown; `summary` is what ``summary.json`` holds."""
    budget, peak = summary["budget"], summary["peak"]
    share = peak["measured"] / budget["bytes"]
    parameters, rates = summary["parameters"], summary["images_per_second"]
    images, calibration = summary["images"], summary["calibration"]
    test = summary["test_accuracy"]
    chosen = summary["chosen"]
    total = sum(summary["seconds"].values())
    lines = [
        f"# {summary['model']} on {summary['data']}" + f" by {summary['method']}" * (summary["method"] != "neuroflux"),
        "",
        f"- **Budget** {budget['asked']} = {budget['bytes']:,} bytes; **measured peak** "
        f"{format_bytes(peak['measured'])} ({share:.0%} of it), predicted "
        f"{format_bytes(peak['predicted'])}; counted: {peak['what']}",
        f"- **Chosen exit**: layer {chosen + 1} of {len(summary['layers'])} ({summary['layers'][chosen]}), "
        f"validation accuracy {summary['val_accuracy']:.4f}, "
        + (f"**test accuracy {test:.4f}**" if test is not None else "no test set"),
        f"- **Streamlined model**: {parameters['model']:,} parameters, "
        f"{parameters['full'] / max(1, parameters['model']):.1f}x fewer than the full model's {parameters['full']:,}; "
        f"{rates['model']:.0f} images/s at inference, {rates['model'] / rates['full']:.2f}x the full model's "
        f"{rates['full']:.0f}",
        *_finetuning(summary),
        f"- **Confidence**: scores are divided by {calibration['temperature']:.2f}, fitted to validation images; the "
        f"expected calibration error there is {calibration['error']:.3f} ({calibration['error_before']:.3f} before)",
        f"- {images['train']} training, {images['val']} validation and {images['test']} test images; "
        f"{summary['precision']}{', channels-last' if summary['channels_last'] else ''} on {summary['device']} "
        f"with {summary['threads']} threads, seed {summary['seed']}, torch {summary['torch']}",
        "",
        "## Blocks",
        "",
        _blocks(summary),
        "",
        "## Exits",
        "",
        _exits(summary),
        "",
        "## Where the time went",
        "",
        _times(summary, total),
        "",
        "A pass over the training images, by what it is spent on:",
        "",
        _parts(summary),
        "",
    ]
    return "\n".join(lines)


def _finetuning(summary: dict[str, Any]) -> list[str]:
    """Return the line about training the chosen model end to end, where that was done."""
    if not (tuned := summary["finetuned"]):
        return []
    before, after = summary["exits"][summary["chosen"]], tuned["accuracies"][0]
    said = "" if after > before else ", so it was undone"
    passes, batch = len(tuned["epoch_seconds"]), tuned["batch"]
    return [
        f"- **Fine-tuning**: {passes} passes of the chosen layers together, batch {batch}, "
        f"{sum(tuned['epoch_seconds']):.0f} s: validation accuracy {before:.4f} -> {after:.4f}{said}"
    ]


def _blocks(summary: dict[str, Any]) -> str:
    rows = []
    for number, block in enumerate(summary["blocks"], 1):
        seconds = block["epoch_seconds"]
        settled = seconds[:-1] or seconds  # layers have finished in the last pass
        per_pass = f"{sum(settled) / len(settled):.1f}" if settled else "frozen"
        widths = summary["head_widths"][block["first"] : block["first"] + len(block["accuracies"])]
        batch = str(block["batch"]) + (
            f" (planned {block['planned_batch']})" * (block["batch"] != block["planned_batch"])
        )
        rows.append(
            [
                str(number),
                f"{block['first'] + 1}-{block['first'] + len(block['accuracies'])}",
                " ".join(str(width or "own") for width in widths),
                batch,
                per_pass,
                format_bytes(block["peak"]),
            ]
        )
    text = table(["block", "layers", "head widths", "batch", "s/pass", "measured peak"], rows)
    for number, block in enumerate(summary["blocks"], 1):
        for count, what in (
            (block["failures"], "steps were made in halves, since the system had no memory for them"),
            (block["skipped"], "steps were skipped, since their loss was not finite"),
            (block["restarts"], "times training went back to an earlier pass, at a lower rate"),
        ):
            if count:
                text += f"\n\nBlock {number}: {count} {what}."
    trained, planned = len(summary["exits"]), len(summary["layers"])
    if trained < planned:
        text += f"\n\nLayers {trained + 1} to {planned} were not trained: no better exit was to be expected of them."
    return text


def _exits(summary: dict[str, Any]) -> str:
    rows = [
        [
            str(k + 1),
            summary["layers"][k],
            f"{accuracy:.4f}" if accuracy or k >= summary["frozen"] else "frozen",
            "chosen" if k == summary["chosen"] else "",
        ]
        for k, accuracy in enumerate(summary["exits"])
    ]
    return table(["exit", "layer", "validation accuracy", ""], rows)


def _times(summary: dict[str, Any], total: float) -> str:
    rows = [[name, f"{value:.1f}", f"{value / total:.1%}"] for name, value in summary["seconds"].items()]
    return table(["phase", "seconds", "share"], rows)


def _parts(summary: dict[str, Any]) -> str:
    """Return where a pass goes: each layer with its speed, and moving data (reading runs beside training)."""
    rows = []
    for number, block in enumerate(summary["blocks"], 1):
        if not block["epoch_seconds"]:  # frozen
            continue
        parts = block["parts"]
        whole = sum(parts["layers"]) + parts["inputs"] + parts["waiting"]
        for k, (seconds, speed) in enumerate(zip(parts["layers"], block["gigaflops"], strict=True)):
            name = f"layer {block['first'] + k + 1} ({summary['layers'][block['first'] + k]})"
            rows.append([str(number), name, f"{seconds:.2f}", f"{seconds / whole:.1%}", f"{speed:.1f}"])
        for name, text in _MOVING.items():
            rows.append([str(number), text, f"{parts[name]:.2f}", f"{parts[name] / whole:.1%}", ""])
    return table(["block", "part", "s/pass", "share", "GFLOP/s"], rows)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return what ``summary.json`` in the run folder `folder` holds.

    Raises:
        NeuroFluxError: there is none: the folder is missing or its run has not finished.
    """
    path = folder / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict) or not {"evaluated_on", "eval_batch", "test_accuracy"} <= summary.keys():
            raise ValueError("it is not the summary of a finished run")
        return summary
    except FileNotFoundError as error:
        raise NeuroFluxError(f"{folder} holds no finished run ({path.name} is missing); train it first") from error
    except (OSError, ValueError) as error:
        raise NeuroFluxError(f"cannot read {path}: {error}") from error


def write_report(folder: Path) -> None:
    """Write ``report.md`` from ``summary.json`` in `folder`."""
    (folder / "report.md").write_text(render(read_summary(folder)), encoding="utf-8")
