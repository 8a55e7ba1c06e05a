"""Models by name: which model a name means, what its errors say, and weights that never lie in anonymous memory."""

import gc
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from neuroflux.errors import NeuroFluxError
from neuroflux.inputs import models
from neuroflux.inputs.models import build_model, build_on_disk, input_channels, rest_on_disk


def build(name, num_classes=10, in_channels=3, image_size=32):
    return build_model(name, num_classes=num_classes, in_channels=in_channels, image_size=image_size)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Write a module into the current folder and return its name."""
    monkeypatch.chdir(tmp_path)
    written = []

    def write(code):
        name = f"user_nets_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


# ---- names ----


@pytest.mark.parametrize(
    ("name", "millions"), [("vgg11", 9.2), ("vgg16", 14.7), ("resnet18", 11.2), ("resnet34", 21.3)]
)
def test_small_form_has_the_usual_size_and_takes_small_images(name, millions):
    model = build(name).eval()
    assert count(model) / 1e6 == pytest.approx(millions, abs=0.1)
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("size", [1, 8, 28, 33])
def test_small_vgg_skips_pools_on_one_pixel(size):
    model = build("vgg11", in_channels=1, image_size=size).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 1, size, size)).shape == (1, 10)


def test_large_images_mean_torchvisions_own():
    with torch.device("meta"):
        assert [n for n, _ in build("vgg11", image_size=96).named_parameters()] == [
            n for n, _ in torchvision.models.vgg11_bn().named_parameters()
        ]
        assert build("resnet18", image_size=96).conv1.kernel_size == (7, 7)
        assert build("resnet18", image_size=95).conv1.kernel_size == (3, 3)


def test_torchvision_prefix_means_torchvisions_own():
    with torch.device("meta"):
        assert build("torchvision:resnet18").conv1.kernel_size == (7, 7)
        assert not any(isinstance(m, nn.BatchNorm2d) for m in build("torchvision:vgg11").modules())


def test_other_torchvision_models():
    with torch.device("meta"):
        assert build("mobilenet_v2", num_classes=7).classifier[1].out_features == 7
        assert build("googlenet").aux1 is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vg16", "vgg16"),
        ("resnet_18", "resnet18"),
        ("VGG16", "vgg16"),
        ("torchvision:mobilenetv2", "mobilenet_v2"),
        ("qqqq", "such as vgg16"),
        ("vit_b_16", "vision transformer"),
        ("torchvision:swin_t", "vision transformer"),
    ],
)
def test_unknown_name_gives_the_nearest(name, words):
    with pytest.raises(NeuroFluxError, match=words) as caught:
        build(name)
    assert "\n" not in str(caught.value)


def test_sizes_must_be_positive():
    with pytest.raises(NeuroFluxError, match="num_classes is 0"):
        build("vgg11", num_classes=0)


# ---- channels ----


def test_grey_images():
    assert input_channels("vgg16", 32, 1) == 1
    assert input_channels("resnet18", 28, 1) == 1
    assert input_channels("resnet18", 96, 1) == 3
    assert input_channels("torchvision:resnet18", 28, 1) == 3
    assert input_channels("mobilenet_v2", 32, 1) == 3
    assert build("resnet18", in_channels=1).conv1.in_channels == 1
    assert build("mobilenet_v2", in_channels=1).features[0][0].in_channels == 3
    assert input_channels("vgg16", 32, 5) == 5


def test_channels_that_the_model_cannot_take():
    with pytest.raises(NeuroFluxError, match="3 channels, these have 5"):
        build("mobilenet_v2", in_channels=5)


# ---- the user's own ----

GOOD = """
from torch import nn

def plain(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))

def full(num_classes=10, *, in_channels=3, image_size=32):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

def anything(**options):
    assert options == {"num_classes": 5}
    return plain(**options)
