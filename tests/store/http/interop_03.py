"""Run by test_interop.py with the Python of an environment that has agentlightning 0.3: its client, unchanged, against
our server. Prints what it saw as JSON."""

import asyncio
import json
import sys
import time

from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest, PromptTemplate, RolloutConfig, Span


def a_span(claimed, sequence_id, name="work"):
    return Span.from_attributes(
        attributes={"step": sequence_id, "tags": ["a", "b"]},
        rollout_id=claimed.rollout_id,
        attempt_id=claimed.attempt.attempt_id,
        sequence_id=sequence_id,
        name=name,
        start_time=time.time(),
        end_time=time.time() + 1,
    )


async def main(url):
    store = LightningStoreClient(url, retry_delays=())
    seen = {}
    resources = await store.add_resources({"prompt": PromptTemplate(template="Say {x}", engine="f-string")})
    latest = await store.get_latest_resources()
    seen["resources"] = [latest.resources_id == resources.resources_id, latest.resources["prompt"].template]
    by_id = await store.get_resources_by_id(resources.resources_id)
    seen["versions"] = [by_id.version, (await store.query_resources()).total]

    first = await store.enqueue_rollout({"question": "6 x 7"}, mode="train", resources_id=resources.resources_id)
    config = RolloutConfig(timeout_seconds=60, max_attempts=2, retry_condition=["failed"])
    many = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, config=config) for n in range(3)])
    seen["enqueued"] = [first.status, first.mode, len(many), many[0].config.max_attempts]

    worker = await store.update_worker("w1", {"cpu": 0.5})
    claimed = await store.dequeue_rollout(worker_id="w1")
    seen["claimed"] = [claimed.rollout_id == first.rollout_id, claimed.input, claimed.attempt.worker_id, worker.status]
    seen["worker"] = (await store.get_worker_by_id("w1")).model_dump()
    seen["nobody"] = await store.get_worker_by_id("nobody")
    seen["workers"] = (await store.query_workers()).total

    ids = claimed.rollout_id, claimed.attempt.attempt_id
    number = await store.get_next_span_sequence_id(*ids)
    kept = await store.add_span(a_span(claimed, number))
    await store.add_many_spans(
        [a_span(claimed, await store.get_next_span_sequence_id(*ids), "other") for _ in range(2)]
    )
    spans = await store.query_spans(*ids)
    seen["spans"] = [kept.sequence_id, [span.sequence_id for span in spans], spans.total]
    seen["span"] = [spans[0].name, spans[0].attributes, spans[0].status.status_code, spans[0].start_time is not None]
    seen["named"] = [span.name for span in await store.query_spans(*ids, name="other", limit=1)]
    beat = await store.update_attempt(*ids, last_heartbeat_time=123.0)
    seen["heartbeat"] = [beat.last_heartbeat_time, beat.status]

    seen["waiting"] = len(await store.wait_for_rollouts(rollout_ids=[first.rollout_id], timeout=0.05))
    ended = await store.update_attempt(*ids, status="succeeded")
    done = await store.wait_for_rollouts(rollout_ids=[first.rollout_id], timeout=0.1)
    seen["ended"] = [ended.status, done[0].status, done[0].end_time is not None]

    rest = await store.dequeue_many_rollouts(limit=5, worker_id="w1")
    seen["rest"] = [rollout.input for rollout in rest]
    failed = rest[0]
    await store.update_attempt(failed.rollout_id, "latest", status="failed")
    seen["retried"] = (await store.get_rollout_by_id(failed.rollout_id)).status
    again = await store.start_attempt(failed.rollout_id, worker_id="w1")
    seen["again"] = again.attempt.sequence_id
    attempts = await store.query_attempts(failed.rollout_id)
    seen["attempts"] = [[attempt.status for attempt in attempts], attempts.total]
    seen["latest"] = (await store.get_latest_attempt(failed.rollout_id)).sequence_id
    changed = await store.update_rollout(failed.rollout_id, metadata={"a": 1}, status="cancelled")
    seen["changed"] = [changed.status, changed.metadata]

    started = await store.start_rollout({"own": True}, worker_id="w2")
    seen["started"] = [started.status, started.attempt.sequence_id]
    found = await store.query_rollouts(status_in=["succeeded"])
    seen["found"] = [rollout.rollout_id == first.rollout_id for rollout in found]
    page = await store.query_rollouts(limit=2, offset=1, sort_by="start_time")
    seen["page"] = [len(page), page.limit, page.offset, page.total]
    newest = await store.query_rollouts(limit=1, sort_by="start_time", sort_order="desc")
    seen["newest"] = newest[0].rollout_id == started.rollout_id
    seen["unknown"] = await store.get_rollout_by_id("nope")
    seen["statistics"] = (await store.statistics())["total_rollouts"]
    await store.close()
    sys.stdout.write(json.dumps(seen))


asyncio.run(main(sys.argv[1]))
