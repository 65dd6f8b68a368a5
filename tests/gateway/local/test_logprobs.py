"""Log-probabilities and the likeliest tokens in every OpenAI dialect, whole and streamed; what reshapes a draw."""

import openai
import pytest
from tests.gateway.conftest import SECRET

from agentlightning import span as names
from agentlightning.engine.base import DISTRIBUTION_PARAMS
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.gateway.config import GatewayConfig

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


# -- in spans ----------------------------------------------------------------------------------------------------------


def likeliest(span):
    """The likeliest tokens of a span as the scripted engine numbers them; None where there are none."""
    text = span.attributes.get(names.TOP_LOGPROBS)
    return None if text is None else likeliest_from_text(text, len(span.attributes[names.RESPONSE_TOKEN_IDS]))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_asks_for_the_likeliest_tokens_is_recorded_with_them(serve, stream):
    service = await serve(["Hi", "Hi"])
    options = {"logprobs": True, "top_logprobs": 2}
    await (service.stream(**options) if stream else service.ask(**options))
    await service.ask(logprobs=True)
    asked, plain = await service.spans()
    assert likeliest(asked) == [((t, v), (65, v - 1)) for t, v in ((72, -0.375), (105, -0.125), (258, -0.875))]
    assert likeliest(plain) is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "recorded"), [(None, 3), (0, 3), (1, 3), (5, 5)])
async def test_record_top_logprobs_records_so_many_of_every_call_and_tells_the_caller_what_it_asked_for(
    serve, stream, asked, recorded
):
    service = await serve(["Hi"], config=GatewayConfig(record_top_logprobs=3))
    options = {} if asked is None else {"logprobs": True, "top_logprobs": asked}
    if stream:
        choices = [choice for chunk in await service.stream(**options) for choice in chunk.choices]
    else:
        choices = (await service.ask(**options)).choices
    shown = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [len(token.top_logprobs) for token in shown] == ([] if asked is None else [asked] * 3)
    (span,) = await service.spans()
    assert [len(row) for row in likeliest(span)] == [recorded] * 3


async def test_a_call_of_no_rollout_does_not_cost_the_likeliest_tokens(serve):
    service = await serve(["Hi"], config=GatewayConfig(record_top_logprobs=3), allow_unattributed=True)
    client = await service.client(base_url=f"{service.server.url}/v1", api_key=SECRET)
    await client.chat.completions.create(model="scripted", messages=ASKED)
    assert service.engine.calls[-1][1].top_logprobs == 0
    assert await service.spans() == []
