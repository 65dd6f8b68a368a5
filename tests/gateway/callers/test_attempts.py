"""What the gateway knows of the attempts that call it, and how soon it knows that one has ended."""

import asyncio

import pytest

from agentlightning.errors import StoreLostError
from agentlightning.gateway.callers import AttemptTable
from agentlightning.gateway.errors import ApiError
from agentlightning.resources import LLM
from agentlightning.rollouts import RolloutConfig

CHECK = 0.1
TRUSTED = 2.5 * CHECK


class WatchedStore:
    """A store that counts what it is asked, and can be away or slow."""

    def __init__(self, store):
        self._store, self.asked, self.away, self.answers = store, [], False, asyncio.Event()
        self.answers.set()

    def __getattr__(self, name):
        if self.away:
            raise StoreLostError("the database is away")
        self.asked.append(name)

        async def answer(*args, **options):
            await self.answers.wait()
            return await getattr(self._store, name)(*args, **options)

        return answer


@pytest.fixture
async def watched(store):
    """A store that counts what the table asks it."""
    return WatchedStore(store)


@pytest.fixture
async def table(watched):
    """table(...) -> a table that checks its attempts twenty times as often; `forgotten` are those it gave up."""
    tables = []

    def make(**options):
        forgotten = []
        made = AttemptTable(watched, lambda *ids: forgotten.append(ids), **{"check_seconds": CHECK} | options)
        made.forgotten = forgotten
        tables.append(made)
        return made

    yield make
    for each in tables:
        await each.close()


async def start(store, **options):
    started = await store.start_rollout("a task", **options)
    return started.rollout_id, started.attempt.attempt_id


async def until(true):
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


# -- what a call gets --------------------------------------------------------------------------------------------------


async def test_resources_stay_those_the_attempt_began_with(store, table):
    await store.add_resources({"llm": LLM(endpoint="x", model="m", sampling_parameters={"temperature": 0.5})})
    attempts, ids = table(check_seconds=0.01), await start(store)
    await attempts.get(ids)
    await store.add_resources({"llm": LLM(endpoint="x", model="m", sampling_parameters={"temperature": 0.9})})
    await asyncio.sleep(0.1)
    assert (await attempts.get(ids)).sampling_parameters("m") == ("llm", {"temperature": 0.5})
    assert (await attempts.get(ids)).sampling_parameters("other") == ("", {})


async def test_a_rollout_bound_to_a_version_of_the_resources_gets_that_one(store, table):
    for name, temperature in (("one", 0.1), ("two", 0.2)):
        await store.add_resources(
            {"llm": LLM(endpoint="x", model="m", sampling_parameters={"temperature": temperature})}, name
        )
    context = await table().get(await start(store, resources_id="one"))
    assert context.sampling_parameters("m")[1] == {"temperature": 0.1}


async def test_an_attempt_belongs_to_its_rollout_only(store, table):
    attempts, one, two = table(), await start(store), await start(store)
    await attempts.get(one)
    with pytest.raises(ApiError, match=f"rollout '{two[0]}' has no attempt '{one[1]}'") as refused:
        await attempts.get((two[0], one[1]))
    assert (refused.value.status, refused.value.code) == (404, "attempt_not_found")
    with pytest.raises(ApiError, match="the store knows no rollout 'ro-nobody'"):
        await attempts.get(("ro-nobody", one[1]))
    assert len(attempts) == 1


async def test_a_later_attempt_and_its_worker_are_found_by_the_id_alone(store, watched, table):
    attempts, ids = table(), await start(store, worker_id="w")
    await attempts.get(ids)
    watched.asked.clear()
    found = await attempts.find(ids[1])
    assert (found.rollout_id, found.worker_id, watched.asked) == (ids[0], "w", [])
    await store.update_attempt(*ids, worker_id="v")
    await asyncio.sleep(2 * CHECK)
    assert (await attempts.find(ids[1])).worker_id == "v"
    assert (await attempts.find((await start(store))[1])).status == "preparing"
    assert await attempts.find("at-nobody") is None


# -- what it costs the store -------------------------------------------------------------------------------------------


async def test_calls_of_attempts_that_run_read_nothing_while_the_watch_keeps_the_table(store, watched, table):
    """Agents think for longer than an attempt is taken for running."""
    attempts, everyone = table(), [await start(store) for _ in range(20)]
    first = [await attempts.get(ids) for ids in everyone]
    watched.asked.clear()
    for _ in range(3):
        await asyncio.sleep(1.5 * TRUSTED)
        assert [await attempts.get(ids) for ids in everyone] == first
    assert set(watched.asked) == {"get_latest_attempts"}
    assert len(watched.asked) < 40  # for 60 calls of 20 attempts


