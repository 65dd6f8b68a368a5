"""The gate in front of an engine: who waits for an update, who goes on, and in which order."""

import asyncio
import logging
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.gateway import local as gate_module
from agentlightning.gateway.local import UpdateGate, UpdateGates


async def settle():
    """Let everything happen that can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def closed(gate: UpdateGate) -> AsyncExitStack:
    """An update that lasts until `aclose`."""
    update = AsyncExitStack()
    await update.enter_async_context(gate.update())
    return update


class Calls:
    """Calls that pass a gate, and stay inside until they are told to leave."""

    def __init__(self, gate: UpdateGate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def start(self, *names: str) -> None:
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._call(name))
        await settle()

    async def _call(self, name: str) -> None:
        visitor = await self.gate.enter(name)
        self.entered.append(name)
        try:
            await self.ends[name].wait()
        finally:
            self.gate.leave(visitor)

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await settle()


@pytest.fixture
def gate():
    return UpdateGate()


@pytest.fixture
def calls(gate):
    return Calls(gate)


async def test_those_who_wait_are_let_in_in_the_order_they_came_and_before_those_who_come_then(gate, calls):
    waiting = [f"early {i}" for i in range(2000)]
    update = await closed(gate)
    await calls.start(*waiting)
    assert (gate.num_waiting, gate.num_in_flight, calls.entered) == (2000, 0, [])

    async def come_late():
        await calls.start("late")

    late = asyncio.create_task(come_late())  # Runs before any of those who are woken now.
    await update.aclose()
    await late
    await settle()
    assert calls.entered == [*waiting, "late"]
    await calls.end(*waiting, "late")
    assert gate.num_in_flight == 0


async def test_a_call_that_comes_right_after_the_gate_opens_goes_behind_those_who_have_waited(gate, calls):
    async with gate.update():
        await calls.start("early 1", "early 2")
    visitor = await gate.enter("late")
    assert calls.entered == ["early 1", "early 2"]
    gate.leave(visitor)
    await calls.end("early 1", "early 2")


async def test_a_call_that_hangs_up_while_it_waits_is_forgotten(gate, calls):
    async with gate.update():
        await calls.start("first", "second", "third")
        calls.tasks["second"].cancel()
        await settle()
        assert gate.num_waiting == 2
    calls.tasks["third"].cancel()  # It is let in already, but has not woken.
    await settle()
    assert (calls.entered, gate.num_in_flight) == (["first"], 1)
    await calls.end("first")
    async with asyncio.timeout(10), gate.update():
        await calls.start("fourth")
        calls.tasks["fourth"].cancel()  # It hangs up, and the gate opens before it has noticed.
    await settle()
    await calls.start("fifth")
    assert calls.entered == ["first", "fifth"]


async def test_an_update_waits_for_calls_under_way_and_holds_back_those_that_come(gate, calls):
    await calls.start("early")
    log = []

    async def update():
        async with gate.update() as under_way:
            log.append(under_way)
            await calls.start("late")
            log.append(calls.entered.copy())

    updating = asyncio.create_task(update())
    await settle()
    assert log == []
    await calls.end("early")
    await updating
    await settle()
    assert log == [False, ["early"]]
    assert calls.entered == ["early", "late"]


async def test_in_flight_an_update_waits_for_nobody_and_says_that_calls_go_on(gate, calls):
    async with gate.update(in_flight=True) as under_way:
        assert not under_way
    await calls.start("early")
    async with gate.update(in_flight=True) as under_way:
        assert under_way
        await calls.start("late")
        assert calls.entered == ["early"]
    await settle()
    assert calls.entered == ["early", "late"]


async def test_after_its_time_to_drain_an_update_goes_on_under_those_left_and_names_them(gate, calls, caplog):
    await calls.start("ro-1 at-1", *(f"other {i}" for i in range(6)))
    with caplog.at_level(logging.INFO, gate_module.__name__):
        async with gate.update(drain_seconds=0.01) as under_way:
            assert under_way
    assert "7 calls go on across the update after 0.01 s: ro-1 at-1 (0 s)" in caplog.text
    assert "and 2 more" in caplog.text


async def test_without_a_time_to_drain_an_update_waits_as_long_as_it_takes_and_says_for_whom(
    gate, calls, caplog, monkeypatch
):
    monkeypatch.setattr(gate_module, "WARN_SECONDS", 0.01)
    await calls.start("ro-1 at-1")

    async def update():
        async with gate.update() as under_way:
            return under_way

    updating = asyncio.create_task(update())
    done, _ = await asyncio.wait({updating}, timeout=0.05)
    assert not done
    assert "for 1 calls: ro-1 at-1" in caplog.text
    await calls.end("ro-1 at-1")
    assert not await updating


async def test_updates_of_one_engine_follow_one_another_and_a_failed_one_opens_the_gate(gate, calls):
    under_way: list[int] = []

    async def update(number):
        async with gate.update():
            under_way.append(number)
            await settle()
            assert under_way[-1] == number
            raise ValueError(number)

    ends = await asyncio.gather(*(update(number) for number in range(3)), return_exceptions=True)
    assert [error.args for error in ends] == [(0,), (1,), (2,)]
    await calls.start("after")
    assert calls.entered == ["after"]


async def test_an_update_that_is_given_up_while_it_waits_opens_the_gate(gate, calls):
    await calls.start("early")

    async def update():
        async with gate.update():
            raise AssertionError("not reached")

    updating = asyncio.create_task(update())
    await settle()
    updating.cancel()
    await settle()
    await calls.start("late")
    assert calls.entered == ["early", "late"]


async def test_every_engine_has_a_gate_of_its_own():
    gates, policy, reference = UpdateGates(), object(), object()
    asking, other = Calls(gates.of(policy)), Calls(gates.of(reference))
    async with gates.of(policy).update():
        await asking.start("waits")
        await other.start("passes")
        assert (asking.entered, other.entered) == ([], ["passes"])
    await settle()
    assert asking.entered == ["waits"]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["come", "leave", "cancel", "update", "give up", "tick"]), st.integers(0, 7)), max_size=40
)


@settings(max_examples=60)
@given(ACTIONS)
def test_whatever_happens_everybody_passes_in_the_end_and_nobody_during_an_update(actions):
    async def run():
        calls = Calls(UpdateGate())
        gate, updates = calls.gate, []

        async def update():
            async with gate.update():
                before = calls.entered.copy()
                assert gate.num_in_flight == 0
                await settle()
                assert calls.entered == before

        for number, (action, which) in enumerate(actions):
            names = list(calls.tasks)
            if action == "come":
                calls.ends[str(number)] = asyncio.Event()
                calls.tasks[str(number)] = asyncio.create_task(calls._call(str(number)))
            elif action == "leave" and names:
                calls.ends[names[which % len(names)]].set()
            elif action == "cancel" and names:
                calls.tasks[names[which % len(names)]].cancel()
            elif action == "update":
                updates.append(asyncio.create_task(update()))
            elif action == "give up" and updates:
                updates[which % len(updates)].cancel()
            else:
                await asyncio.sleep(0)
        for end in calls.ends.values():
            end.set()
        async with asyncio.timeout(10):
            ends = await asyncio.gather(*updates, return_exceptions=True)
            await asyncio.gather(*calls.tasks.values(), return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
        assert (gate.num_in_flight, gate.num_waiting, gate.closed) == (0, 0, False)
        assert len(calls.entered) == len(set(calls.entered))
        uncancelled = {name for name, task in calls.tasks.items() if not task.cancelled()}
        assert uncancelled <= set(calls.entered)

    asyncio.run(run())
