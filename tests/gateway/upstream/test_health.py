"""How long a server that failed is left alone."""

from agentlightning.gateway.upstream.servers import MAX_FAILURES, ServerHealth


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_server_that_goes_on_failing_is_left_alone_twice_as_long_each_time_up_to_thirty_seconds():
    clock = Clock()
    health, pauses = ServerHealth(clock), []
    for _ in range(7):
        health.record_failure(unreachable=True)
        assert health.is_suspect
        assert not health.is_available
        pauses.append(health.seconds_left)
        clock.now += health.seconds_left
        assert health.is_available  # it may be tried again, and is still doubted
        assert health.is_suspect
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_server_that_can_be_reached_is_left_alone_after_several_failures_in_a_row():
    health = ServerHealth(Clock())
    for _ in range(MAX_FAILURES - 1):
        health.record_failure()
    health.record_success()
    for _ in range(MAX_FAILURES - 1):
        health.record_failure()
        assert health.is_available
    health.record_failure()
    assert health.seconds_left == 1
