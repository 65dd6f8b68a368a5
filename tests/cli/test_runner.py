"""`agl runner`: real runners of a real server, told to stop, killed, suspended, and left without their server."""

import asyncio
import os
import signal
import time

import pytest
from tests.support.waiting import until

from agentlightning.rollouts import EnqueueRolloutRequest, RolloutConfig
from agentlightning.span import REWARD, SCORE_VALUE
from agentlightning.store.http.client import LightningStoreClient

RUNNER = ("runner", "--agent", "agent.py:work", "--json")


@pytest.fixture
async def server(start):
    """(program, url, client) of `agl serve`."""
    program = start("serve", "--port", "0", "--store", "s.db", "--json")
    url = program.line()["url"]
    client = LightningStoreClient(url)
    yield program, url, client
    await client.close()


def enqueue(client, *tasks, **options):
    config = RolloutConfig(max_attempts=options.pop("max_attempts", 1))
    return client.enqueue_many_rollouts([EnqueueRolloutRequest(task, config=config, **options) for task in tasks])


async def ends(client, rollouts, seconds=60):
    ids = [rollout.rollout_id for rollout in rollouts]
    ended = await client.wait_for_rollouts(rollout_ids=ids, timeout=seconds)
    assert len(ended) == len(ids), [await client.get_rollout_by_id(rollout_id) for rollout_id in ids]
    return [rollout.status for rollout in ended]


async def is_running(client, rollout):
    latest = await client.get_latest_attempt(rollout.rollout_id)
    return latest is not None and latest


# -- the usual life --------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_it_runs_what_is_queued_and_drains_when_told_to_stop(start, server, tmp_path):
    _, url, client = server
    quick = await enqueue(client, *({"reward": i} for i in range(6)))
    runner = start(*RUNNER, "--server", url, "--worker-id", "w1")
    assert await ends(client, quick) == ["succeeded"] * 6
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    [slow] = await enqueue(client, {"marks": str(marks), "until": str(gate)})
    await until(lambda: asyncio.to_thread(marks.exists))
    runner.process.send_signal(signal.SIGTERM)
    await until(lambda: asyncio.to_thread(lambda: any("stopping" in line for line in runner.errors)))
    [late] = await enqueue(client, {})
    gate.touch()
    assert await ends(client, [slow]) == ["succeeded"]
    assert await asyncio.to_thread(runner.process.wait, 30) == 0
    report = runner.line()
    assert (report["worker_id"], report["succeeded"], report["requeued"]) == ("w1", 7, 0)
    assert (await client.get_rollout_by_id(late.rollout_id)).status == "queuing"
    worker = await client.get_worker("w1")
    assert (worker.status, worker.stats["stopped"]) == ("idle", True)


def test_it_needs_an_agent_and_a_server_that_is_there(invoke):
    assert "--agent" in invoke("runner", "--server", "http://127.0.0.1:9").stderr
    refused = invoke("runner", "--server", "http://127.0.0.1:9", "--agent", "x:y", "--variable", "NAME")
    assert (refused.exit_code, "VARIABLE=FIELD" in refused.stderr) == (2, True)
    refused = invoke("runner", "--server", "http://127.0.0.1:9", "--agent", "x:y", "--cwd", "nowhere")
    assert "the agent's directory cwd='nowhere' does not exist" in refused.stderr


def test_without_a_server_the_variable_that_names_one_is_said(invoke):
    assert "AGL_SERVER" in invoke("runner", "--agent", "x:y").stderr


@pytest.mark.slow
def test_the_server_may_be_named_by_the_environment(invoke, monkeypatch):
    monkeypatch.setenv("AGL_SERVER_PORT", "9")
    refused = invoke("runner", "--agent", "x:y", "--patience", "0")
    assert "http://127.0.0.1:9" in refused.stderr
    monkeypatch.setenv("AGL_SERVER_HOST", "127.0.0.2")
    assert "http://127.0.0.2:9" in invoke("runner", "--agent", "x:y", "--patience", "0").stderr


