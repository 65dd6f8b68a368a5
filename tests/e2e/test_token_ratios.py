"""`run.token_ratios`: what a run writes of each token is what its own checkpoint says of it."""

import asyncio
import json

import pytest

from agentlightning import span as names
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.store import LightningStore
from agentlightning.trajectory import Node, TokenTree


async def calls_of(directory):
    store = LightningStore(directory / "store.db")
    try:
        rollouts = await store.query_rollouts(rollout_id_contains="-train-")
        spans = [span for each in rollouts for span in await store.query_spans(each.rollout_id)]
    finally:
        await store.close()
    return {(s.rollout_id, s.span_id): s.attributes for s in spans if names.RESPONSE_TOKEN_IDS in s.attributes}


async def scored(checkpoint, attributes):
    """The log-probabilities of a recorded answer under the weights of a checkpoint."""
    tokens = tuple(attributes[names.RESPONSE_TOKEN_IDS])
    tree = TokenTree(
        (
            Node(-1, tuple(attributes[names.PROMPT_TOKEN_IDS])),
            Node(0, tokens, True, tuple(attributes[names.LOGPROBS]), "r", "c", temperature=1.0),
        )
    )
    policy = LocalPolicy.open(LocalPolicyConfig(model=str(checkpoint)))
    try:
        columns = await policy.score([tree], {"logprobs"})
    finally:
        await policy.close()
    return columns["logprobs"][0][1].tolist()


@pytest.mark.slow
def test_the_ratios_of_a_run_are_those_of_the_weights_that_its_update_made(job):
    done = job.run(job.command("--run", "run", "algorithm.steps=1", "run.token_ratios=true"))
    assert done.returncode == 0, done.stderr
    run = job.directory / "run"
    lines = [json.loads(line) for line in (run / "ratios" / "step-000001.jsonl").read_text().splitlines()]
    found = {(line["rollout"], line["call"]): line["log_ratios"] for line in lines}
    calls = asyncio.run(calls_of(run))
    assert found
    assert set(found) <= set(calls)
    assert any(abs(each) > 1e-3 for ratios in found.values() for each in ratios), "an update moves the policy"
    key, ratios = max(found.items(), key=lambda each: max(map(abs, each[1])))
    after = asyncio.run(scored(run / "checkpoints" / "step-000001", calls[key]))
    expected = [new - old for new, old in zip(after, calls[key][names.LOGPROBS], strict=True)]
    assert ratios == pytest.approx(expected, abs=2e-3)
    (metrics,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics["ratio_seconds"] > 0


@pytest.mark.slow
def test_a_run_that_is_not_asked_writes_none(job):
    done = job.run(job.command("--run", "run", "algorithm.steps=1"))
    assert done.returncode == 0, done.stderr
    assert not (job.directory / "run" / "ratios").exists()
