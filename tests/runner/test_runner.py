"""The runner with real processes and a real store."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import opentelemetry.trace
import pytest
from tests.support import agents
from tests.support.waiting import until

from agentlightning.attempt_address import attempt_key
from agentlightning.errors import AgentError, ConfigError, StoreFullError
from agentlightning.resources import LLM, PromptTemplate
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.runner.runner import Runner
from agentlightning.span import MESSAGE, REWARD, SCORE_VALUE, Span
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracing.emit import emit_reward
from agentlightning.tracing.rewards import get_reward_value

pytestmark = pytest.mark.integration

HERE = "tests.support.agents"
OPTIONS: Any = {"secret": "s", "server_url": "http://127.0.0.1:9", "poll_seconds": 0.05}


class Proxy:
    """A store that does one thing differently."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("name", ["reward_of_task", "reward_of_task_async", "decorated", "Sync"])
async def test_a_returned_number_is_the_final_reward(
    name: str, start: Any, roll: Any, rewards_of: Any, attempt_of: Any
) -> None:
    await start(f"{HERE}:{name}")
    ended = await roll({"reward": 0.5}, {"reward": 0})
    assert [rollout.status for rollout in ended] == ["succeeded", "succeeded"]
    assert [await rewards_of(rollout) for rollout in ended] == [[0.5], [0.0]]
    assert "output" not in (await attempt_of(ended[0])).metadata


async def test_what_is_emitted_is_kept_in_order(start: Any, roll: Any, store: Any) -> None:
    await start(agents.emits_rewards)
    [ended] = await roll({"rewards": [0.1, 0.2, 0.3]})
    spans = await store.query_spans(ended.rollout_id)
    assert [span.name for span in spans] == [MESSAGE, REWARD] * 3
    assert [span.sequence_id for span in spans] == [1, 2, 3, 4, 5, 6]
    assert {span.attempt_id for span in spans} == {(await store.get_latest_attempt(ended.rollout_id)).attempt_id}


async def test_a_reward_stands_before_the_model_call_that_follows_it(
    start: Any, roll: Any, store: Any, gateway: Any
) -> None:
    def agent(task: Any, base_url: str, api_key: str) -> None:
        for value in range(3):
            agents.post(f"{base_url}/chat/completions", api_key, {"model": "m", "messages": []})
            emit_reward(value)

    gateway.script = [{"content": "x"}]
    await start(agent, server_url=gateway.url)
    [ended] = await roll({})
    assert [span.name for span in await store.query_spans(ended.rollout_id)] == ["chat", REWARD] * 3


async def test_spans_of_any_library_and_spans_returned_are_kept(start: Any, roll: Any, store: Any) -> None:
    def agent(task: Any) -> list[Span]:
        with opentelemetry.trace.get_tracer("a library").start_as_current_span("traced"):
            return [Span("", "", "made by hand", 1.0, 2.0, span_id="a" * 16)]

    await start(agent)
    [ended] = await roll({})
    spans = await store.query_spans(ended.rollout_id)
    assert [span.name for span in spans] == ["traced", "made by hand"]
    assert {span.attempt_id for span in spans} == {(await store.get_latest_attempt(ended.rollout_id)).attempt_id}


async def test_each_mode_runs_its_own_method(start: Any, roll: Any, rewards_of: Any) -> None:
    await start(agents.ByMode())
    [train], [val] = await roll({}, mode="train"), await roll({}, mode="val")
    assert [await rewards_of(train), await rewards_of(val)] == [[1.0], [2.0]]


async def test_a_closure_runs_as_it_is(start: Any, roll: Any, rewards_of: Any) -> None:
    factor = 0.25

    async def agent(task: dict[str, Any]) -> float:
        return task["x"] * factor

    await start(agent)
    [ended] = await roll({"x": 2})
    assert await rewards_of(ended) == [0.5]


