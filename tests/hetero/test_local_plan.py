"""The shortest period and the weakest codec for a link and a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hetero.local_period import MOST_STEPS
from paceline.hetero.local_plan import (
    CODECS,
    COMPUTING,
    ELEMENT_BYTES,
    SHORT,
    ExchangeCost,
    LocalPlan,
    plan_local,
    plan_period,
)

seconds = st.floats(1e-4, 100.0)


def exchanges_of(elements: float, fixed_s: float, bytes_per_s: float) -> dict[str, ExchangeCost]:
    """Return the exchange of each codec over a link that carries pushes and answers one after the other."""
    sizes = {codec: 2 * elements * ELEMENT_BYTES.get(codec, 4.0) for codec in CODECS}
    return {codec: ExchangeCost(fixed_s + sizes[codec] / bytes_per_s, 0.0) for codec in CODECS}


def computing(plan: LocalPlan, step_s: float, exchange: ExchangeCost) -> float:
    idle_s = exchange.own_s + max(0.0, exchange.travel_s - plan.delay * step_s)
    return plan.steps * step_s / (plan.steps * step_s + idle_s)


@given(step_s=seconds, travel_s=seconds, own_s=seconds)
def test_period_is_the_shortest_one_with_which_machines_compute_enough(
    step_s: float, travel_s: float, own_s: float
) -> None:
    exchange = ExchangeCost(travel_s, own_s)
    plan = plan_period(step_s, exchange)
    assert plan.computing == pytest.approx(computing(plan, step_s, exchange))
    assert plan.computing >= COMPUTING or plan.steps >= MOST_STEPS
    assert plan.delay <= plan.steps // 4
    shorter = plan.steps * 31 // 32 - 1
    if shorter > 0:
        fewer = LocalPlan(shorter, "", min(shorter // 4, plan.delay), 0.0)
        assert computing(fewer, step_s, exchange) < COMPUTING


def test_quick_links_need_no_local_steps() -> None:
    assert plan_local(0.1, exchanges_of(1e6, 1e-4, 1e10)) == LocalPlan(1, "", 0, pytest.approx(1.0, abs=0.02))


@pytest.mark.parametrize(
    ("bits_s", "codec", "most"),
    [(1e10, "", 8), (1e9, "", 32), (3e8, "int8", 32), (1e8, "int4", 32), (1e7, "chunktopk", 12)],
)
def test_codec_is_the_weakest_one_whose_period_is_short(bits_s: float, codec: str, most: int) -> None:
    """30 M parameters, a step of 300 ms."""
    plan = plan_local(0.3, exchanges_of(30e6, 1e-3, bits_s / 8))
    assert plan.codec == codec
    assert plan.steps <= most


def test_strongest_codec_takes_long_periods_where_none_is_enough() -> None:
    plan = plan_local(0.03, exchanges_of(30e6, 1e-3, 1e5))
    assert plan.codec == "chunktopk"
    assert plan.steps > SHORT
    assert plan_local(0.03, {"int4": ExchangeCost(100.0)}).codec == "int4"


def test_plan_is_said_as_arguments() -> None:
    assert LocalPlan(8, "", 0, 0.95).arguments == 'local_steps="8 by speed"'
    assert LocalPlan(8, "chunktopk", 2, 0.95).arguments == (
        'local_steps="8 by speed", delay=2, compression={"type": "chunktopk", "leg": "both"}, '
        'outer={"lr": 1.0, "momentum": 0.0}'
    )


def test_cost_is_said_where_there_is_one() -> None:
    assert LocalPlan(1, "", 0, 0.99).cost == "It costs no loss"
    assert "equal samples" in LocalPlan(1, "int8", 0, 0.99).cost
    assert LocalPlan(8, "int8", 2, 0.96).with_delay(9) == LocalPlan(10, "int8", 9, 0.96)


def test_plan_is_said_in_words() -> None:
    assert str(LocalPlan(1, "", 0, 0.991)) == "periods of 1 step, no codec: 99% of the time is computation"
    assert str(LocalPlan(24, "int4", 6, 0.95)) == (
        "periods of 24 steps, int4 both ways, answers up to 6 steps late: 95% of the time is computation"
    )
