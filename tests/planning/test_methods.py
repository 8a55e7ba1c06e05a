"""The baselines are what they say: equal to loops written by hand, within their budgets, with floors of their own."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neuroflux
from neuroflux.inputs.chain import trace_chain
from neuroflux.planning.methods import METHODS, Checkpointed, Whole
from neuroflux.planning.step import Exit, ExitTrainer, Recipe
from neuroflux.train import main as train
from neuroflux.training.block import Block, rate

CPU = torch.device("cpu")


class Residual(nn.Module):
    """A small net with a block whose input is used twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.last = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.fc = nn.Linear(16, 4)

    def forward(self, images):
        features = self.stem(images)
        features = torch.relu(features + self.second(self.first(features)))
        return self.fc(self.last(features).mean((2, 3)))


def straight():
    def conv(a, b, *more):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True), *more)

    pool = nn.MaxPool2d(2)
    return nn.Sequential(conv(3, 8, pool), conv(8, 16), conv(16, 16, pool), nn.Flatten(), nn.Linear(256, 4))


NETS = {"straight": straight, "residual": Residual}


def model(name="straight"):
    torch.manual_seed(0)
    return NETS[name]()


def whole(method, net):
    """Return the chain that `method` makes of `net`, in double precision, since training enlarges rounding."""
    chain = trace_chain(net, (3, 16, 16))
    chain = METHODS[method].chain(chain, [len(chain.layers)], "int8")
    net.double()
    return chain


def batches(count, size=16):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        images = torch.rand(size, 3, 16, 16, generator=draw, dtype=torch.float64)
        yield images, torch.randint(0, 4, (size,), generator=draw)


def by_method(method, net, recipe, steps, pieces=1):
    """Train `net` by a baseline, each batch cut into `pieces`."""
    chain = whole(method, net)
    trainer = ExitTrainer(Exit(chain.layers[0], chain.classifier), recipe, CPU)
    for images, labels in batches(steps):
        for part, of in zip(images.chunk(pieces), labels.chunk(pieces), strict=True):
            trainer.step(part, of)
    trainer.close()
    return net.state_dict()


def by_hand(net, steps, lr=0.02):
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
    net.double().train()
    for images, labels in batches(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return net.state_dict()


def assert_near(first, second, tolerance):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("name", NETS)
def test_backprop_equals_a_loop_written_by_hand_after_20_steps(name):
    assert_near(by_method("backprop", model(name), Recipe(lr=0.02), 20), by_hand(model(name), 20), 1e-6)


@pytest.mark.parametrize("name", NETS)
def test_checkpointing_equals_plain_backprop_with_its_statistics(name):
    plain = by_method("backprop", model(name), Recipe(lr=0.02), 20)
    assert_near(by_method("checkpoint", model(name), Recipe(lr=0.02), 20), plain, 1e-6)


def without_norms(net):
    """Norms look at a batch as a whole: without them, pieces of a batch give the gradients of all of it."""
    for parent in [m for m in net.modules() if any(isinstance(c, nn.BatchNorm2d) for c in m.children())]:
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.Identity())
    return net


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    plain = by_method("backprop", without_norms(model()), Recipe(lr=0.02), 20)
    pieces = by_method("accumulate", without_norms(model()), Recipe(lr=0.02, accumulate=16), 20, pieces=4)
    assert_near(pieces, plain, 1e-6)


def test_gradients_that_wait_are_applied_at_the_end_of_a_pass():
    recipe = Recipe(lr=0.02, accumulate=64)
    chain = whole("accumulate", without_norms(model()))
    trainer = ExitTrainer(Exit(chain.layers[0], chain.classifier), recipe, CPU)
    weight = next(chain.layers[0].parameters())
    before = weight.detach().clone()
    (images, labels) = next(batches(1))
    trainer.step(images, labels)
    assert torch.equal(weight, before)
    trainer.optimizer.flush()
    net = without_norms(model())
    by_hand(net, 1)
    torch.testing.assert_close(weight, next(net.parameters()), rtol=1e-6, atol=1e-6)
    assert all(p.grad is None for p in chain.layers[0].parameters())


