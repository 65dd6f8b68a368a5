"""A collector asks for rollouts, and gets trajectories; asking again continues."""

import asyncio
import contextlib
from dataclasses import asdict, replace

import pytest

from agentlightning.assemble import TokenLimits
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import Failure, TrainingStopped, UnknownTokensError
from agentlightning.resources import ProxyLLM
from agentlightning.rollouts import RolloutConfig
from agentlightning.runner.agents.command import CommandError
from agentlightning.span import (
    LOGPROBS,
    OPERATION_NAME,
    PROMPT_TOKEN_IDS,
    RESPONSE_TOKEN_IDS,
    REWARD,
    SCORE_VALUE,
    Span,
    new_span_id,
)
from agentlightning.store.types import Retention
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan, TrajectoryReader, cause_of_failure

PLANS = [RolloutPlan(f"run-{index}", {"n": index}, group=f"g{index // 2}") for index in range(4)]


@contextlib.asynccontextmanager
async def agents(store, behave):
    """Run `behave(task)` for every rollout: its number is the reward, an exception a failure, None no word at all."""

    async def work():
        while True:
            claimed = await store.dequeue_rollout(timeout=5)
            if claimed is None:
                continue
            ids = claimed.rollout_id, claimed.attempt.attempt_id
            try:
                reward = behave(claimed.input)
            except ValueError as error:
                failure = {"error": {"type": "ValueError", "message": str(error), "traceback": f"line 1\n{error}"}}
                await store.update_attempt(*ids, status="failed", metadata=failure)
            else:
                if reward is None:
                    continue
                span = Span(*ids, REWARD, 0.0, span_id=new_span_id(), attributes={SCORE_VALUE: reward})
                await store.add_span(span)
                await store.update_attempt(*ids, status="succeeded")

    worker = asyncio.create_task(work())
    yield
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


def make(store, *options, **reading):
    return RolloutCollector(TrajectoryReader(store, **reading), *options)


async def collect(collector, plans=PLANS, **options):
    resources = await collector.store.add_resources({})
    return await collector.collect(plans, resources_id=resources.resources_id, **options)


async def test_trajectories_come_back_in_the_order_asked_for_with_their_groups(store):
    async with agents(store, lambda task: float(task["n"])):
        collected = await collect(make(store))
    assert [trajectory.rollout_id for trajectory in collected.trajectories] == [plan.rollout_id for plan in PLANS]
    assert [trajectory.reward for trajectory in collected.trajectories] == [0.0, 1.0, 2.0, 3.0]
    assert [trajectory.group for trajectory in collected.trajectories] == ["g0", "g0", "g1", "g1"]


async def test_asking_again_runs_no_rollout_twice(store):
    runs = []
    async with agents(store, lambda task: runs.append(task["n"]) or 1.0):
        await collect(make(store), PLANS[:2])
        collected = await collect(make(store))
    assert sorted(runs) == [0, 1, 2, 3]
    assert len(collected.trajectories) == 4


async def test_asking_again_gives_a_failed_rollout_another_chance(store):
    broken = True

    def behave(task):
        if broken and task["n"] == 1:
            raise ValueError("no luck")
        return 1.0

    async with agents(store, behave):
        first = await collect(make(store))
        broken = False
        second = await collect(make(store))
    assert [rollout.rollout_id for rollout in first.failed] == ["run-1"]
    assert len(first.trajectories) == 3
    assert not second.failed
    assert len(second.trajectories) == 4


async def test_a_failed_rollout_is_retried_as_often_as_the_configuration_says(store):
    tries = []

    def behave(task):
        tries.append(task["n"])
        if len(tries) == 1:
            raise ValueError("once")
        return 1.0

    async with agents(store, behave):
        collected = await collect(make(store, RolloutConfig(max_attempts=2)), PLANS[:1])
    assert tries == [0, 0]
    assert not collected.failed


