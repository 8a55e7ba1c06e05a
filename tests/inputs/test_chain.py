"""A model as a chain: it computes what the model does, cuts where one tensor is alive, and says why when it cannot."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs.chain import ByMode, trace_chain
from neuroflux.inputs.models import build_model


def pieces(chain):
    return [*chain.layers, chain.classifier]


def run(chain, x):
    for piece in pieces(chain):
        x = piece(x)
    return x


def parameter_names(modules):
    return sorted(name for module in modules for name, _ in module.named_parameters())


def check_chain(model, shape, batch=2):
    """Trace `model`; check shapes, names, inputs and the output in eval mode; return the chain in train mode."""
    chain = trace_chain(model, shape)
    model.eval()
    images = torch.randn(batch, *shape)
    with torch.no_grad():
        expected = model(images.clone())
        x = images
        for i, layer in enumerate(chain.layers):
            layer.eval()
            assert tuple(x.shape[1:]) == chain.layer_input_shape(i)
            before = x.clone()
            y = layer(x)
            assert torch.equal(x, before), f"{chain.names[i]} changed its input"
            assert tuple(y.shape[1:]) == chain.shapes[i]
            x = y
        assert torch.equal(chain.classifier.eval()(x), expected)
    assert chain.layer_input_shape(len(chain.layers)) == chain.shapes[-1]
    assert len(chain.names) == len(set(chain.names)) == len(chain.layers)
    assert parameter_names(pieces(chain)) == parameter_names([model])
    ours = {id(p) for piece in pieces(chain) for p in piece.parameters()}
    assert ours == {id(p) for p in model.parameters()}
    for piece in pieces(chain):
        piece.train()
    return chain


def check_training(model, shape, batch=4):
    """Compare outputs, gradients and buffers of one training step of the model and of a chain of its copy."""
    other = copy.deepcopy(model).train()
    chain = trace_chain(other, shape)
    model.train()
    images = torch.randn(batch, *shape)
    results = []
    for forward in (model, lambda x: run(chain, x)):
        torch.manual_seed(1)
        y = forward(images.clone())
        y.square().sum().backward()
        results.append(y)
    assert torch.equal(*results)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for ours, theirs in zip(other.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    return chain


# ---- the zoo ----

FAST = [("vgg11", 32, 8), ("resnet18", 8, 9), ("squeezenet1_1", 32, None), ("mnasnet0_5", 32, None)]
SLOW = [
    ("vgg16", 32, 13),
    ("torchvision:resnet18", 32, 9),
    ("mobilenet_v2", 32, None),
    ("mobilenet_v3_small", 32, None),
    ("efficientnet_b0", 32, None),
    ("densenet121", 32, None),
    ("shufflenet_v2_x0_5", 32, None),
    ("convnext_tiny", 32, 22),
    ("googlenet", 32, None),
    ("regnet_y_400mf", 32, 17),
    ("inception_v3", 96, None),
    ("alexnet", 64, 5),
]


@pytest.mark.parametrize(("name", "size", "layers"), FAST + [pytest.param(*m, marks=pytest.mark.slow) for m in SLOW])
def test_chain_equals_the_model(name, size, layers):
    model = build_model(name, num_classes=5, in_channels=3, image_size=size)
    chain = check_chain(model, (3, size, size))
    assert layers is None or len(chain.layers) == layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["densenet121", "efficientnet_b0", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_training_equals_the_model(name):
    check_training(build_model(name, num_classes=5, in_channels=3, image_size=32), (3, 32, 32))


def test_layers_of_the_vgg():
    chain = trace_chain(build_model("vgg16", num_classes=5, in_channels=1, image_size=32), (1, 32, 32))
    assert chain.names[:3] == ["features.0", "features.3", "features.7"]
    assert len(chain.layers) == 13
    assert chain.shapes[:3] == [(64, 32, 32), (64, 16, 16), (128, 16, 16)]
    assert parameter_names([chain.layers[1]]) == [
        "features.3.weight",
        "features.4.bias",
        "features.4.weight",
    ]
    assert parameter_names([chain.classifier]) == ["classifier.bias", "classifier.weight"]


# ---- small models ----


def block(*parts):
    return nn.Sequential(*parts)


class Net(nn.Module):
    """Two convs and a linear; subclasses replace the forward."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def head(self, x):
        return self.fc(x.mean((2, 3)))

    def forward(self, x):
        return self.head(self.conv2(F.relu(self.conv1(x))))