@pytest.mark.slow
async def test_a_second_signal_queues_again_what_runs(start, server, tmp_path):
    _, url, client = server
    marks = tmp_path / "marks"
    [rollout] = await enqueue(client, {"marks": str(marks), "seconds": 600})
    runner = start(*RUNNER, "--server", url)
    await until(lambda: asyncio.to_thread(marks.exists))
    runner.process.send_signal(signal.SIGTERM)
    await until(lambda: asyncio.to_thread(lambda: any("stopping" in line for line in runner.errors)))
    assert await asyncio.to_thread(runner.stop, signal.SIGTERM) == 0
    assert runner.line()["requeued"] == 1
    assert (await client.get_rollout_by_id(rollout.rollout_id)).status == "requeuing"


@pytest.mark.slow
async def test_a_drain_that_takes_too_long_is_cut(start, server, tmp_path):
    _, url, client = server
    marks = tmp_path / "marks"
    [rollout] = await enqueue(client, {"marks": str(marks), "seconds": 600})
    runner = start(*RUNNER, "--server", url, "--drain-seconds", "0.2")
    await until(lambda: asyncio.to_thread(marks.exists))
    assert await asyncio.to_thread(runner.stop) == 0
    assert (await client.get_rollout_by_id(rollout.rollout_id)).status == "requeuing"


@pytest.mark.slow
async def test_it_ends_after_as_many_rollouts_as_it_was_told(start, server):
    _, url, client = server
    await enqueue(client, {}, {}, {})
    runner = start(*RUNNER, "--server", url, "--max-rollouts", "2")
    assert await asyncio.to_thread(runner.process.wait, 30) == 0
    assert runner.line()["succeeded"] == 2
    assert (await client.statistics())["rollouts.queuing"] == 1


@pytest.mark.slow
async def test_with_fresh_processes_every_attempt_has_its_own(start, server, tmp_path):
    _, url, client = server
    rollouts = await enqueue(client, *({"marks": str(tmp_path / f"m{i}")} for i in range(4)))
    start(*RUNNER, "--server", url, "--fresh-process", "--concurrency", "2")
    assert await ends(client, rollouts) == ["succeeded"] * 4
    assert len({(tmp_path / f"m{i}").read_text() for i in range(4)}) == 4


@pytest.mark.slow
async def test_a_token_is_needed_and_the_agents_keys_follow_from_it(start, tmp_path):
    program = start("serve", "--port", "0", "--store", ":memory:", "--json", AGL_TOKEN="t0p")
    url = program.line()["url"]
    stranger = start(*RUNNER, "--server", url, AGL_TOKEN="wrong")
    assert await asyncio.to_thread(stranger.process.wait, 30) == 1
    assert "token" in stranger.line()["error"]["message"]
    client = LightningStoreClient(url, "t0p")
    [rollout] = await enqueue(client, {"reward": 0.25})
    start("runner", "--agent", "agent.py:posts", "--server", url, AGL_TOKEN="t0p")
    assert await ends(client, [rollout]) == ["succeeded"]
    [span] = await client.query_spans(rollout.rollout_id, name=REWARD)
    assert span.attributes[SCORE_VALUE] == 0.25
    await client.close()


# -- trouble ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_server_that_restarts_costs_nothing(start, server, tmp_path):
    program, url, client = server
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    [under_way] = await enqueue(client, {"marks": str(marks), "until": str(gate)})
    runner = start(*RUNNER, "--server", url)
    await until(lambda: asyncio.to_thread(marks.exists))
    program.process.kill()
    program.process.wait()
    gate.touch()
    await asyncio.sleep(1.5)  # the agent ends and reports to nobody
    assert runner.process.poll() is None
    start("serve", "--port", url.rsplit(":", 1)[1], "--store", "s.db", "--json").line()
    after = await enqueue(client, {}, {})
    assert await ends(client, [under_way, *after]) == ["succeeded"] * 3
    assert len(await client.query_attempts(under_way.rollout_id)) == 1
    assert await asyncio.to_thread(runner.stop) == 0
    report = runner.line()
    assert (report["succeeded"], report["failed"], report["discarded"]) == (3, 0, 0)


