"""Promises about hierarchies: every level is the environment of the level above it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store.types import RolloutRecord


class Line:
    """Numbers from `start` on; each step adds one, and the end is at `end`. A reward of 1 for every "go"."""

    def __init__(self, end: int = 4) -> None:
        self.end, self.at, self.actions = end, 0, list[Any]()

    def reset(self, start: int = 0) -> tuple[int, dict[str, Any]]:
        self.at = start
        return self.at, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.at += 1
        return self.at, float(action == "go"), self.at == self.end, False, {}


def test_a_level_acts_some_times_for_each_goal_of_the_level_above() -> None:
    asked: list[tuple[str, Any, Any]] = []

    def act(name: str, answer: str) -> Any:
        def acted(observation: Any, goal: Any) -> str:
            asked.append((name, observation, goal))
            return answer

        return acted

    world = Line()
    bottom = agl.Level("bottom", act("bottom", "go"), world)
    middle = agl.Level("middle", act("middle", "forward"), bottom, steps=2)
    top = agl.Level("top", act("top", "there"), middle)
    assert asyncio.run(top.run()) == 4.0
    assert world.actions == ["go"] * 4
    assert asked == [
        ("top", 0, None),
        ("middle", 0, "there"),
        ("bottom", 0, "forward"),
        ("middle", 1, "there"),
        ("bottom", 1, "forward"),
        ("top", 2, None),
        ("middle", 2, "there"),
        ("bottom", 2, "forward"),
        ("middle", 3, "there"),
        ("bottom", 3, "forward"),
    ]


def test_the_level_above_sees_and_is_given_what_the_level_says() -> None:
    seen: list[Any] = []
    below = agl.Level(
        "below",
        lambda observation, goal: goal,
        Line(end=3),
        steps=2,
        observe=lambda step: f"at {step.observations[-1]}",
        reward=lambda step: 10 * step.reward + len(step.actions),
    )

    async def act(observation: str, goal: None) -> str:
        seen.append(observation)
        return "go" if len(seen) == 1 else "stay"

    assert asyncio.run(agl.Level("above", act, below).run()) == 22.0 + 1.0
    assert seen == ["at 0", "at 2"]


def test_an_environment_may_be_a_coroutine_and_takes_the_options_of_reset() -> None:
    class Slow(Line):
        async def reset(self, start: int = 0) -> int:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().reset(start)[0]

        async def step(self, action: Any) -> Any:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().step(action)

    world = Slow()
    level = agl.Level("one", lambda observation, goal: "go", world)
    assert asyncio.run(level.run(start=2)) == 2.0
    assert asyncio.run(level.run(start=0, max_steps=3)) == 3.0


def test_calls_and_rewards_carry_the_name_of_their_level(tmp_path: Path) -> None:
    def act(observation: Any, goal: Any) -> str:
        agl.emit_message(f"{observation} {goal}")
        return "go"

    low = agl.Level("low", act, Line(), steps=2, credit=lambda step: step.reward)
    high = agl.Level("high", act, low)

    async def play() -> list[RolloutRecord]:
        store = agl.LightningStore(tmp_path / "store.db")
        with agl.track_session(store=store):
            agl.emit_reward(await high.run())
        assert agl.flush_recording()
        found = await store.read_records([rollout.rollout_id for rollout in await store.query_rollouts()])
        await store.close()
        return found

    (record,) = asyncio.run(play())
    said = [
        (span.attributes["gen_ai.agent.name"], span.attributes["agentlightning.message.body"])
        for span in record.spans
        if span.name == "agentlightning.message"
    ]
    assert said == [
        ("high", "0 None"),
        ("low", "0 go"),
        ("low", "1 go"),
        ("high", "2 None"),
        ("low", "2 go"),
        ("low", "3 go"),
    ]
    rewards = agl.find_reward_spans(record.spans)
    assert [(agl.get_reward_value(span), span.attributes.get("agentlightning.reward.agent")) for span in rewards] == [
        (2.0, "low"),
        (2.0, "low"),
        (4.0, None),
    ]


def test_what_cannot_be_a_level_is_refused_by_name() -> None:
    with pytest.raises(agl.errors.AgentError, match="'low', steps=0"):
        agl.Level("low", lambda *_: "go", Line(), steps=0)
    with pytest.raises(agl.errors.AgentError, match=r"'low'.*no reset and step"):
        agl.Level("low", lambda *_: "go", "a world")


def test_a_level_that_has_ended_or_never_begun_says_so() -> None:
    level = agl.Level("low", lambda *_: "go", Line(end=1))
    with pytest.raises(agl.errors.AgentError, match="'low' has ended, or was never begun"):
        asyncio.run(level.step("on"))
    assert asyncio.run(level.run()) == 1.0
    with pytest.raises(agl.errors.AgentError, match="call reset first"):
        asyncio.run(level.step("on"))
