"""Deadlines do not move when someone sets the clock of the machine."""

from __future__ import annotations

import time

import pytest

from agentlightning.store.clock import Clock


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_setting_the_machines_clock_moves_the_time_people_read_and_no_deadline(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    clock = Clock()
    wall, steady = clock.wall(), clock.steady()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert abs(clock.wall() - wall - step) < 60
    assert 0 <= clock.steady() - steady < 60


def test_both_start_at_the_same_time() -> None:
    clock = Clock()
    assert abs(clock.wall() - clock.steady()) < 60
