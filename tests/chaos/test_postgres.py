"""Two servers on one PostgreSQL, one of them killed; and PostgreSQL itself, crashed and started again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from tests.support.postgres import PostgresCluster, PostgresNotFoundError

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

KILLS, CRASHES, CLIENTS = 6, 5, 3


@pytest.fixture
def cluster() -> Iterator[PostgresCluster]:
    try:
        cluster = PostgresCluster()
    except PostgresNotFoundError as error:
        pytest.skip(str(error))
    with cluster:
        yield cluster


def test_one_of_two_servers_is_killed_again_and_again_and_nothing_is_lost(
    cluster, make_server, start_client, heard, audit, tell
) -> None:
    """The last time it stays away, and its clients are killed too: the other server has their rollouts done."""
    chance = random.Random(6)
    url = cluster.new_database()
    killed, kept = make_server(url), make_server(url)
    killed.start()
    kept.start()
    options = ("--attempts", "9", "--lease", "4", "--pause", "0.02")
    here = [start_client("work", killed.url, *options) for _ in range(CLIENTS)]
    there = [start_client("work", kept.url, *options) for _ in range(CLIENTS)]
    heard.wait_for_more(50_000, here[0])
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.0, 0.5))
        killed.process.kill()
        killed.start()
        heard.wait_for_more(20_000)
    assert [client.popen.poll() for client in here + there] == [None] * 2 * CLIENTS, here[0].said()
    killed.process.kill()
    for client in here:
        client.kill()
    last = time.monotonic()
    assert [client.end() for client in there] == [0] * CLIENTS, there[0].said()
    wait_for_leases(kept, start_client, heard, last)
    assert kept.process.end() == 0, kept.process.said()
    found = audit(url)
    found.check_nothing_is_lost()
    found.check_everything_ended_once()
    again = sum(len(attempts) > 1 for attempts in found.attempts.values())
    tell(kills=KILLS + 1, **found.figures(), done_again_elsewhere=again)


def wait_for_leases(server, start_client, heard, since: float) -> None:
    """Have what the killed clients had in hand done by one that comes once their leases have run out."""
    time.sleep(max(0.0, since + 6.0 - time.monotonic()))
    last = start_client("work", server.url, "--attempts", "9")
    heard.wait_for_more(1, last)
    assert last.end() == 0, last.said()


def test_postgresql_crashes_under_load_and_everybody_gets_on(
    cluster, make_server, start_client, heard, audit, tell
) -> None:
    chance = random.Random(5)
    url = cluster.new_database()
    servers = [make_server(url), make_server(url)]
    for server in servers:
        server.start()
    clients = [start_client("work", server.url) for server in servers for _ in range(CLIENTS)]
    heard.wait_for_more(50_000, clients[0])
    away = []
    for _ in range(CRASHES):
        time.sleep(chance.uniform(0.1, 0.6))
        cluster.kill()
        crashed = time.monotonic()
        time.sleep(chance.uniform(0.0, 1.0))
        cluster.start()
        heard.wait_for_more(20_000)
        away.append(time.monotonic() - crashed)
    assert [client.end() for client in clients] == [0] * len(clients), clients[0].said()
    for server in servers:
        assert server.process.end() == 0, server.process.said()
    found = audit(url)
    found.check_nothing_is_lost()
    found.check_everything_ended_once()
    longest = max(line["longest"] for line in heard.lines() if line["kind"] == "ended")
    for attempts in found.attempts.values():
        assert len(attempts) == 1, "a claim that was committed was made again"
    tell(crashes=CRASHES, **found.figures(), back_at_work_after=f"{max(away):.1f} s", longest_call=f"{longest:.1f} s")
