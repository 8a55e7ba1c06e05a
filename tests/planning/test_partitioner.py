"""Plans from made-up profiles: the rules, whatever the machine."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroflux.errors import BudgetTooSmall, NeuroFluxError
from neuroflux.planning.partitioner import Job, Partitioner, Plan, make_plan
from neuroflux.planning.profiler import LayerProfile, Profile

MB = 10**6


def layer(name="conv", resident=5 * MB, fixed=3 * MB, per_image=1 * MB, second_per_image=1e-3, step=2e-3, side=16):
    sizes = [4, 16, 64]
    times = [step + second_per_image * size for size in sizes]
    return LayerProfile(
        name=name,
        input_shape=(16, side, side),
        output_shape=(16, side, side),
        head_width=16,
        parameters=1000,
        resident=resident,
        compact_peak=(fixed, per_image),
        fast_peak=(1.6 * fixed, 1.6 * per_image),
        measured=True,
        step_flops=1e6,
        batches=sizes,
        compact_seconds=[1.4 * seconds for seconds in times],
        fast_seconds=times,
        forward_seconds=second_per_image / 4,
    )


def profile(layers):
    return Profile(layers, overhead=10 * MB, precision="fp32", channels_last=False, disk_rate=5e8, seconds=0.1)


def job(budget, batch_limit=64, **changes):
    values = {"model": "net", "epochs": 5, "train_images": 10_000, "val_images": 1000, "disk_limit": None}
    return Job(budget=budget, batch_limit=batch_limit, **(values | changes))


def random_layers(seed, count):
    draw = random.Random(seed)
    return [
        layer(
            f"conv{k}",
            resident=int(10 ** draw.uniform(4, 7.5)),
            fixed=10 ** draw.uniform(5, 7),
            per_image=10 ** draw.uniform(4, 6.3),
            second_per_image=10 ** draw.uniform(-4.5, -2.5),
            step=10 ** draw.uniform(-4, -1.5),
            side=draw.choice([4, 8, 16, 32]),
        )
        for k in range(count)
    ]


FALLING = [layer(f"conv{k}", per_image=2 * MB / 2**k) for k in range(6)]


@pytest.mark.parametrize("rule", ["exact", "greedy"])
class TestBothRules:
    def test_blocks_cover_every_layer_once_and_in_order(self, rule):
        for budget in (40, 60, 100, 500):
            plan = make_plan(profile(FALLING), job(budget * MB), rule)
            covered = [k for block in plan.blocks for k in range(block.first, block.last + 1)]
            assert covered == list(range(6))

    def test_no_block_is_predicted_to_pass_the_budget(self, rule):
        for seed in range(20):
            prof = profile(random_layers(seed, 6))
            floor, _ = Partitioner(prof, job(10**9)).floor()
            for factor in (1.0, 1.3, 2, 5):
                plan = make_plan(prof, job(int(floor * factor)), rule)
                assert plan.peak <= floor * factor

    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 10**6), count=st.integers(2, 7), factors=st.lists(st.floats(1.0, 20.0), min_size=2))
    def test_more_budget_never_gives_a_slower_plan(self, rule, seed, count, factors):
        prof = profile(random_layers(seed, count))
        floor, _ = Partitioner(prof, job(10**9)).floor()
        times = [make_plan(prof, job(int(floor * factor)), rule).seconds for factor in sorted(factors)]
        assert all(slow >= quick - 1e-9 for slow, quick in itertools.pairwise(times))

    @pytest.mark.parametrize("frozen", [1, 3, 5])
    def test_frozen_layers_are_a_block_of_their_own_that_is_only_cached(self, rule, frozen):
        plan = make_plan(profile(FALLING), job(100 * MB, frozen=frozen), rule)
        first, *rest = plan.blocks
        assert (first.first, first.last, first.passes, first.seconds) == (0, frozen - 1, 0, 0.0)
        assert first.cache_seconds > 0
        assert [k for block in rest for k in range(block.first, block.last + 1)] == list(range(frozen, 6))
        assert all(block.passes >= 5 for block in rest)

    def test_more_views_need_more_disk_and_time_to_write_them(self, rule):
        one, three = (make_plan(profile(FALLING), job(60 * MB, views=views), rule) for views in (1, 3))
        assert len(one.blocks) > 1
        ratio = (3 * 10_000 + 1000) / 11_000
        again = [Partitioner(profile(FALLING), job(60 * MB, views=v)).plan_block(0, 1, 60 * MB) for v in (1, 3)]
        assert again[1].cache_bytes == pytest.approx(ratio * again[0].cache_bytes)
        assert again[1].cache_seconds == pytest.approx(ratio * again[0].cache_seconds)
        assert three.disk > one.disk

    def test_without_a_cache_forward_passes_take_time_and_memory_instead_of_disk(self, rule):
        cached, anew = (make_plan(profile(FALLING), job(60 * MB, views=views), rule) for views in (1, 0))
        assert cached.disk > 0
        assert anew.disk == 0
        assert all(block.peak <= 60 * MB for block in anew.blocks)
        rules = [Partitioner(profile(FALLING), job(60 * MB, views=views)) for views in (1, 0)]
        one, other = (each.plan_block(4, 5, 60 * MB) for each in rules)
        per_pass = 10_000 * sum(layer.forward_seconds for layer in FALLING[:4])
        read = 10_000 * 2 * 16 * 16 * 16 / 5e8 - 10_000 * 16 * 16 * 16 / 5e8
        validated = 1000 / 10_000
        assert other.epoch_seconds - one.epoch_seconds == pytest.approx((1 + validated) * (per_pass - read), rel=0.02)
        assert rules[1].peak(5, 5, 2) > rules[0].peak(5, 5, 2)
        assert rules[1].peak(0, 0, 8) == rules[0].peak(0, 0, 8)

    def test_below_the_floor_the_error_names_floor_and_layer(self, rule):
        layers = [*FALLING, layer("fat", resident=80 * MB)]
        with pytest.raises(BudgetTooSmall, match="decided by layer fat") as error:
            make_plan(profile(layers), job(60 * MB), rule)
        assert error.value.layer == "layer fat"
        assert make_plan(profile(layers), job(error.value.floor), rule).peak <= error.value.floor
        with pytest.raises(BudgetTooSmall):
            make_plan(profile(layers), job(error.value.floor - 1), rule)

    def test_a_plan_survives_json(self, rule):
        plan = make_plan(profile(FALLING), job(60 * MB), rule)
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan

    def test_caches_that_do_not_fit_the_disk_are_refused_or_avoided(self, rule):
        tight = int(Partitioner(profile(FALLING), job(10**9)).floor()[0] * 1.05)
        assert make_plan(profile(FALLING), job(tight), rule).disk > 0
        with pytest.raises(NeuroFluxError, match="do not fit"):
            make_plan(profile(FALLING), job(tight, disk_limit=1000), rule)


def test_a_smaller_budget_gives_more_blocks():
    counts = [len(make_plan(profile(FALLING), job(budget * MB)).blocks) for budget in (30, 45, 1000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1
    assert counts[0] > 1


def test_a_smaller_budget_gives_no_larger_batches():
    batches = [make_plan(profile(FALLING), job(budget * MB)).blocks[0].batch for budget in (30, 45, 1000)]
    assert batches == sorted(batches)


def test_greedy_joins_layers_of_like_batches_and_parts_unlike_ones():
    layers = [layer("a", per_image=4 * MB), layer("b", per_image=4 * MB), layer("c", per_image=0.2 * MB)]
    layers.append(layer("d", per_image=0.2 * MB))
    rule = Partitioner(profile(layers), job(100 * MB, batch_limit=512))
    blocks = rule._greedy(100 * MB)
    assert [(block.first, block.last) for block in blocks] == [(0, 1), (2, 3)]


def test_greedy_with_a_small_batch_limit_joins_what_a_large_one_parts():
    layers = [layer(f"conv{k}", per_image=4 * MB / 4**k) for k in range(4)]
    large = Partitioner(profile(layers), job(100 * MB, batch_limit=512))._greedy(100 * MB)
    small = Partitioner(profile(layers), job(100 * MB, batch_limit=8))._greedy(100 * MB)
    assert len(small) < len(large)
    assert len(small) == 1


def test_the_batch_is_the_smallest_that_is_nearly_as_fast_as_the_best():
    flat = [layer(step=0.0, second_per_image=1e-3)]  # a batch of any size is equally fast for each image
    steep = [layer(step=0.1, second_per_image=1e-4)]  # every step costs much
    assert make_plan(profile(flat), job(10**9)).blocks[0].batch == 16
    assert make_plan(profile(steep), job(10**9)).blocks[0].batch == 64


def test_layers_that_have_finished_and_run_on_are_counted():
    together, staggered = (
        Partitioner(profile(FALLING), job(10**9, stagger=stagger)).plan_block(0, 2, 10**9) for stagger in (0, 2)
    )
    assert staggered.passes == together.passes + 2 * 2
    assert staggered.epoch_seconds == together.epoch_seconds
    forward = [layer.forward_seconds for layer in profile(FALLING).layers]
    assert staggered.seconds > together.seconds + job(10**9).train_images * (2 * 2 * forward[0] + 2 * forward[1])


def test_exact_equals_brute_force():
    for seed in range(30):
        prof = profile(random_layers(seed, 5))
        floor, _ = Partitioner(prof, job(10**9)).floor()
        rule = Partitioner(prof, job(int(floor * random.Random(seed).uniform(1.0, 4.0))))
        best = float("inf")
        for cuts in itertools.product([False, True], repeat=4):
            ends = [k for k, cut in enumerate(cuts) if cut] + [4]
            starts = [0] + [end + 1 for end in ends[:-1]]
            blocks = [rule.plan_block(a, b, rule.job.budget) for a, b in zip(starts, ends, strict=True)]
            if all(blocks):
                best = min(best, sum(map(rule.cost, blocks)))
        assert sum(map(rule.cost, rule.exact())) == pytest.approx(best)
        assert sum(map(rule.cost, rule.greedy())) >= best - 1e-9


GOOD = make_plan(profile(FALLING), job(45 * MB)).to_dict()


def changed(**values):
    return {**GOOD, **values}


def changed_block(**values):
    return changed(blocks=[{**GOOD["blocks"][0], **values}, *GOOD["blocks"][1:]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected an object"),
        ({key: value for key, value in GOOD.items() if key != "blocks"}, "'blocks' is missing"),
        (changed(surprise=1), "unknown field 'surprise'"),
        (changed(blocks=[]), "no blocks"),
        (changed(blocks="all"), "must be a list"),
        (changed(budget="512MB"), "'budget' must be of type int"),
        (changed(head_widths=[1]), "head_widths for"),
        (changed(precision="fp8"), "is none of fp32"),
        (changed(seconds=float("nan")), "must be a number from 0"),
        (changed(layer_flops=[1.0]), "layer_flops for"),
        (changed_block(first=1), "should start at 0"),
        (changed_block(last=99), "should start at 0 and end before"),
        (changed_block(batch=0), "must be from 2"),
        (changed_block(batch=True), "must be of type int"),
        (changed_block(peak=-1), "must be a number from 0"),
    ],
)
def test_a_damaged_plan_is_refused_by_field(values, message):
    with pytest.raises(NeuroFluxError, match=message):
        Plan.from_dict(values)


def test_no_floor_is_below_what_opening_data_and_model_took():
    small = job(10**9, preparation=300 * MB)
    assert Partitioner(profile(FALLING), small).floor()[0] == 300 * MB
    with pytest.raises(BudgetTooSmall, match="opening the data"):
        make_plan(profile(FALLING), job(200 * MB, preparation=300 * MB))