async def test_too_many_failures_stop_training_with_the_first_traceback(store):
    def behave(task):
        raise ValueError("the tool is gone")

    async with agents(store, behave):
        with pytest.raises(TrainingStopped, match=r"4 of 4 rollouts failed.*\nline 1\nthe tool is gone\n"):
            await collect(make(store))


async def test_a_rollout_that_is_removed_while_it_is_waited_for_is_run_again(store):
    runs = []

    def behave(task):
        runs.append(task["n"])
        return 1.0

    collector = make(store)
    asking = asyncio.create_task(collect(collector))
    claimed = await store.dequeue_rollout(timeout=5)
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    await store.update_attempt(*ids, status="succeeded")
    await store.prune(Retention(max_rollouts=0))
    async with agents(store, behave):
        collected = await asking
    assert sorted(runs) == [0, 1, 2, 3]
    assert len(collected.trajectories) == 4


async def test_what_a_dead_process_had_claimed_is_queued_again(store):
    await store.enqueue_rollout({"n": 0}, rollout_id="run-0")
    claimed = await store.dequeue_rollout()
    collector = make(store)
    assert await collector.recover("run", "it died") == 1
    async with agents(store, lambda task: 1.0):
        collected = await collect(collector, PLANS[:1])
    assert collected.trajectories[0].attempt_id != claimed.attempt.attempt_id


async def test_what_is_queued_calls_the_address_of_the_process_that_goes_on(store):
    """Runners claim it before any step publishes resources again."""
    dead = {name: ProxyLLM(endpoint="http://dead:1", model="m") for name in ("llm", "llm:writer", "judge")}
    await store.add_resources(dead, "run-1")
    await store.add_resources(dead, "other")
    await store.enqueue_rollout({"n": 1}, resources_id="run-1", rollout_id="run-1-0")
    await store.enqueue_rollout({"n": 1}, resources_id="other", rollout_id="finished-0")
    await make(store).move("run", "http://alive:2")
    found = (await store.get_resources_by_id("run-1")).resources
    assert {name: each.endpoint for name, each in found.items()} == {
        **{"llm": "http://alive:2", "llm:writer": "http://alive:2"},
        **{"judge": "http://dead:1"},
    }
    assert (await store.get_resources_by_id("other")).resources == dead, "of another run"


def unloved(*numbers, reason="unloved"):
    """A check that rejects the rollouts with these rewards."""
    return lambda trajectories: [
        Rejection(each.rollout_id, reason, "nobody likes it") for each in trajectories if each.reward in numbers
    ]


async def test_a_rollout_whose_spans_make_no_sense_is_left_out_with_its_reason(store):
    async with agents(store, lambda task: "hot" if task["n"] == 1 else 1.0):
        collected = await collect(make(store))
    assert [trajectory.rollout_id for trajectory in collected.trajectories] == ["run-0", "run-2", "run-3"]
    [rejected] = collected.rejected
    assert (rejected.rollout_id, rejected.reason) == ("run-1", "bad_reward")
    assert "'hot'" in rejected.message
    assert not collected.failed


async def test_too_many_rejected_and_failed_rollouts_stop_training_with_counts_and_the_first_reason(store):
    def behave(task):
        if task["n"] == 3:
            raise ValueError("gone")
        return float(task["n"])

    stop = r"3 of 4 rollouts cannot be used \(3 unloved\), and 1 failed.*\nnobody likes it\n.*--resume"
    async with agents(store, behave):
        with pytest.raises(TrainingStopped, match=stop):
            await collect(make(store), check=unloved(0.0, 1.0, 2.0))
        with pytest.raises(UnknownTokensError):
            await collect(make(store), check=unloved(0.0, 1.0, 2.0, reason="unknown_tokens"))
        collected = await collect(make(store), check=unloved(0.0, 1.0, 2.0), max_failed_share=1.0)
    assert not collected.trajectories
    assert len(collected.rejected) == 3


