"""How many calls are worked on at once, and who does not count."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from agentlightning.gateway.http import Slot, released_slot


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def slot_of(limit: asyncio.Semaphore):
    slot = Slot(limit)
    await slot.acquire()
    try:
        yield
    finally:
        slot.close()


class Work:
    def __init__(self, limit: asyncio.Semaphore) -> None:
        self.limit, self.begun, self.waiting, self.event = limit, [], [], asyncio.Event()

    def start(self, name, *, waits=False):
        return asyncio.create_task(self._run(name, waits))

    async def _run(self, name, waits):
        async with slot_of(self.limit):
            self.begun.append(name)
            if waits:
                async with released_slot():
                    self.waiting.append(name)
                    await self.event.wait()
                self.waiting.remove(name)


async def test_more_calls_than_slots_wait_and_go_in_the_order_they_came():
    limit, order = asyncio.Semaphore(2), []

    async def call(number):
        async with slot_of(limit):
            order.append(number)
            await settle()

    await asyncio.gather(*(call(number) for number in range(6)))
    assert order == list(range(6))


async def test_a_call_that_waits_for_something_else_leaves_its_slot_to_others_meanwhile():
    work = Work(asyncio.Semaphore(1))
    waits = [work.start(number, waits=True) for number in range(3)]
    await settle()
    await asyncio.wait_for(work.start("other"), 10)
    assert work.begun == [0, 1, 2, "other"]
    work.event.set()
    await asyncio.wait_for(asyncio.gather(*waits), 10)
    assert work.waiting == []


@pytest.mark.parametrize("opened", [False, True])
async def test_a_call_given_up_while_it_waits_costs_no_slot(opened):
    work = Work(asyncio.Semaphore(1))
    waits = work.start("gone", waits=True)
    await settle()
    busy = asyncio.Event()

    async def hold():
        async with slot_of(work.limit):
            await busy.wait()

    holding = asyncio.create_task(hold())
    await settle()
    if opened:
        work.event.set()  # It may go on, and waits for a slot.
        await settle()
    waits.cancel()
    await asyncio.wait([waits])
    assert waits.cancelled()
    busy.set()
    await holding
    for number in range(2):
        await asyncio.wait_for(work.start(number), 10)
    second = work.start("second", waits=True)
    await settle()
    assert work.begun[-1] == "second"
    work.event.set()
    await second


async def test_outside_any_call_there_is_nothing_to_give_back():
    async with released_slot():
        pass


async def test_a_slot_that_comes_as_its_caller_hangs_up_is_not_lost():
    limit = asyncio.Semaphore(1)
    await limit.acquire()
    late = asyncio.create_task(limit.acquire())
    await asyncio.sleep(0)
    limit.release()
    late.cancel()  # its turn has come, and it has not woken yet
    with pytest.raises(asyncio.CancelledError):
        await late
    async with asyncio.timeout(5):
        await limit.acquire()
