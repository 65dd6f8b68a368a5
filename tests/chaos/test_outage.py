"""The server is away for longer than the lease: what was alive when it went is alive when it comes back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.rollouts import RolloutConfig

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

LEASE, AWAY = 4.0, 10.0
RUNNERS = 4


def kill_and_start(server: Any) -> None:
    server.process.kill()
    time.sleep(AWAY)
    server.start()


def stop_and_continue(server: Any) -> None:
    server.process.signal(signal.SIGSTOP)
    time.sleep(AWAY)
    server.process.signal(signal.SIGCONT)


@pytest.mark.parametrize("outage", [kill_and_start, stop_and_continue])
@pytest.mark.parametrize("kind", ["file", "postgres"])
def test_an_outage_longer_than_the_lease_costs_nobody_his_attempt(
    make_server, start_client, connect, heard, wait_until, request, outage: Callable[[Any], None], kind: str
) -> None:
    server = make_server(request.getfixturevalue("postgres_url") if kind == "postgres" else None)
    server.start()
    asyncio.run(enqueue(connect(server.url)))
    clients = [start_client("hold", server.url, "--lease", str(LEASE)) for _ in range(RUNNERS)]
    wait_until(lambda: len(heard.of("claimed")) == RUNNERS, "every client has claimed", clients[0])
    outage(server)
    for client in clients:
        client.say("go on")
    assert [client.wait() for client in clients] == [0] * RUNNERS, clients[0].said()
    ended = [line for line in heard.lines() if line["kind"] == "ended"]
    assert [line["status"] for line in ended] == ["succeeded"] * RUNNERS
    assert not [line for line in ended if "superseded" in line["metadata"]]
    statuses = asyncio.run(look(connect(server.url)))
    assert statuses == [("succeeded", 1)] * RUNNERS
    assert server.process.end() == 0


async def enqueue(connection: Any) -> None:
    async with connection as store:
        for number in range(RUNNERS):
            await store.enqueue_rollout(number, config=RolloutConfig(max_attempts=1 + number % 2))


async def look(connection: Any) -> list[tuple[str, int]]:
    async with connection as store:
        rollouts = await store.query_rollouts()
        return [(each.status, len(await store.query_attempts(each.rollout_id))) for each in rollouts]
