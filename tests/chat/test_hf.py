"""HFChatFormat: text, tokens and tool calls of a Hugging Face tokenizer."""

import json
import sys

import pytest
from tests.chat.sentencepiece import KINDS, TEMPLATES, own_tokens, sentencepiece
from tests.support.tokenizer import CHATML, tiny_tokenizer

from agentlightning.chat.hf import HFChatFormat, load_chat_format
from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.util import templates
from agentlightning.util.templates import TemplateLimitError


@pytest.fixture(scope="module")
def chat():
    return HFChatFormat(tiny_tokenizer())


def assistant(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


async def test_the_extra_that_loads_tokenizers_is_named_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"agentlightning\[train\]"):
        await load_chat_format(tmp_path)


def test_a_conversation_is_written_by_the_template_and_read_back_from_tokens(chat):
    text = chat.render([{"role": "user", "content": "héllo 🎉"}])
    assert text == "<|im_start|>user\nhéllo 🎉<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(chat.encode(text)) == text
    assert chat.decode(chat.encode("hi<|im_end|>"), skip_special_tokens=True) == "hi"


def test_tool_call_arguments_from_the_wire_are_not_encoded_twice(chat):
    text = chat.render([{"role": "user", "content": "?"}, assistant('{"expression": "6*7"}')])
    assert '{"name": "calculator", "arguments": {"expression": "6*7"}}' in text


def test_arguments_that_are_not_json_stay_text(chat):
    text = chat.render([{"role": "user", "content": "?"}, assistant('{"expression": ')])
    assert json.dumps('{"expression": ') in text


def test_a_template_that_concatenates_arguments_gets_text():
    calls = "{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.arguments }}{% endfor %}"
    template = "{{ tools or '' }}{% for m in messages %}{{ m.content }}" + calls + "<|im_end|>{% endfor %}"
    text = HFChatFormat(tiny_tokenizer(template)).render([assistant('{"a":1}')], add_generation_prompt=False)
    assert text == 'CALL {"a":1}<|im_end|>'


def test_the_templates_end_of_turn_also_ends_an_answer(chat):
    assert {chat.decode([token]) for token in chat.eos_token_ids} == {"<|endoftext|>", "<|im_end|>"}


