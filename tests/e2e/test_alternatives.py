"""`gateway.record_top_logprobs`: the spans of a run keep the likeliest tokens at the place of each sampled one."""

import asyncio

import pytest

from agentlightning import span as names
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.store import LightningStore


async def model_calls(run):
    store = LightningStore(run / "store.db")
    try:
        ids = [each.rollout_id for each in await store.query_rollouts(status_in=["succeeded"])]
        return [
            span.attributes
            async for _, spans in store.iter_spans(ids)
            for span in spans
            if names.RESPONSE_TOKEN_IDS in span.attributes
        ]
    finally:
        await store.close()


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "expected"), [(["gateway.record_top_logprobs=3"], 3), ([], 0)])
def test_a_run_records_as_many_likeliest_tokens_as_it_is_asked_to(job, settings, expected):
    done = job.run(job.command("--run", "run", "algorithm.steps=1", *settings))
    assert done.returncode == 0, done.stderr
    calls = asyncio.run(model_calls(job.directory / "run"))
    assert calls
    assert all((names.TOP_LOGPROBS in call) == bool(expected) for call in calls)
    for call in calls if expected else ():
        tokens, logprobs = call[names.RESPONSE_TOKEN_IDS], call[names.LOGPROBS]
        rows = likeliest_from_text(call[names.TOP_LOGPROBS], len(tokens))
        assert {len(row) for row in rows} == {expected}
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            assert dict(row).get(token, logprob) == pytest.approx(logprob, abs=0.02)