def test_compressed_backprop_still_learns_and_keeps_its_weights_exact():
    net = model()
    chain = whole("compressed", net)
    trainer = ExitTrainer(Exit(chain.layers[0], chain.classifier), Recipe(lr=0.02), CPU)
    images, labels = next(batches(1, 32))
    losses = [float(trainer.step(images, labels)[1]) for _ in range(15)]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("method", ["backprop", "checkpoint", "compressed"])
def test_a_whole_layer_is_the_model_bit_for_bit(method):
    net = model().eval()
    chain = whole(method, net)
    chain.layers[0].eval()
    images, _ = next(batches(1))
    assert torch.equal(chain.classifier(chain.layers[0](images)), net(images))


def test_checkpointing_cuts_where_least_is_held():
    chain = trace_chain(model(), (3, 16, 16))
    shapes = [chain.input_shape, *chain.shapes]
    plain, cut = Whole(chain.layers, shapes), Checkpointed(chain.layers, shapes)
    assert cut.step_elements < plain.step_elements
    assert cut.segments[0] == 0
    assert cut.segments == sorted(set(cut.segments))


# --- through the command line ---


def summary(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


@pytest.mark.parametrize("method", [m for m in METHODS if m != "neuroflux"])
def test_every_method_trains_from_the_command_line(options, method, capsys):
    assert train([*options, "--out=run", f"--method={method}", "--epochs=4"]) == 0
    result = summary("run")
    assert result["method"] == method
    assert result["test_accuracy"] > 0.6
    assert 0 < result["peak"]["measured"] <= result["budget"]["bytes"]
    assert len(result["blocks"]) == 1
    assert len(result["exits"]) == (4 if method == "local" else 1)
    assert f"by {method}" in Path("run/report.md").read_text()
    loaded = neuroflux.load("run")
    assert loaded.description.head == (METHODS[method].head or "conv")
    if method != "local":
        assert loaded.description.layers == 4


@pytest.mark.parametrize("method", ["backprop", "local"])
def test_every_method_knows_its_floor(options, method, capsys):
    assert train([*options, "--out=run", f"--method={method}", "--budget=1KB"]) == 2
    error = capsys.readouterr().err
    assert f"with --method {method}, decided by all" in error


def test_the_command_equals_a_loop_written_by_hand_on_the_same_batches(options, monkeypatch):
    seen, rates = [], []
    original, set_time = Block.train_batch, Block.set_time

    def recording(self, level, rows, labels, generator):
        state = generator.get_state()
        seen.append((level.features(rows, generator).clone(), labels.clone()))
        generator.set_state(state)
        return original(self, level, rows, labels, generator)

    monkeypatch.setattr(Block, "train_batch", recording)

    def timed(self, share):
        rates.append(rate((self.passes + share) / 5))
        set_time(self, share)

    monkeypatch.setattr(Block, "set_time", timed)
    assert train([*options, "--out=run", "--method=backprop", "--epochs=5", "--lr=0.05"]) == 0
    assert len(seen) >= 20
    import mine

    torch.manual_seed(0)
    net = mine.make(3).train()
    batch = summary("run")["blocks"][0]["planned_batch"]
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 5e-4},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    for (images, labels), factor in zip(seen, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (batch / 32) ** 0.5 * factor
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
    trained = neuroflux.load("run")
    ours = torch.cat([p.flatten() for p in trained.parameters()])
    theirs = torch.cat([p.flatten() for p in net.parameters()])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert rates[0] == rate(0.0)


def test_updates_count_the_same_images_whatever_fits(options):
    assert train([*options, "--out=run", "--method=accumulate", "--batch-limit=32", "--budget=200MB"]) == 0
    plan = json.loads(Path("run/plan.json").read_text())
    plan["blocks"][0]["batch"] = 5
    Path("five.json").write_text(json.dumps(plan))
    assert train([*options, "--out=b", "--method=accumulate", "--batch-limit=32", "--plan=five.json"]) == 0
    assert summary("b")["blocks"][0]["batch"] == 5


def test_a_plan_for_another_method_is_refused(options, capsys):
    assert train([*options, "--out=a", "--method=backprop"]) == 0
    assert train([*options, "--out=b", "--plan=a/plan.json"]) == 2
    assert "is for --method backprop, not neuroflux" in capsys.readouterr().err
