"""Figures: the plan, and what the model gets right and wrong. Drawn without a screen and without pyplot's state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from neuroflux.inputs.datasets import Data
from neuroflux.planning.partitioner import Plan

__all__ = ["Figure", "confusion_figure", "mistakes_figure", "pixels", "plan_figure", "save_figure"]

_COLUMNS, _ROWS = 6, 3
# class names are written along the axes up to so many classes, and counts into the cells
_NAMED, _COUNTED = 40, 20


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` as a PNG file."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


def pixels(figure: Figure) -> np.ndarray:
    """Return `figure` as an image (H, W, 3) of uint8."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def plan_figure(plan: Plan) -> Figure:
    """Return the plan as a picture: layers by block, their predicted peak against the budget, batch and time."""
    figure = Figure(figsize=(8, 0.5 + 0.45 * max(4, len(plan.blocks))), layout="constrained")
    axis = figure.subplots()
    top = plan.budget / 1e6
    for row, block in enumerate(plan.blocks):
        axis.barh(row, block.peak / 1e6, color=f"C{row % 10}", height=0.7)
        layers = (
            f"layers {block.first + 1}-{block.last + 1}" if block.last > block.first else f"layer {block.first + 1}"
        )
        kept = "" if block.compact else ", kept heap"
        text = f"{layers}: batch {block.batch}, {block.epoch_seconds:.1f} s/pass{kept}"
        axis.text(top * 0.01, row, text, va="center", fontsize="small", bbox={"fc": "white", "alpha": 0.8, "lw": 0})
    axis.axvline(top, color="k", ls="--", lw=1, label=f"budget {top:.0f} MB")
    axis.axvline(plan.floor / 1e6, color="r", ls=":", lw=1, label=f"floor {plan.floor / 1e6:.0f} MB")
    axis.set(xlabel="predicted peak (MB)", xlim=(0, top * 1.05), yticks=range(len(plan.blocks)))
    axis.set_yticklabels([f"block {row + 1}" for row in range(len(plan.blocks))])
    axis.set_ylim(len(plan.blocks) - 0.4, -0.6)
    axis.legend(loc="lower right", fontsize="small")
    return figure


def confusion_figure(data: Data, predicted: np.ndarray) -> Figure:
    """Return the confusion matrix of the test images: rows are true classes, columns the `predicted` ones (n,)."""
    assert data.test is not None
    count = len(data.classes)
    matrix = np.zeros((count, count), np.int64)
    np.add.at(matrix, (data.test.labels, predicted), 1)
    share = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    side = min(12.0, 3 + 0.35 * count)
    figure = Figure(figsize=(side, side), layout="constrained")
    axis = figure.subplots()
    axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axis.set(xlabel="predicted", ylabel="true")
    if count <= _NAMED:
        axis.set_xticks(range(count), [_short(name) for name in data.classes], rotation=90, fontsize="small")
        axis.set_yticks(range(count), [_short(name) for name in data.classes], fontsize="small")
    if count <= _COUNTED:
        for row, column in np.argwhere(matrix):
            colour = "white" if share[row, column] > 0.5 else "black"
            axis.text(column, row, str(matrix[row, column]), ha="center", va="center", color=colour, fontsize="x-small")
    return figure


def mistakes_figure(data: Data, predicted: np.ndarray) -> Figure | None:
    """Return some of the test images that were classified wrongly, from all over the set, or None for none."""
    assert data.test is not None
    wrong = np.flatnonzero(predicted != data.test.labels)
    if not len(wrong):
        return None
    shown = wrong[np.linspace(0, len(wrong) - 1, min(len(wrong), _COLUMNS * _ROWS)).astype(int)]
    images = data.test.read(shown).permute(0, 2, 3, 1).numpy()
    if images.dtype != np.uint8:  # images as the user's own transforms made them
        low, high = images.min(), images.max()
        images = ((images - low) / max(1e-9, high - low) * 255).astype(np.uint8)
    rows = -(-len(shown) // _COLUMNS)
    figure = Figure(figsize=(1.5 * _COLUMNS, 1.75 * rows), layout="constrained")
    axes = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axis in axes:
        axis.axis("off")
    for axis, image, index in zip(axes, images, shown, strict=False):
        axis.imshow(image.squeeze(2) if image.shape[2] == 1 else image[..., :3], cmap="gray", vmin=0, vmax=255)
        true, found = data.classes[data.test.labels[index]], data.classes[predicted[index]]
        axis.set_title(f"{_short(true)}\nnot {_short(found)}", fontsize="x-small")
    return figure


def _short(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"