class NormNet(Net):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(8)


SHAPE = (3, 8, 8)


def test_pieces_without_weights_join_the_layer_before():
    class Many(NormNet):
        def forward(self, x):
            x = F.max_pool2d(F.relu(self.norm1(self.conv1(x * 2 - 1))), 2)
            x = F.avg_pool2d(torch.tanh(self.conv2(x)), 2)
            return self.head(x)

    chain = check_chain(Many(), SHAPE)
    assert chain.names == ["conv1", "conv2"]
    assert chain.shapes == [(8, 4, 4), (8, 2, 2)]


@pytest.mark.parametrize("pool", [nn.AvgPool2d(8), nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1), nn.Flatten(2)])
def test_global_pooling_belongs_to_the_classifier(pool):
    features = 8 if not isinstance(pool, nn.Flatten) else 8 * 64
    model = block(nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(features, 5))
    chain = check_chain(model, SHAPE)
    assert chain.shapes == [(8, 8, 8), (8, 8, 8)]


def test_max_pool_to_one_pixel_belongs_to_the_layer():
    model = block(nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 1), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(8, 5))
    assert check_chain(model, SHAPE).shapes[-1] == (8, 1, 1)


def test_classifier_without_parameters():
    model = block(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    chain = check_chain(model, SHAPE)
    assert parameter_names([chain.classifier]) == []
    assert chain.shapes[-1] == (5, 6, 6)


def test_branches_stay_in_one_layer():
    class Branches(NormNet):
        def forward(self, x):
            x = self.conv1(x)
            a, b = F.relu(x).chunk(2, 1)
            x = torch.cat([self.norm1(torch.cat([b, a], 1)), x], 1)
            return self.head(self.conv2(x[:, 4:12]))

    assert check_chain(Branches(), SHAPE).names == ["conv1", "conv2"]
    check_training(Branches(), SHAPE)


def test_tensors_that_fold_the_batch_are_not_cut():
    class Folded(Net):
        def __init__(self):
            super().__init__()
            self.folded = block(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))

        def forward(self, x):
            x = self.conv1(x)
            x = self.folded(x.reshape(-1, 4, 8, 8)).reshape(-1, 8, 8, 8)
            return self.head(self.conv2(x))

    assert check_chain(Folded(), SHAPE).names == ["conv1", "folded.0", "conv2"]


@pytest.mark.parametrize("batch_size", [lambda x: x.size(0), lambda x: x.shape[0], lambda x: x.size()[0]])
def test_batch_size_taken_early_forbids_no_cut(batch_size):
    class Early(Net):
        def forward(self, x):
            n = batch_size(x)
            x = self.conv2(F.relu(self.conv1(x)))
            return self.fc(F.avg_pool2d(x, 8).view(n, -1))

    assert len(check_chain(Early(), SHAPE).layers) == 2


def test_sizes_that_cross_forbid_cuts():
    class Resized(Net):
        def __init__(self):
            super().__init__()
            self.conv3 = nn.Conv2d(8, 8, 3)

        def forward(self, x):
            h, w = x.shape[2:]
            x = self.conv2(F.max_pool2d(self.conv1(x), 2))
            return self.head(self.conv3(F.interpolate(x, (h, w))))

    assert check_chain(Resized(), SHAPE).names == ["conv1", "conv3"]


