"""Log-probabilities and the likeliest tokens in every OpenAI dialect, whole and streamed; what reshapes a draw."""

import openai
import pytest

from agentlightning import span as names
from agentlightning.engine.base import DISTRIBUTION_PARAMS

ASKED = [{"role": "user", "content": "hi"}]
DELTA = "response.output_text.delta"
MESSAGE = "message.output_text.logprobs"


def seen(tokens):
    """(token, log-probability, the likeliest ones) of a list of tokens as chat completions and responses show them."""
    return [(token.token, token.logprob, [(top.token, top.logprob) for top in token.top_logprobs]) for token in tokens]


def expected(top):
    """What the scripted engine gives for the answer "Hi"."""
    values = [(text, -(1 + token % 7) / 8) for text, token in (("H", 72), ("i", 105), ("<|im_end|>", 258))]
    others = ["A", "B"]
    likeliest = [
        [(text, value), *((others[step - 1], value - step) for step in range(1, top))] for text, value in values
    ]
    return [(text, value, top_of[:top]) for (text, value), top_of in zip(values, likeliest, strict=True)]


def check(tokens, top):
    assert seen(tokens) == expected(top)


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_chat_completions_name_the_likeliest_tokens(serve, top):
    service = await serve(["Hi", "Hi"])
    options = {"logprobs": True, "top_logprobs": top}
    check((await service.ask(**options)).choices[0].logprobs.content, top)
    client = await service.client()
    async with client.chat.completions.stream(model="scripted", messages=ASKED, **options) as events:
        check((await events.get_final_completion()).choices[0].logprobs.content, top)


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_responses_name_the_likeliest_tokens(serve, top):
    service = await serve(["Hi", "Hi", "Hi"])
    client = await service.client()
    options = {"model": "scripted", "input": "hi", "include": [MESSAGE], "top_logprobs": top}
    check((await client.responses.create(**options)).output[0].content[0].logprobs, top)
    deltas = [event async for event in await client.responses.create(**options, stream=True) if event.type == DELTA]
    assert [(event.delta, len(event.logprobs)) for event in deltas] == [("H", 1), ("i", 1)]
    async with client.responses.stream(**options) as events:
        check((await events.get_final_response()).output[0].content[0].logprobs, top)


@pytest.mark.parametrize("top", [0, 1, 3])
async def test_completions_name_the_likeliest_tokens_by_their_text(serve, top):
    service = await serve(["Hi", "Hi"])
    create = (await service.client()).completions.create
    options = {"model": "scripted", "prompt": "Say: ", "logprobs": top}
    chunks = [chunk async for chunk in await create(**options, stream=True)]
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    whole = (await create(**options)).choices[0].logprobs
    tops = [dict(likeliest) for _, _, likeliest in expected(top) if likeliest]
    for shown in ([whole], parts):
        assert [token for part in shown for token in part.tokens] == ["H", "i", "<|im_end|>"]
        assert [offset for part in shown for offset in part.text_offset] == [0, 1, 2]
        assert [likeliest for part in shown for likeliest in part.top_logprobs or ()] == tops
    assert [len(part.tokens) for part in parts] == [1, 1, 1]


async def test_the_likeliest_tokens_need_log_probabilities_and_are_twenty_at_most(serve):
    service = await serve([])
    for options in ({"top_logprobs": 2}, {"top_logprobs": 21, "logprobs": True}):
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await service.ask(**options)


RESHAPED = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -1.0, "logit_bias": {"5": 3}}


@pytest.mark.parametrize("name", RESHAPED)
async def test_what_reshapes_a_draw_is_refused_by_name_where_the_engine_would_ignore_it(serve, name):
    service = await serve([])
    with pytest.raises(openai.BadRequestError, match=f"{name} cannot be honoured by what serves scripted"):
        await service.ask(extra_body={name: RESHAPED[name]})
    assert not service.engine.calls


async def test_what_reshapes_a_draw_reaches_an_engine_that_honours_it_and_the_span_says_so(serve):
    service = await serve(["Hi", "Hi"])
    service.engine.supported_params = frozenset(DISTRIBUTION_PARAMS)
    await service.ask(extra_body=RESHAPED)
    await service.ask(presence_penalty=0, frequency_penalty=0, logit_bias={}, extra_body={"min_p": 0})
    params = service.engine.calls[0][1]
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, 0.5, -1.0)
    assert params.logit_bias == ((5, 3.0),)
    reshaped, plain = [span.attributes for span in await service.spans()]
    assert reshaped[names.RESHAPED] == list(RESHAPED)
    assert (reshaped[names.REQUEST_PRESENCE_PENALTY], reshaped[names.REQUEST_FREQUENCY_PENALTY]) == (0.5, -1.0)
    assert names.RESHAPED not in plain