async def test_a_class_reads_its_environment_and_posts_its_reward(
    start: Any, roll: Any, rewards_of: Any, gateway: Any
) -> None:
    await start(agents.Posting, server_url=gateway.url, env={"SCORE": "score"})
    ended = await roll({"score": 0.75}, {"score": -1})
    assert [await rewards_of(rollout) for rollout in ended] == [[0.75], [-1.0]]
    keys = {f"Bearer {attempt_key('a secret', *request['path'].split('/')[2:5:2])}" for request in gateway.requests}
    assert {request["key"] for request in gateway.requests} == keys


async def test_variables_hold_the_fields_that_were_asked_for(
    start: Any, roll: Any, rewards_of: Any, gateway: Any
) -> None:
    await start(agents.Posting, server_url=gateway.url, env={"SCORE": "points"})
    good, bad = await roll({"points": 3}, {"score": 3})
    assert await rewards_of(good) == [3.0]
    assert bad.status == "failed"


async def test_resources_are_those_of_the_rollout_else_the_latest(start: Any, store: Any, attempt_of: Any) -> None:
    await start(agents.filled_prompt)
    old = await store.add_resources({"p": PromptTemplate(template="old {word}")})
    await store.add_resources({"p": PromptTemplate(template="new {word}")})
    task = {"word": "x"}
    requests = [EnqueueRolloutRequest(task, resources_id=old.resources_id), EnqueueRolloutRequest(task)]
    ids = [r.rollout_id for r in await store.enqueue_many_rollouts(requests)]
    ended = await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
    assert [(await attempt_of(rollout)).metadata["output"] for rollout in ended] == ["old x", "new x"]


async def test_resources_the_store_lost_fail_the_rollout(store: Any, roll: Any, attempt_of: Any) -> None:
    class Forgetful(Proxy):
        async def get_resources_by_id(self, resources_id: str) -> None:
            return None

    lost = (await store.add_resources({})).resources_id
    async with Runner(Forgetful(store), agents.echo, **OPTIONS):
        queued = await store.enqueue_rollout({}, resources_id=lost)
        [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=30)
    assert ended.status == "failed"
    assert repr(lost) in (await attempt_of(ended)).metadata["error"]["message"]


async def test_the_model_leads_to_the_attempt(start: Any, roll: Any, store: Any, attempt_of: Any) -> None:
    await store.add_resources({"main": LLM(endpoint="http://127.0.0.1:9", model="policy")})
    await start(agents.model_name)
    [ended] = await roll({})
    attempt = await attempt_of(ended)
    key = attempt_key("a secret", ended.rollout_id, attempt.attempt_id)
    assert attempt.metadata["output"] == f"policy at http://127.0.0.1:9/key/{key}/v1"


# -- rewards ---------------------------------------------------------------------------------------------------------


async def test_a_reward_function_judges_the_output(start: Any, roll: Any, rewards_of: Any, attempt_of: Any) -> None:
    await start(lambda task: task["says"], reward=f"{HERE}:exact")
    right, wrong = await roll({"says": "42", "answer": 42}, {"says": "41", "answer": 42})
    assert [await rewards_of(right), await rewards_of(wrong)] == [[1.0], [0.0]]
    assert (await attempt_of(wrong)).metadata["output"] == "41"


async def test_a_reward_function_sees_what_the_agent_noted_in_its_task(start: Any, roll: Any, rewards_of: Any) -> None:
    def agent(task: dict[str, Any]) -> str:
        task["moves"] = 3
        return "won"

    await start(agent, reward=lambda task, output: 1.0 / task.get("moves", 100))
    [ended] = await roll({"board": "empty"})
    assert await rewards_of(ended) == [1 / 3]


async def test_a_reward_may_have_named_dimensions(start: Any, roll: Any, store: Any) -> None:
    await start("cat", reward=agents.dimensions)
    [ended] = await roll("12345678")
    [span] = await store.query_spans(ended.rollout_id)
    assert get_reward_value(span) == {"correctness": 1.0, "length": 1.0}


