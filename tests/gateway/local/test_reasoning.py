"""What a model thinks is kept apart from what it says, by the markers of its own template, and never drawn again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tokenizer import tiny_tokenizer

from agentlightning import span as names
from agentlightning.chat.base import ThoughtMarkers
from agentlightning.chat.hf import HFChatFormat
from agentlightning.chat.reasoning import find_reasoning_markers
from agentlightning.engine.base import Sample
from agentlightning.gateway.answer import ReasoningDelta
from agentlightning.gateway.sampling import SampledAnswer
from agentlightning.span import CONSTRAINT
from agentlightning.testing import ByteChatFormat

# As Qwen writes it: thoughts after the last question only, an empty one where the last answer has none.
LATE = """\
{%- set last = namespace(place=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.place = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > last.place and (loop.last or m.reasoning_content) %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content }}{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + call.function.name
+ '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
OPENED = LATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
THINK = ThoughtMarkers("<think>", "</think>", False)


def chat_of(template):
    return HFChatFormat(tiny_tokenizer(template))


@pytest.fixture(scope="module")
def late():
    return chat_of(LATE)


@pytest.fixture(scope="module")
def opened():
    return chat_of(OPENED)


# -- the markers -----------------------------------------------------------------------------------------------------


def test_markers_are_read_off_the_template(late, opened, bpe_chat):
    assert find_reasoning_markers(late) == THINK
    assert find_reasoning_markers(opened) == ThoughtMarkers("<think>", "</think>", True)
    assert find_reasoning_markers(
        chat_of(LATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"))
    ) == ThoughtMarkers("[THINK]", "[/THINK]", False)
    assert find_reasoning_markers(bpe_chat) is None
    assert find_reasoning_markers(ByteChatFormat()) is None


def test_a_template_that_writes_a_thought_as_a_message_of_its_own_is_left_alone():
    assert find_reasoning_markers(chat_of(LATE.replace("</think>", "<|im_end|>"))) is None


# -- one answer ------------------------------------------------------------------------------------------------------


def show(text, markers=THINK, size=1):
    chat = ByteChatFormat()
    tokens = chat.encode(text + "<|im_end|>")
    answer, pieces = SampledAnswer(0, chat=chat, tools=[], reasoning_markers=markers), []
    for start in range(0, len(tokens), size):
        pieces += answer.feed(tokens[start : start + size])
    pieces += answer.finish(Sample(tuple(tokens), (0.0,) * len(tokens), "stop", 0))
    return pieces, answer


CASES = [
    ("<think>\nHm. \n</think>\n\nHello.", "Hm.", "Hello."),
    ("\n<think>Hm.</think>Hello.", "Hm.", "Hello."),
    ("<think></think>\n\nHello.", "", "Hello."),
    ("<think>\nHm, <b>", "Hm, <b>", ""),
    ("Hello. <think>no</think>", "", "Hello. <think>no</think>"),
    (" <thin", "", " <thin"),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "thought", "content"), CASES)
def test_a_thought_at_the_beginning_is_told_from_the_rest(text, thought, content):
    _, answer = show(text)
    assert (answer.reasoning, answer.content) == (thought, content)
    assert answer.message.get("reasoning_content") == (thought or None)


def test_an_answer_begins_inside_the_thought_its_template_opens():
    _, answer = show("Hm.\n</think>\n\nHello.", ThoughtMarkers("<think>", "</think>", True))
    assert (answer.reasoning, answer.content) == ("Hm.", "Hello.")


def test_tool_calls_within_a_thought_are_thoughts():
    _, answer = show(f"<think>\nPerhaps {CALL}</think>\n{CALL}")
    assert answer.reasoning == f"Perhaps {CALL}"
    assert [call.name for call in answer.tool_calls] == ["f"]


PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", " ", "\n", "a", "é", CALL, "<tool_call>"]), max_size=8
)


@given(PARTS.map("".join), st.booleans(), st.integers(1, 7))
def test_what_is_shown_piece_by_piece_is_the_thought_and_the_content_however_it_is_cut(text, opened, size):
    markers = ThoughtMarkers("<think>", "</think>", opened)
    pieces, answer = show(text, markers, size)
    _, whole = show(text, markers, 10_000)
    assert (
        "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta))
        == answer.reasoning
        == whole.reasoning
    )
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == answer.content == whole.content
    assert len(answer.tool_calls) == len(whole.tool_calls)