def test_tied_parameters_stay_in_one_layer():
    class Tied(NormNet):
        def __init__(self):
            super().__init__()
            self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
            self.conv3.weight = self.conv2.weight

        def forward(self, x):
            x = self.conv2(self.norm1(self.conv1(x)))
            x = self.conv2(F.relu(x))
            return self.head(self.conv3(F.relu(x)))

    model = Tied()
    chain = trace_chain(model, SHAPE)
    assert chain.names == ["conv1", "conv2"]
    assert chain.layers[1].conv2.weight is chain.layers[1].conv3.weight is model.conv2.weight
    check_training(model, SHAPE)


def test_own_parameters_and_buffers_keep_names_and_persistence():
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((1, 8, 1, 1), 2.0))
            self.register_buffer("mean", torch.rand(3, 1, 1))
            self.register_buffer("shift", torch.rand(8, 1, 1), persistent=False)
            self.plain = torch.rand(8, 1, 1)

        def forward(self, x):
            x = self.conv1(x - self.mean) * self.scale
            x = self.conv2(x + self.shift * self.plain + torch.ones(8, 1, 1))
            return self.head(x)

    model = Own()
    keys = set(vars(model))
    chain = check_chain(model, SHAPE)
    assert len(chain.layers) == 2  # a scale is no weight
    saved = {key for piece in pieces(chain) for key in piece.state_dict()}
    assert saved == set(model.state_dict())
    assert set(vars(model)) == keys


# ---- modes ----


def test_functional_dropout_follows_the_mode():
    class Dropout(NormNet):
        def forward(self, x):
            x = F.dropout(F.relu(self.norm1(self.conv1(x))), 0.5, self.training)
            x = F.dropout2d(self.conv2(x), p=0.3 if self.training else 0.0, training=self.training)
            return self.head(x)

    chain = check_training(Dropout(), SHAPE)
    check_chain(Dropout(), SHAPE)
    assert any(isinstance(module, ByMode) for module in chain.layers[0].modules())
    torch.manual_seed(0)
    x = torch.randn(2, *SHAPE)
    layer = chain.layers[0].train()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_operations_that_differ_by_mode_run_in_their_own_module():
    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x):
            x = self.inner(x)
            return x + torch.randn_like(x) if self.training else x

    class Noisy(NormNet):
        def __init__(self):
            super().__init__()
            self.noise = Noise()

        def forward(self, x):
            return self.head(self.conv2(self.noise(self.norm1(self.conv1(x)))))

    check_chain(Noisy(), SHAPE)
    check_training(Noisy(), SHAPE)


def test_operations_that_differ_by_mode_in_the_model_itself():
    class Noisy(Net):
        def forward(self, x):
            x = self.conv1(x)
            if self.training:
                x = x + torch.randn_like(x)
            return self.head(self.conv2(x))

    with pytest.raises(NeuroFluxError, match="other operations in training than in evaluation; move that step"):
        trace_chain(Noisy(), SHAPE)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), random.random])
def test_random_draws_are_not_frozen(draw):
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return x if self.training and draw() < 0.5 else x + self.conv(x)

    class Stochastic(Net):
        def __init__(self):
            super().__init__()
            self.skips = nn.Sequential(*(Skip() for _ in range(4)))

        def forward(self, x):
            return self.head(self.conv2(self.skips(self.conv1(x))))

    model, state = Stochastic(), random.getstate()
    chain = trace_chain(model, SHAPE).layers
    assert random.getstate() == state
    assert len(chain) == 6
    x = torch.randn(1, 8, 8, 8)
    assert len({chain[1](x).sum().item() for _ in range(30)}) == 2


def test_dropout_and_norm_train_as_in_the_model():
    model = block(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.4),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(8, 5),
    )
    check_training(model, SHAPE)