async def test_a_reward_that_is_none_fails_the_rollout_and_is_never_zero(
    start: Any, roll: Any, rewards_of: Any, attempt_of: Any
) -> None:
    def reward(task: str, output: float) -> Any:
        return {"nothing": None, "text": "1.0", "not a number": output}[task]

    await start(lambda task: float("nan"), reward=reward)
    for ended in await roll("nothing", "text", "not a number"):
        assert ended.status == "failed"
        assert await rewards_of(ended) == []
        error = (await attempt_of(ended)).metadata["error"]
        assert error["type"] == "RewardError"
        assert len(error["traceback"].splitlines()) == 1, "it says what is wrong; where we noticed helps nobody"


async def test_a_returned_nan_fails_the_rollout(start: Any, roll: Any, rewards_of: Any, attempt_of: Any) -> None:
    await start(lambda task: float("nan"))
    [ended] = await roll({})
    assert (ended.status, await rewards_of(ended)) == ("failed", [])
    assert "the agent gave nan" in (await attempt_of(ended)).metadata["error"]["message"]


# -- many ------------------------------------------------------------------------------------------------------------


async def test_many_rollouts_at_once_all_end_with_their_own_reward(start: Any, roll: Any, store: Any) -> None:
    runner = await start(agents.reward_of_task_async, concurrency=64, hosts=2)
    ended = await roll(*({"reward": i} for i in range(200)))
    rewards = {}
    async for rollout_id, spans in store.iter_spans([rollout.rollout_id for rollout in ended]):
        rewards[rollout_id] = [span.attributes[SCORE_VALUE] for span in spans]
    assert [rewards[rollout.rollout_id] for rollout in ended] == [[float(i)] for i in range(200)]
    assert runner.statistics.succeeded == 200


async def test_one_process_runs_128_agents_at_once(start: Any, roll: Any) -> None:
    barrier: list[Any] = []

    async def meets(task: Any) -> None:
        barrier.append(task)
        while len(barrier) < 128:  # noqa: ASYNC110  the others run in the same process, or never come
            await asyncio.sleep(0.05)

    await start(meets, concurrency=128)
    assert {rollout.status for rollout in await roll(*range(128))} == {"succeeded"}


async def test_all_spans_are_there_when_a_rollout_has_succeeded(start: Any, store: Any) -> None:
    await start(agents.emits_rewards, concurrency=8)
    for _ in range(10):
        queued = await store.enqueue_rollout({"rewards": list(range(20))})
        await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=30)
        assert len(await store.query_spans(queued.rollout_id)) == 40


async def test_attempts_at_once_each_see_their_own_environment(start: Any, roll: Any, attempt_of: Any) -> None:
    await start(agents.environment_everywhere, concurrency=8)
    ended = await roll(*({"seconds": 0.01 * (i % 3)} for i in range(16)))
    for rollout in ended:
        attempt = await attempt_of(rollout)
        seen = attempt.metadata["output"]
        assert seen == dict.fromkeys(["thread", "executor", "to_thread", "subprocess", "here"], attempt.attempt_id)


async def test_two_runners_share_a_queue(start: Any, roll: Any) -> None:
    runners = [await start(agents.reward_of_task_async, concurrency=2) for _ in range(2)]
    ended = await roll(*({"reward": 1} for _ in range(40)))
    assert {rollout.status for rollout in ended} == {"succeeded"}
    assert sum(runner.statistics.succeeded for runner in runners) == 40


# -- life ------------------------------------------------------------------------------------------------------------


async def test_an_agent_that_cannot_be_imported_is_an_error_of_start(start: Any) -> None:
    with pytest.raises(AgentError, match=f"did you mean {HERE}:echo"):
        await start(f"{HERE}:ecoh")


async def test_an_agent_whose_import_ends_the_process_is_an_error_of_start(start: Any, tmp_path: Any) -> None:
    path = tmp_path / "abrupt.py"
    path.write_text("import os; os._exit(5)")
    with pytest.raises(AgentError, match=r"abrupt.py:solve ended with exit code 5 before it was done"):
        await start(f"{path}:solve")


