"""The limit of groups in flight follows the load of the engine."""

from __future__ import annotations

import asyncio
import math

import pytest

from agentlightning.training.sources import stream as in_flight_limit
from agentlightning.training.sources.stream import SETTLE_SECONDS, InFlightLimit
from agentlightning.util.event_loop import in_background


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def limit(used: float | None = None, groups: float = math.inf) -> InFlightLimit:
    async def usage() -> float | None:
        return used

    return InFlightLimit(usage, groups, clock=Clock())


async def test_an_engine_that_reports_nothing_limits_nothing() -> None:
    free = limit()
    async with in_background(free.read()):
        await asyncio.sleep(0)
    assert free.load() is None
    assert free.groups == math.inf
    assert free.metrics() == {}


@pytest.mark.parametrize(("used", "groups"), [(0.85, 32), (0.95, 29), (1.0, 28)])
def test_it_shrinks_to_what_fills_seven_tenths(used: float, groups: float) -> None:
    loaded = limit()
    assert loaded.is_overload(used)
    loaded.shrink(used, running=40)
    assert loaded.groups == groups


@pytest.mark.parametrize("used", [0.0, 0.6, 0.8])
def test_a_load_of_eight_tenths_is_not_too_much(used: float) -> None:
    assert not limit().is_overload(used)


def test_it_grows_by_a_quarter_for_each_turnover() -> None:
    idle = limit(groups=8)
    idle.count(7)
    idle.grow(0.5, most=12)
    assert idle.groups == 8
    idle.count(1)
    idle.grow(0.6, most=12)
    assert idle.groups == 8, "only below 0.6"
    idle.grow(0.5, most=12)
    assert idle.groups == 10
    idle.count(20)
    idle.grow(0.5, most=12)
    assert idle.groups == 12


def test_one_group_may_always_run() -> None:
    full = limit()
    full.shrink(1.0, running=1)
    assert full.groups == 1


def test_after_it_has_shrunk_the_load_has_time_to_follow() -> None:
    loaded = limit()
    assert isinstance(loaded.clock, Clock)
    loaded.shrink(0.95, running=40)
    loaded.clock.now = SETTLE_SECONDS / 2
    assert not loaded.is_overload(1.0)
    loaded.clock.now = SETTLE_SECONDS
    assert loaded.is_overload(1.0)


async def test_the_highest_load_counts_and_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight_limit, "READ_SECONDS", 0.0)
    readings = iter([0.3, 0.9, 0.4])

    async def usage() -> float | None:
        return next(readings, None)

    loaded = InFlightLimit(usage, clock=Clock())
    async with in_background(loaded.read()):
        for _ in range(20):
            await asyncio.sleep(0)
    assert loaded.load() == 0.9
    assert loaded.load() is None, "until it is read again"
    loaded.shrink(0.9, running=9)
    assert loaded.metrics() == {"kv_cache_usage": 0.9, "groups_limit": 7.0}
    assert loaded.metrics() == {"groups_limit": 7.0}
