"""HFChatFormat: text, tokens and tool calls of a Hugging Face tokenizer."""

import json

import pytest

from agentlightning.chat.hf import HFChatFormat
from agentlightning.errors import ConfigError
from agentlightning.testing.tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def chat():
    return HFChatFormat(tiny_tokenizer())


def assistant(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


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