async def test_callers_that_come_together_ask_the_store_once_and_one_that_leaves_takes_nothing_along(
    store, watched, table
):
    attempts, ids = table(), await start(store)
    asking = [asyncio.create_task(attempts.get(ids)) for _ in range(10)]
    await asyncio.sleep(0)
    asking[0].cancel()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert len({id(context) for context in found[1:]}) == 1
    assert watched.asked.count("get_rollout_by_id") == 1


async def test_only_so_many_attempts_are_remembered_and_those_in_a_call_first(store, watched, table):
    attempts, everyone = table(limit=2), [await start(store) for _ in range(4)]
    busy = await attempts.get(everyone[0])
    with attempts.track(busy):
        for ids in everyone[1:]:
            await attempts.get(ids)
        watched.asked.clear()
        assert await attempts.get(everyone[0]) is busy
        await attempts.get(everyone[3])
        assert watched.asked == []
        await attempts.get(everyone[1])
        assert watched.asked != []


async def test_an_attempt_that_makes_no_calls_costs_nothing_until_it_calls_again(store, watched, table):
    attempts, ids = table(idle_seconds=2 * CHECK), await start(store)
    await attempts.get(ids)
    await asyncio.sleep(4 * CHECK)
    watched.asked.clear()
    await asyncio.sleep(2 * TRUSTED)
    assert watched.asked == []
    await succeed(store, *ids)
    with pytest.raises(ApiError, match="ended as succeeded"):
        await attempts.get(ids)
    assert attempts.forgotten == [ids]


async def test_an_attempt_that_calls_for_long_is_watched(store, table):
    attempts, ids = table(idle_seconds=0), await start(store)
    call = attempts.track(await attempts.get(ids))
    await succeed(store, *ids)
    with pytest.raises(ApiError, match="ended as succeeded"), call:
        await asyncio.sleep(20)


async def test_many_attempts_are_checked_with_few_queries(store, watched, table):
    attempts, everyone = table(check_seconds=0.3), [await start(store) for _ in range(600)]
    for ids in everyone:
        await attempts.get(ids)
    for ids in everyone[:500]:
        await succeed(store, *ids)
    await until(lambda: len(attempts) == 600 - 500)
    watched.asked.clear()
    await until(lambda: watched.asked)
    assert watched.asked == ["get_latest_attempts"]
    assert attempts.forgotten == everyone[:500]


# -- attempts that end -------------------------------------------------------------------------------------------------


async def succeed(store, rollout_id, attempt_id):
    await store.update_attempt(rollout_id, attempt_id, status="succeeded")


async def time_out(store, rollout_id, attempt_id):
    await store.update_attempt(rollout_id, attempt_id, status="timeout")


async def cancel(store, rollout_id, attempt_id):
    await store.cancel_rollout(rollout_id)


async def supersede(store, rollout_id, attempt_id):
    await store.start_attempt(rollout_id)


async def lose(store, rollout_id, attempt_id):
    await store.update_attempt(rollout_id, attempt_id, status="unresponsive")


async def delete(store, rollout_id, attempt_id):
    await store.cancel_rollout(rollout_id)
    await store.delete_rollouts([rollout_id])


@pytest.mark.parametrize(
    ("end", "message", "code"),
    [
        (succeed, "the attempt '{1}' of rollout '{0}' ended as succeeded; it takes no more calls", "attempt_ended"),
        (time_out, "the attempt '{1}' of rollout '{0}' ended as timeout; it takes no more calls", "attempt_ended"),
        (cancel, "the rollout '{0}' was cancelled; it takes no more calls", "attempt_ended"),
        (lose, "the rollout '{0}' has ended; it takes no more calls", "attempt_ended"),
        (
            supersede,
            "a later attempt of rollout '{0}' has taken the place of '{1}'; stop calling",
            "attempt_superseded",
        ),
        (delete, "the store knows no rollout '{0}'", "rollout_not_found"),
    ],
)
async def test_what_ends_an_attempt_elsewhere_is_told_to_the_call_in_progress_and_to_the_next_one(
    store, watched, table, end, message, code
):
    attempts, ids, other = table(), await start(store), await start(store)
    calls = [await attempts.get(each) for each in (ids, other)]
    watched.answers.clear()  # it sees the end as a whole
    await end(store, *ids)
    watched.answers.set()
    with pytest.raises(ApiError) as ended, attempts.track(calls[0]):
        await asyncio.sleep(20)
    with pytest.raises(ApiError) as refused:
        await attempts.get(ids)
    for error in (ended.value, refused.value):
        assert (error.message, error.code) == (message.format(*ids), code)
        assert (error.status, error.retry) in ((409, False), (404, None))
    assert set(attempts.forgotten) == {ids}
    assert await attempts.get(other) is calls[1]


