"""Nets of a size that a long study on two cores can afford."""

from __future__ import annotations

from torch import nn


def vgg6(num_classes: int, in_channels: int = 3) -> nn.Sequential:
    """Return a VGG of six conv layers, 32-64-128-128-256-256 filters, for images of 32 pixels."""
    layers: list[nn.Module] = []
    for filters, pooled in ((32, True), (64, True), (128, False), (128, True), (256, False), (256, True)):
        layers += [nn.Conv2d(in_channels, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU(True)]
        layers += [nn.MaxPool2d(2)] * pooled
        in_channels = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes))
