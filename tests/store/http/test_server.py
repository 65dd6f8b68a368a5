"""The REST API: what it takes, what it answers, and what it says to what it cannot take."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from tests.support.store_hub import StoreHub

from agentlightning.rollouts import AttemptedRollout, EnqueueRolloutRequest
from agentlightning.server.app import Server
from agentlightning.span import Span
from agentlightning.store import LightningStoreBase
from agentlightning.store.base import IMPLEMENTED
from agentlightning.store.http.endpoint import read_body
from agentlightning.store.http.errors import RequestError
from agentlightning.store.http.operations import OPERATIONS
from agentlightning.store.instrumented import instrument
from agentlightning.store.paging import PAGE

pytestmark = pytest.mark.integration

Store = LightningStoreBase
BASE = "/v1/agl"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def http(store: Store, hub: StoreHub) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=hub.serve(store) + BASE, verify=False
    ) as http:  # no TLS here, which is slow to prepare
        yield http


@pytest.fixture
async def claimed(store: Store) -> AttemptedRollout:
    return await store.start_rollout({"question": "6 x 7"}, worker_id="w1")


def body_of_span(claimed: AttemptedRollout, **fields: Any) -> dict[str, Any]:
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    return {**ids, "name": "work", "start_time": 1.0, **fields}


def refusal(reply: httpx.Response, status: int, kind: str, *named: str) -> None:
    """It has this status and type, its message names the values, and 0.x clients find the message too."""
    assert reply.status_code == status, reply.text
    answer = reply.json()
    assert answer["error"]["type"] == kind
    for each in named:
        assert each in answer["error"]["message"]
    assert answer["detail"] == answer["error"]["message"]


# -- the paths of 0.x ------------------------------------------------------------------------------------------------


async def test_a_rollout_goes_its_whole_way(http: httpx.AsyncClient) -> None:
    (made,) = (await http.post("/queues/rollouts/enqueue", json={"rollouts": [{"input": "t", "mode": "val"}]})).json()
    assert (made["status"], made["mode"], made["queue"]) == ("queuing", "val", "val")
    (claimed,) = (await http.post("/queues/rollouts/dequeue", json={"worker_id": "w1"})).json()
    attempt = claimed["attempt"]
    assert (claimed["rollout_id"], attempt["worker_id"]) == (made["rollout_id"], "w1")
    path = f"/rollouts/{made['rollout_id']}"
    span = {"rollout_id": made["rollout_id"], "attempt_id": attempt["attempt_id"], "name": "work", "start_time": 1}
    kept = await http.post("/spans", json=span)
    assert (kept.status_code, kept.json()["sequence_id"]) == (201, 1)
    waiting = asyncio.create_task(http.post("/waits/rollouts", json={"rollout_ids": [made["rollout_id"]]}))
    ended = await http.post(f"{path}/attempts/{attempt['attempt_id']}", json={"status": "succeeded"})
    assert ended.json()["status"] == "succeeded"
    assert [each["status"] for each in (await waiting).json()] == ["succeeded"]
    assert (await http.get(path)).json()["status"] == "succeeded"
    page = (await http.get("/spans", params={"rollout_id": made["rollout_id"]})).json()
    assert ([each["name"] for each in page["items"]], page["total"]) == (["work"], 1)


async def test_an_empty_body_is_a_request_without_wishes(http: httpx.AsyncClient, store: Store) -> None:
    assert (await http.post("/queues/rollouts/dequeue")).json() == []
    made = await store.enqueue_rollout("task")
    assert (await http.post("/queues/rollouts/dequeue", content=b"null", headers=JSON)).json() != []
    assert (await http.post(f"/rollouts/{made.rollout_id}/attempts")).status_code == 201
    assert (await http.post("/workers/w9")).json()["worker_id"] == "w9"


async def test_a_span_of_0_x_is_kept_and_shown_in_its_shape(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    sent = body_of_span(
        claimed,
        sequence_id=7,
        trace_id="a" * 32,
        span_id="b" * 16,
        parent_id="c" * 16,
        status={"status_code": "ERROR", "description": "it broke"},
        attributes={"x": [1, 2]},
        events=[{"name": "retry", "attributes": {"n": 1}, "timestamp": 1.5}],
        links=[],
        end_time=2.0,
        context={"trace_id": "a" * 32, "span_id": "b" * 16, "is_remote": False, "trace_state": {}},
        parent=None,
        resource={"attributes": {"service.name": "agent"}, "schema_url": ""},
        instrumentation_scope={"name": "what 0.x sends and nobody reads"},
    )
    assert (await http.post("/spans", json=sent)).status_code == 201
    (shown,) = (await http.post("/spans/search", json={"rollout_id": claimed.rollout_id})).json()["items"]
    for name in ("sequence_id", "trace_id", "span_id", "parent_id", "status", "attributes", "events", "end_time"):
        assert shown[name] == sent[name]
    assert shown["resource"]["attributes"] == {"service.name": "agent"}
    assert shown["parent"]["span_id"] == "c" * 16


async def test_links_of_a_span_are_kept_and_shown(
    http: httpx.AsyncClient, claimed: AttemptedRollout, store: Store
) -> None:
    context = {
        "trace_id": "d" * 32,
        "span_id": "e" * 16,
        "is_remote": False,
        "trace_state": {"vendor": "a", "other": "b"},
    }
    links = [{"context": context, "attributes": {"why": "retry"}}, {"context": {**context, "trace_state": {}}}]
    assert (await http.post("/spans", json=body_of_span(claimed, links=links))).status_code == 201
    (kept,) = await store.query_spans(claimed.rollout_id)
    plain = {"trace_id": "d" * 32, "span_id": "e" * 16}
    assert kept.attributes["otel.links"] == [
        {**plain, "attributes": {"why": "retry"}, "trace_state": "vendor=a,other=b"},
        {**plain, "attributes": {}},
    ]
    (shown,) = (await http.get("/spans", params={"rollout_id": claimed.rollout_id})).json()["items"]
    assert shown["links"] == [links[0], {**links[1], "attributes": {}}]
    again = {**shown, "span_id": "f" * 16, "context": None, "sequence_id": 0}
    assert (await http.post("/spans", json=again)).json()["links"] == shown["links"]
    assert (await store.query_spans(claimed.rollout_id))[1].attributes == kept.attributes


async def test_the_trace_state_of_a_span_is_kept_and_shown(
    http: httpx.AsyncClient, claimed: AttemptedRollout, store: Store
) -> None:
    context = {
        "trace_id": "d" * 32,
        "span_id": "e" * 16,
        "is_remote": False,
        "trace_state": {"vendor": "a=1", "b": "2"},
    }
    assert (await http.post("/spans", json=body_of_span(claimed, context=context))).status_code == 201
    (kept,) = await store.query_spans(claimed.rollout_id)
    assert kept.attributes["w3c.tracestate"] == "vendor=a=1,b=2"
    (shown,) = (await http.get("/spans", params={"rollout_id": claimed.rollout_id})).json()["items"]
    assert shown["context"] == {**context, "trace_id": shown["trace_id"], "span_id": shown["span_id"]}


async def test_an_attribute_that_holds_no_links_is_none(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    for given in ("text", [1, {"trace_id": 7, "attributes": []}]):
        await http.post("/spans", json=body_of_span(claimed, attributes={"otel.links": given}))
    first, second = (await http.get("/spans", params={"rollout_id": claimed.rollout_id})).json()["items"]
    assert first["links"] == []
    assert [each["context"]["trace_id"] for each in second["links"]] == ["7"]


async def test_a_reward_of_0_x_is_a_reward(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    given = {"agentlightning.reward.0.name": "correct", "agentlightning.reward.0.value": 0.5}
    sent = body_of_span(claimed, name="agentlightning.annotation", attributes=given)
    assert (await http.post("/spans", json=sent)).status_code == 201
    (shown,) = (await http.post("/spans/search", json={"rollout_id": claimed.rollout_id})).json()["items"]
    assert (shown["name"], shown["attributes"]["gen_ai.evaluation.score.value"]) == ("gen_ai.evaluation.result", 0.5)
    assert given.items() <= shown["attributes"].items()


async def test_resources_are_published_replaced_and_listed(http: httpx.AsyncClient) -> None:
    assert (await http.get("/resources/latest")).json() is None
    prompt = {"prompt": {"resource_type": "prompt_template", "template": "{x}", "engine": "f-string"}}
    first = (await http.post("/resources", json=prompt)).json()
    assert (first["version"], first["resources"], first["update_time"]) == (1, prompt, first["create_time"])
    named = await http.put("/resources/mine", json=prompt)
    assert (named.status_code, named.json()["resources_id"]) == (201, "mine")
    assert (await http.post(f"/resources/{first['resources_id']}", json={})).json()["version"] == 3
    assert (await http.get("/resources/latest")).json()["resources_id"] == first["resources_id"]
    listed = (await http.get("/resources", params={"limit": 1})).json()
    assert ([each["resources_id"] for each in listed["items"]], listed["total"]) == ([first["resources_id"]], 2)


async def test_workers_and_queues_are_seen_and_set(http: httpx.AsyncClient, store: Store) -> None:
    worker = (await http.post("/workers/w1", json={"heartbeat_stats": {"cpu": 0.5}, "lease_seconds": 30})).json()
    assert (worker["status"], worker["heartbeat_stats"], worker["lease_seconds"]) == ("idle", {"cpu": 0.5}, 30)
    refusal(await http.post("/workers/w1", json={"heartbeat_stats": None}), 400, "RequestError", "heartbeat_stats")
    assert (await http.post("/workers/w1")).json()["heartbeat_stats"] == {"cpu": 0.5}
    assert (await http.get("/workers/nobody")).json() is None
    assert (await http.post("/workers/search", json={"filter_logic": "and"})).json()["total"] == 1
    assert (await http.post("/queues/train", json={"limit": 2})).json()["limit"] == 2
    await store.enqueue_rollout("task", mode="train")
    assert (await http.get("/queues")).json() == [{"name": "train", "limit": 2, "waiting": 1, "open": 0}]


async def test_finished_rollouts_are_moved_and_removed(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    path, rollout_id = f"/rollouts/{claimed.rollout_id}", claimed.rollout_id
    await http.post("/spans", json=body_of_span(claimed, span_id="s1"))
    refusal(await http.delete(path), 409, "ConflictError", rollout_id)
    await http.post(f"{path}/cancel")
    (record,) = (await http.post("/records/read", json={"rollout_ids": [rollout_id]})).json()
    assert [span["span_id"] for span in record["spans"]] == ["s1"]
    assert (await http.post("/prune", json={"retention": {"max_rollouts": 0}, "dry_run": True})).json()["rollouts"] == 1
    assert (await http.delete(path)).json() == {"count": 1}
    assert (await http.get(path)).status_code == 404
    assert (await http.post("/records", json={"records": [record]})).json() == {"count": 1}
    assert (await http.get(path)).json()["status"] == "cancelled"
    assert (await http.post("/vacuum")).json() is None


async def test_statistics_have_our_names_and_those_of_0_x(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    counts = (await http.get("/statistics")).json()
    assert (counts["rollouts.preparing"], counts["attempts"]) == (1, 1)
    assert (counts["total_rollouts"], counts["total_attempts"], counts["total_spans"]) == (1, 1, 0)
    assert counts["name"] == "LightningStore"
    assert 0 < counts["uptime"] < (await http.get("/statistics")).json()["uptime"]


# -- lists -----------------------------------------------------------------------------------------------------------


async def test_a_list_comes_in_pages_and_says_how_many_there_are(http: httpx.AsyncClient, store: Store) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n, rollout_id=f"r{n}") for n in range(7)])

    async def page(**wishes: Any) -> tuple[list[str], int | None]:
        answer = (await http.get("/rollouts", params=wishes)).json()
        return [each["rollout_id"] for each in answer["items"]], answer["total"]

    assert await page(limit=2, offset=3) == (["r3", "r4"], 7)
    assert await page(limit=2, after="r4") == (["r5", "r6"], 7)
    assert await page(limit=2, after="r4", rollout_id_contains="r") == (["r5", "r6"], None)
    assert await page(limit=2, rollout_id_contains="r") == (["r0", "r1"], 7)
    assert await page(offset=9) == ([], 7)
    assert await page(limit=1, sort_by="start_time", sort_order="desc") == (["r6"], 7)
    assert await page(rollout_id_in=["r1", "r2"], status_in="queuing") == (["r1", "r2"], 2)


async def test_a_long_list_is_answered_in_pieces(http: httpx.AsyncClient, store: Store) -> None:
    number = 2 * PAGE + 3
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(n) for n in range(number)])
    pieces = 0
    async with http.stream("GET", "/rollouts") as reply:
        assert "content-length" not in reply.headers
        data = b""
        async for piece in reply.aiter_raw():
            pieces += 1
            data += piece
    answer = json.loads(data)
    assert [each["input"] for each in answer["items"]] == list(range(number))
    assert (answer["total"], answer["limit"]) == (number, -1)
    assert pieces > 1


class Watched:
    """An observer: how many spans each query answered, and how many queries there were at once."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        self.under_way = self.most = 0

    def on_start(self, method: str) -> None:
        self.under_way += method == "query_spans"
        self.most = max(self.most, self.under_way)

    def on_end(self, call: Any) -> None:
        if call.method == "query_spans":
            self.under_way -= 1
            self.answered.append(len(call.result))


