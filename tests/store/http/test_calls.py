"""A call with an idempotency key is done once: after a restart, under load, and by whichever server it reaches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.store_hub import StoreHub

from agentlightning import LightningStoreClient
from agentlightning.resources import PromptTemplate
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.span import Span
from agentlightning.store import LightningStore, LightningStoreBase
from agentlightning.store.sql import answers

pytestmark = pytest.mark.integration

Store = LightningStoreBase
BASE = "/v1/agl"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = LightningStore(tmp_path / "store.db")
    yield store
    await store.close()


class Server:
    """One that serves a store, asked without a client that knows better."""

    def __init__(self, hub: StoreHub, store: Store) -> None:
        self.http = httpx.AsyncClient(base_url=hub.serve(store) + BASE, verify=False)

    async def call(self, method: str, key: str | None, **arguments: Any) -> Any:
        """The value, or the type of the error."""
        calls = {"calls": [{"method": method, "arguments": arguments, "key": key}]}
        result = (await self.http.post("/calls", json=calls)).json()["results"][0]
        return result["error"]["type"] if result.get("error") else result["value"]


Serve = Callable[[Store], Server]


@pytest.fixture
async def serve(hub: StoreHub) -> AsyncIterator[Serve]:
    servers: list[Server] = []

    def serve(store: Store) -> Server:
        servers.append(Server(hub, store))
        return servers[-1]

    yield serve
    for server in servers:
        await server.http.aclose()


async def remembered(store: Any) -> int:
    """Bytes, about."""
    sql = "SELECT sum(number) FROM counts WHERE name = 'answered bytes'"
    rows = await store.read("counts", lambda connection: connection.all(sql))
    return rows[0][0] or 0


async def test_a_repeated_requeue_leaves_the_attempt_alone_that_was_claimed_meanwhile(
    tmp_path: Path, serve: Serve
) -> None:
    store = LightningStore(tmp_path / "store.db")
    first = await store.start_rollout("a task")
    server = serve(store)
    told = await server.call("requeue_rollout", "k1", rollout_id=first.rollout_id, reason="shutdown")
    live = await store.dequeue_rollout()
    assert live is not None
    assert await server.call("requeue_rollout", "k1", rollout_id=first.rollout_id, reason="shutdown") == told
    await store.close()
    store = LightningStore(tmp_path / "store.db")  # and after a restart
    server = serve(store)
    assert await server.call("requeue_rollout", "k1", rollout_id=first.rollout_id, reason="shutdown") == told
    latest = await store.get_latest_attempt(first.rollout_id)
    assert latest is not None
    assert (latest.attempt_id, latest.status) == (live.attempt.attempt_id, "preparing")
    await server.call("requeue_rollout", "k2", rollout_id=first.rollout_id, reason="shutdown")  # a new call is done
    assert (await store.query_rollouts())[0].status == "requeuing"
    await store.close()


async def test_a_repeated_request_of_the_rest_api_is_answered_as_the_first_time(store: Store, serve: Serve) -> None:
    server = serve(store)
    claims = {"worker_id": "w1"}
    for path, body in (
        ("/rollouts", {"input": "started"}),
        ("/queues/rollouts/enqueue", {"rollouts": [{"input": "one"}, {"input": "two"}]}),
        ("/queues/rollouts/dequeue", claims),
        ("/resources", {}),
    ):
        answers = [await server.http.post(path, json=body, headers={"idempotency-key": "k"}) for _ in range(2)]
        assert answers[0].status_code in (200, 201), answers[0].text
        assert (answers[0].status_code, answers[0].content) == (answers[1].status_code, answers[1].content)
    (claimed,) = answers_of_claim = (await server.http.post("/queues/rollouts/dequeue", json=claims)).json()
    assert (len(answers_of_claim), claimed["input"]) == (1, "two")
    span = {"rollout_id": claimed["rollout_id"], "attempt_id": claimed["attempt"]["attempt_id"], "name": "no time"}
    kept = [await server.http.post("/spans", json=span, headers={"idempotency-key": "k"}) for _ in range(2)]
    assert kept[0].status_code == 201
    assert kept[0].content == kept[1].content
    assert await store.count_rollouts() == 3
    assert len(await store.query_resources()) == 1
    assert len(await store.query_spans(claimed["rollout_id"])) == 1


async def test_a_key_that_was_used_for_other_arguments_is_refused(store: Store, serve: Serve) -> None:
    one, two = [await store.start_rollout("a task") for _ in range(2)]
    server = serve(store)
    await server.call("cancel_rollout", "k", rollout_id=one.rollout_id)
    assert await server.call("cancel_rollout", "k", rollout_id=two.rollout_id) == "ConflictError"
    assert sorted([each.status for each in await store.query_rollouts()]) == ["cancelled", "preparing"]


async def test_a_call_that_failed_is_done_when_it_is_repeated(store: Store, serve: Serve) -> None:
    server = serve(store)
    assert await server.call("requeue_rollout", "k", rollout_id="ro-1", reason="") == "NotFoundError"
    await store.start_rollout("a task", rollout_id="ro-1")
    assert (await server.call("requeue_rollout", "k", rollout_id="ro-1", reason=""))["status"] == "requeuing"


async def test_of_an_answer_too_long_to_keep_the_present_state_is_told(store: Store, serve: Serve) -> None:
    await store.start_rollout("x" * 100_000, rollout_id="ro-1")
    server = serve(store)
    assert (await server.call("requeue_rollout", "k", rollout_id="ro-1", reason=""))["status"] == "requeuing"
    assert await store.dequeue_rollout() is not None
    again = await server.call("requeue_rollout", "k", rollout_id="ro-1", reason="")
    assert (again["status"], len(again["input"])) == ("preparing", 100_000)
    assert 0 < await remembered(store) < 1000
    many = {"rollouts": [{"input": "y" * 20_000}]}
    assert len(await server.call("enqueue_many_rollouts", "k", **many)) == 1
    assert await server.call("enqueue_many_rollouts", "k", **many) == "ConflictError"
    assert await store.count_rollouts() == 2


async def test_a_client_of_another_version_is_refused(store: Store, serve: Serve) -> None:
    calls = {"calls": [{"method": "enqueue_rollout", "arguments": {"input": "a task"}}]}
    reply = await serve(store).http.post("/calls", json=calls, headers={"agl-protocol": "9"})
    assert (reply.status_code, reply.headers["agl-protocol"]) == (400, "1")
    assert "protocol 9" in reply.json()["error"]["message"]
    assert await store.count_rollouts() == 0


async def test_the_same_call_twice_in_one_request_is_done_once(store: Store, serve: Serve) -> None:
    one = {"method": "enqueue_rollout", "arguments": {"input": "a task"}, "key": "k"}
    results = (await serve(store).http.post("/calls", json={"calls": [one] * 5})).json()["results"]
    assert len({each["value"]["rollout_id"] for each in results}) == 1
    assert await store.count_rollouts() == 1


async def test_a_field_that_is_new_inside_a_span_loses_no_span(store: Store, serve: Serve) -> None:
    rollout, server = await store.start_rollout("a task"), serve(store)
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    event = {"name": "first token", "timestamp": 1.5, "new": 1}
    await server.call("add_span", "k", span={**ids, "name": "work", "start_time": 1.0, "events": [event]})
    [span] = await store.query_spans(rollout.rollout_id)
    assert [(each.name, each.timestamp) for each in span.events] == [("first token", 1.5)]


async def test_what_is_remembered_is_bounded(store: Store, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BYTES", 8_000)
    monkeypatch.setattr(answers, "TRIM_INTERVAL", 8)
    server = serve(store)
    await store.start_rollout("a task", rollout_id="ro-1")

    async def repeatable(key: str, number: int) -> Any:
        return await server.call("update_rollout", key, rollout_id="ro-1", metadata={"number": number})

    for start in range(0, 80, 20):
        await asyncio.gather(*(repeatable(f"k{number}", number) for number in range(start, start + 20)))
    assert 5_000 < await remembered(store) < 25_000
    assert (await repeatable("k79", 79))["metadata"] == {"number": 79}  # the last ones are known
    later = store.clock.wall() + 2 * answers.RETENTION_SECONDS  # type: ignore[attr-defined]
    monkeypatch.setattr(store.clock, "wall", lambda: later)  # type: ignore[attr-defined]
    await asyncio.gather(*(repeatable(f"later {number}", number) for number in range(8)))
    assert 0 < await remembered(store) < 5_000


async def test_claims_spans_and_reports_cost_no_row(store: Any, hub: StoreHub) -> None:
    client = LightningStoreClient(hub.serve(store))
    await client.enqueue_rollout("a task")
    claimed = await client.dequeue_rollout("w1")
    assert claimed is not None
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    await client.add_span(Span(*ids, "work", 1.0))
    await client.update_attempt(*ids, status="running", last_heartbeat_time=1.0)
    await client.update_attempt(*ids, status="succeeded")
    await client.add_resources({"prompt": PromptTemplate(template="{x}")})
    assert await remembered(store) == 0
    await client.update_attempt(*ids, metadata={"a": 1})
    assert await remembered(store) > 0
    await client.close()


async def test_two_servers_of_one_database_do_a_call_once_between_them(postgres_store_url: str, serve: Serve) -> None:
    stores = [LightningStore(postgres_store_url) for _ in range(2)]
    servers = [serve(store) for store in stores]
    first = await stores[0].start_rollout("a task")
    arguments = {"rollout_id": first.rollout_id, "reason": "shutdown"}
    told = await servers[0].call("requeue_rollout", "k", **arguments)
    live = await stores[1].dequeue_rollout()
    assert await servers[1].call("requeue_rollout", "k", **arguments) == told
    latest = await stores[0].get_latest_attempt(first.rollout_id)
    assert live is not None
    assert latest is not None
    assert (latest.attempt_id, latest.status) == (live.attempt.attempt_id, "preparing")
    answers = await asyncio.gather(
        *(servers[turn % 2].call("enqueue_rollout", f"k{turn // 4}", input="at once") for turn in range(40))
    )
    assert len({each["rollout_id"] for each in answers}) == 10
    assert await stores[0].count_rollouts() == 11
    for store in stores:
        await store.close()


def spans_of(rollout: Any, *names: str) -> list[dict[str, Any]]:
    """Calls that add a span each, with keys and without ids."""
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    arguments = [{"span": {**ids, "name": name, "start_time": 1.0}} for name in names]
    return [{"method": "add_span", "arguments": each, "key": f"k-{each['span']['name']}"} for each in arguments]


@pytest.mark.parametrize(
    "splits",
    [
        [["a", "b"], ["a", "b"]],
        [["a", "b", "c"], ["a"], ["b", "c"]],
        [["a"], ["b"], ["c", "b", "a"]],
        [["a", "a", "b"], ["b", "c", "a"]],
    ],
)
async def test_keys_count_in_a_batch_of_any_size_however_it_is_split_again(
    store: Store, serve: Serve, splits: list[list[str]]
) -> None:
    rollout, server = await store.start_rollout("a task"), serve(store)
    told: dict[str, Any] = {}
    for names in splits:
        calls = {"calls": spans_of(rollout, *names)}
        results = (await server.http.post("/calls", json=calls)).json()["results"]
        for name, result in zip(names, results, strict=True):
            assert told.setdefault(name, result) == result
    assert {each.name for each in await store.query_spans(rollout.rollout_id)} == set(told)
    assert await store.count_spans(rollout.rollout_id, "latest") == len(told)


async def test_in_a_mixed_batch_only_the_calls_with_keys_are_remembered(store: Store, serve: Serve) -> None:
    rollout, server = await store.start_rollout("a task"), serve(store)
    one, two = spans_of(rollout, "one", "two")
    spans = [{**one["arguments"]["span"], "name": name} for name in ("many 1", "many 2")]
    calls = [
        {"method": "query_queues", "arguments": {}},
        {key: value for key, value in one.items() if key != "key"},
        {key: value for key, value in two.items() if key != "key"},
        one,
        {"method": "add_many_spans", "arguments": {"spans": spans}, "key": "k-many"},
        {"method": "enqueue_rollout", "arguments": {"input": "new"}, "key": "k-new"},
    ]
    for _ in range(2):
        answered = (await server.http.post("/calls", json={"calls": calls})).json()["results"]
        assert [list(each) for each in answered] == [["value"]] * 6
    names = sorted(each.name for each in await store.query_spans(rollout.rollout_id))
    assert names == ["many 1", "many 2", "one", "one", "one", "two", "two"]
    assert await store.count_rollouts() == 2


async def test_in_a_batch_a_key_with_other_arguments_is_refused_alone(store: Store, serve: Serve) -> None:
    rollout, server = await store.start_rollout("a task"), serve(store)
    one, two = spans_of(rollout, "one", "two")
    await server.http.post("/calls", json={"calls": [one]})
    calls = {"calls": [{**two, "key": one["key"]}, two]}
    refused, added = (await server.http.post("/calls", json=calls)).json()["results"]
    assert (refused["error"]["type"], added["value"]["sequence_id"]) == ("ConflictError", 2)
    assert [each.name for each in await store.query_spans(rollout.rollout_id)] == ["one", "two"]


async def test_a_claim_with_a_key_is_made_once_in_batches_too(store: Store, serve: Serve) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(number) for number in range(4)])
    server = serve(store)
    claims = [
        {"method": "dequeue_rollout", "arguments": {}, "key": "k"},
        {"method": "dequeue_many_rollouts", "arguments": {"limit": 2}, "key": "k"},
    ]
    first = (await server.http.post("/calls", json={"calls": claims})).json()["results"]
    again = [(await server.http.post("/calls", json={"calls": [each]})).json()["results"][0] for each in claims]
    assert again == first
    assert await store.count_rollouts(status_in=["queuing"]) == 1
