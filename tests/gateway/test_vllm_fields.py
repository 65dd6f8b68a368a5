"""What clients of vLLM, old ones of OpenAI and Anthropic's ask of a local policy besides: honoured, or named."""

import json

import openai
import pytest
from tests.support.tokenizer import CHATML, tiny_tokenizer

from agentlightning import span as names
from agentlightning.chat.hf import HFChatFormat
from agentlightning.engine.base import DISTRIBUTION_PARAMS, TERMINATION_PARAMS

OFF = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
SWITCH = CHATML.replace("<|im_start|>assistant\n", f"<|im_start|>assistant\n{OFF}")
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 6}}\n</tool_call>'
HI = {"role": "user", "content": "hi"}


async def test_variables_of_the_template_reach_it_and_begin_a_path_of_their_own(serve):
    chat = HFChatFormat(tiny_tokenizer(SWITCH))
    service = await serve(["Hello."] * 3, engine={"chat": chat})
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    said = (await service.ask([HI], **off)).choices[0].message
    await service.ask([HI])
    later = [HI, {"role": "assistant", "content": said.content}, HI]
    await service.ask(later, **off)
    without, plain, third = (chat.decode(prompt) for prompt, _ in service.engine.calls)
    assert without.endswith("<think>\n\n</think>\n\n")
    assert plain.endswith("assistant\n")
    assert third.startswith(without + "Hello.<|im_end|>")
    assert service.gateway.counters.continued == 1


async def test_variables_that_are_none_and_formats_without_them_are_named(serve, bpe_chat):
    for chat, given in ((bpe_chat, {"tokenize": True}), (None, {"enable_thinking": False})):
        service = await serve([], engine={"chat": chat})
        with pytest.raises(openai.BadRequestError) as refused:
            await service.ask([HI], extra_body={"chat_template_kwargs": given})
        assert refused.value.param == "chat_template_kwargs"


async def test_fields_that_end_an_answer_or_reshape_it_are_honoured_by_a_local_model(serve_tiny):
    service = await serve_tiny()
    plain = await service.ask([HI], temperature=0, max_tokens=12)
    (first,) = await service.spans()
    drawn = first.attributes[names.RESPONSE_TOKEN_IDS]
    stop = {"stop_token_ids": [drawn[2]]}
    await service.ask([HI], temperature=0, max_tokens=12, extra_body=stop)
    await service.ask([HI], temperature=0, max_tokens=12, extra_body=stop | {"min_tokens": 5})
    await service.ask([HI], temperature=0, max_tokens=12, extra_body={"repetition_penalty": 9.0})
    _, stopped, later, other = [span.attributes for span in await service.spans()]
    place = drawn.index(drawn[2]) + 1
    assert (stopped[names.RESPONSE_TOKEN_IDS], stopped[names.FINISH_REASONS]) == (drawn[:place], ["stop"])
    assert len(later[names.RESPONSE_TOKEN_IDS]) >= 5
    assert drawn[2] not in later[names.RESPONSE_TOKEN_IDS][:5]
    assert (later[names.RESHAPED], other[names.RESHAPED]) == (["min_tokens"], ["repetition_penalty"])
    assert len(set(other[names.RESPONSE_TOKEN_IDS])) > len(set(drawn)) or other != first.attributes
    assert plain.choices[0].finish_reason in ("stop", "length")


async def test_an_end_of_turn_is_not_the_end_where_that_is_asked_for(serve_tiny):
    service = await serve_tiny()
    end = service.engine.chat.encode("<|im_end|>")[0]
    bias = {str(end): 100}
    await service.ask([HI], max_tokens=5, logit_bias=bias)
    reply = await service.ask([HI], max_tokens=5, logit_bias=bias, extra_body={"ignore_eos": True})
    ended, went_on = [span.attributes[names.RESPONSE_TOKEN_IDS] for span in await service.spans()]
    assert (len(ended), len(went_on), reply.choices[0].finish_reason) == (1, 5, "length")


@pytest.mark.parametrize("field", [{"stop_token_ids": [1]}, {"ignore_eos": True}, {"min_tokens": 2}])
async def test_an_engine_that_would_ignore_a_field_is_not_asked(serve, field):
    service = await serve([])
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(field))} cannot be honoured"):
        await service.ask([HI], extra_body=field)


@pytest.mark.parametrize("said", ["guided_json", "structured_outputs"])
async def test_a_schema_in_vllms_words_is_checked_like_any_other(serve, said):
    service = await serve(['{"a": 1}', "no"])
    schema = {"type": "object", "required": ["a"]}
    given = json.dumps(schema) if said == "guided_json" else {"json": schema}
    for _ in range(2):
        await service.ask([HI], extra_body={said: given})
    verdicts = [span.attributes for span in await service.spans()]
    assert [each[names.CONSTRAINT] for each in verdicts] == ["checked", "violated"]
    assert verdicts[1][names.VIOLATIONS] == [said]


async def test_functions_of_old_are_refused_with_the_way_out(serve):
    service = await serve([CALL])
    with pytest.raises(openai.BadRequestError, match="functions are not read here; send them as tools"):
        await service.ask([HI], functions=[FUNCTION], function_call="auto")
    (span,) = await service.spans()
    assert span.status_code == "ERROR"


async def test_an_answer_goes_on_with_what_the_caller_began(serve, bpe_chat):
    service = await serve([" is 42.", "Yes."], engine={"chat": bpe_chat})
    url = f"{service.environment['ANTHROPIC_BASE_URL']}/v1/messages"
    http, headers = await service.http(), {"x-api-key": service.key}
    asked = [HI, {"role": "assistant", "content": "The answer"}]
    body = {"model": "scripted", "max_tokens": 50, "messages": asked}
    reply = (await http.post(url, json=body, headers=headers)).json()
    assert reply["content"] == [{"type": "text", "text": " is 42."}]
    whole = [HI, {"role": "assistant", "content": "The answer is 42."}, HI]
    await http.post(url, json=body | {"messages": whole}, headers=headers)
    (begun, _), (later, _) = service.engine.calls
    assert bpe_chat.decode(begun).endswith("<|im_start|>assistant\nThe answer")
    assert later[: len(begun)] == begun
    assert service.gateway.counters.continued == 1
    first, _ = await service.spans()
    assert "The answer" in json.loads(first.attributes[names.INPUT_MESSAGES])[-1]["parts"][0]["content"]


async def test_vllms_way_to_say_so_works_too(serve, bpe_chat):
    service = await serve([" is 42."], engine={"chat": bpe_chat})
    how = {"continue_final_message": True, "add_generation_prompt": False}
    reply = await service.ask([HI, {"role": "assistant", "content": "The<|im_end|> answer"}], extra_body=how)
    assert reply.choices[0].message.content == " is 42."
    ((prompt, _),) = service.engine.calls
    assert prompt.count(bpe_chat.encode("<|im_end|>")[0]) == 1


async def test_every_field_reaches_an_engine_that_honours_it(serve):
    service = await serve(["Hello."])
    service.engine.supported_params = frozenset([*DISTRIBUTION_PARAMS, *TERMINATION_PARAMS])
    given = {"repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [5], "ignore_eos": True}
    await service.ask([HI], extra_body=given)
    (_, params) = service.engine.calls[0]
    assert (params.repetition_penalty, params.min_tokens) == (1.2, 2)
    assert (params.stop_token_ids, params.ignore_eos) == ((5,), True)
