"""A block: local losses, freed graphs, and the rate."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from neuroflux.inputs.chain import trace_chain
from neuroflux.inputs.models import build_model
from neuroflux.planning.heads import AuxiliaryHead, adaptive_width, layers_ahead, make_head
from neuroflux.planning.step import Exit, ExitTrainer, Recipe
from neuroflux.training.block import Block, Diverged, rate, train_epoch

CPU = torch.device("cpu")


def make_exits(seed=0):
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
    ]
    return [Exit(layers[0], AuxiliaryHead(8, (8, 8), 3, 16)), Exit(layers[1], AuxiliaryHead(16, (4, 4), 3, 16))]


class Images:
    """A level of random images whose class shows in their mean."""

    def __init__(self, count=60):
        generator = torch.Generator().manual_seed(1)
        self.labels = np.arange(count) % 3
        self.views, self.view = 1, 0
        self.images = torch.randn(count, 3, 8, 8, generator=generator) + torch.from_numpy(self.labels).view(-1, 1, 1, 1)

    def read(self, indices):
        return self.images[indices]

    def features(self, rows, generator):
        return rows


class FixedGuard:
    def __init__(self, batch):
        self.batch = batch

    def after_step(self, size):
        return 0


def test_no_gradient_crosses_a_layer():
    exits = make_exits()
    trainer = ExitTrainer(exits[1], Recipe(lr=0.1), CPU)
    before = [p.detach().clone() for p in exits[0].parameters()]
    features = exits[0].layer(torch.randn(4, 3, 8, 8)).detach()
    output, _ = trainer.step(features, torch.tensor([0, 1, 2, 0]))
    assert not output.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, exits[0].parameters(), strict=True))
    assert all(p.grad is None for exit in exits for p in exit.parameters())


def test_a_step_equals_plain_pytorch():
    ours, plain = make_exits()[0], make_exits()[0]
    recipe = Recipe(lr=0.1, weight_decay=1e-2, label_smoothing=0.1)
    trainer = ExitTrainer(ours, recipe, CPU)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 1e-2},
        {"params": [p for p in plain.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        images = torch.randn(6, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 3, (6,), generator=generator)
        trainer.step(images, labels)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(images)[1], labels, label_smoothing=0.1).backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_all_layers_of_a_block_learn():
    exits, level = make_exits(), Images()
    block = Block(exits, Recipe(lr=0.05), CPU, 6)
    generator = torch.Generator().manual_seed(0)
    with block.on_device():
        with block.training():
            block.start(2)
            losses = []
            while block.passes < block.last_pass:
                steps = list(train_epoch(block, level, FixedGuard(10), generator))
                losses.append(steps[-1].losses)
                assert [step.images for step in steps] == [10, 20, 30, 40, 50, 60]
        assert min(block.accuracies(level, 7)) > 0.9
    assert all(last < first / 2 for first, last in zip(losses[0], losses[-1], strict=True))


def test_a_layer_that_has_not_joined_yet_learns_nothing_and_has_no_exit():
    exits, level = make_exits(), Images()
    block = Block(exits, Recipe(lr=0.05), CPU)
    before = [p.detach().clone() for p in exits[1].parameters()]
    generator = torch.Generator().manual_seed(0)
    with block.training():
        block.start(1)
        (*_, last) = train_epoch(block, level, FixedGuard(10), generator)
        assert len(last.losses) == len(block.accuracies(level, 10)) == 1
        assert all(torch.equal(a, b) for a, b in zip(before, exits[1].parameters(), strict=True))
        block.start(9)
        (*_, last) = train_epoch(block, level, FixedGuard(10), generator)
        assert len(last.losses) == len(block.accuracies(level, 10)) == 2
    assert not torch.equal(before[0], next(exits[1].parameters()))


def test_a_layer_that_has_finished_only_runs_forward():
    exits, level = make_exits(), Images()
    block = Block(exits, Recipe(lr=0.05), CPU, 2)
    generator = torch.Generator().manual_seed(0)
    with block.training():
        block.start(1)
        list(train_epoch(block, level, FixedGuard(10), generator))
        block.start(2)
        assert block.last_pass == 3
        list(train_epoch(block, level, FixedGuard(10), generator))
        assert block.learning == [1]
        block.accuracies(level, 10)
        before = {k: v.clone() for k, v in exits[0].state_dict().items()}
        (*_, last) = train_epoch(block, level, FixedGuard(10), generator)
        assert math.isnan(last.losses[0])
        assert math.isfinite(last.losses[1])
    assert all(torch.equal(v, exits[0].state_dict()[k]) for k, v in before.items())  # statistics of norms as well


def test_every_layer_has_the_whole_schedule_to_itself():
    block, rates = Block(make_exits(), Recipe(lr=1.0), CPU, 4), []
    with block.training():
        block.start(1)
        for _ in range(6):
            block.set_time(0.5)
            rates.append(
                [
                    learner.trainer and learner.trainer.optimizer._optimizers[0].param_groups[0]["lr"]
                    for learner in block._learners
                ]
            )
            block.end_pass()
            if block.passes == 2:
                block.start(2)
    first = [r[0] for r in rates[:4]]
    assert first == [r[1] for r in rates[2:]]
    assert first == pytest.approx([rate((k + 0.5) / 4) for k in range(4)])
    assert rates[4][0] is None


def test_trained_weights_return_to_where_they_rested():
    exits = make_exits()
    resting = [p.data_ptr() for p in exits[0].parameters()]
    before = [p.detach().clone() for p in exits[0].parameters()]
    block = Block(exits, Recipe(lr=0.05), CPU)
    with block.on_device():
        assert [p.data_ptr() for p in exits[0].parameters()] != resting
        with block.training():
            block.start(2)
            list(train_epoch(block, Images(), FixedGuard(10), torch.Generator().manual_seed(0)))
    assert [p.data_ptr() for p in exits[0].parameters()] == resting
    assert not torch.equal(before[0], next(exits[0].parameters()))


def test_evaluation_changes_nothing():
    exits, level = make_exits(), Images()
    block = Block(exits, Recipe(), CPU)
    before = {k: v.clone() for k, v in exits[0].state_dict().items()}
    first = block.accuracies(level, 7)
    assert first == block.accuracies(level, 60)
    assert all(torch.equal(v, exits[0].state_dict()[k]) for k, v in before.items())


def test_a_step_whose_loss_is_not_finite_is_skipped_and_the_rate_is_lowered():
    exits, level = make_exits(), Images()
    level.images[5] = float("nan")
    block = Block(exits, Recipe(lr=0.05), CPU)
    with block.training():
        block.start(2)
        steps = list(train_epoch(block, level, FixedGuard(10), torch.Generator().manual_seed(0)))
        bad = [step for step in steps if not all(map(math.isfinite, step.losses))]
        assert len(bad) == block.skipped == 1
        assert [learner.caution for learner in block._learners] == [0.5, 0.5]
    for exit in exits:
        assert all(torch.isfinite(tensor).all() for tensor in exit.state_dict().values())


def test_a_skipped_step_changes_nothing():
    exit = make_exits()[0]
    trainer = ExitTrainer(exit, Recipe(lr=0.05), CPU)
    labels = torch.tensor([0, 1, 2, 0])
    trainer.step(torch.randn(4, 3, 8, 8), labels)
    before = {name: tensor.clone() for name, tensor in exit.state_dict().items()}
    _, loss = trainer.step(torch.full((4, 3, 8, 8), float("inf")), labels)
    assert not math.isfinite(float(loss))
    assert all(torch.equal(tensor, before[name]) for name, tensor in exit.state_dict().items())
    trainer.step(torch.randn(4, 3, 8, 8), labels)
    assert not torch.equal(before["layer.0.weight"], exit.layer[0].weight)


def test_losses_that_stay_infinite_are_an_error_that_names_the_layer():
    exits, level = make_exits(), Images()
    with torch.no_grad():
        exits[1].layer[0].weight.fill_(float("nan"))
    block = Block(exits, Recipe(), CPU)
    with block.training():
        block.start(2)
        with pytest.raises(Diverged, match="layer 2 of the block was nan in 8 steps in a row"):
            list(train_epoch(block, level, FixedGuard(5), torch.Generator().manual_seed(0)))


class Scarce:
    """A block that has memory for a step of `most` images only."""

    def __init__(self, block, most):
        self._block, self.most, self.failed = block, most, []

    def __getattr__(self, name):
        return getattr(self._block, name)

    def train_batch(self, level, rows, labels, generator):
        if len(labels) > self.most:
            self.failed.append(len(labels))
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return self._block.train_batch(level, rows, labels, generator)


class HalvingGuard(FixedGuard):
    def failed(self, size):
        self.batch = size // 2


def test_a_batch_for_which_there_is_no_memory_is_taken_in_halves_to_the_last_image():
    exits, level = make_exits(), Images()
    block = Block(exits, Recipe(lr=0.05), CPU)
    with block.training():
        block.start(2)
        scarce = Scarce(block, 6)
        steps = list(train_epoch(scarce, level, HalvingGuard(20), torch.Generator().manual_seed(0)))
    assert scarce.failed[:2] == [20, 10]
    assert steps[-1].images == 60
    assert max(step.batch for step in steps) <= 6


def test_another_error_is_no_lack_of_memory():
    block = Block(make_exits(), Recipe(), CPU)
    with block.training():
        block.start(2)
        block.train_batch = lambda *_: (_ for _ in ()).throw(RuntimeError("shapes do not match"))
        with pytest.raises(RuntimeError, match="shapes"):
            list(train_epoch(block, Images(), FixedGuard(5), torch.Generator().manual_seed(0)))


def test_a_step_that_failed_half_way_leaves_nothing():
    exit = make_exits()[0]
    trainer = ExitTrainer(exit, Recipe(lr=0.05), CPU)
    trainer.step(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
    before = exit.layer[1].running_mean.clone()
    for buffer, copy in trainer._statistics:
        copy.copy_(buffer)
    exit(torch.randn(4, 3, 8, 8))[1].sum()
    exit.layer[0].weight.grad = torch.ones_like(exit.layer[0].weight)
    trainer.discard()
    assert torch.equal(exit.layer[1].running_mean, before)
    assert all(p.grad is None for p in exit.parameters())


def test_weights_rest_as_they_were_after_an_error():
    exits = make_exits()
    before = [p.detach().clone() for p in exits[0].parameters()]
    block = Block(exits, Recipe(lr=0.05), CPU)

    def fail():
        with block.on_device(), block.training():
            block.start(2)
            list(train_epoch(block, Images(), FixedGuard(10), torch.Generator().manual_seed(0)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(a, b) for a, b in zip(before, exits[0].parameters(), strict=True))


def test_a_last_batch_of_one_image_is_left_out():
    exits, level = make_exits(), Images(21)
    block = Block(exits, Recipe(), CPU)
    with block.training():
        block.start(2)
        steps = list(train_epoch(block, level, FixedGuard(10), torch.Generator().manual_seed(0)))
    assert steps[-1].images == 20


def test_the_rate_rises_and_falls_to_zero():
    values = [rate(k / 100) for k in range(101)]
    top = values.index(max(values))
    assert max(values) == pytest.approx(1.0)
    assert values[0] > 0
    assert values[:top] == sorted(values[:top])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert values[-1] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_too(precision):
    exit = make_exits()[0]
    trainer = ExitTrainer(exit, Recipe(lr=0.05, precision=precision), CPU)
    level = Images()
    labels = torch.from_numpy(level.labels)
    losses = [float(trainer.step(level.images, labels)[1]) for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    assert all(p.dtype == torch.float32 for p in exit.parameters())


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 5), (4, 4), (32, 32)])
def test_heads_fit_any_map(size):
    head = AuxiliaryHead(8, size, 5, 16)
    assert head(torch.randn(3, 8, *size)).shape == (3, 5)


@pytest.mark.parametrize("index", range(7))
def test_a_head_looks_ahead_at_fewer_layers_the_deeper_it_is(index):
    chain = trace_chain(build_model("vgg11", num_classes=4, in_channels=3, image_size=32), (3, 32, 32))
    ahead = layers_ahead(chain, index)
    assert len(ahead) == (3, 3, 2, 2, 1, 1, 1)[index]
    assert ahead[-1] == list(chain.shapes[-1])
    head = make_head(chain, index, 4, 48, 0, "auglocal")
    convs = [module for module in head.modules() if isinstance(module, nn.Conv2d)]
    assert [conv.out_channels for conv in convs] == [min(48, shape[0]) for shape in ahead]
    assert head(torch.randn(3, *chain.shapes[index])).shape == (3, 4)


def test_wider_layers_get_wider_heads_within_bounds():
    widths = [adaptive_width(channels, channels * channels * 9) for channels in (8, 32, 64, 128, 512, 2048)]
    assert widths == sorted(widths)
    assert widths[0] >= 1
    assert widths[-1] <= 256