@pytest.fixture
async def large(store: Store, claimed: AttemptedRollout) -> AttemptedRollout:
    """A rollout of twelve spans of a megabyte."""
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    for number in range(12):
        await store.add_span(Span(*ids, f"span {number}", 1.0, attributes={"text": "x" * 1_000_000}))
    return claimed


async def test_large_items_are_read_a_few_at_a_time(store: Store, large: AttemptedRollout) -> None:
    watched = Watched()
    server = Server(instrument(store, [watched]), secret="s")
    async with server, httpx.AsyncClient(base_url=server.url) as client:
        items = (await client.get("/v1/agl/spans", params={"rollout_id": large.rollout_id})).json()["items"]
    assert [item["name"] for item in items] == [f"span {number}" for number in range(12)]
    assert (watched.answered[0], max(watched.answered[1:])) == (8, 4)


async def test_the_total_of_a_long_list_is_counted_in_few_reads(store: Store, claimed: AttemptedRollout) -> None:
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    await store.add_many_spans([Span(*ids, "work", 1.0) for _ in range(500)])
    watched = Watched()
    server = Server(instrument(store, [watched]), secret="s")
    async with server, httpx.AsyncClient(base_url=server.url) as client:
        params = {"rollout_id": claimed.rollout_id, "limit": 1}
        page = (await client.get("/v1/agl/spans", params=params)).json()
    assert (len(page["items"]), page["total"]) == (1, 500)
    assert len(watched.answered) < 12


