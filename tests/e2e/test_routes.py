"""`agl train` with agents that also call other people's models: those are recorded, paid for, and not learned from."""

import asyncio
import json

import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer

from agentlightning import span as names
from agentlightning.gateway.upstream.limits import spend_of_spans
from agentlightning.store import LightningStore

AGENT = """
from openai import OpenAI

CLIENT = OpenAI()


def ask(model: str, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return CLIENT.chat.completions.create(model=model, messages=messages, max_tokens=6).choices[0].message.content or ""


def say(word: str) -> str:
    said = ask("ASKED", f"say {word}")
    return said + ask("gpt-judge", f"judge {said}")
"""


def route(provider, *more):
    them = f'{{name="them", base_urls=["{provider.url}/v1"], price={{input=100, output=1000}}}}'
    return [f"gateway.providers=[{them}]", 'gateway.routes=[{model="gpt-*", provider="them"}]', *more]


async def spans_of(directory):
    store = LightningStore(directory / "store.db")
    rollouts = await store.query_rollouts()
    spans = [span for each in rollouts for span in await store.query_spans(each.rollout_id)]
    await store.close()
    return [span for span in spans if span.attributes.get(names.OPERATION_NAME)]


async def train(job, asked, steps, *settings):
    (job.directory / "agent.py").write_text(AGENT.replace("ASKED", asked))
    command = job.command("--run", "run", "--json", f"algorithm.steps={steps}", *settings)
    return await asyncio.to_thread(job.run, command)


@pytest.mark.slow
async def test_a_judge_is_asked_and_paid_and_only_the_policy_learns(job):
    async with ScriptedProvider(lambda seen: Reply(chat_answer("Good.", usage=(20, 5)))) as provider:
        done = await train(job, "policy", 2, *route(provider))
    assert done.returncode == 0, done.stderr
    spans = await spans_of(job.directory / "run")
    judged = [span for span in spans if span.attributes.get(names.PROVIDER_NAME) == "them"]
    assert (len(judged), len(provider.seen)) == (len(spans) / 2, len(judged))
    assert {span.attributes[names.TOKENS] for span in judged} == {"none"}
    assert spend_of_spans(judged).dollars == pytest.approx(len(judged) * 0.007)
    cost = json.loads(done.stdout)["cost"]
    assert (cost["provider_calls"], cost["provider_calls_without_price"]) == (len(judged), 0)
    assert cost["provider_tokens"] == len(judged) * 25
    assert cost["provider_dollars"] == pytest.approx(len(judged) * 0.007), "those of evaluations included"
    figures = [json.loads(line) for line in (job.directory / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["calls_per_rollout"] for each in figures if "calls_per_rollout" in each] == [1, 1]


@pytest.mark.slow
async def test_a_run_whose_agent_never_asks_the_policy_says_what_to_do(job):
    async with ScriptedProvider(lambda seen: Reply(chat_answer("Good."))) as provider:
        done = await train(job, "gpt-5", 1, *route(provider))
    assert done.returncode != 0
    assert "none of the 32 model calls of these rollouts can be learned from" in done.stderr


@pytest.mark.slow
async def test_a_budget_outlives_the_run_that_spent_it(job):
    async with ScriptedProvider(lambda seen: Reply(chat_answer("Good.", usage=(20, 5)))) as provider:
        budget = "gateway.budget.dollars=0.05"
        await train(job, "policy", 3, *route(provider, budget, "runner.max_failed_share=1.0"))
        asked = len(provider.seen)
        await asyncio.to_thread(job.run, [*job.command()[:2], "--resume", "run"])
    assert 0 < asked * 0.007 <= 0.05
    assert len(provider.seen) == asked
    refused = [span.attributes.get(names.ERROR_TYPE) for span in await spans_of(job.directory / "run")]
    assert "budget_exceeded" in refused
