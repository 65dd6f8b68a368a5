"""Runners that are killed or suspended: others get their rollouts, and what they say too late changes nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from agentlightning.rollouts import EnqueueRolloutRequest, RolloutConfig
from agentlightning.span import SUPERSEDED

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

LEASE = 2.0
AGENT = """
import time
from itertools import pairwise

def work(task):
    time.sleep(0.3)
    return 1.0
"""
SLOW_AGENT = """
import os, time
from pathlib import Path

def work(task):
    Path(os.environ["BEGAN"]).touch()
    time.sleep(float(os.environ["SECONDS"]))
    return float(os.environ["SECONDS"])
"""


@pytest.fixture
def kill_clients(start_client, connect, heard, wait_until):
    """Six clients of one store, one after the other killed and replaced; tells when, by worker id."""

    def run(url: str, kills: int) -> dict[str, float]:
        chance, killed_at = random.Random(8), dict[str, float]()
        options = ("--attempts", "50", "--lease", str(LEASE), "--pause", "0.05")
        clients = [start_client("work", url, *options) for _ in range(6)]
        for _ in range(kills):
            heard.wait_for_more(30_000, clients[0])
            at_work = {line["pid"] for line in heard.lines()}
            victim = chance.choice([client for client in clients if client.pid in at_work])
            clients.remove(victim)
            killed_at[f"worker-{victim.pid}"] = time.time()
            victim.kill()
            clients.append(start_client("work", url, *options))
        heard.wait_for_more(30_000, clients[0])
        # What the last one held must wait again before the others stop looking.
        wait_until(lambda: asyncio.run(is_lost(connect(url), list(killed_at)[-1])), "it is lost")
        assert [client.end() for client in clients] == [0] * len(clients), clients[0].said()
        return killed_at

    return run


def check_retries(found, killed_at: dict[str, float]) -> dict[str, object]:
    """Everything ended once, and what was tried again was tried again because its worker was lost."""
    found.check_nothing_is_lost()
    found.check_everything_ended_once()
    waited = []
    for attempts in found.attempts.values():
        for first, second in pairwise(attempts):
            assert first.status == "unresponsive"
            assert first.worker_id in str(first.metadata["error"]), "the error does not name the worker that was lost"
            waited.append(second.start_time - killed_at[first.worker_id])
    assert waited
    figures = {"kills": len(killed_at), **found.figures(), "retried": len(waited), "lease": f"{LEASE:g} s"}
    return figures | {"longest_from_kill_to_retry": f"{max(waited):.1f} s"}


def test_the_rollouts_of_killed_clients_are_finished_by_others(make_server, kill_clients, audit, tell) -> None:
    server = make_server()
    server.start()
    killed_at = kill_clients(server.url, 8)
    server.process.end()
    tell(**check_retries(audit(server.database), killed_at))


def test_the_rollouts_of_killed_processes_that_share_a_file_are_finished_by_others(
    tmp_path: Path, kill_clients, audit, tell
) -> None:
    killed_at = kill_clients(str(tmp_path / "store.db"), 6)
    tell(**check_retries(audit(tmp_path / "store.db"), killed_at))


def test_killed_runners_leave_no_rollout_behind(make_server, start_runner, connect, audit, tell) -> None:
    """`agl runner`, with kill -9: every rollout ends once, with one reward that counts."""
    server = make_server()
    server.start()
    start = lambda: start_runner(server.url, AGENT, "--lease", str(LEASE))  # noqa: E731
    runners = [start() for _ in range(3)]
    enqueued = asyncio.run(enqueue(connect(server.url), 120))
    for _ in range(3):
        asyncio.run(until_more_finished(connect(server.url), 15))
        runners.pop(0).kill()
        runners.append(start())
    statuses = asyncio.run(finish(connect(server.url), enqueued))
    assert statuses == ["succeeded"] * len(enqueued)
    assert [runner.end() for runner in runners] == [0] * len(runners), runners[0].said()
    server.process.end()
    found = audit(server.database)
    found.check_everything_ended_once()
    for rollout_id, spans in found.spans.items():
        counted = [span for span in spans if not span.attributes.get(SUPERSEDED)]
        rewards = [span for span in counted if span.attempt_id == found.attempts[rollout_id][-1].attempt_id]
        assert len(rewards) == 1
    lost = [a for attempts in found.attempts.values() for a in attempts if a.status == "unresponsive"]
    tell(kills=3, **found.figures(), retried=len(lost))


def test_a_suspended_client_that_comes_back_changes_nothing(make_server, start_client, connect, heard, audit) -> None:
    server = make_server()
    server.start()
    config = RolloutConfig(max_attempts=3)
    (rollout_id,) = asyncio.run(enqueue(connect(server.url), 1, config))
    client = start_client("hold", server.url, "--lease", str(LEASE))
    heard.wait_for_more(1, client)
    client.signal(signal.SIGSTOP)
    asyncio.run(take_over(connect(server.url), rollout_id))
    client.say("go on")
    client.signal(signal.SIGCONT)
    assert client.wait() == 0, client.said()
    server.process.end()
    told = heard.lines()[-1]
    assert told["attributes"][SUPERSEDED] is True
    assert told["metadata"]["superseded"] is True
    assert told["status"] == "unresponsive"
    found = audit(server.database)
    assert found.rollouts[rollout_id].status == "succeeded"
    assert [attempt.status for attempt in found.attempts[rollout_id]] == ["unresponsive", "succeeded"]
    marks = [span.attributes.get(SUPERSEDED, False) for span in found.spans[rollout_id]]
    assert marks == [False, True], "what was written before it was superseded counts, what came after is marked"


async def take_over(connection, rollout_id: str) -> None:
    async with connection as store:
        claimed = await store.dequeue_rollout("another", timeout=60)
        assert claimed is not None
        assert claimed.rollout_id == rollout_id
        assert claimed.attempt.sequence_id == 2
        await store.update_attempt(rollout_id, claimed.attempt.attempt_id, status="succeeded")


def test_a_suspended_runner_that_comes_back_stops_what_was_given_away(
    tmp_path: Path, make_server, start_runner, connect, wait_until, audit
) -> None:
    """`agl runner`: suspended while its agent works, it finds its rollout finished by another and reports nothing."""
    server = make_server()
    server.start()
    began = tmp_path / "began"
    options = ("--lease", str(LEASE))
    first = start_runner(server.url, SLOW_AGENT, *options, environment={"BEGAN": str(began), "SECONDS": "30"})
    (rollout_id,) = asyncio.run(enqueue(connect(server.url), 1, RolloutConfig(max_attempts=3)))
    wait_until(began.exists, "the agent has begun", first)
    first.signal(signal.SIGSTOP)
    second = start_runner(
        server.url, SLOW_AGENT, *options, environment={"BEGAN": str(tmp_path / "again"), "SECONDS": "0"}
    )
    assert asyncio.run(finish(connect(server.url), [rollout_id])) == ["succeeded"]
    first.signal(signal.SIGCONT)
    ended = time.monotonic()
    assert first.end() == 0, first.said()
    assert time.monotonic() - ended < 25, "it waited for an agent whose rollout was given away"
    assert second.end() == 0
    server.process.end()
    found = audit(server.database)
    assert [attempt.status for attempt in found.attempts[rollout_id]] == ["unresponsive", "succeeded"]
    rewards = [span for span in found.spans[rollout_id] if not span.attributes.get(SUPERSEDED)]
    assert [span.attributes["gen_ai.evaluation.score.value"] for span in rewards] == [0.0]


async def is_lost(connection, worker_id: str) -> bool:
    async with connection as store:
        worker = await store.get_worker(worker_id)
        return worker is not None and worker.status == "lost"


async def enqueue(connection, number: int, config: RolloutConfig | None = None) -> list[str]:
    config = config or RolloutConfig(max_attempts=10)
    async with connection as store:
        made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, config=config) for n in range(number)])
        return [each.rollout_id for each in made]


async def until_more_finished(connection, number: int) -> None:
    async with connection as store:
        left = [each.rollout_id for each in await store.query_rollouts() if not each.finished]
        await store.wait_for_rollouts(rollout_ids=left, timeout=60, minimum=min(number, len(left)))


async def finish(connection, ids: list[str]) -> list[str]:
    async with connection as store:
        return [each.status for each in await store.wait_for_rollouts(rollout_ids=ids, timeout=120)]