async def test_a_page_is_one_read_also_where_0_x_sends_its_filters_as_null(
    store: Store, claimed: AttemptedRollout
) -> None:
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    await store.add_many_spans([Span(*ids, "work", 1.0, span_id=f"{number:04}") for number in range(500)])
    watched = Watched()
    nulls = dict.fromkeys(("name", "name_contains", "span_id", "span_id_contains", "trace_id", "parent_id"))
    wishes = {"rollout_id": claimed.rollout_id, "attempt_id": "latest", "limit": 50, **nulls}
    async with (
        Server(instrument(store, [watched]), secret="s") as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        for after, first in ((None, 0), ("0399", 400)):
            page = (await client.post("/v1/agl/spans/search", json={**wishes, "after": after})).json()
            assert [item["span_id"] for item in page["items"]] == [f"{first + number:04}" for number in range(50)]
            assert page["total"] == 500
    assert watched.answered == [50, 50]


async def test_many_large_lists_of_one_request_are_read_a_few_at_a_time(store: Store, large: AttemptedRollout) -> None:
    watched = Watched()
    call = {"method": "query_spans", "arguments": {"rollout_id": large.rollout_id}}
    small = {"method": "query_spans", "arguments": {"rollout_id": large.rollout_id, "name": "span 3"}}
    body = {"calls": [{"method": "query_queues", "arguments": {}}, small, *[call] * 9, {"method": "no"}, small]}
    server = Server(instrument(store, [watched]), secret="s")
    async with server, httpx.AsyncClient(base_url=server.url) as client:
        results = (await client.post("/v1/agl/calls", json=body)).json()["results"]
    assert results[0]["value"][0]["name"] == "default"
    assert [len(results[index]["value"]) for index in (1, *range(2, 11), 12)] == [1, *[12] * 9, 1]
    assert "error" in results[11]
    assert watched.most == 4


async def test_lists_are_sorted_and_filtered_as_0_x_does_it(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    for number, (name, parent) in enumerate((("search", "b"), ("answer", None), ("search again", "a"))):
        times = {"start_time": 10.0 - number, "parent_id": parent}
        await http.post("/spans", json=body_of_span(claimed, name=name, **times))

    async def names(**wishes: Any) -> list[str]:
        given = {"rollout_id": claimed.rollout_id, "sort_by": "sequence_id", "filter_logic": "and"} | wishes
        found = (await http.post("/spans/search", json=given)).json()
        assert found["total"] >= len(found["items"])
        asked = {name: value for name, value in given.items() if value is not None}
        assert (await http.get("/spans", params=asked)).json() == found
        return [item["name"] for item in found["items"]]

    assert await names() == ["search", "answer", "search again"]
    assert await names(sort_order="desc", limit=1) == ["search again"]
    assert await names(sort_by="start_time") == ["search again", "answer", "search"]
    assert await names(sort_by="parent_id") == ["answer", "search again", "search"]
    assert await names(sort_by="parent_id", sort_order="desc", limit=2, offset=1) == ["search again", "answer"]
    assert await names(name_contains="search", parent_id="a", filter_logic="or") == ["search", "search again"]
    assert await names(name_contains="search", parent_id="a") == ["search again"]
    wrong = {"rollout_id": claimed.rollout_id, "sort_by": "nothing"}
    refusal(await http.post("/spans/search", json=wrong), 400, "ConfigError", "parent_id")


async def test_a_rollout_is_shown_with_its_latest_attempt(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    await http.post("/queues/rollouts/enqueue", json={"rollouts": [{"input": 1, "rollout_id": "waits"}]})
    shown = (await http.get(f"/rollouts/{claimed.rollout_id}")).json()
    assert shown["attempt"]["attempt_id"] == claimed.attempt.attempt_id
    assert "attempt" not in (await http.get("/rollouts/waits")).json()
    listed = (await http.get("/rollouts")).json()["items"]
    assert {each["rollout_id"]: "attempt" in each for each in listed} == {claimed.rollout_id: True, "waits": False}
    assert listed == (await http.post("/rollouts/search", json={})).json()["items"]


async def test_numbers_are_reserved_many_at_once(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    pair = [claimed.rollout_id, claimed.attempt.attempt_id]
    answer = await http.post("/spans/next/batch", json={"rollout_attempt_ids": [pair, pair]})
    assert answer.json() == {"sequence_ids": [1, 2]}


# -- who may ---------------------------------------------------------------------------------------------------------


async def test_with_a_token_nothing_but_health_is_open(hub: StoreHub, store: Store) -> None:
    async with (
        Server(store, secret="s", token="right") as server,
        httpx.AsyncClient(base_url=server.url + BASE) as http,
    ):
        assert (await http.get("/health")).json()["status"] == "ok"
        for operation in OPERATIONS:
            path = operation.path.replace("{", "").replace("}", "")
            reply = await http.request(operation.verb, path)
            refusal(reply, 401, "StoreAuthError", "AGL_TOKEN")
            assert reply.headers["www-authenticate"].startswith("Bearer")
        for path in ("/calls", "/waits/calls"):
            refusal(await http.post(path, json={"calls": []}), 401, "StoreAuthError")
        refusal(await http.get("/openapi.json"), 401, "StoreAuthError")
        refusal(await http.get("/nowhere"), 401, "StoreAuthError")
        for key in ("wrong", "right", "rightt", "ri\xdfht"):
            headers = {b"authorization": b"Bearer " + key.encode("latin-1")}
            reply = await http.get("/statistics", headers=headers)
            assert reply.status_code == (200 if key == "right" else 401)
        assert (await http.get("/statistics", headers={"authorization": "bearer right"})).status_code == 200


async def test_a_page_of_another_site_may_do_nothing(http: httpx.AsyncClient) -> None:
    refusal(
        await http.post("/queues/rollouts/dequeue", headers={"origin": "https://evil.example"}),
        403,
        "ForbiddenError",
        "evil.example",
    )
    own = f"http://{http.base_url.netloc.decode()}"
    assert (await http.post("/queues/rollouts/dequeue", headers={"origin": own})).status_code == 200


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "kind", "named"),
    [
        ("GET", "/rollouts/nope", None, 404, "NotFoundError", "nope"),
        ("GET", "/resources/nope", None, 404, "NotFoundError", "nope"),
        ("GET", "/attempts/nope", None, 404, "NotFoundError", "nope"),
        ("GET", "/rollouts/nope/attempts/latest", None, 404, "NotFoundError", "nope"),
        ("GET", "/spans?rollout_id=nope", None, 404, "NotFoundError", "nope"),
        ("POST", "/rollouts/nope", {"mode": "val"}, 404, "NotFoundError", "nope"),
        ("POST", "/waits/rollouts", {"rollout_ids": ["nope"]}, 404, "NotFoundError", "nope"),
        ("POST", "/spans/next", {"rollout_id": "nope", "attempt_id": "x"}, 404, "NotFoundError", "nope"),
        ("POST", "/rollouts", {"input": 1, "resources_id": "nope"}, 404, "NotFoundError", "nope"),
        ("POST", "/rollouts", {"input": 1, "mode": "practice"}, 400, "RequestError", "practice"),
        ("POST", "/rollouts", {"input": 1, "rollout_id": "a/b"}, 400, "ConfigError", "a/b"),
        ("POST", "/rollouts", {}, 400, "RequestError", "input"),
        ("POST", "/rollouts", {"input": 1, "metadate": {}}, 400, "RequestError", "metadate"),
        ("POST", "/rollouts", {"input": 1, "config": {"max_attempts": 0}}, 400, "RequestError", "max_attempts"),
        ("POST", "/rollouts", [1], 400, "RequestError", "[1]"),
        ("POST", "/queues/rollouts/enqueue", {"rollouts": [{"inputs": 1}]}, 400, "RequestError", "input"),
        ("POST", "/queues/rollouts/dequeue", {"limit": -3}, 400, "ConfigError", "-3"),
        ("POST", "/queues/rollouts/dequeue", {"limit": 10**30}, 400, "RequestError", "9223372036854775807"),
        ("POST", "/queues/rollouts/dequeue", {"worker_id": 7}, 400, "RequestError", "worker_id is 7"),
        ("GET", "/rollouts?limit=-2", None, 400, "RequestError", "limit is -2"),
        ("GET", "/rollouts?limit=many", None, 400, "RequestError", "many"),
        ("GET", "/rollouts?offset=-1", None, 400, "RequestError", "offset is -1"),
        ("GET", "/rollouts?status_in=done", None, 400, "RequestError", "done"),
        ("GET", "/rollouts?no_such=1", None, 400, "RequestError", "no_such"),
        ("GET", "/rollouts?rollout_id_contains=%FF", None, 400, "RequestError", "query string"),
        ("POST", "/resources", {"x": {"resource_type": "llm"}}, 400, "RequestError", "endpoint"),
        ("POST", "/resources", {"x": {"resource_type": "car"}}, 400, "RequestError", "car"),
        ("POST", "/queues/train", {"limit": -1}, 400, "ConfigError", "-1"),
    ],
)
async def test_a_bad_request_is_refused_by_name(
    http: httpx.AsyncClient, verb: str, path: str, body: Any, status: int, kind: str, named: str
) -> None:
    refusal(await http.request(verb, path, json=body), status, kind, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rollout_id": "nope"}, "nope"),
        ({"attempt_id": "nope"}, "nope"),
        ({"start_time": "2026-01-01T00:00:00"}, "seconds since the epoch"),
        ({"start_time": "2026-01-01T00:00:00"}, '"2026-01-01T00:00:00"'),
        ({"sequence_id": -1}, "-1"),
        ({"sequence_id": 2**70}, "sequence_id"),
        ({"status": {"status_code": "FINE"}}, "FINE"),
        ({"attributes": [1]}, "attributes"),
        ({"events": [{}]}, "name"),
        ({"name": None}, "name is null"),
    ],
)
async def test_a_bad_span_is_refused_with_all_that_came_with_it(
    http: httpx.AsyncClient, store: Store, claimed: AttemptedRollout, fields: dict[str, Any], named: str
) -> None:
    spans = [body_of_span(claimed), body_of_span(claimed, **fields), body_of_span(claimed)]
    reply = await http.post("/spans/batch", json={"spans": spans})
    assert reply.status_code in (400, 404)
    assert named in reply.json()["detail"]
    assert await store.query_spans(claimed.rollout_id) == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"input": NaN}', "NaN"),
        (b'{"input": 1e999}', "out of range"),
        (b'{"input": "\xff"}', "UTF-8"),
        (b'{"input": "\\ud800"}', "UTF-8"),
        (b'{"input": {"question": "6 x', "JSON"),
        (b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
        (b"input=1", "JSON"),
        (b"", "JSON"),
    ],
)
async def test_a_body_that_is_no_json_is_refused(
    http: httpx.AsyncClient, store: Store, body: bytes, named: str
) -> None:
    refusal(await http.post("/rollouts", content=body, headers=JSON), 400, "RequestError", named)
    assert await store.query_rollouts() == []


