"""How long a server that failed is left alone, and in which order calls try the servers of a set."""

import asyncio

from agentlightning.transport.servers import MAX_FAILURES, Server, ServerSet


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_server_that_goes_on_failing_is_left_alone_twice_as_long_each_time_up_to_thirty_seconds():
    clock = Clock()
    server, pauses = Server("http://host", clock), []
    for _ in range(7):
        server.record_failure(unreachable=True)
        assert not server.up
        pauses.append(server.seconds_left)
        clock.now += server.seconds_left
        assert server.seconds_left == 0  # it may be tried again, and is still doubted
        assert not server.up
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    server.record_success()
    server.record_failure()
    assert server.up


def test_a_server_that_can_be_reached_is_left_alone_after_several_failures_in_a_row():
    server = Server("http://host", Clock())
    for _ in range(MAX_FAILURES - 1):
        server.record_failure()
    server.record_success()
    for _ in range(MAX_FAILURES - 1):
        server.record_failure()
        assert server.up
    server.record_failure()
    assert (server.up, server.seconds_left) == (False, 1)


def test_calls_without_affinity_go_to_the_least_loaded_server():
    servers = ServerSet([Server(f"http://host{number}") for number in range(3)], 10.0, watches_all=False)
    first, second, third = servers.replicas
    first.requests |= {1, 2}
    second.requests.add(3)
    assert list(servers.in_order("")) == [third, second, first]
    assert {each.url for each in servers.in_order("talk")} == {each.url for each in servers.replicas}


async def test_a_server_that_fails_is_checked_until_it_is_up_however_slow_another_check_is():
    class Checked(ServerSet[Server]):
        checks = 0

        async def check(self, replica: Server) -> None:
            if replica is self.replicas[0]:
                await asyncio.Event().wait()
            self.checks += 1
            if self.checks == 3:
                return replica.record_success()
            replica.record_failure()

    class Quick(Server):
        pauses = 0.001, 0.002

    servers = Checked([Quick("http://slow"), Quick("http://host")], 60.0, watches_all=False)
    for replica in servers.replicas:
        replica.record_failure(unreachable=True)
        servers.watch(replica)
    async with asyncio.timeout(10):
        await servers._watches[servers.replicas[1]]
    assert (servers.checks, [each.up for each in servers.replicas]) == (3, [False, True])
    await servers.end_watches()
