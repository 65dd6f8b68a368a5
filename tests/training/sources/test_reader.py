"""Trajectories are assembled and checked in threads, while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning.algorithms.lightning_rl import reward_metrics
from agentlightning.algorithms.training import Collected
from agentlightning.credit.rejection import Rejection
from agentlightning.span import (
    AIR_RULE,
    LOGPROBS,
    OPERATION_NAME,
    PROMPT_TOKEN_IDS,
    RESPONSE_TOKEN_IDS,
    REWARD,
    SCORE_VALUE,
    TOOL_NAME,
    Span,
    new_span_id,
)
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracing.air import AutomaticRewards, weighted_rules
from agentlightning.training.health.step_record import step_line
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.sources import collector as reader
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan, TrajectoryReader
from agentlightning.training.sources.stream import RolloutStream
from agentlightning.trajectory import Trajectory


async def test_the_event_loop_runs_while_trajectories_are_assembled_and_checked(
    store: InMemoryLightningStore, finish: Any, monkeypatch: Any
) -> None:
    """Assembly and the check each wait until the event loop has ticked: on the loop they would wait for ever."""
    rollout = await store.start_rollout({"n": 0})
    await finish(rollout)
    ticked = threading.Event()
    assemble = reader.trajectory

    def wait_for_tick() -> None:
        ticked.clear()
        assert ticked.wait(30)

    def slow_trajectory(*args: Any, **options: Any) -> Trajectory:
        wait_for_tick()
        return assemble(*args, **options)

    def check(found: Sequence[Trajectory]) -> list[Rejection]:
        wait_for_tick()
        return []

    async def tick() -> None:
        while True:
            ticked.set()
            await asyncio.sleep(0)

    monkeypatch.setattr(reader, "trajectory", slow_trajectory)
    heartbeat = asyncio.create_task(tick())
    trajectories, _ = await TrajectoryReader(store).read([RolloutPlan(rollout.rollout_id, None, "g")], check)
    heartbeat.cancel()
    assert [each.reward for each in trajectories] == [1.0]


async def finished_with_tool(store: InMemoryLightningStore, finish: Any, tools: int = 1, reward: float = 1.0) -> str:
    """A rollout with one call, tool calls after it, and a final reward."""
    rollout = await store.start_rollout({"n": 0})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    call = {OPERATION_NAME: "chat", PROMPT_TOKEN_IDS: [1], RESPONSE_TOKEN_IDS: [2], LOGPROBS: [-0.5]}
    await store.add_span(Span(*ids, "chat", 0.0, span_id=new_span_id(), attributes=call))
    for _ in range(tools):
        tool = {OPERATION_NAME: "execute_tool", TOOL_NAME: "noop"}
        await store.add_span(Span(*ids, "noop", 0.0, span_id=new_span_id(), attributes=tool))
    await store.add_span(Span(*ids, REWARD, 0.0, span_id=new_span_id(), attributes={SCORE_VALUE: reward}))
    await store.update_attempt(*ids, status="succeeded")
    return rollout.rollout_id


async def test_automatic_rewards_are_recorded_once_however_often_a_rollout_is_read(
    store: InMemoryLightningStore, finish: Any
) -> None:
    rollout_id = await finished_with_tool(store, finish)
    reader = TrajectoryReader(store, air=weighted_rules({"tool_succeeded": 0.5}))
    for _ in range(3):
        ((found,), _) = await reader.read([RolloutPlan(rollout_id, None, "g")])
        assert (found.reward, found.transitions[0].reward) == (1.0, 0.5)
    recorded = [span for span in await store.query_spans(rollout_id) if AIR_RULE in span.attributes]
    assert [span.attributes[AIR_RULE] for span in recorded] == ["tool_succeeded"]
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    assert rollout.status == "succeeded"


async def test_the_rules_of_today_replace_recorded_rewards(store: InMemoryLightningStore, finish: Any) -> None:
    rollout_id = await finished_with_tool(store, finish)
    for weight in (0.5, 0.25, 0.5):
        ((found,), _) = await TrajectoryReader(store, air=weighted_rules({"tool_succeeded": weight})).read(
            [RolloutPlan(rollout_id, None, "g")]
        )
        assert found.transitions[0].reward == weight


async def test_a_rule_that_fails_rejects_the_rollout_and_names_it(store: InMemoryLightningStore, finish: Any) -> None:
    rollout_id = await finished_with_tool(store, finish)
    rules = AutomaticRewards({"mine:bad": (lambda span: float("nan"), 1.0)})
    found, rejected = await TrajectoryReader(store, air=rules).read([RolloutPlan(rollout_id, None, "g")])
    assert not found
    assert (rejected[0].reason, rollout_id in rejected[0].message) == ("bad_reward", True)


async def test_an_exploited_rule_raises_the_automatic_reward_and_not_the_true_one(
    store: InMemoryLightningStore, finish: Any
) -> None:
    """An agent that calls a useless tool ever more often: the metrics tell both rewards apart."""
    reader = TrajectoryReader(store, air=weighted_rules({"tool_succeeded": 0.1}))
    lines: list[Any] = []
    for tools in (1, 5, 25):
        rollout_id = await finished_with_tool(store, finish, tools, reward=0.0)
        trajectories, _ = await reader.read([RolloutPlan(rollout_id, None, "g")])
        collected = Collected(trajectories)
        lines.append(step_line(RunState("r1"), collected, reward_metrics(collected)))
    assert [line["reward"] for line in lines] == [0.0, 0.0, 0.0]
    assert [line["air_reward"] for line in lines] == pytest.approx([0.1, 0.5, 2.5])
    assert [line["air_tool_succeeded"] for line in lines] == pytest.approx([0.1, 0.5, 2.5])


async def test_rollouts_that_were_removed_meanwhile_are_left_out(store: InMemoryLightningStore, finish: Any) -> None:
    rollout = await store.start_rollout({"n": 0})
    await finish(rollout)
    nothing: Any = None
    stream = RolloutStream(RolloutCollector(TrajectoryReader(store)), [], RunState("r"), nothing, nothing)
    groups, tasks = {"removed": "g", rollout.rollout_id: "g"}, {rollout.rollout_id: {"n": 0}}
    found = await stream.recall(groups, None, tasks, 0)
    assert [(each.rollout_id, each.group, each.task) for each in found] == [(rollout.rollout_id, "g", {"n": 0})]

    def reject_all(trajectories: Sequence[Trajectory]) -> list[Rejection]:
        return [Rejection(each.rollout_id, "bad", "no use") for each in trajectories]

    assert await stream.recall(groups, reject_all, tasks, 0) == ()
