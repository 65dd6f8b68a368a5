"""Agents offer tools to a model whose chat template has no place for them, and continue its tokens."""

import json
import re

import openai
import pytest
from tests.support.tokenizer import tiny_tokenizer

from agentlightning.chat.hf import HFChatFormat

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = re.sub(r"^{% for m in messages %}", "{% for m in messages %}ROLES", TEMPLATE).replace(
    "ROLES",
    "{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('roles alternate') }}{% endif %}",
)
UNREAD = "{{ tools or '' }}" + TEMPLATE.replace(
    "<|im_end|>",
    "{% for c in m.tool_calls or [] %}@@{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<|im_end|>",
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 6}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("template", [TEMPLATE, ALTERNATING], ids=["a system message", "no system message"])
async def test_a_call_and_its_result_are_turns_that_continue_the_tokens(serve, template):
    chat = HFChatFormat(tiny_tokenizer(template))
    service = await serve([CALL, "It is 7.", "You are welcome."], engine={"chat": chat})
    said = (await service.ask([HI], tools=TOOLS)).choices[0].message
    (call,) = said.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 6})
    messages = [HI, said.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    done = (await service.ask(messages, tools=TOOLS)).choices[0].message
    messages += [{"role": "assistant", "content": [{"type": "text", "text": done.content}]}, HI]
    await service.ask(messages, tools=TOOLS)
    first, second, third = (chat.decode(prompt) for prompt, _ in service.engine.calls)
    assert json.dumps(TOOLS[0]) in first
    assert second.startswith(
        f"{first}{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>"
    )
    assert third.startswith(f"{second}It is 7.<|im_end|>")
    counters = service.gateway.counters
    assert (counters.continued, counters.drift, counters.tools_in_messages) == (2, 0, 3)


async def test_tools_whose_calls_nothing_reads_are_a_bad_request_by_name(serve):
    service = await serve(["Hello."], engine={"chat": HFChatFormat(tiny_tokenizer(UNREAD))})
    with pytest.raises(openai.BadRequestError, match=r"@@probe.*no format parses it.*policy.tool_calls"):
        await service.ask([HI], tools=TOOLS)
    assert (await service.ask([HI])).choices[0].message.content == "Hello."


async def test_a_setting_makes_tools_without_a_place_a_bad_request(serve):
    service = await serve([], engine={"chat": HFChatFormat(tiny_tokenizer(TEMPLATE), tool_calls="template")})
    with pytest.raises(openai.BadRequestError, match="has no place for tools"):
        await service.ask([HI], tools=TOOLS)
