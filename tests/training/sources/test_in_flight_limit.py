"""The limit of groups in flight follows the load of the engine."""

from __future__ import annotations

import math

import pytest

from agentlightning.training.sources.in_flight_limit import InFlightLimit


def limit(used: float | None, groups: float = math.inf) -> InFlightLimit:
    async def usage() -> float | None:
        return used

    return InFlightLimit(usage, groups)


async def test_an_engine_that_reports_nothing_limits_nothing() -> None:
    free = limit(None)
    assert await free.adapt(running=40, least=4, most=40) == 0
    assert free.groups == math.inf


@pytest.mark.parametrize(
    ("used", "groups", "cancelled"),
    [(0.5, math.inf, 0), (0.8, math.inf, 0), (0.85, 32, 0), (0.95, 29, 11), (1.0, 28, 12)],
)
async def test_it_is_trimmed_to_what_fills_seven_tenths(used: float, groups: float, cancelled: int) -> None:
    loaded = limit(used)
    assert await loaded.adapt(running=40, least=4, most=40) == cancelled
    assert loaded.groups == groups


async def test_it_grows_by_a_quarter_for_each_turnover() -> None:
    idle = limit(0.5, 8)
    idle.count(7)
    await idle.adapt(running=8, least=4, most=12)
    assert idle.groups == 8
    idle.count(1)
    await idle.adapt(running=8, least=4, most=12)
    assert idle.groups == 10
    idle.count(20)
    await idle.adapt(running=8, least=4, most=12)
    assert idle.groups == 12


async def test_a_step_always_has_its_groups() -> None:
    full = limit(1.0)
    assert await full.adapt(running=4, least=4, most=16) == 0
    assert full.groups == 4