async def test_times_of_the_far_future_stop_nobody(http: httpx.AsyncClient) -> None:
    assert (await http.post("/workers/w1", json={"lease_seconds": 1e300})).status_code == 200
    config = {"timeout_seconds": 1e300, "unresponsive_seconds": 1e300}
    made = (await http.post("/rollouts", json={"input": 1, "config": config, "worker_id": "w1"})).json()
    beat = await http.post(f"/rollouts/{made['rollout_id']}/attempts/latest", json={"last_heartbeat_time": 1e300})
    assert beat.status_code == 200
    for timeout in (1e300, -1e300):
        waiting = http.post("/queues/rollouts/dequeue", json={"timeout": timeout}, timeout=30)
        claimed, made = await asyncio.gather(
            waiting, http.post("/queues/rollouts/enqueue", json={"rollouts": [{"input": 1}]})
        )
        assert (claimed.status_code, made.status_code) == (200, 201)
    assert (await http.get("/health")).status_code == 200


async def test_a_body_of_another_type_is_refused(http: httpx.AsyncClient) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", ""):
        reply = await http.post("/rollouts", content=b'{"input": 1}', headers={"content-type": kind})
        refusal(reply, 415, "RequestError", "application/json")
    reply = await http.post("/rollouts", content=b"x", headers={**JSON, "content-encoding": "br"})
    refusal(reply, 415, "RequestError", "br")


