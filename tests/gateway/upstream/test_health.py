"""How long a server that failed is left alone."""

from agentlightning.gateway.upstream.health import FAILURES, Health


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_server_that_goes_on_failing_is_left_alone_twice_as_long_each_time_up_to_thirty_seconds():
    clock = Clock()
    health, pauses = Health(clock), []
    for _ in range(7):
        health.failed(unreachable=True)
        assert health.doubted
        assert not health.well
        pauses.append(health.seconds_left)
        clock.now += health.seconds_left
        assert health.well  # it may be tried again, and is still doubted
        assert health.doubted
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_server_that_can_be_reached_is_left_alone_after_several_failures_in_a_row():
    health = Health(Clock())
    for _ in range(FAILURES - 1):
        health.failed()
    health.succeeded()
    for _ in range(FAILURES - 1):
        health.failed()
        assert health.well
    health.failed()
    assert health.seconds_left == 1