def test_the_generation_config_beside_the_tokenizer_is_read(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    from transformers import AutoTokenizer

    assert {1, 7} <= HFChatFormat(AutoTokenizer.from_pretrained(tmp_path)).eos_token_ids


def test_a_tokenizer_without_a_chat_template_is_rejected_with_a_remedy(tmp_path):
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.name_or_path = str(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} has no chat template; .*tokenizer_config.json"):
        HFChatFormat(tokenizer)


def test_errors_quote_the_template():
    refusal = "{% if m.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m.content }}<|im_end|>{% endfor %}"
    chat = HFChatFormat(tiny_tokenizer(template))
    with pytest.raises(ConfigError, match="no critics here"):
        chat.render([{"role": "critic", "content": "42"}])


def test_the_tokenizer_is_independent_of_the_trainers():
    tokenizer = tiny_tokenizer()
    chat = HFChatFormat(tokenizer)
    tokenizer.chat_template = "nothing"
    assert chat.render([{"role": "user", "content": "hello"}]) != "nothing"


# -- tools that the template has no place for -------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "computes", "parameters": {}}}]
ASKED = {"role": "user", "content": "6*7?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "calculator", "content": "forty-two"}
DONE = {"role": "assistant", "content": "It is 42."}
ALTERNATING = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ONLY_KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}[system]{{ m.content }}<|im_end|>"
    "{% elif m.role == 'user' %}[user]{{ m.content }}<|im_end|>"
    "{% elif m.role == 'assistant' %}[assistant]{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ANY_ROLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = ANY_ROLE.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
RESULTS_ARE_LOST = "{{ tools or '' }}" + ONLY_KNOWN_ROLES
CALLS_BUT_NO_LIST = ANY_ROLE.replace("<|im_end|>", "{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}<|im_end|>")
WITHOUT_A_PLACE = {
    "a system message is refused": ALTERNATING,
    "results are dropped": ONLY_KNOWN_ROLES,
    "any role is written": ANY_ROLE,
    "content is a list of parts": PARTS,
    "tools are listed, and results dropped": RESULTS_ARE_LOST,
    "calls are written, and no tools listed": CALLS_BUT_NO_LIST,
    "tools are listed, and calls only mentioned": "{% if false %}[TOOL_CALLS]{% endif %}{{ tools or '' }}" + ANY_ROLE,
}


@pytest.mark.parametrize("template", WITHOUT_A_PLACE.values(), ids=WITHOUT_A_PLACE)
def test_tools_calls_and_results_stand_in_the_messages_where_the_template_has_no_place(template, caplog):
    chat = HFChatFormat(tiny_tokenizer(template))
    first = chat.render([ASKED], TOOLS)
    called = assistant('{"expression": "6*7"}')
    whole = chat.render([ASKED, called, RESULT, RESULT, DONE, ASKED], TOOLS)
    assert first.count(json.dumps(TOOLS[0])) == whole.count(json.dumps(TOOLS[0])) == 1
    text = chat.render([ASKED, called], TOOLS, add_generation_prompt=False).removeprefix(first)
    assert text == '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call><|im_end|>'
    assert chat.parse(text.removesuffix("<|im_end|>")).tool_calls[0].name == "calculator"
    result = "<tool_response>\nforty-two\n</tool_response>"
    assert f"[user]{result}\n{result}<|im_end|>[assistant]It is 42.<|im_end|>" in whole
    assert whole.startswith(first.removesuffix("[assistant]"))
    assert chat.tool_calls.layout is not None
    assert (chat.tools_in_messages, caplog.text.count("Hermes' format")) == (True, 1)


def test_a_system_message_of_the_caller_stays_before_the_tools():
    text = HFChatFormat(tiny_tokenizer(ANY_ROLE)).render([{"role": "system", "content": "Be brief."}, ASKED], TOOLS)
    assert text.startswith("[system]Be brief.\n\nYou can call tools.")
    assert text.count("[system]") == 1


def test_special_tokens_in_tools_calls_and_results_are_text():
    chat = HFChatFormat(tiny_tokenizer(ANY_ROLE))
    said = "x<|im_end|>y"
    messages = [ASKED, assistant(json.dumps({"e": said})), {**RESULT, "content": said}]
    tokens = chat.encode(chat.render(messages, [{"type": "function", "function": {"name": "f", "description": said}}]))
    assert sum(token in chat.eos_token_ids for token in tokens) == 4


@pytest.mark.parametrize("template", WITHOUT_A_PLACE.values(), ids=WITHOUT_A_PLACE)
def test_a_setting_refuses_tools_that_the_template_has_no_place_for(template):
    chat = HFChatFormat(tiny_tokenizer(template), tool_calls="template")
    assert not chat.tools_in_messages
    for messages, tools in [([ASKED], TOOLS), ([ASKED, assistant("{}")], None), ([ASKED, RESULT], None)]:
        with pytest.raises(ConfigError, match=r'(no place for tools|no format parses).*policy.tool_calls = "messages"'):
            chat.render(messages, tools)


def test_a_setting_writes_tools_into_the_messages_of_any_template():
    chat = HFChatFormat(tiny_tokenizer(), tool_calls="messages")
    text = chat.render([ASKED], TOOLS)
    assert text.count("<tools>\n") == 1
    assert "Tools: [" not in text


@pytest.mark.parametrize(
    "listed",
    [
        "{{ tools | tojson }}",
        "{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties | join(', ') }}) {% endfor %}",
        "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}{% endfor %}",
        "{% for t in tools %}{{ t | string }}{% endfor %}",
    ],
)
def test_a_template_with_a_place_is_left_alone(listed):
    chat = HFChatFormat(tiny_tokenizer(CHATML.replace("{{ tools | tojson }}", listed)))
    assert not chat.tools_in_messages
    assert "calculator" in chat.render([ASKED], TOOLS)
    assert "<tools>" not in chat.render([ASKED], TOOLS)


@pytest.mark.parametrize(
    "call", ["@@{{ c.function.name }}@{{ c.function.arguments | tojson }}", "CALL {{ c.function }}", "{{ c | tojson }}"]
)
def test_calls_that_no_format_reads_refuse_tools_by_name(call):
    template = "{{ tools or '' }}" + ANY_ROLE.replace(
        "<|im_end|>", "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}<|im_end|>"
    )
    chat = HFChatFormat(tiny_tokenizer(template))
    assert chat.render([ASKED]) == "[user]6*7?<|im_end|>[assistant]"
    with pytest.raises(ConfigError, match=r'writes a tool call as .*probe.*no format parses.*tool_calls = "messages"'):
        chat.render([ASKED], TOOLS)
    assert HFChatFormat(tiny_tokenizer(template), tool_calls="messages").render([ASKED], TOOLS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_text_is_encoded_as_it_is_after_what_is_before(kind, template):
    tokenizer = sentencepiece(kind, template)
    chat = HFChatFormat(tokenizer)
    whole = own_tokens(tokenizer, [ASKED, DONE, ASKED])
    text = chat.render([ASKED, DONE, ASKED], add_generation_prompt=False)
    for cut in (text.index("It is"), text.index("</s>") + len("</s>")):
        tokens, exact = chat.encode_after(text[:cut], text[cut:])
        assert exact
        assert whole[-len(tokens) :] == tokens
    tokens, exact = chat.encode_after("The capi", "tal of")
    assert not exact
    assert chat.decode(chat.encode("x") + tokens) == "xtal of"


LOOPS = {
    "in every rendering": "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "without an end": "{% macro m(n) %}{% for a in range(99999) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
    "in what it writes": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_chat_template_that_does_not_end_is_refused_when_it_is_opened(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    with pytest.raises((TemplateLimitError, ConfigError)):
        HFChatFormat(tiny_tokenizer(CHATML + loop))


def test_a_chat_template_that_does_not_end_for_some_messages_fails_these_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    loops = "{% if 'loop' in messages[0].content %}" + LOOPS["in every rendering"] + "{% endif %}"
    chat = HFChatFormat(tiny_tokenizer(CHATML + loops))
    with pytest.raises(ConfigError, match="runs for more than"):
        chat.render([{"role": "user", "content": "loop"}])
    assert "hello" in chat.render([{"role": "user", "content": "hello"}])
