"""The planner of a run: in which precision it plans."""

from dataclasses import replace

import pytest

from neuroflux.errors import BudgetTooSmall
from neuroflux.plan import main as plan
from neuroflux.planning.profiler import Profiler
from neuroflux.training import planner
from tests.test_bad_input import refused


@pytest.fixture
def bf16_is_faster(monkeypatch):
    monkeypatch.setattr(
        Profiler, "choose_precision", lambda self, chain, head, recipe: replace(recipe, precision="bf16")
    )


def give(monkeypatch, batches):
    """Let plans have the batch that `batches` has for their precision, and none where that is 0."""
    original = planner.make_plan

    def make(profile, *rest):
        batch = batches[profile.precision]
        if not batch:
            raise BudgetTooSmall(f"too small in {profile.precision}", 1, "a layer")
        made = original(profile, *rest)
        return replace(made, blocks=[replace(block, batch=batch) for block in made.blocks])

    monkeypatch.setattr(planner, "make_plan", make)


@pytest.mark.usefixtures("bf16_is_faster")
@pytest.mark.parametrize(
    ("bf16", "fp32", "chosen"), [(32, 64, "bf16"), (2, 4, "fp32"), (0, 2, "fp32"), (2, 0, "bf16"), (4, 2, "bf16")]
)
def test_low_precision_gives_way_where_its_copies_leave_room_for_small_batches_only(
    options, monkeypatch, capsys, bf16, fp32, chosen
):
    give(monkeypatch, {"bf16": bf16, "fp32": fp32})
    for _ in range(2):  # measured, then from the profiles that are kept
        assert plan([*options, "--precision=auto", "--batch_limit=64"]) == 0
        assert f"; {chosen};" in capsys.readouterr().out


@pytest.mark.usefixtures("bf16_is_faster")
def test_a_budget_is_refused_where_no_precision_fits(options, monkeypatch, capsys):
    give(monkeypatch, {"bf16": 0, "fp32": 0})
    assert "too small in fp32" in refused(plan, [*options, "--precision=auto"], capsys)
