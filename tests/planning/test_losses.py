"""Local losses: their values by hand, where their gradients go, and that they teach."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuroflux.planning.heads import AuxiliaryHead
from neuroflux.planning.losses import LOSSES, mismatch, similarities
from neuroflux.planning.step import Exit, ExitTrainer, Recipe

CPU = torch.device("cpu")


def test_similarities_are_correlations_of_spreads():
    maps = torch.randn(5, 7, 3, 4)
    spread = maps.flatten(2).std(2)
    expected = torch.corrcoef(spread)
    torch.testing.assert_close(similarities(maps), expected, atol=1e-5, rtol=1e-5)


def test_single_pixels_are_compared_as_they_are():
    maps = torch.randn(5, 7, 1, 1)
    torch.testing.assert_close(similarities(maps), torch.corrcoef(maps.flatten(1)), atol=1e-5, rtol=1e-5)


def test_features_that_are_alike_within_classes_only_match():
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    assert mismatch(F.one_hot(labels, 3).float() * 4, labels).item() == pytest.approx(0, abs=1e-6)
    assert mismatch(torch.randn(6, 20), labels).item() > 0.1


def test_a_batch_of_one_class_has_a_finite_gradient():
    hidden = torch.randn(4, 6, 2, 2, requires_grad=True)
    mismatch(hidden, torch.zeros(4, dtype=torch.long)).backward()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_reach_the_layer_and_all_of_the_head(name):
    head = AuxiliaryHead(6, (8, 8), 3, 16)
    output = torch.randn(9, 6, 8, 8, requires_grad=True)
    LOSSES[name](head, output, torch.arange(9) % 3, 0.1).backward()
    assert output.grad.abs().sum() > 0
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())


def test_sim_teaches_the_layer_by_similarity_alone():
    head = AuxiliaryHead(6, (8, 8), 3, 16)
    output = torch.randn(9, 6, 8, 8, requires_grad=True)
    labels = torch.arange(9) % 3
    alone = torch.autograd.grad(99 * mismatch(head.embed(output), labels), output)[0]
    with_head = torch.autograd.grad(LOSSES["sim"](head, output, labels, 0.0), output)[0]
    torch.testing.assert_close(with_head, alone)


@pytest.mark.parametrize("name", LOSSES)
def test_the_models_own_classifier_is_trained_by_cross_entropy(name):
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
    output, labels = torch.randn(9, 6, 2, 2), torch.arange(9) % 3
    expected = F.cross_entropy(head(output), labels)
    torch.testing.assert_close(LOSSES[name](head, output, labels, 0.0), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_a_layer_learns_by_it(name):
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    images = torch.randn(60, 3, 8, 8) + labels.view(-1, 1, 1, 1)
    layer = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    exit = Exit(layer, AuxiliaryHead(8, (8, 8), 3, 16))
    trainer = ExitTrainer(exit, Recipe(lr=0.01, local_loss=name), CPU)
    for _ in range(40):
        trainer.step(images, labels)
    exit.eval()
    assert (exit(images)[1].argmax(1) == labels).float().mean() > 0.8
