"""OpenAI's completions: raw prompts in, text out, in the tokens that were drawn."""

import json

import openai
import pytest

from agentlightning import span as names
from agentlightning.errors import PolicyError
from agentlightning.gateway.dialects.chat import read_completion as read_request
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError
from agentlightning.testing import ByteChatFormat

CHAT = ByteChatFormat()


def read(**fields):
    return read_request({"model": "m", "prompt": "hi"} | fields, ResponseLookup())


REFUSED = {
    "prompt": [],
    "echo": True,
    "suffix": "end",
    "best_of": 3,
    "logprobs": 21,
    "logit_bias": {"5": 101},
    "presence_penalty": 2.5,
    "temperature": -1,
    "n": 0,
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_would_change_the_sample_and_cannot_be_honoured_is_refused_by_name(field):
    with pytest.raises(ApiError, match=field) as refused:
        read(**{field: REFUSED[field]})
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize("prompt", [None, "", {}, [[]], [""], [1.5], [-1], ["a", 1], [True]])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ApiError, match="prompt"):
        read(prompt=prompt)


def test_every_shape_of_prompt_is_read():
    assert [read(prompt=given).prompts for given in ("a", ["a", "b"], [1, 2], [[1], [2]])] == [
        ("a",),
        ("a", "b"),
        ([1, 2],),
        ([1], [2]),
    ]
    assert read().params.max_tokens == 16
    assert read(suffix="", echo=False, zero=1).ignored_fields == ("zero",)


async def create(service, prompt, **options):
    client = await service.client()
    return await client.completions.create(model="scripted", prompt=prompt, **{"max_tokens": 100} | options)


async def test_a_prompt_is_given_to_the_engine_as_it_stands(serve):
    service = await serve(["Hello."])
    reply = await create(service, "Say: ", temperature=0.5, stop=["##"], seed=1)
    assert (reply.choices[0].text, reply.choices[0].finish_reason, reply.id[:5]) == ("Hello.", "stop", "cmpl-")
    (span,) = await service.spans()
    kept, ((prompt, params),) = span.attributes, service.engine.calls
    assert prompt == kept[names.PROMPT_TOKEN_IDS] == CHAT.encode("Say: ")
    assert CHAT.decode(kept[names.RESPONSE_TOKEN_IDS]) == "Hello.<|im_end|>"
    assert (params.temperature, params.stop, params.seed) == (0.5, ("##",), 1)
    assert (kept[names.OPERATION_NAME], span.name) == ("text_completion", "text_completion scripted")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 7)


async def test_several_prompts_in_tokens_are_each_answered_n_times(serve):
    service = await serve(lambda messages: "Hello.", engine={"context_length": 99})
    reply = await create(service, [[72, 105], [72]], n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage.prompt_tokens == 3
    spans = [span.attributes for span in await service.spans()]
    assert [kept[names.PROMPT_TOKEN_IDS] for kept in spans] == [[72, 105]] * 2 + [[72]] * 2
    assert json.loads(spans[0][names.INPUT_MESSAGES])[0]["parts"] == [{"type": "text", "content": "Hi"}]


async def test_text_streams_as_it_is_sampled_and_ends_with_reason_and_usage(serve):
    service = await serve(["Hé 🎉!", "Hé 🎉!"], engine={"delay": 0.001})
    chunks = [chunk async for chunk in await create(service, ["a", "b"], stream=True)]
    said = {0: "", 1: ""}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        said[choice.index] += choice.text
    assert said == {0: "Hé 🎉!", 1: "Hé 🎉!"}
    assert chunks[-1].usage.prompt_tokens == 2
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.choices for chunk in chunks)


async def test_log_probabilities_of_sampled_tokens_have_openais_format(serve):
    service = await serve(["Hi"])
    logprobs = (await create(service, "Say: ", logprobs=0)).choices[0].logprobs
    (span,) = await service.spans()
    assert logprobs.tokens == ["H", "i", "<|im_end|>"]
    assert logprobs.token_logprobs == pytest.approx(span.attributes[names.LOGPROBS])
    assert logprobs.text_offset == [0, 1, 2]


async def test_a_prompt_that_continues_after_a_stop_string_has_every_token(serve):
    service = await serve(["Think.\nObservation: made up", "Done."])
    first = (await create(service, "Go.\n", stop=["\nObservation:"])).choices[0].text
    assert first == "Think."
    await create(service, f"Go.\n{first}\nObservation: 42\n")
    one, two = await service.spans()
    known = one.attributes[names.PROMPT_TOKEN_IDS] + one.attributes[names.RESPONSE_TOKEN_IDS]
    assert two.attributes[names.PROMPT_TOKEN_IDS] == known + CHAT.encode(" 42\n")
    assert two.attributes[names.CONTINUES] == one.span_id


async def test_refusals_and_failures_are_the_exceptions_the_sdk_has_for_them(serve):
    service = await serve([PolicyError("the device is lost")])
    with pytest.raises(openai.InternalServerError, match="the device is lost"):
        await create(service, "hi")
    with pytest.raises(openai.BadRequestError, match="echo") as refused:
        await create(service, "hi", echo=True)
    assert refused.value.param == "echo"
