"""The server is killed twenty times under load; nothing that it acknowledged is lost, and everybody gets on."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from agentlightning.rollouts import EnqueueRolloutRequest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

KILLS, CLIENTS = 20, 8


def test_clients_get_through_twenty_kills_of_the_server_and_nothing_is_lost(
    make_server, start_client, heard, audit, tell
) -> None:
    chance = random.Random(20)
    server = make_server()
    server.start()
    clients = [start_client("work", server.url) for _ in range(CLIENTS)]
    heard.wait_for_more(100_000, clients[0])
    away = []
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.0, 0.4))
        assert server.process is not None
        server.process.kill()
        killed = time.monotonic()
        server.start()
        heard.wait_for_more(20_000)
        away.append(time.monotonic() - killed)
    assert [client.popen.poll() for client in clients] == [None] * CLIENTS, clients[0].said()
    assert [client.end() for client in clients] == [0] * CLIENTS, clients[0].said()
    assert server.process.end() == 0, server.process.said()
    found = audit(server.database)
    found.check_nothing_is_lost()
    found.check_everything_ended_once()
    for rollout_id, spans in found.spans.items():
        assert len(found.attempts[rollout_id]) == 1, "a claim whose answer was lost was made again"
        assert len(spans) == 8
    longest = max(line["longest"] for line in heard.lines() if line["kind"] == "ended")
    tell(kills=KILLS, **found.figures(), back_at_work_after=f"{max(away):.1f} s", longest_call=f"{longest:.1f} s")


AGENT = """
import os

def work(task):
    with open(os.environ["RAN"], "a") as file:
        print(os.environ["AGL_ROLLOUT_ID"], os.environ["AGL_ATTEMPT_ID"], file=file)
    return float(task["number"])
"""


def test_runners_get_through_five_kills_of_the_server(
    tmp_path: Path, make_server, start_runner, connect, audit, tell
) -> None:
    """`agl runner` processes: each rollout is executed and reported exactly once, with its reward."""
    chance = random.Random(5)
    server = make_server()
    server.start()
    ran = tmp_path / "ran.txt"
    runners = [start_runner(server.url, AGENT, environment={"RAN": str(ran)}) for _ in range(4)]
    number, enqueued = 600, list[str]()

    def enqueue(count: int) -> None:
        enqueued.extend(asyncio.run(enqueue_tasks(connect(server.url), len(enqueued), count)))

    for _ in range(5):
        enqueue(number // 5)
        time.sleep(chance.uniform(0.0, 1.0))
        assert server.process is not None
        server.process.kill()
        server.start()
    assert asyncio.run(finish(connect(server.url), enqueued, runners)) == ["succeeded"] * number
    assert [runner.end() for runner in runners] == [0] * len(runners), runners[0].said()
    assert server.process.end() == 0
    found = audit(server.database)
    for rollout in found.rollouts.values():
        assert len(found.attempts[rollout.rollout_id]) == 1
        rewards = [span.attributes["gen_ai.evaluation.score.value"] for span in found.spans[rollout.rollout_id]]
        assert rewards == [rollout.input["number"]]
    executed = [tuple(line.split()) for line in ran.read_text().splitlines()]
    assert len(set(executed)) == len(executed) == number
    tell(kills=5, **found.figures())


async def enqueue_tasks(connection, first: int, count: int) -> list[str]:
    async with connection as store:
        requests = [EnqueueRolloutRequest({"number": first + index}) for index in range(count)]
        return [made.rollout_id for made in await store.enqueue_many_rollouts(requests)]


async def finish(connection, ids: list[str], runners) -> list[str]:
    end = time.monotonic() + 120
    async with connection as store:
        while len(done := await store.wait_for_rollouts(rollout_ids=ids, timeout=2)) < len(ids):
            assert time.monotonic() < end, f"{len(done)} of {len(ids)} have finished"
            for runner in runners:
                assert runner.popen.poll() is None, runner.said()
        return [each.status for each in done]
