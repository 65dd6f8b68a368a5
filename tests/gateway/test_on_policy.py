"""Training rollouts are sampled as learning needs, whatever the agent asks for; all others as the agent says."""

import json
import logging

import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer

from agentlightning import LLM
from agentlightning import span as names
from agentlightning.assemble import OVERRIDDEN_CALLS, trajectory
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.config import GatewayConfig
from agentlightning.tracing.otlp.codec import encode

WANTED = {"seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {"65": 5}, "temperature": 0.0}
POLICY = LLM(endpoint="http://x", model="scripted", sampling_parameters={"temperature": 0.8})


async def begin(service, secret, mode):
    """Another attempt: `service` calls within it from now on."""
    rollout = await service.store.start_rollout({"question": "6*7"}, mode=mode)
    service.attempted = rollout
    return rollout


async def ask_as_1_0(service, secret, **options):
    """A call within another training attempt, by the URL that 1.0 gave its agents."""
    ids = (await begin(service, secret, "train")).ids
    base = f"{service.server.url}/proxy/rollout/{ids[0]}/attempt/{ids[1]}/mode/train/openai/v1"
    key = attempt_environment(service.server.url, secret, *ids)["AGL_KEY"]
    client = await service.client(base_url=base, api_key=key)
    await client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **options)


async def test_a_group_whose_agent_passes_a_seed_still_explores(serve_tiny, secret):
    service = await serve_tiny()
    answers = []
    for _ in range(4):
        await begin(service, secret, "train")
        reply = await service.ask("What is 12 + 30?", seed=7, max_tokens=8)
        answers.append(reply.choices[0].message.content)
    assert len(set(answers)) == 4
    again = []
    for _ in range(2):
        await begin(service, secret, "val")
        again.append((await service.ask("What is 12 + 30?", seed=7, max_tokens=8)).choices[0].message.content)
    assert again[0] == again[1]


async def test_what_keeps_a_policy_from_learning_is_not_followed_and_said_once(serve, store, secret, caplog):
    await store.add_resources({"llm": POLICY})
    service = await serve(["Hello."] * 3)
    with caplog.at_level(logging.WARNING, "agentlightning.gateway.sampling"):
        for _ in range(2):
            await begin(service, secret, "train")
            await service.ask(**WANTED, extra_body={"top_k": 5, "min_p": 0.1}, stop=["!"], max_tokens=9)
        await begin(service, secret, "train")
        await service.ask(stop=["!"])
    for _, params in service.engine.calls[:2]:
        assert (params.temperature, params.seed, params.top_p, params.top_k) == (0.8, None, 1.0, 0)
        assert (params.stop, params.max_tokens, params.distribution_params) == (("!",), 9, ())
    (said,) = caplog.messages
    for name in ("seed", "top_p", "top_k", "min_p", "presence_penalty", "logit_bias", "temperature"):
        assert name in said
    assert service.gateway.metrics()["overridden"] == 2
    (plain,) = await service.spans()
    assert names.OVERRIDDEN not in plain.attributes


async def test_the_span_and_the_trajectory_name_what_was_not_followed(serve, secret):
    service = await serve(["Hello."])
    attempted = await begin(service, secret, "train")
    await service.ask(seed=7, top_p=0.9)
    spans = await service.spans()
    assert spans[0].attributes[names.OVERRIDDEN] == ["seed", "top_p"]
    found = trajectory(attempted.rollout_id, attempted.attempt.attempt_id, spans)
    assert found.metadata[OVERRIDDEN_CALLS] == 1


async def test_the_temperature_of_a_url_of_1_0_is_said_to_replace_that_of_the_agent(serve, secret):
    service = await serve(["Hello."])
    await ask_as_1_0(service, secret, model="scripted", temperature=0.5)
    ((_, params),) = service.engine.calls
    assert params.temperature == 1.0
    (span,) = await service.spans()
    assert span.attributes[names.OVERRIDDEN] == ["temperature"]


