"""Calibration: the temperature that scores were made with is found, and confidence then is accuracy."""

import pytest
import torch

from neuroflux.training.calibration import calibration_error, fit_temperature


def drawn(temperature, count=20_000):
    """Return scores whose softmax, after division by `temperature`, is how likely each label is."""
    draw = torch.Generator().manual_seed(0)
    truth = 2 * torch.randn(count, 5, generator=draw)
    labels = torch.multinomial(truth.softmax(1), 1, generator=draw).squeeze(1)
    return truth * temperature, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_is_found(temperature):
    scores, labels = drawn(temperature)
    assert fit_temperature(scores, labels) == pytest.approx(temperature, rel=0.05)


def test_confidence_becomes_accuracy():
    scores, labels = drawn(3.5)
    assert calibration_error(scores, labels) > 0.2
    assert calibration_error(scores / fit_temperature(scores, labels), labels) < 0.02


def test_scores_that_are_always_right_or_say_nothing_keep_it_in_bounds():
    labels = torch.arange(10) % 2
    right = torch.eye(2)[labels] * 5
    assert 0.25 <= fit_temperature(right, labels) <= 1
    assert 0.25 <= fit_temperature(torch.zeros(10, 2), labels) <= 4
    assert 0.25 <= fit_temperature(-right, labels) <= 4


def test_the_error_by_hand():
    scores = torch.log(torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.3, 0.7]]))
    labels = torch.tensor([0, 1, 1, 1])
    assert calibration_error(scores, labels) == pytest.approx((2 * (0.9 - 0.5) + 2 * (1 - 0.7)) / 4)