# -- on the wire -----------------------------------------------------------------------------------------------------

SAID = "<think>\nHm.\n</think>\n\nHello."
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("streams", [False, True])
async def test_chat_completions_say_it_beside_the_content(serve, late, streams):
    service = await serve([SAID], engine={"chat": late})
    if streams:
        deltas = [chunk.choices[0].delta for chunk in await service.stream() if chunk.choices]
        thought = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        message = (await service.ask()).choices[0].message
        thought, content = message.reasoning_content, message.content
    assert (thought, content) == ("Hm.", "Hello.")
    said = (await service.spans())[0].attributes[names.OUTPUT_MESSAGES]
    assert '{"type":"reasoning","content":"Hm."}' in said


@pytest.mark.parametrize("streams", [False, True])
async def test_messages_say_it_in_a_block_of_its_own(serve, late, streams):
    service = await serve([SAID], engine={"chat": late})
    client = await service.anthropic()
    asked = {"model": "scripted", "max_tokens": 99, "messages": [USER]}
    if streams:
        async with client.messages.stream(**asked) as events:
            message = await events.get_final_message()
    else:
        message = await client.messages.create(**asked)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "Hello.")
    assert thinking.signature


@pytest.mark.parametrize("streams", [False, True])
async def test_responses_say_it_in_an_item_of_its_own(serve, late, streams):
    service = await serve([SAID], engine={"chat": late})
    client = await service.client()
    if streams:
        async with client.responses.stream(model="scripted", input="hi") as events:
            reply = await events.get_final_response()
    else:
        reply = await client.responses.create(model="scripted", input="hi")
    reasoning, message = reply.output
    assert (reasoning.type, reasoning.content[0].text, message.content[0].text) == ("reasoning", "Hm.", "Hello.")


async def test_a_call_within_a_thought_does_not_end_an_answer_of_one_call(serve, late):
    service = await serve([f"<think>\nPerhaps {CALL}?\n</think>\n\n{CALL}"], engine={"chat": late})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    choice = (await service.ask(tools=tools, parallel_tool_calls=False)).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert (await service.spans())[0].attributes[CONSTRAINT] == "checked"


async def test_a_turn_that_is_all_thought_is_still_a_turn(serve, late):
    service = await serve(["<think>\nHm.\n</think>", "<think>\nHm.\n</think>", "ok"], engine={"chat": late})
    client = await service.client()
    async with client.responses.stream(model="scripted", input="hi") as events:
        streamed = (await events.get_final_response()).output
    plain = (await client.responses.create(model="scripted", input="hi")).output
    assert [item.type for item in plain] == [item.type for item in streamed] == ["reasoning", "message"]
    reasoning = plain[0].to_dict()
    await client.responses.create(model="scripted", input=[USER, reasoning, USER])
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)


# -- the next call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [LATE, OPENED], ids=["late", "opened"])
@pytest.mark.parametrize("echoes", [False, True])
async def test_the_next_prompt_keeps_the_thought_in_its_tokens_whether_the_client_sends_it_back_or_not(
    serve, template, echoes
):
    opening = "" if template == OPENED else "<think>\n"
    answers = [
        f"{opening}One.\n</think>\n\n{CALL}",
        f"{opening}Two.\n</think>\n\n42.",
        f"{opening}Three.\n</think>\n\nYes.",
    ]
    service = await serve(answers, engine={"chat": chat_of(template)})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [USER]
    for asked in ("1", "sure?", "bye"):
        message = (await service.ask(messages, tools=tools)).choices[0].message
        echo = message.model_dump(exclude=set() if echoes else {"reasoning_content"})
        calls = message.tool_calls or ()
        new = [{"role": "tool", "tool_call_id": call.id, "content": asked} for call in calls]
        messages = [*messages, echo, *(new or [{"role": "user", "content": asked}])]
    one, two, three = [span.attributes for span in await service.spans()]
    for before, after in ((one, two), (two, three)):
        known = [*before[names.PROMPT_TOKEN_IDS], *before[names.RESPONSE_TOKEN_IDS]]
        assert after[names.PROMPT_TOKEN_IDS][: len(known)] == known
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (2, 0)
