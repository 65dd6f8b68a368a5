"""What `/metrics` says, read by Prometheus' own parser."""

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentlightning.errors import NotFoundError
from agentlightning.observability.metrics import Metrics
from agentlightning.server.app import Server
from agentlightning.span import Span
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.instrumented import instrument


@pytest.fixture
async def parts():
    bare = InMemoryLightningStore()
    metrics = Metrics(bare)
    yield bare, instrument(bare, [metrics]), metrics
    await bare.close()


def read(text: bytes) -> dict[tuple, float]:
    """(name, sorted labels) -> value."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_rollouts_claims_spans_and_calls_are_counted(parts):
    _, store, metrics = parts
    await store.enqueue_rollout("one", mode="val")
    await store.enqueue_rollout("two", mode="val")
    claimed = await store.dequeue_rollout("w")
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    await store.add_many_spans([Span(*ids, "s", 1.0, 2.0), Span(*ids, "t", 1.0, 2.0)])
    with pytest.raises(NotFoundError):
        await store.cancel_rollout("ro-nobody")
    seen = read(await metrics.render())
    assert seen["agentlightning_up",] == 1
    assert seen["agentlightning_rollouts", ("status", "queuing")] == 1
    assert seen["agentlightning_claims_total", ("queue", "val")] == 1
    assert seen["agentlightning_spans_received_total",] == 2
    assert seen["agentlightning_store_call_seconds_count", ("method", "enqueue_rollout")] == 2
    assert seen["agentlightning_store_call_seconds_bucket", ("le", "+Inf"), ("method", "enqueue_rollout")] == 2
    assert seen["agentlightning_spans_per_call_bucket", ("le", "1")] == 0
    assert seen["agentlightning_spans_per_call_bucket", ("le", "2")] == 1
    assert seen["agentlightning_store_errors_total", ("error", "NotFoundError"), ("method", "cancel_rollout")] == 1
    assert seen["agentlightning_queue_waiting", ("queue", "val")] == 1
    assert seen["agentlightning_queue_open", ("queue", "val")] == 1
    assert seen["agentlightning_workers", ("status", "busy")] == 1
    assert seen["process_resident_memory_bytes",] > 1e6
    assert ("agentlightning_store_call_seconds_count", ("method", "dequeue_rollout")) not in seen


async def test_workers_that_signed_off_are_not_lost(parts):
    _, store, metrics = parts
    await store.update_worker("w", {"stopped": True}, lease_seconds=1000)
    assert read(await metrics.render())["agentlightning_workers", ("status", "stopped")] == 1


async def test_the_limit_of_a_queue_is_shown_where_there_is_one(parts):
    _, store, metrics = parts
    await store.update_queue("train", 5)
    await store.enqueue_rollout("x", mode="val")
    seen = read(await metrics.render())
    assert seen["agentlightning_queue_limit", ("queue", "train")] == 5
    assert ("agentlightning_queue_limit", ("queue", "val")) not in seen


async def test_transactions_are_measured_by_the_store_itself(parts):
    bare, store, metrics = parts
    bare.observe = metrics.took
    await store.enqueue_rollout("x")
    seen = read(await metrics.render())
    assert seen["agentlightning_store_calls_together_bucket", ("le", "1")] == 1
    assert seen["agentlightning_store_transaction_seconds_sum",] > 0


async def test_a_store_that_does_not_answer_is_down_and_the_rest_is_still_said(parts):
    bare, _, metrics = parts
    await bare.close()
    seen = read(await metrics.render())
    assert seen["agentlightning_up",] == 0
    assert ("agentlightning_spans_received_total",) in seen


async def test_a_store_of_ones_own_may_leave_counts_out(parts):
    bare, _, metrics = parts

    async def counted():
        return {"rollouts.running": 2, "attempts": 3}

    bare.statistics = counted
    seen = read(await metrics.render())
    assert (seen["agentlightning_up",], seen["agentlightning_attempts",]) == (1, 3)
    assert ("agentlightning_store_bytes",) not in seen


async def test_requests_are_counted_by_route_and_status_and_ids_make_no_series(parts):
    _, store, metrics = parts
    async with Server(store, secret="s", metrics=metrics) as server, httpx.AsyncClient(base_url=server.url) as client:
        for attempt in ("at-1", "at-2"):
            await client.post(f"/rollout/ro-1/attempt/{attempt}/events", json={})
        await client.get("/nowhere/in/particular")
        await client.get("/nowhere/else")
        reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    seen = read(reply.content)
    requests = {key: value for key, value in seen.items() if key[0] == "agentlightning_http_requests_total"}
    route = ("route", "/rollout/{rollout_id}/attempt/{attempt_id}/events")
    assert requests["agentlightning_http_requests_total", ("method", "POST"), route, ("status", "401")] == 2
    name, other = "agentlightning_http_requests_total", ("route", "other")
    assert requests[name, ("method", "GET"), other, ("status", "404")] == 2
    assert seen["agentlightning_http_request_seconds_count", route] == 2
    assert seen["agentlightning_http_requests_under_way",] == 1, "this one"


async def test_metrics_are_for_those_who_present_the_token(parts):
    _, store, metrics = parts
    async with (
        Server(store, secret="s", token="open sesame", metrics=metrics) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        refused = await client.get("/metrics", headers={"authorization": "Bearer guess"})
        shown = await client.get("/metrics", headers={"authorization": "Bearer open sesame"})
        beside = await client.get("/metrics/", headers={"host": "evil.example"})
    assert (beside.status_code, beside.headers.get("location")) == (404, None)
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Bearer realm="agentlightning"')
    assert "check AGL_TOKEN" in refused.text
    assert shown.status_code == 200


async def test_every_metric_is_explained_where_it_is_read_and_the_documentation_names_only_those_that_there_are(parts):
    _, store, metrics = parts
    await store.update_queue("train", 5)
    page = (Path(__file__).parents[2] / "docs" / "guides" / "operations" / "serving.md").read_text()
    families = list(text_string_to_metric_families((await metrics.render()).decode()))
    assert not [family.name for family in families if not family.documentation]
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert set(re.findall(r"`(agentlightning_\w+[a-z])`", page)) <= names