async def test_a_compressed_body_is_read_and_a_bomb_is_not(
    hub: StoreHub, store: Store, claimed: AttemptedRollout
) -> None:
    packed = {**JSON, "content-encoding": "gzip"}
    span = orjson.dumps(body_of_span(claimed, attributes={"text": "a" * 10_000}))
    url = hub.serve(store, max_body_bytes=1_000_000) + BASE
    async with httpx.AsyncClient(base_url=url, verify=False) as http:
        assert (await http.post("/spans", content=gzip.compress(span), headers=packed)).status_code == 201
        bomb = gzip.compress(b'{"name": "' + b"a" * 20_000_000 + b'"}')
        assert len(bomb) < 100_000
        refusal(await http.post("/spans", content=bomb, headers=packed), 413, "RequestError", "1000000")
        for broken in (gzip.compress(span)[:-9], gzip.compress(span) + b"more", b"no gzip"):
            refusal(await http.post("/spans", content=broken, headers=packed), 400, "RequestError", "gzip")
        large = orjson.dumps(body_of_span(claimed, attributes={"text": "a" * 1_000_000}))
        refusal(await http.post("/spans", content=large, headers=JSON), 413, "RequestError", "1000000")

        async def unannounced() -> AsyncIterator[bytes]:
            for start in range(0, len(large), 100_000):
                yield large[start : start + 100_000]

        refusal(await http.post("/spans", content=unannounced(), headers=JSON), 413, "RequestError", "1000000")
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    first = f"POST {address.path}/spans HTTP/1.1"
    head = first, "host: localhost", "expect: 100-continue", "content-length: 1000000000"
    writer.write("\r\n".join([*head, "", ""]).encode())
    status = await asyncio.wait_for(reader.readline(), 10)  # before any of it is sent
    writer.close()
    assert b" 413 " in status
    assert len(await store.query_spans(claimed.rollout_id)) == 1