async def test_a_lost_attempt_may_call_until_another_takes_its_place(store, watched, table):
    """It may be back: its rollout only waits for another attempt."""
    attempts, config = table(), RolloutConfig(max_attempts=2)
    everyone = [await start(store, config=config) for _ in range(20)]
    for ids in everyone:
        await lose(store, *ids)
        await attempts.get(ids)
    watched.asked.clear()
    await asyncio.sleep(TRUSTED)
    for ids in everyone:
        await attempts.get(ids)
    assert set(watched.asked) == {"get_latest_attempts", "query_rollouts"}
    assert len(watched.asked) < 20
    await supersede(store, *everyone[0])
    await until(lambda: attempts.forgotten == [everyone[0]])


async def test_a_call_whose_attempt_ends_before_it_begins_is_ended(store, table):
    attempts, ids = table(), await start(store)
    context = await attempts.get(ids)
    await succeed(store, *ids)
    await until(lambda: attempts.forgotten)
    with pytest.raises(ApiError, match="ended as succeeded"), attempts.track(context):
        await asyncio.sleep(20)


async def test_a_call_that_takes_long_to_leave_is_ended_once(store, watched, table):
    """Ended again, it would lose what it does last: its record."""
    attempts, ids, recorded = table(check_seconds=0.01), await start(store), []
    context, _ = await attempts.get(ids), await attempts.get(await start(store))

    async def call():
        with attempts.track(context):
            try:
                await asyncio.sleep(60)
            finally:
                watched.asked.clear()
                await until(lambda: len(watched.asked) > 3)
                recorded.append(True)

    task = asyncio.create_task(call())
    await until(lambda: context.calls)
    await succeed(store, *ids)
    with pytest.raises(ApiError, match="ended as succeeded"):
        await asyncio.wait_for(task, 20)
    assert (recorded, task.cancelling()) == ([True], 0)


# -- a store that does not answer --------------------------------------------------------------------------------------


async def test_while_the_store_is_away_calls_ask_it_themselves_and_the_log_says_so(store, watched, table, caplog):
    attempts, ids = table(), await start(store)
    context = await attempts.get(ids)
    watched.away = True
    assert await attempts.get(ids) is context  # for a moment, what it said counts
    await until(lambda: "so calls ask it themselves: the database is away" in caplog.text)
    await asyncio.sleep(TRUSTED)
    for _ in range(2):
        with pytest.raises(StoreLostError):
            await attempts.get(ids)
    assert caplog.text.count("the database is away") == 1
    watched.away = False
    assert await attempts.get(ids) is context
    await until(lambda: "the store says again which attempts have ended" in caplog.text)


async def test_while_the_store_is_slow_no_call_relies_on_what_it_said_long_ago(store, watched, table):
    attempts, ids = table(), await start(store)
    context = await attempts.get(ids)
    with attempts.track(context):  # the call in progress continues
        watched.answers.clear()
        await asyncio.sleep(2 * TRUSTED)
        call = asyncio.create_task(attempts.get(ids))
        await asyncio.sleep(CHECK)
        assert not call.done()
        watched.answers.set()
        assert await asyncio.wait_for(call, 20) is context


async def test_an_unexpected_failure_of_a_check_ends_no_watch(store, watched, table, caplog):
    attempts, ids = table(), await start(store)
    await attempts.get(ids)
    working, watched._store = watched._store, None
    await until(lambda: "so calls ask it themselves" in caplog.text)
    assert "AttributeError" in caplog.text  # with its traceback
    watched._store = working
    await succeed(store, *ids)
    await until(lambda: attempts.forgotten == [ids])


async def test_a_closed_table_watches_again_from_its_next_call(store, table):
    attempts, ids, other = table(), await start(store), await start(store)
    await attempts.get(ids)
    await attempts.close()
    await attempts.close()
    await attempts.get(other)
    await succeed(store, *ids)
    await until(lambda: attempts.forgotten == [ids])
