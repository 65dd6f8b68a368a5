"""Callers that learn by themselves get the tokens, as vLLM's clients are used to; and an engine is free at once when
its caller hangs up."""

import asyncio

import pytest
from tests.support.waiting import until

from agentlightning import span as names

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_chat_completions_hold_the_tokens_of_the_span(serve, streams, logprobs):
    service = await serve(["Hé."] * 3, engine={"delay": 0.001})
    options = {"logprobs": logprobs, "extra_body": {"return_token_ids": True}}
    if streams:
        chunks = await service.stream(**options)
        prompt = chunks[0].prompt_token_ids
        drawn = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    else:
        reply = await service.ask(HI, **options)
        prompt, drawn = reply.prompt_token_ids, reply.choices[0].token_ids
    (span,) = await service.spans()
    assert prompt == span.attributes[names.PROMPT_TOKEN_IDS]
    assert drawn == span.attributes[names.RESPONSE_TOKEN_IDS]
    plain = await service.ask(HI)
    assert not hasattr(plain, "prompt_token_ids")
    assert not hasattr(plain.choices[0], "token_ids")


@pytest.mark.parametrize("streams", [False, True])
async def test_completions_hold_them_for_each_prompt(serve, streams):
    service = await serve(["one", "two"])
    client = await service.client()
    reply = await client.completions.create(
        model="scripted", prompt=["a", "bc"], stream=streams, extra_body={"return_token_ids": True}
    )
    drawn: dict[int, list[int]] = {0: [], 1: []}
    prompts: dict[int, list[list[int]]] = {0: [], 1: []}
    for part in [chunk async for chunk in reply] if streams else [reply]:
        for choice in part.choices:
            drawn[choice.index] += choice.token_ids
            prompts[choice.index] += [choice.prompt_token_ids] if hasattr(choice, "prompt_token_ids") else []
    assert prompts == {0: [[97]], 1: [[98, 99]]}, "once, however many pieces there are"
    assert drawn == {0: [*b"one", 258], 1: [*b"two", 258]}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("prompt", [[97], [[97], [98, 99]], ["a", [98]]])
async def test_completions_of_token_ids_hold_token_ids_unasked(serve, streams, prompt):
    service = await serve(["one", "two"])
    client = await service.client()
    reply = await client.completions.create(model="scripted", prompt=prompt, stream=streams)
    drawn: dict[int, list[int]] = {}
    for part in [chunk async for chunk in reply] if streams else [reply]:
        for choice in part.choices:
            drawn.setdefault(choice.index, []).extend(choice.token_ids)
    assert list(drawn.values()) == [[*b"one", 258], [*b"two", 258]][: len(drawn)]


@pytest.mark.parametrize(("prompt", "options"), [("a", {}), ([97], {"extra_body": {"return_token_ids": False}})])
async def test_others_get_none(serve, prompt, options):
    service = await serve(["one"])
    client = await service.client()
    reply = await client.completions.create(model="scripted", prompt=prompt, **options)
    assert not hasattr(reply.choices[0], "token_ids")


async def test_a_caller_that_hangs_up_frees_the_engine_within_a_step(serve_tiny):
    service = await serve_tiny()
    generator = service.engine._generator
    call = asyncio.create_task(service.stream(max_tokens=200, extra_body={"ignore_eos": True}))
    await until(lambda: [row for row in generator._rows if len(row.logprobs) > 2])
    (row,) = generator._rows
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: generator.idle)
    assert row.cancelled
    assert len(row.logprobs) < 200