async def test_a_reward_that_cannot_be_imported_is_an_error_of_start(start: Any) -> None:
    with pytest.raises(AgentError, match=f"reward {HERE}:exakt.*did you mean {HERE}:exact"):
        await start(agents.echo, reward=f"{HERE}:exakt")


async def test_a_directory_that_is_not_there_is_named(start: Any) -> None:
    with pytest.raises(AgentError, match="cwd='/nowhere' does not exist"):
        await start(agents.echo, cwd="/nowhere")


async def test_a_runner_needs_to_know_where_the_gateway_is(store: Any) -> None:
    with pytest.raises(ConfigError, match="needs server_url"):
        await Runner(store, agents.echo, secret="s").start()


def test_a_runner_that_can_run_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="hosts=4, concurrency=2"):
        Runner(InMemoryLightningStore(), agents.echo, secret="s", hosts=4, concurrency=2)


def test_the_agent_is_imported_before_there_is_a_loop_or_a_server() -> None:
    async def work(runner: Runner, store: Any) -> str:
        await runner.start("http://127.0.0.1:9")
        queued = await store.enqueue_rollout({"reward": 1})
        [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=30)
        await runner.stop()
        await store.close()
        return ended.status

    import uvloop

    store = InMemoryLightningStore()
    runner = Runner(store, agents.reward_of_task, secret="s")
    runner.start_hosts()
    assert uvloop.run(work(runner, store)) == "succeeded"


async def test_the_agent_runs_where_it_is_told_to_and_prints_where_it_is_told_to(
    start: Any, roll: Any, attempt_of: Any, tmp_path: Any
) -> None:
    (tmp_path / "local_agent.py").write_text(
        "import os\ndef where(task): print('hello from', task); return os.getcwd()"
    )
    log = tmp_path / "agent.log"
    await start("local_agent:where", cwd=tmp_path, log=log)
    [ended] = await roll("here")
    assert (await attempt_of(ended)).metadata["output"] == str(tmp_path)
    assert log.read_text() == "hello from here\n"


async def test_importing_a_small_agent_brings_no_heavy_library(start: Any, roll: Any, attempt_of: Any) -> None:
    await start(lambda task: sorted({"torch", "transformers", "openai", "sqlite3"} & set(sys.modules)))
    [ended] = await roll({})
    assert (await attempt_of(ended)).metadata["output"] == []


async def test_stopping_lets_what_runs_end_and_queues_the_rest_again(start: Any, store: Any) -> None:
    runner = await start(agents.hangs_async, concurrency=2)
    requests = [EnqueueRolloutRequest({"hang": True}) for _ in range(3)]
    ids = [r.rollout_id for r in await store.enqueue_many_rollouts(requests)]
    await until(lambda: runner.statistics.running == 2)
    await runner.stop(0.1)
    assert sorted(r.status for r in await store.query_rollouts(rollout_id_in=ids)) == [
        "queuing",
        "requeuing",
        "requeuing",
    ]
    assert runner.statistics.requeued == 2
    await runner.stop()


async def test_stopping_does_not_bring_back_what_was_cancelled(start: Any, store: Any) -> None:
    runner = await start(agents.hangs_async, heartbeat_seconds=600)
    queued = await store.enqueue_rollout({"hang": True})
    await until(lambda: runner.statistics.running == 1)
    await store.cancel_rollout(queued.rollout_id)
    await runner.stop(0)
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "cancelled"
    assert runner.statistics.requeued == 0


async def test_a_runner_whose_processes_cannot_start_says_so(start: Any, tmp_path: Any) -> None:
    path = tmp_path / "stillborn.py"
    path.write_text("import os\nos.register_at_fork(after_in_child=lambda: os._exit(9))\ndef agent(task): return 1.0")
    with pytest.raises(AgentError, match=r"(?s)end as soon as they start; the last one ended with exit code 9"):
        await start(f"{path}:agent")


