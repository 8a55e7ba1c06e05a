"""Calibration: a temperature for the scores, so that a model's confidence is how often it is right."""

from __future__ import annotations

import torch
from torch.nn import functional as F

_BINS = 15


def fit_temperature(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the temperature by which `scores` (N, classes) are divided for the least cross-entropy with labels (N,).

    "On Calibration of Modern Neural Networks" (Guo et al. 2017, section 4.2). It never changes which class is highest.
    It stays between 1/4 and 4: scores that are always right, or say nothing, have no best one.
    """
    inverse_log = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([inverse_log], max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(scores * inverse_log.exp(), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    temperature = float((-inverse_log.detach()).exp())
    return min(max(temperature, 0.25), 4.0) if temperature == temperature else 1.0


def calibration_error(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return how far confidence is from accuracy: the mean over 15 bins of confidence, weighted by their images.

    The expected calibration error of Guo et al. 2017, section 2, from scores (N, classes) and labels (N,).
    """
    confidence, predicted = scores.softmax(1).max(1)
    right = (predicted == labels).float()
    bins = (confidence * _BINS).long().clamp(max=_BINS - 1)
    gaps = torch.zeros(_BINS).index_add_(0, bins, confidence - right)
    return float(gaps.abs().sum() / len(labels))
