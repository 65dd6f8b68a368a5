"""The runner's side of a process: whose fault its end is, and when it is killed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.rollouts import Attempt, AttemptedRollout
from agentlightning.runner.agents.agent import Reference
from agentlightning.runner.hosts.host_pool import AgentCrashedError, AttemptProcess, LostAttemptError
from agentlightning.runner.hosts.messages import Done, Exited, Job, Load, Ready, Stopping, encode


class Wire(asyncio.Transport):
    """The socket of a process that this test plays."""

    closed = False

    def write(self, data: Any) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class Fixture:
    """A process with its socket, and what was done to it."""

    def __init__(self, slots: int, alone: bool = False, ready: bool = True) -> None:
        self.kills, self.wire = 0, Wire()
        load = Load(Reference("module", "name"), None, {}, (), grace=-0.4, slots=slots)
        self.process = AttemptProcess(load, alone, self.kill, lambda: None)
        self.process.connection_made(self.wire)
        if ready:
            self.says(Ready())

    def kill(self) -> None:
        self.kills += 1

    def says(self, *messages: Any) -> None:
        self.process.data_received(b"".join(map(encode, messages)))

    async def call(self, number: int) -> asyncio.Task[Done]:
        rollout = AttemptedRollout("ro", {}, 1.0, attempt=Attempt("ro", f"at-{number}", 1, 2.0))
        job = Job(rollout, {}, "", {})
        task = asyncio.create_task(self.process.call(job, encode(job), lambda _: None))
        await asyncio.sleep(0)
        return task

    def exits(self) -> None:
        self.process.connection_lost(None)
        self.process.on_exit(Exited(1, 3, ""))


async def test_an_exit_is_the_fault_of_the_only_attempt_that_ran() -> None:
    made = Fixture(2)
    ran = await made.call(1)
    made.exits()
    with pytest.raises(AgentCrashedError, match="ended with exit code 3"):
        await ran


async def test_an_exit_before_anything_ran_is_the_fault_of_no_attempt() -> None:
    made = Fixture(1, alone=True, ready=False)
    waited = await made.call(1)
    made.exits()
    with pytest.raises(LostAttemptError):
        await waited


async def test_of_several_attempts_each_is_to_be_repeated_alone() -> None:
    made = Fixture(2)
    both = [await made.call(1), await made.call(2)]
    made.exits()
    for each in both:
        with pytest.raises(LostAttemptError, match="1 other attempts shared"):
            await each


async def test_one_that_does_not_stop_keeps_its_slot_and_its_process_ends_once_the_others_have() -> None:
    made = Fixture(3)
    hangs, works = await made.call(1), await made.call(2)
    hangs.cancel()
    await asyncio.wait([hangs])
    assert not made.process.usable, "nobody knows whether its event loop still runs"
    made.says(Stopping("at-1"))
    assert (made.process.usable, made.process.free) == (True, 1)
    await asyncio.sleep(0.2)  # the grace is over
    assert (made.process.usable, made.kills) == (False, 0)
    made.says(Done("at-2"))
    assert await works == Done("at-2")
    assert made.kills == 1


async def test_a_blocked_event_loop_costs_all_and_none_of_the_others_failed() -> None:
    made = Fixture(2)
    blocks, works = await made.call(1), await made.call(2)
    blocks.cancel()
    await asyncio.wait([blocks])
    await asyncio.sleep(0.2)
    assert made.kills == 1
    made.exits()
    with pytest.raises(LostAttemptError, match="blocked its event loop"):
        await works


@pytest.mark.parametrize("alone", [True, False])
async def test_a_process_for_one_attempt_ends_with_it(alone: bool) -> None:
    made = Fixture(1, alone=alone)
    task = await made.call(1)
    made.says(Done("at-1"))
    assert await task == Done("at-1")
    assert (made.wire.closed, made.process.usable, made.kills) == (alone, not alone, 0)


async def test_what_is_no_message_is_the_end_of_the_process() -> None:
    made = Fixture(1)
    task = await made.call(1)
    made.process.data_received(b"\xff" * 64)
    assert (made.kills, made.process.usable, made.process.ending) == (1, False, False)
    made.exits()
    with pytest.raises(AgentCrashedError, match=r"was killed: a message of .* bytes was announced"):
        await task