@pytest.mark.parametrize("mode", ["val", "test", None])
async def test_outside_training_the_caller_decides(serve, store, secret, mode):
    await store.add_resources({"llm": LLM(endpoint="http://x", model="scripted")})
    service = await serve(["Hello."])
    await begin(service, secret, mode)
    await service.ask(seed=7, top_p=0.9, temperature=0.0)
    (_, params) = service.engine.calls[0]
    assert (params.seed, params.top_p, params.temperature) == (7, 0.9, 0.0)
    assert service.gateway.metrics()["overridden"] == 0


async def test_the_resource_may_set_what_an_agent_may_not(serve, store, secret):
    resource = LLM(endpoint="http://x", model="scripted", sampling_parameters={"top_p": 0.95, "seed": 3})
    await store.add_resources({"llm": resource})
    service = await serve(["Hello."])
    await begin(service, secret, "train")
    await service.ask(seed=7, top_p=0.5)
    (_, params) = service.engine.calls[0]
    assert (params.seed, params.top_p) == (3, 0.95)


async def test_another_model_of_a_training_rollout_keeps_the_callers_parameters(serve, store, secret):
    await store.add_resources({"llm": LLM(endpoint="http://x", model="the-policy")})
    service = await serve(["Hello."])
    await begin(service, secret, "train")
    await service.ask(seed=7, top_p=0.9)
    (_, params) = service.engine.calls[0]
    assert (params.seed, params.top_p) == (7, 0.9)


@pytest.mark.parametrize(("reports", "seen"), [(False, (0.1, 7)), (True, (1.0, None))])
async def test_of_providers_only_one_that_reports_tokens_is_sampled_by_the_rule(serve, store, secret, reports, seen):
    """The mode of 1.0's URL and the rule are for what learns: a judge gets the temperature it was asked with."""
    async with ScriptedProvider(lambda _: Reply(chat_answer("Good."))) as provider:
        them = {"name": "them", "base_urls": [f"{provider.url}/v1"], "token_ids": reports}
        config = {"providers": [them], "routes": [{"model": "judge", "provider": "them"}]}
        service = await serve([], config=GatewayConfig.model_validate(config))
        await ask_as_1_0(service, secret, model="judge", temperature=0.1, seed=7)
        (span,) = await service.spans()
    assert span.attributes.get(names.OVERRIDDEN) == (["temperature", "seed"] if reports else None)
    (sent,) = provider.seen
    body = json.loads(sent.body)
    assert (body.get("temperature"), body.get("seed")) == seen


async def test_the_tokens_that_top_p_kept_are_recorded_where_a_call_may_be_trained(serve_tiny, store, secret):
    service = await serve_tiny()
    forced = {"llm": LLM(endpoint="http://x", model="scripted", sampling_parameters={"top_p": 0.5, "temperature": 0.7})}
    await store.add_resources(forced)
    for mode in ("train", None, "val"):
        attempted = await begin(service, secret, mode)
        await service.ask("What is 12 + 30?", max_tokens=6)
        (span,) = await service.spans()
        assert (names.KEPT_SETS in span.attributes) == (mode != "val")
        assert names.KEPT_SETS not in str(encode([span]))
        (call,) = trajectory(attempted.rollout_id, attempted.attempt.attempt_id, [span]).transitions
        assert (call.kept_sets is not None) == (mode != "val")
        for token, kept in zip(call.response_token_ids, call.kept_sets.lists() if call.kept_sets else [], strict=False):
            assert token in kept


async def test_nothing_is_recorded_of_calls_that_sample_from_every_token(serve_tiny, secret):
    service = await serve_tiny()
    await begin(service, secret, "train")
    await service.ask("What is 12 + 30?", max_tokens=6, top_p=0.5)
    (span,) = await service.spans()
    assert names.KEPT_SETS not in span.attributes