async def test_asking_again_runs_what_was_rejected_again_and_nothing_else(store):
    runs = []
    mended = False

    def behave(task):
        runs.append(task["n"])
        return "hot" if task["n"] == 1 and not mended else 1.0

    async with agents(store, behave):
        assert len((await collect(make(store))).rejected) == 1
        assert len((await collect(make(store))).rejected) == 1
        mended = True
        third = await collect(make(store))
        fourth = await collect(make(store))
    assert runs.count(1) == 3
    assert [runs.count(n) for n in (0, 2, 3)] == [1, 1, 1]
    assert not third.rejected
    assert [trajectory.group for trajectory in third.trajectories] == ["g0", "g0", "g1", "g1"]
    assert fourth.trajectories == third.trajectories


async def test_a_rollout_of_tokens_the_policy_does_not_have_is_run_again(store):
    collector = make(store, limits=TokenLimits(vocabulary=10))
    tokens = {OPERATION_NAME: "chat", PROMPT_TOKEN_IDS: [1], RESPONSE_TOKEN_IDS: [99], LOGPROBS: [-0.5]}
    claimed = await store.start_rollout(PLANS[0].task, rollout_id=PLANS[0].rollout_id)
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    await store.add_span(Span(*ids, "chat", 0.0, span_id=new_span_id(), attributes=tokens))
    await store.update_attempt(*ids, status="succeeded")
    async with agents(store, lambda task: 1.0):
        collected = await collect(collector, PLANS[:2], max_failed_share=1.0)
    assert [trajectory.rollout_id for trajectory in collected.trajectories] == ["run-0-again1", "run-1"]


async def test_a_step_of_any_size_is_queued_and_awaited_in_parts(store, monkeypatch):
    monkeypatch.setattr("agentlightning.training.sources.collector.CHUNK", 3)
    sizes, seen = list[int](), list[int]()
    enqueue = store.enqueue_many_rollouts

    async def counted(requests):
        sizes.append(len(requests))
        return await enqueue(requests)

    store.enqueue_many_rollouts = counted
    plans = [RolloutPlan(f"run-{index}", {"n": index}, group="g") for index in range(8)]
    async with agents(store, lambda task: float(task["n"])):
        collected = await collect(make(store), plans=plans, on_progress=seen.append)
    assert sizes == [3, 3, 2]
    assert [t.reward for t in collected.trajectories] == [float(n) for n in range(8)]
    assert seen == sorted(seen)
    assert seen[-1] == 8


async def test_a_rollout_that_ran_out_of_time_fails_or_has_the_reward_it_was_given(store):
    config = RolloutConfig(timeout_seconds=0.2)
    collector = make(store, config)

    def behave(task):
        return None if task["n"] in (1, 2) else 1.0

    async with agents(store, behave):
        collected = await collect(collector)
    assert collected.timeouts == 2
    assert [rollout.rollout_id for rollout in collected.failed] == ["run-1", "run-2"]
    assert [each.rollout_id for each in collected.trajectories] == ["run-0", "run-3"]

    again = [replace(plan, rollout_id=f"again-{plan.rollout_id}") for plan in PLANS]
    async with agents(store, behave):
        collected = await collect(collector, plans=again, timeout_reward=-1.0, max_failed_share=0.0)
    assert (collected.timeouts, collected.failed) == (2, ())
    assert [each.reward for each in collected.trajectories] == [1.0, -1.0, -1.0, 1.0]


def with_note(error: Exception) -> Exception:
    error.add_note("During task with name 'tools' and id '37f1'")
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (with_note(KeyError("drills")), "KeyError: 'drills'"),
        (ValueError("2 fields are wrong\nname: missing"), "ValueError: 2 fields are wrong"),
        (CommandError("'python a.py' exited with status 1", "Traceback\nLookupError: no page"), "LookupError: no page"),
    ],
)
async def test_a_failure_is_named_by_its_error_and_not_by_notes_of_a_framework(store, error, cause):
    rollout = await store.start_rollout({"n": 1})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    await store.update_attempt(*ids, status="failed", metadata={"error": asdict(Failure.of(error))})
    assert cause_of_failure(await store.get_latest_attempt(rollout.rollout_id)) == cause