def test_model_is_left_as_it_was():
    class Counting(NormNet):
        calls = 0

        def forward(self, x):
            self.calls += 1
            self.last = self.conv1(x)
            self.norm1.running_mean.mul_(2.0)
            return self.head(self.conv2(self.norm1(self.last)) + torch.zeros(8, 1, 1))

    model = Counting().train()
    model.norm1.eval()
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    chain = trace_chain(model, SHAPE)
    assert model.training
    assert not model.norm1.training
    assert chain.layers[0].training
    assert model.calls == 0
    assert not hasattr(model, "last")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert not trace_chain(model.eval(), SHAPE).layers[0].training


def test_layer_does_not_change_its_input():
    class PreActivation(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return F.relu(x, inplace=True) + self.conv(x)

    class PreActivations(Net):
        def __init__(self):
            super().__init__()
            self.blocks = block(PreActivation(), PreActivation())

        def forward(self, x):
            return self.head(self.conv2(self.blocks(self.conv1(x.mul_(2)))))

    assert len(check_chain(PreActivations(), SHAPE).layers) == 4
    check_training(PreActivations(), SHAPE)
    chain = trace_chain(PreActivations(), SHAPE)
    x = torch.randn(2, 8, 8, 8)
    chain.layers[1](x.detach()).sum().backward()
    # a copy only where it is needed
    assert sum("clone" in layer.code for layer in chain.layers) == 3


# ---- what cannot be traced ----


def test_module_with_control_flow_is_one_piece():
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return self.a(x) if x.mean() > 0 else self.b(x)

    class Choosing(Net):
        def __init__(self):
            super().__init__()
            self.choice = Choice()

        def forward(self, x):
            return self.head(self.conv2(self.choice(self.conv1(x))))

    chain = check_chain(Choosing(), SHAPE)
    assert chain.names == ["conv1", "choice", "conv2"]


def message(model, shape=SHAPE):
    with pytest.raises(NeuroFluxError) as caught:
        trace_chain(model, shape)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_control_flow_in_the_model_itself_names_the_line():
    class Choosing(Net):
        def forward(self, x):
            x = self.conv1(x)
            if x.mean() > 0:
                x = -x
            return self.head(self.conv2(x))

    text = message(Choosing())
    assert "control flow" in text
    assert "test_chain.py:" in text
    assert "Choosing" in text


def test_arguments_with_defaults_keep_them():
    class Masked(Net):
        def forward(self, x, mask=None, scale=1.0):
            x = self.conv1(x)
            if mask is not None:
                x = x * mask
            return self.head(self.conv2(x)) * scale

    check_chain(Masked(), SHAPE)


def test_too_few_layers_names_what_is_alive():
    class Dense(Net):
        def forward(self, x):
            y = self.conv1(x)
            return self.head(self.conv2(y) + y + x.mean())

    text = message(Dense())
    assert "gives 0 layer(s)" in text or "gives 1 layer(s)" in text
    assert "alive together" in text
    assert "conv1" in text


def test_one_opaque_module_says_why():
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = block(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))

        def forward(self, x):
            return self.convs(-x if x.sum() > 0 else x)

    text = message(block(Opaque(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))
    assert "'0' is one piece" in text
    assert "control flow" in text


def test_model_without_convs():
    assert "layer(s)" in message(block(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 5)))


def test_images_that_are_too_small(capfd):
    text = message(build_model("torchvision:vgg11", num_classes=5, in_channels=3, image_size=8), (3, 8, 8))
    assert "cannot take images of 3x8x8" in text
    assert "too small" in text
    assert capfd.readouterr().err == ""


def test_images_with_other_channels():
    text = message(Net(), (1, 8, 8))
    assert "1x8x8" in text
    assert "conv1" in text


@pytest.mark.parametrize(
    "wrap", [lambda y: {"out": y}, lambda y: (y, y), lambda y: y[:, :, None], lambda y: y.sum(), lambda y: 3]
)
def test_output_must_be_scores(wrap):
    class Wrapped(Net):
        def forward(self, x):
            return wrap(super().forward(x))

    assert "must return one tensor of shape (n, classes)" in message(Wrapped())