@pytest.mark.slow
async def test_a_cancelled_rollout_stops_its_agent_within_a_heartbeat(start, server, tmp_path):
    _, url, client = server
    marks = tmp_path / "marks"
    [rollout] = await enqueue(client, {"marks": str(marks), "seconds": 600})
    runner = start(*RUNNER, "--server", url, "--lease", "2", "--fresh-process")
    await until(lambda: asyncio.to_thread(lambda: marks.exists() and marks.read_text()))
    await client.cancel_rollout(rollout.rollout_id)
    pid = int(marks.read_text())
    await until(lambda: asyncio.to_thread(lambda: not os.path.exists(f"/proc/{pid}")))
    assert await asyncio.to_thread(runner.stop) == 0
    assert runner.line()["discarded"] == 1


@pytest.mark.slow
async def test_the_rollouts_of_a_killed_runner_go_to_another_after_its_lease(start, server, tmp_path):
    _, url, client = server
    marks = tmp_path / "marks"
    gate = tmp_path / "gate"
    [rollout] = await enqueue(client, {"marks": str(marks), "until": str(gate)}, max_attempts=2)
    killed = start(*RUNNER, "--server", url, "--worker-id", "victim", "--lease", "1")
    await until(lambda: asyncio.to_thread(marks.exists))
    killed.process.kill()
    gate.touch()
    start(*RUNNER, "--server", url, "--worker-id", "heir")
    assert await ends(client, [rollout]) == ["succeeded"]
    first, second = await client.query_attempts(rollout.rollout_id)
    assert (first.worker_id, first.status, second.worker_id) == ("victim", "unresponsive", "heir")
    assert "victim" in first.metadata["error"]["message"]
    assert (await client.get_worker("victim")).status == "lost"


@pytest.mark.slow
async def test_a_suspended_runner_that_comes_back_changes_nothing(start, server, tmp_path):
    _, url, client = server
    marks, gate = tmp_path / "marks", tmp_path / "gate"
    [rollout] = await enqueue(client, {"marks": str(marks), "until": str(gate)}, max_attempts=2)
    suspended = start(*RUNNER, "--server", url, "--worker-id", "sleeper", "--lease", "1")
    await until(lambda: asyncio.to_thread(marks.exists))
    suspended.process.send_signal(signal.SIGSTOP)
    marks.unlink()
    start(*RUNNER, "--server", url, "--worker-id", "heir")
    await until(lambda: asyncio.to_thread(marks.exists))
    suspended.process.send_signal(signal.SIGCONT)

    async def noticed():
        worker = await client.get_worker("sleeper")
        return worker.status == "idle" and worker.stats.get("discarded") == 1

    await until(noticed)
    gate.touch()
    assert await ends(client, [rollout]) == ["succeeded"]
    first, second = await client.query_attempts(rollout.rollout_id)
    assert (first.status, second.worker_id, second.status) == ("unresponsive", "heir", "succeeded")
    rewards = [span for span in await client.query_spans(rollout.rollout_id) if span.attempt_id == first.attempt_id]
    assert rewards == []


@pytest.mark.slow
async def test_a_limited_queue_leaves_room_for_another(start, server, tmp_path):
    _, url, client = server
    await client.update_queue("train", 2)
    gate = tmp_path / "gate"
    train = await enqueue(client, *({"until": str(gate)} for _ in range(6)), mode="train")
    for name in ("w1", "w2"):
        start(*RUNNER, "--server", url, "--worker-id", name, "--concurrency", "4")

    async def open_in(queue):
        return next((q.open for q in await client.query_queues() if q.name == queue), 0)

    await until(lambda: _equals(open_in("train"), 2))
    val = await enqueue(client, {}, {}, {}, mode="val")
    began = time.monotonic()
    assert await ends(client, val) == ["succeeded"] * 3
    assert time.monotonic() - began < 30
    assert await open_in("train") == 2
    gate.touch()
    assert await ends(client, train) == ["succeeded"] * 6


async def _equals(work, value):
    return await work == value
