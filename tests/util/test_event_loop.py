"""Synchronous calls work wherever they are made, a notebook's running event loop included."""

import asyncio
import contextvars
import signal
import threading
from collections.abc import Iterator

import pytest

import agentlightning as agl
from agentlightning.util.event_loop import run_sync

VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


async def value_of_the_variable():
    await asyncio.sleep(0)
    return VARIABLE.get()


async def test_work_is_done_where_a_loop_runs_already_with_the_callers_context():
    VARIABLE.set("set")
    assert run_sync(value_of_the_variable()) == "set"


async def test_errors_come_back_as_they_are():
    async def fail():
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        run_sync(fail())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal. A shell has the programs that it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_work_and_is_raised():
    ended = []

    async def work():
        await asyncio.sleep(0.1)  # until the caller waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def cell():
        with pytest.raises(KeyboardInterrupt):
            run_sync(work())

    loop = asyncio.new_event_loop()
    loop.run_until_complete(cell())
    loop.close()
    assert ended == [True]


@pytest.mark.slow
async def test_an_agent_is_evaluated_from_a_notebook():
    assert agl.evaluate(lambda task: float(task["n"]), [{"n": 1}, {"n": 0}]) == 0.5
