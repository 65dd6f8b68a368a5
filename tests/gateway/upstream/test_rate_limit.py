"""Promises of limits: nobody is let in beyond them, all wait in order, and none longer than is worth it."""

import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.gateway.config import Provider
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.limits import RateLimiter, TokenBucket


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def limiter(max_concurrency, clock=time.monotonic, **limits):
    provider = Provider(name="them", base_urls=("http://host/v1",), max_concurrency=max_concurrency, **limits)
    return RateLimiter(provider, clock)


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_beyond_the_limit_wait_and_go_in_the_order_they_came():
    limits, order = limiter(2), []

    async def one(number):
        await limits.acquire(1)
        order.append(number)

    calls = [asyncio.create_task(one(number)) for number in range(6)]
    await settled()
    assert (order, limits.in_flight, limits.num_waiting) == ([0, 1], 2, 4)
    for count in range(3, 7):
        limits.release(1, 1)
        await settled()
        assert len(order) == count
    await asyncio.gather(*calls)
    assert order == list(range(6))


async def test_a_call_that_gives_up_lets_the_next_one_go():
    limits = limiter(1)
    await limits.acquire(1)
    first, second = (asyncio.create_task(limits.acquire(1)) for _ in range(2))
    await settled()
    first.cancel()
    limits.release(1, 1)
    await second
    assert (limits.in_flight, limits.num_waiting) == (1, 0)


@pytest.mark.parametrize("limit", [{"requests_per_minute": 60}, {"tokens_per_minute": 6000}])
async def test_a_rate_lets_a_minutes_worth_in_at_once_and_the_rest_as_time_passes(limit):
    clock = Clock()
    limits = limiter(1000, **limit, max_wait_seconds=2, clock=clock)
    for _ in range(60):
        await limits.acquire(100)
    waiting = asyncio.create_task(limits.acquire(100))
    await settled()
    assert (limits.in_flight, limits.num_waiting) == (60, 1)
    clock.now += 1
    limits.release(100, 100)
    await waiting
    assert limits.in_flight == 60


async def test_a_wait_that_is_not_worth_it_is_refused_at_once_with_the_time_to_come_back():
    clock = Clock()
    limits = limiter(10, requests_per_minute=6, max_wait_seconds=20, clock=clock)
    for _ in range(6):
        await limits.acquire(1)
    waiting = [asyncio.create_task(limits.acquire(1)) for _ in range(2)]
    await settled()
    with pytest.raises(ApiError) as caught:
        await limits.acquire(1)
    assert (caught.value.status, caught.value.retry, caught.value.retry_after) == (429, True, 30)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (limits.in_flight, limits.num_waiting) == (6, 0)


async def test_a_wait_for_calls_under_way_ends_as_well():
    limits = limiter(1, max_wait_seconds=0.02)
    await limits.acquire(1)
    with pytest.raises(ApiError, match="1 calls in flight, 0 waiting"):
        await limits.acquire(1)
    impatient = limiter(1, max_wait_seconds=0)
    await impatient.acquire(1)
    with pytest.raises(ApiError):
        await impatient.acquire(1)


def test_no_more_than_a_minutes_worth_gathers_while_nothing_is_asked():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    clock.now += 600
    assert bucket.seconds_until(90, math.inf) == 30
    bucket.take(10)
    clock.now += 30
    bucket.take(-5)
    assert bucket.seconds_until(62, math.inf) == 2


async def test_tokens_that_were_not_used_are_given_back():
    limits = limiter(10, tokens_per_minute=100, max_wait_seconds=0, clock=Clock())
    await limits.acquire(100)
    with pytest.raises(ApiError):
        await limits.acquire(50)
    limits.release(100, 40)
    await limits.acquire(50)


async def test_a_call_that_is_sent_again_counts_twice():
    limits = limiter(10, requests_per_minute=2, max_wait_seconds=0, clock=Clock())
    await limits.acquire(1)
    limits.record_retry()
    with pytest.raises(ApiError):
        await limits.acquire(1)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=60))
def test_no_stretch_of_time_sees_more_than_its_share_and_one_minutes_worth(steps):
    clock = Clock()
    rate, begun, taken = TokenBucket(60, clock), clock.now, 0
    for wait, amount in steps:
        clock.now += wait
        if rate.seconds_until(amount) == 0:
            rate.take(amount)
            taken += amount
        assert taken <= 60 + (clock.now - begun) * 1.0 + 1e-6
