"""Sizes and operations from shapes alone."""

import pytest
from torch import nn

from neuroflux.planning.sizes import count_flops, elements, inner_elements


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((3,), 3), ((3, 4, 5), 60)])
def test_elements(shape, count):
    assert elements(shape) == count


def test_operations_of_a_conv_and_a_linear_layer():
    assert count_flops(nn.Conv2d(3, 8, 3, padding=1), (3, 10, 10)) == 2 * 3 * 9 * 8 * 100
    assert count_flops(nn.Sequential(nn.Flatten(), nn.Linear(300, 7)), (3, 10, 10)) == 2 * 300 * 7


def test_what_the_modules_put_out_is_added_up_and_the_mode_is_kept():
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    before = module[1].running_mean.clone()
    assert inner_elements(module, (3, 10, 10)) == 3 * 800 + 200
    assert module.training
    assert module[1].running_mean.equal(before)
