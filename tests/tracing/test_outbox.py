"""Promises about what waits on its way to a store or a server: nothing acknowledged is lost, no loss is silent."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from agentlightning.errors import ConfigError, StoreClosedError, StoreFullError
from agentlightning.span import Span
from agentlightning.tracing.outbox import Outbox, Retry, Tries, Unavailable


def span(name: str) -> Span:
    return Span("ro-1", "at-1", name, 1.0)


class Box(Outbox[Span]):
    """Keeps what it is sent, but for what it is told to fail with first."""

    rejections = (ConfigError,)

    def __init__(self, *failures: Exception, **options: Any) -> None:
        super().__init__("a box", **{"patience": 20.0, "thread": "a-box", **options})
        self.failures = list(failures)
        self.batches: list[list[str]] = []
        self.open = threading.Event()
        self.open.set()

    @property
    def arrived(self) -> list[str]:
        return [name for batch in self.batches for name in batch]

    async def send(self, batch: list[Span]) -> None:
        while not self.open.is_set():  # noqa: ASYNC110  set in another thread
            await asyncio.sleep(0.001)
        if self.failures:
            raise self.failures.pop(0)
        if any(each.name.startswith("bad") for each in batch):
            raise ConfigError("no bad ones")
        self.batches.append([each.name for each in batch])

    def repair(self, item: Span) -> Span:
        return span("repaired") if item.name == "bad, but can be mended" else item


@pytest.fixture
def boxes() -> Iterator[list[Box]]:
    made: list[Box] = []
    yield made
    for each in made:
        each.close(0.1)


def test_items_arrive_in_order_in_batches_and_once(boxes: list[Box]) -> None:
    boxes.append(box := Box(batch=3, linger=60.0))
    assert box.offer([span("1"), span("2")])
    assert box.offer([span("3"), span("4")])  # a full batch does not wait
    assert box.flush(10)  # and nothing waits for longer than somebody who asks for it
    assert box.batches == [["1", "2", "3"], ["4"]]
    assert (box.counts.sent, box.waiting) == (4, 0)
    assert box.flush(0)


def test_threads_may_put_at_once_and_nothing_is_lost(boxes: list[Box]) -> None:
    boxes.append(box := Box(batch=7))

    def put(thread: int) -> None:
        for number in range(200):
            box.put([span(f"{thread} {number}")])

    threads = [threading.Thread(target=put, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert box.flush(20)
    assert sorted(box.arrived) == sorted(f"{thread} {number}" for thread in range(4) for number in range(200))
    of_one = [name for name in box.arrived if name.startswith("0 ")]
    assert of_one == [f"0 {number}" for number in range(200)]


def test_what_cannot_be_taken_now_is_sent_again(boxes: list[Box]) -> None:
    boxes.append(box := Box(StoreFullError("full"), Unavailable("busy", after=0.0), StoreFullError("still full")))
    box.put([span("1")])
    assert box.flush(20)
    assert (box.arrived, box.counts.sent, box.counts.dropped) == (["1"], 1, 0)


def test_pauses_draw_nothing_from_the_generator_that_agents_seed() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    assert Tries(60.0).pause() is not None
    assert random.random() == expected


def test_a_caller_who_waits_ends_a_pause(boxes: list[Box]) -> None:
    boxes.append(box := Box(Unavailable("in a minute", after=60.0), patience=600.0))
    box.put([span("1")])
    while box.failures:
        time.sleep(0.001)
    assert box.flush(20)
    assert box.arrived == ["1"]


def test_flush_says_in_time_that_something_is_not_there(boxes: list[Box]) -> None:
    boxes.append(box := Box())
    box.open.clear()
    box.put([span("1")])
    start = time.monotonic()
    assert not box.flush(0.05)
    assert time.monotonic() - start < 5
    assert box.waiting == 1
    box.open.set()
    assert box.flush(20)


def test_a_rejected_item_costs_nothing_but_itself_and_is_named(
    boxes: list[Box], caplog: pytest.LogCaptureFixture
) -> None:
    boxes.append(box := Box())
    box.open.clear()
    names = ["1", "bad", "2", "bad, but can be mended", "3"]
    box.put([span(name) for name in names])
    box.open.set()
    assert box.flush(20)
    assert box.arrived == ["1", "2", "repaired", "3"]
    assert (box.counts.sent, box.counts.dropped) == (4, 1)
    assert "1 spans for a box are dropped: it rejects span 'bad' of attempt at-1: no bad ones" in caplog.text


def test_what_does_not_fit_is_counted_and_said_once_until_something_arrives(
    boxes: list[Box], caplog: pytest.LogCaptureFixture
) -> None:
    boxes.append(box := Box(capacity=2, linger=60.0))
    for turn in (1, 2):
        assert not box.offer([span("1"), span("2"), span("3")])
        assert not box.offer([span("4")])
        assert box.flush(20)
        assert box.counts.dropped == 2 * turn
        said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == turn
    assert said[0] == "1 spans for a box are dropped: 2 wait already; further ones are only counted"


def test_the_patience_ends_and_what_was_not_sent_is_dropped(boxes: list[Box], caplog: pytest.LogCaptureFixture) -> None:
    boxes.append(box := Box(Unavailable("nobody is there"), patience=0.0))
    box.put([span("1")])
    assert box.flush(20)  # it is done: it was given up
    box.put([span("2")])
    assert box.flush(20)
    assert (box.arrived, box.counts.dropped) == (["2"], 1)
    assert "1 spans for a box are dropped: nobody is there" in caplog.text


def test_closing_sends_what_waits_and_takes_nothing_more(boxes: list[Box]) -> None:
    boxes.append(box := Box(linger=60.0))
    box.put([span("1")])
    assert box.close(20)
    assert box.arrived == ["1"]
    assert not box.offer([span("2")])
    assert (box.counts.dropped, box.close(0)) == (1, True)


def test_what_is_left_when_the_time_to_close_is_over_is_counted(
    boxes: list[Box], caplog: pytest.LogCaptureFixture
) -> None:
    boxes.append(box := Box(batch=1))
    box.open.clear()
    box.put([span("1"), span("2"), span("3")])
    waiting = threading.Thread(target=box.flush, args=[60.0])
    waiting.start()
    assert not box.close(0.05)
    waiting.join(10)
    assert not waiting.is_alive()  # nobody waits for what is given up
    assert box.counts.dropped == 3
    assert "3 spans for a box are dropped: not sent within 0.05 s of closing" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_process_begins_with_an_empty_queue_of_its_own(boxes: list[Box]) -> None:
    boxes.append(box := Box(linger=60.0))
    box.put([span("of the parent")])
    child = os.fork()
    if child == 0:
        box.put([span("of the child")])
        ok = box.flush(10) and box.arrived == ["of the child"]
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert box.flush(10)
    assert box.arrived == ["of the parent"]


# -- in an event loop of its owner -------------------------------------------------------------------------------------


class Strict(Box):
    """Ends with an error rather than drop anything."""

    def give_up(self, batch: list[Span], error: Exception) -> None:
        raise error


async def test_the_owner_waits_for_what_was_put_before() -> None:
    box = Strict(StoreFullError("full"), thread=None)
    work = asyncio.create_task(box.run())
    box.put([span("1"), span("2")])
    await asyncio.wait_for(box.written(), 20)
    assert box.arrived == ["1", "2"]
    box.put([span("3")])
    waiting = asyncio.create_task(box.written())
    waiting.cancel()  # one who no longer waits disturbs nothing
    await asyncio.wait_for(box.written(), 20)
    assert box.arrived == ["1", "2", "3"]
    assert box.close(0)
    await asyncio.wait_for(work, 20)


async def test_an_error_that_is_no_matter_of_waiting_ends_it() -> None:
    box = Strict(StoreClosedError("closed"), thread=None)
    box.put([span("1")])
    with pytest.raises(StoreClosedError):
        await asyncio.wait_for(box.run(), 20)
    assert box.waiting == 1


# -- trying again ------------------------------------------------------------------------------------------------------


def test_pauses_grow_and_end_with_the_patience() -> None:
    tries = Tries(600.0)
    pauses = [tries.pause() or 0.0 for _ in range(12)]
    assert pauses[0] < 0.1
    assert all(later > earlier for earlier, later in pairwise(pauses[:7]))
    assert 3.9 < pauses[-1] < 6.1
    assert tries.pause(Unavailable("as it says", after=7.0)) == 7.0
    assert Tries(0.0).pause() is None
    assert 0 < (Tries(0.01).pause() or 0.0) <= 0.01


async def test_an_operation_is_repeated_while_the_store_is_full_and_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [StoreFullError("full"), StoreFullError("full"), StoreClosedError("closed")]

    async def operation() -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    with pytest.raises(StoreClosedError):
        await Retry(20.0)(operation)
    assert len([record for record in caplog.records if "retrying for up to 20 s: full" in record.message]) == 1
    failures.append(StoreFullError("full"))
    with pytest.raises(StoreFullError):
        await Retry(0.0)(operation)
    assert await Retry(0.0)(operation) == "done"