@pytest.mark.parametrize("asked", [{}, {"timeout": None}, {"timeout": 1e9}])
async def test_no_wait_is_endless(
    http: httpx.AsyncClient, claimed: AttemptedRollout, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr("agentlightning.store.http.server.MAX_WAIT_SECONDS", 0.05)
    assert (await http.post("/waits/rollouts", json={"rollout_ids": [claimed.rollout_id], **asked})).json() == []


async def test_of_a_body_that_is_announced_as_far_too_large_nothing_is_read() -> None:
    async def receive() -> Any:
        raise AssertionError("it was read")

    with pytest.raises(RequestError, match="larger than 1000 bytes") as refused:
        await read_body({**JSON, "content-length": "9" * 12}, receive, 1000)
    assert refused.value.status == 413


@pytest.mark.parametrize("depth", [300, 900])
async def test_an_input_that_is_nested_too_deeply_is_refused(http: httpx.AsyncClient, depth: int) -> None:
    body = b'{"input": %b1%b}' % (b"[" * depth, b"]" * depth)
    refusal(await http.post("/rollouts", content=body, headers=JSON), 400, "ConfigError", "Recursion limit")


async def test_an_attribute_of_ten_megabytes_is_kept(
    http: httpx.AsyncClient, store: Store, claimed: AttemptedRollout
) -> None:
    text = "ä" * 5_000_000
    assert (await http.post("/spans", json=body_of_span(claimed, attributes={"text": text}))).status_code == 201
    (kept,) = await store.query_spans(claimed.rollout_id)
    assert kept.attributes["text"] == text


SQL = "'; DROP TABLE rollouts; -- \" %s ? :x $1"


async def test_sql_is_text_everywhere(http: httpx.AsyncClient, store: Store) -> None:
    rollout = {"input": SQL, "metadata": {SQL: SQL}, "worker_id": SQL}
    made = (await http.post("/rollouts", json=rollout)).json()
    assert (made["input"], made["metadata"], made["attempt"]["worker_id"]) == (SQL, {SQL: SQL}, SQL)
    ids = {"rollout_id": made["rollout_id"], "attempt_id": made["attempt"]["attempt_id"]}
    span = {**ids, "name": SQL, "start_time": 1, "span_id": SQL, "attributes": {SQL: SQL}}
    assert (await http.post("/spans", json=span)).json()["span_id"] == SQL
    for name in ("name", "name_contains", "span_id", "after"):
        found = (await http.get("/spans", params={"rollout_id": made["rollout_id"], name: SQL})).json()
        assert found["total"] == (0 if name == "after" else 1) or name == "after"
    assert (await http.get("/rollouts", params={"rollout_id_contains": SQL})).json()["items"] == []
    assert (await http.get("/rollouts", params={"queue_in": SQL})).json()["total"] == 0
    assert (await http.post(f"/rollouts/{made['rollout_id']}/requeue", json={"reason": SQL})).status_code == 200
    (attempt,) = await store.query_attempts(made["rollout_id"])
    assert attempt.metadata["error"]["message"] == SQL


async def test_what_is_not_there_and_what_is_not_allowed_is_said_in_json(http: httpx.AsyncClient) -> None:
    refusal(await http.get("/rollout"), 404, "NotFoundError", "/v1/agl/rollout")
    reply = await http.delete("/statistics")
    refusal(reply, 405, "RequestError", "DELETE")
    assert reply.headers["allow"] == "GET"
    assert (await http.get("/queues/rollouts/dequeue")).headers["allow"] == "POST"


async def test_a_failure_of_the_store_itself_is_said_in_json(
    http: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(store, "query_queues", fail)
    refusal(await http.get("/queues"), 500, "StoreError", "ZeroDivisionError", "log")
    calls = [{"method": "query_queues", "arguments": {}}, {"method": "get_worker", "arguments": {"worker_id": "w"}}]
    failed, found = (await http.post("/calls", json={"calls": calls})).json()["results"]
    assert (failed["error"]["type"], found) == ("StoreError", {"value": None})


async def test_an_illegal_change_is_a_conflict(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    path = f"/rollouts/{claimed.rollout_id}/attempts/latest"
    await http.post(path, json={"status": "succeeded"})
    refusal(await http.post(path, json={"status": "running"}), 409, "ConflictError", "succeeded", "running")


async def test_a_body_cut_in_half_changes_nothing(store: Store, claimed: AttemptedRollout) -> None:
    async with Server(store, secret="s") as server:
        body = orjson.dumps(body_of_span(claimed))
        head = f"POST {BASE}/spans HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        for length in (f"content-length: {len(body)}\r\n\r\n".encode(), b"transfer-encoding: chunked\r\n\r\n"):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            chunk = b"%x\r\n" % len(body) if b"chunked" in length else b""
            writer.write(head.encode() + length + chunk + body[: len(body) // 2])
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            reader.feed_eof()
        assert (
            await store.add_span(Span(claimed.rollout_id, claimed.attempt.attempt_id, "next", 1.0))
        ).sequence_id == 1
    assert [span.name for span in await store.query_spans(claimed.rollout_id)] == ["next"]


# -- once, and only for those who wait -------------------------------------------------------------------------------


async def test_a_key_makes_a_repeated_request_harmless(http: httpx.AsyncClient, claimed: AttemptedRollout) -> None:
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}

    async def next_number(key: str) -> int:
        reply = await http.post("/spans/next", json=ids, headers={"idempotency-key": key})
        return reply.json()["sequence_id"]

    assert await asyncio.gather(*(next_number("k1") for _ in range(5))) == [1] * 5
    assert [await next_number("k2"), await next_number("k1"), await next_number("k2")] == [2, 1, 2]


async def test_a_client_that_went_away_claims_nothing(store: Store) -> None:
    async with Server(store, secret="s") as server:
        for path in ("queues/rollouts/dequeue", "calls"):
            call = {"method": "dequeue_rollout", "arguments": {"timeout": 60}}
            body = orjson.dumps({"calls": [call]} if path == "calls" else {"timeout": 60})
            head = f"POST {BASE}/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            _, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await writer.wait_closed()
            await asyncio.sleep(0.05)
            await store.enqueue_rollout("task")
            attempted = await store.dequeue_rollout(timeout=10)
            assert attempted is not None
            assert attempted.attempt.sequence_id == 1


async def test_calls_of_one_request_are_answered_each_for_itself(http: httpx.AsyncClient) -> None:
    calls = [
        {"method": "enqueue_rollout", "arguments": {"input": 1, "rollout_id": "r1"}},
        {"method": "get_rollout_by_id", "arguments": {"rollout_id": "nope"}},
        {"method": "cancel_rollout", "arguments": {"rollout_id": "nope"}},
        {"method": "enqueue_rollout", "arguments": {"input": 1, "priority": "high"}},
        {"method": "close", "arguments": {}},
    ]
    results = (await http.post("/calls", json={"calls": calls})).json()["results"]
    assert results[0]["value"]["rollout_id"] == "r1"
    assert results[1] == {"value": None}
    assert [result["error"]["type"] for result in results[2:]] == ["NotFoundError", "RequestError", "RequestError"]
    assert '"high"' in results[3]["error"]["message"]
    assert '"close"' in results[4]["error"]["message"]


async def test_health_tells_the_version(http: httpx.AsyncClient, store: Store) -> None:
    told = (await http.get("/health")).json()
    assert (told["status"], told["protocol"]) == ("ok", 1)
    await store.close()
    reply = await http.get("/health")
    refusal(reply, 503, "StoreClosedError")
    assert reply.headers["retry-after"] == "1"


def test_every_method_of_the_contract_has_a_path() -> None:
    contract = set(IMPLEMENTED)
    covered = {operation.method for operation in OPERATIONS}
    through_many = {"enqueue_rollout", "dequeue_rollout", "iter_spans", "close"}
    assert covered == contract - through_many


def test_no_two_operations_share_a_path_and_a_verb() -> None:
    reached = [(operation.verb, operation.path) for operation in OPERATIONS]
    assert len(set(reached)) == len(reached)