@pytest.mark.chaos
async def test_a_runner_that_lost_its_processes_ends_with_an_error(start: Any, store: Any, caplog: Any) -> None:
    def agent(task: Any) -> None:
        os.kill(os.getppid(), 9)
        time.sleep(3600)

    with caplog.at_level(logging.CRITICAL):
        runner = await start(agent)
        await store.enqueue_rollout({})
        with pytest.raises(AgentError, match=r"that starts the processes of agent .* was killed by SIGKILL"):
            await asyncio.wait_for(runner.wait(), 30)
        with pytest.raises(AgentError):
            await runner.stop()


async def test_a_cancelled_rollout_is_stopped_and_nobody_reports_it(start: Any, store: Any) -> None:
    runner = await start(agents.hangs_async, heartbeat_seconds=0.05)
    queued = await store.enqueue_rollout({"hang": True})
    await until(lambda: runner.statistics.running == 1)
    await store.cancel_rollout(queued.rollout_id)
    await until(lambda: runner.statistics.running == 0)
    assert runner.statistics.discarded == 1
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "cancelled"


async def test_a_superseded_attempt_changes_nothing(start: Any, store: Any, roll: Any) -> None:
    runner = await start(agents.hangs_async, heartbeat_seconds=0.05, concurrency=1)
    queued = await store.enqueue_rollout({"hang": True})
    await until(lambda: runner.statistics.running == 1)
    newer = await store.start_attempt(queued.rollout_id)
    await store.update_attempt(queued.rollout_id, newer.attempt.attempt_id, status="succeeded")
    [other] = await roll({})
    assert other.status == "succeeded"
    assert (await store.get_rollout_by_id(queued.rollout_id)).status == "succeeded"
    assert runner.statistics.discarded == 1


async def test_a_runner_keeps_its_attempts_alive(start: Any, roll: Any) -> None:
    await start(lambda task: time.sleep(2.0), heartbeat_seconds=0.1)
    [ended] = await roll({}, unresponsive_seconds=1.2)
    assert ended.status == "succeeded"


class Full(Proxy):
    """A store that refuses some writes."""

    def __init__(self, store: Any, refusals: int) -> None:
        super().__init__(store)
        self._left = refusals

    async def add_many_spans(self, spans: Any) -> Any:
        if self._left:
            self._left -= 1
            raise StoreFullError("no space left on the disk")
        return await self._store.add_many_spans(spans)


async def test_a_full_store_is_given_time_and_nothing_is_lost(store: Any, roll: Any, rewards_of: Any) -> None:
    async with Runner(Full(store, 2), agents.reward_of_task, **OPTIONS):
        ended = await roll({"reward": 1}, {"reward": 2})
        assert [await rewards_of(rollout) for rollout in ended] == [[1.0], [2.0]]


async def test_a_store_that_stays_full_ends_the_runner_with_its_error(store: Any, caplog: Any) -> None:
    runner = Runner(Full(store, 10**6), agents.reward_of_task, patience=0.1, **OPTIONS)
    await runner.start()
    queued = await store.enqueue_rollout({"reward": 1})
    with caplog.at_level(logging.CRITICAL), pytest.raises(StoreFullError, match="no space left"):
        await asyncio.wait_for(runner.wait(), 30)
    with pytest.raises(StoreFullError):
        await runner.stop()
    assert (await store.get_rollout_by_id(queued.rollout_id)).status not in ("succeeded", "failed")


PARENT = """
import asyncio, os, sys
from agentlightning.runner.runner import Runner
from agentlightning.store import InMemoryLightningStore

async def main():
    store = InMemoryLightningStore()
    runner = Runner(store, ["sh", "-c", "echo $$ $PPID > {path}; exec sleep 600"], secret="s", server_url="http://x")
    await runner.start()
    await store.enqueue_rollout(1)
    while not (os.path.exists("{path}") and open("{path}").read().endswith("\\n")):
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.chaos
def test_nothing_is_left_of_a_runner_that_was_killed(tmp_path: Any) -> None:
    path = tmp_path / "pids"
    subprocess.run([sys.executable, "-c", PARENT.format(path=path)], timeout=60, check=False)
    for pid in map(int, path.read_text().split()):
        for _ in range(1000):
            if not _runs(pid):
                break
            time.sleep(0.01)
        assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
