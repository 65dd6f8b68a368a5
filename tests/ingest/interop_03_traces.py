"""Run by test_otlp.py with the Python of an environment that has agentlightning 0.3: its tracer, unchanged, sends what
an agent emits to our server by OTLP. Prints what it then reads back as JSON."""

import asyncio
import json
import sys

from agentlightning.emitter import emit_message, emit_reward, find_final_reward
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.tracer.otel import OtelTracer


async def main(url):
    store = LightningStoreClient(url, retry_delays=())
    started = await store.start_rollout({"question": "6 x 7"})
    ids = started.rollout_id, started.attempt.attempt_id
    tracer = OtelTracer()
    tracer.init()
    tracer.init_worker(0)
    async with tracer.trace_context("agent", store=store, rollout_id=ids[0], attempt_id=ids[1]):
        emit_message("thinking")
        emit_reward(0.25)
        emit_reward({"correct": 1.0, "style": 0.5}, primary_key="correct")
    spans = await store.query_spans(*ids)
    seen = {"rollout_id": ids[0], "reward": find_final_reward(spans), "spans": len(spans)}
    tracer.teardown_worker(0)
    await store.close()
    print(json.dumps(seen))  # noqa: T201


asyncio.run(main(sys.argv[1]))
