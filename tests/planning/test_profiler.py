"""The profile: measured where a step fits the budget, estimated elsewhere."""

import pytest
import torch
from torch import nn

from neuroflux.inputs.chain import trace_chain
from neuroflux.planning import profiler
from neuroflux.planning.heads import make_head
from neuroflux.planning.memory import make_meter
from neuroflux.planning.partitioner import Job, make_plan
from neuroflux.planning.profiler import LayerProfile, Profiler, touch_code
from neuroflux.planning.step import Recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def chain():
    torch.manual_seed(0)

    def conv(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    model = nn.Sequential(conv(3, 32), conv(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    return trace_chain(model, (3, 32, 32))


def profile(chain, budget):
    touch_code(Recipe(), CPU)
    made = Profiler(make_meter(CPU, budget), CPU, budget, 64, 4)
    return made, made.profile(chain, lambda k: make_head(chain, k, 4, 16, 0), Recipe(), disk_rate=1e9)


def test_what_is_measured_is_near_what_the_tensors_take(chain):
    _, result = profile(chain, 500_000_000)
    second = result.layers[1]
    assert second.measured
    assert second.batches == [4, 16, 64]
    output = 32 * 32 * 32 * 4  # bytes of the layer's output for one image
    # what the heap held before, from other tests, can be counted in a part; a wrong unit or factor cannot hide in this
    assert 2 * output < second.compact_peak[1] < 20 * output
    assert second.step_seconds(64) > second.step_seconds(4) > 0
    assert second.parameters == 32 * 32 * 9 + 32 + 64 + sum(p.numel() for p in chain.classifier.parameters())


def test_profiling_changes_no_weight_and_no_statistic(chain):
    before = {k: v.clone() for layer in chain.layers for k, v in layer.state_dict().items()}
    profile(chain, 500_000_000)
    after = {k: v for layer in chain.layers for k, v in layer.state_dict().items()}
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_profiling_stays_within_the_budget(chain):
    budget = 12_000_000
    made, result = profile(chain, budget)
    made.meter.peak()
    assert made.meter.highest <= budget
    assert max(result.layers[1].batches) < 64


def test_a_first_step_that_passes_the_budget_ends_profiling(chain, monkeypatch):
    from neuroflux.errors import BudgetTooSmall
    from neuroflux.planning.memory import CpuMeter

    monkeypatch.setattr(CpuMeter, "peak", lambda self: 201 * 10**6)
    with pytest.raises(BudgetTooSmall, match=r"took 201.0 MB, over the budget of 200.0 MB; use --budget 222MB or more"):
        profile(chain, 200 * 10**6)


def test_a_layer_that_does_not_fit_is_estimated_not_run(chain):
    _, result = profile(chain, 300_000)
    assert not any(layer.measured for layer in result.layers)
    assert all(layer.compact_peak[1] > 0 for layer in result.layers)


def test_what_a_small_step_takes_shows_that_larger_ones_fit(chain, monkeypatch):
    ten = 10**7  # what an image takes; four times as much is expected
    monkeypatch.setattr(profiler, "estimate_peak", lambda *_: (0.0, 4.0 * ten))
    monkeypatch.setattr(profiler._Bench, "measure", lambda self, size, compact: (ten * size, 0.1))
    _, result = profile(chain, 45 * ten)
    assert [layer.batches for layer in result.layers] == [[4, 8, 16, 32]] * 2


def test_an_unmeasured_profile_still_gives_a_floor(chain):
    _, result = profile(chain, 300_000)
    with pytest.raises(Exception, match="below the floor"):
        make_plan(result, Job("net", 300_000, 64, 5, 100, 10))


def test_operations_of_a_step_are_counted_from_what_runs(chain):
    _, result = profile(chain, 500_000_000)
    first, second = result.layers
    conv = 2 * 3 * 9 * 32 * 32 * 32
    head = 2 * 32 * 9 * 16 * 16 + 2 * 16 * 4 * 4
    # forward and weight gradients; the head's input gradients too, but not the layer's
    assert first.step_flops == 2 * conv + 3 * head
    assert second.step_flops == 2 * (2 * 32 * 9 * 32 * 32 * 32) + 3 * (2 * 32 * 4)


def test_step_seconds_between_and_beyond_the_measured_sizes():
    layer = LayerProfile("a", (1,), (1,), 0, 0, 0, (0, 0), (0, 0), True, 0, [4, 16], [1.0, 4.0], [0.5, 2.0])
    assert layer.step_seconds(16) == 4.0
    assert layer.step_seconds(10) == pytest.approx(2.5)
    assert layer.step_seconds(64) == pytest.approx(16.0)
    assert layer.step_seconds(16, compact=False) == 2.0
    assert layer.step_seconds(2) == pytest.approx(0.5)


def test_precision_falls_back_to_fp32_where_nothing_is_faster(chain):
    profiler = Profiler(make_meter(CPU, 10**9), CPU, 10**9, 16, 4)
    chosen = profiler.choose_precision(chain, make_head(chain, 0, 4, 16, 0), Recipe())
    assert chosen.precision in ("fp32", "bf16")
    profiler.budget = 1000
    assert profiler.choose_precision(chain, make_head(chain, 0, 4, 16, 0), Recipe()) == Recipe()
