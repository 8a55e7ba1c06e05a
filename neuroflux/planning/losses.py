"""Local losses: what a layer with its head is trained by.

The formulas are those of "Training Neural Networks with Local Error Signals" (Nøkland and Eidnes 2019, section 2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from neuroflux.planning.heads import Head

# the paper weighs prediction by 0.01 and similarity by 0.99; here prediction keeps the scale that it has alone
_SIMILARITY_SHARE = 0.99 / 0.01
# maps (head, the layer's output, labels (N,), label smoothing) to a loss
LocalLoss = Callable[[nn.Module, torch.Tensor, torch.Tensor, float], torch.Tensor]


def pred(head: nn.Module, output: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the cross-entropy of the head's scores."""
    return _cross_entropy(head(output), labels, smoothing)


def sim(head: nn.Module, output: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return how unlike the similarities of features and of labels are; cross-entropy trains only the head's end.

    A head that is the model's own classifier has no features to compare, and is trained by `pred`.
    """
    if not isinstance(head, Head):
        return pred(head, output, labels, smoothing)
    hidden = head.embed(output)
    scores = head.classify(hidden.detach())
    return _SIMILARITY_SHARE * mismatch(hidden, labels) + _cross_entropy(scores, labels, smoothing)


def predsim(head: nn.Module, output: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return `pred` and the mismatch of similarities, weighted as in the paper, through the same convolution."""
    if not isinstance(head, Head):
        return pred(head, output, labels, smoothing)
    hidden = head.embed(output)
    return _SIMILARITY_SHARE * mismatch(hidden, labels) + _cross_entropy(head.classify(hidden), labels, smoothing)


LOSSES: dict[str, LocalLoss] = {"pred": pred, "sim": sim, "predsim": predsim}


def mismatch(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean squared difference between the similarities of features (N, C, H, W) and of labels (N,)."""
    same = F.one_hot(labels, int(labels.max()) + 1).to(torch.float32)
    return F.mse_loss(similarities(hidden), similarities(same))


def similarities(features: torch.Tensor) -> torch.Tensor:
    """Return the cosines (N, N) between centred features (N, C), or between the spreads of maps (N, C, H, W)."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    if features.ndim == 4:
        flat = features.flatten(2)
        features = flat.std(2) if flat.shape[2] > 1 else flat.squeeze(2)
    centred = features - features.mean(1, keepdim=True)
    unit = centred / (centred.norm(dim=1, keepdim=True) + 1e-8)
    return (unit @ unit.T).clamp(-1, 1)


def _cross_entropy(scores: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return F.cross_entropy(scores, labels, label_smoothing=smoothing)