"""


def test_users_factory_gets_what_it_takes(user_module):
    name = user_module(GOOD)
    path = list(sys.path)
    assert build(f"{name}:plain", num_classes=5)[-1].out_features == 5
    assert build(f"{name}:full", in_channels=2, image_size=8)[-1].in_features == 128
    build(f"{name}:anything", num_classes=5)
    assert input_channels(f"{name}:plain", 32, 1) == 3
    assert input_channels(f"{name}:full", 32, 1) == 1
    assert sys.path == path


def test_users_class_in_a_package(user_module, tmp_path, monkeypatch):
    package = f"package_{tmp_path.name}".replace("-", "_")
    (tmp_path / package).mkdir()
    code = """
    from torch import nn

    class Net(nn.Linear):
        def __init__(self, num_classes):
            super().__init__(2, num_classes)
    """
    (tmp_path / package / "nets.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    assert build(f"{package}.nets:Net", num_classes=4).out_features == 4


@pytest.mark.parametrize(
    ("code", "attribute", "words"),
    [
        (GOOD, "plian", r"no 'plian'; did you mean 'plain'"),
        (GOOD, "nn", "is a module, not a function"),
        ("import no_such_package_at_all", "f", r"importing .* failed: ModuleNotFoundError.*no_such_package"),
        ("1 +", "f", "SyntaxError"),
        ("import sys; sys.exit(3)", "f", "SystemExit"),
        ("def f(classes): pass", "f", "must take num_classes"),
        ("def f(num_classes, width): pass", "f", "missing 1 required positional argument: 'width'"),
        ("def f(num_classes): return 3", "f", "returned a int"),
        ("def f(num_classes):\n    raise ValueError('too\\nbad')", "f", r"ValueError: too bad \(user_nets.*\.py:2\)"),
        ("from torch import nn\ndef f(num_classes): return nn.LazyLinear(num_classes)", "f", "lazy"),
    ],
)
def test_users_factory_that_fails(user_module, code, attribute, words):
    name = user_module(code)
    with pytest.raises(NeuroFluxError, match=words) as caught:
        build(f"{name}:{attribute}")
    assert "\n" not in str(caught.value)


def test_users_module_that_is_not_there(user_module):
    with pytest.raises(NeuroFluxError, match=r"no module 'no_such_nets'"):
        build("no_such_nets:f")
    with pytest.raises(NeuroFluxError, match=r"no module 'torch\.no_such_part'"):
        build("torch.no_such_part:f")


def test_users_own_error_passes(user_module):
    name = user_module(
        "from neuroflux.errors import NeuroFluxError\ndef f(num_classes): raise NeuroFluxError('use another width')"
    )
    with pytest.raises(NeuroFluxError, match=r"^use another width$"):
        build(f"{name}:f")


# ---- on disk ----


def on_disk(tensor):
    return tensor.untyped_storage().filename is not None


def test_weights_on_disk_are_those_of_a_plain_build(tmp_path):
    torch.manual_seed(3)
    plain = build("vgg11")
    torch.manual_seed(3)
    mapped = build_on_disk(lambda: build("vgg11"), tmp_path / "weights")
    assert [n for n, _ in mapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    state = plain.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in mapped.state_dict().items())
    assert all(on_disk(p) for p in mapped.parameters())
    assert all(on_disk(b) for b in mapped.buffers() if b.is_floating_point())
    assert not list((tmp_path / "weights").iterdir())


def test_weights_on_disk_can_be_trained(tmp_path):
    model = build_on_disk(lambda: build("vgg11", image_size=8), tmp_path)
    before = model.classifier.weight.clone()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model.classifier.weight, before)
    assert on_disk(model.classifier.weight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.view = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.late = nn.Parameter(torch.zeros(3))
        self.late.data = torch.ones(5)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("nothing", None)
        self.empty = nn.Parameter(torch.empty(0))


def test_tying_strides_and_late_data_survive(tmp_path):
    model = build_on_disk(Tied, tmp_path)
    assert model.a.weight is model.b.weight
    assert torch.equal(model.view, torch.arange(6.0).view(2, 3).t())
    assert on_disk(model.a.weight)
    assert on_disk(model.late)
    assert torch.equal(model.late, torch.ones(5))
    assert model.steps == 3


def test_rest_on_disk_moves_a_built_model(tmp_path):
    model = Tied()
    weight, values = model.a.weight, model.a.weight.clone()
    assert rest_on_disk(model, tmp_path) is model
    assert model.a.weight is weight
    assert model.b.weight is weight
    assert torch.equal(weight, values)
    assert on_disk(weight)


def test_hooks_are_removed_when_the_build_fails(tmp_path):
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_on_disk(fail, tmp_path)
    assert not on_disk(nn.Linear(2, 2).weight)


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models.os, "posix_fallocate", full)
    with pytest.raises(NeuroFluxError, match=r"no space for the model's weights.*No space left"):
        build_on_disk(lambda: nn.Linear(4, 4), tmp_path)
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NeuroFluxError, match="cannot make the folder"):
        build_on_disk(lambda: nn.Linear(4, 4), tmp_path / "file" / "weights")


def test_files_go_with_the_model(tmp_path):
    def mapped():
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    model = build_on_disk(lambda: nn.Linear(4, 4), tmp_path)
    assert mapped() == 2
    del model
    gc.collect()
    assert mapped() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_anonymous_memory_never_holds_the_model(tmp_path):
    code = """
    import sys
    from pathlib import Path
    from neuroflux.inputs.chain import trace_chain
    from neuroflux.inputs.models import build_model, build_on_disk

    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000

    before = anonymous()
    build = lambda: build_model("vgg16", num_classes=10, in_channels=3, image_size=32)
    model = build_on_disk(build, Path(sys.argv[1]))
    built = anonymous()
    trace_chain(model, (3, 32, 32))
    print(built - before, anonymous() - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    built, traced = map(float, result.stdout.split())
    assert built < 12  # MB, of a model of 59 MB
    assert traced < 12


class TestTimm:
    """A stand-in for timm, which is not among what the tests need."""

    @pytest.fixture(autouse=True)
    def stand_in(self, monkeypatch):
        module = types.ModuleType("timm")
        module.list_models = lambda: ["tiny_net", "other_net"]

        def create_model(name, num_classes, in_chans):
            return nn.Sequential(
                nn.Conv2d(in_chans, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
            )

        module.create_model = create_model
        monkeypatch.setitem(sys.modules, "timm", module)

    def test_a_model_by_name_takes_any_channels(self):
        assert input_channels("timm:tiny_net", 32, 5) == 5
        model = build_model("timm:tiny_net", num_classes=6, in_channels=5, image_size=32)
        assert model(torch.zeros(2, 5, 32, 32)).shape == (2, 6)

    def test_an_unknown_name_has_a_hint(self):
        with pytest.raises(NeuroFluxError, match="did you mean 'tiny_net'"):
            build_model("timm:tiny_nte", num_classes=6, in_channels=3, image_size=32)

    def test_without_timm_it_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(NeuroFluxError, match=r"neuroflux\[timm\]"):
            build_model("timm:tiny_net", num_classes=6, in_channels=3, image_size=32)
