"""curve.png is drawn again while a run trains, at most every half minute, and a failure ends nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.training.report import reward_curve
from agentlightning.training.report.reward_curve import SECONDS, LiveCurve

pytest.importorskip("matplotlib")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "reward": step / 10} for step in range(1, steps + 1)]


def drawn(curve: LiveCurve, path: Path) -> bytes:
    thread = curve._thread
    assert thread is not None
    thread.join()
    return path.read_bytes()


@pytest.mark.slow
def test_the_picture_follows_the_steps_and_not_more_often_than_every_half_minute(tmp_path: Path):
    clock, path = Clock(), tmp_path / "curve.png"
    curve = LiveCurve(path, clock)
    curve.draw(lambda: lines(2))
    assert not path.exists(), "the run has just begun"
    clock.now += SECONDS
    curve.draw(lambda: lines(3))
    first = drawn(curve, path)
    assert first.startswith(b"\x89PNG")
    clock.now += SECONDS - 1
    curve.draw(lambda: pytest.fail("it is not time"))
    clock.now += 1
    curve.draw(lambda: lines(9))
    assert drawn(curve, path) != first
    curve.close()
    clock.now += SECONDS
    curve.draw(lambda: pytest.fail("the run is over"))
    assert [each.name for each in tmp_path.iterdir()] == ["curve.png"]


def test_a_picture_that_cannot_be_drawn_is_said_once_and_not_tried_again(tmp_path: Path, monkeypatch, caplog):
    def broken(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(reward_curve, "draw_curve", broken)
    clock = Clock()
    curve = LiveCurve(tmp_path / "curve.png", clock)
    for _ in range(3):
        clock.now += SECONDS
        curve.draw(lambda: lines(2))
        if curve._thread is not None:
            curve._thread.join()
    assert len(caplog.records) == 1
    assert "is not drawn while the run goes on: OSError: no space left on device" in caplog.text
