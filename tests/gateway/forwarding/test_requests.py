"""Promises of requests that are translated to another dialect: what a provider receives, and what is left out."""

import base64
from itertools import pairwise

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.gateway.config import Provider
from agentlightning.gateway.dialects.chat import CHAT
from agentlightning.gateway.dialects.messages import MESSAGES
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.responses import RESPONSES
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.bodies import body_of, given_params

OPENAI = Provider(name="them", base_urls=("http://h/v1",))
ANTHROPIC = Provider(name="them", dialect="anthropic", base_urls=("http://h",))
HI = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "number"}}}}}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
USES = [{"type": "tool_use", "id": name, "name": "add", "input": {}} for name in ("a", "b")]
CALLS = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in ("a", "b")]
PDF = base64.b64encode(b"%PDF").decode()
NOTE = base64.b64encode("Grüße".encode()).decode()


def put(dialect, fields, provider, model="big-1"):
    """(the body, what was left out) of a request to a provider of the other dialect."""
    request = dialect.read(fields, ResponseLookup(), attachments=True)
    path = "chat/completions" if provider is OPENAI else "messages"
    return body_of(path, request, provider, model, given_params(fields, request.params, {}), lambda turn: [])


def chat_of(**fields):
    """A request for messages, translated to chat completions."""
    return put(MESSAGES, {"max_tokens": 9, "messages": HI} | fields, OPENAI)


def messages_of(**fields):
    """A request for a chat completion, translated to Anthropic's messages."""
    return put(CHAT, {"messages": HI} | fields, ANTHROPIC)


# -- messages to chat completions --------------------------------------------------------------------------------------


def test_results_of_tools_stand_right_behind_their_calls_in_the_order_they_came():
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in ("b", "a")]
    conversation = [
        *HI,
        {"role": "assistant", "content": USES},
        {"role": "user", "content": [results[0], {"type": "text", "text": "wait"}, results[1]]},
    ]
    body, _ = chat_of(messages=conversation)
    assert [message.get("tool_call_id", message["role"]) for message in body["messages"]] == [
        *("user", "assistant", "b", "a", "user")
    ]


def test_results_of_blocks_are_sent_as_text_and_images():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, image]
    result = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}
    conversation = [*HI, {"role": "assistant", "content": USES[:1]}, {"role": "user", "content": [result]}]
    body, lost = chat_of(messages=conversation)
    assert body["messages"][2] == {"role": "tool", "content": "one\ntwo", "tool_call_id": "a"}
    assert body["messages"][3]["content"][0]["image_url"]["url"] == "data:image/png;base64,AA=="
    assert lost == ("tool_result.is_error",)


def test_a_system_prompt_in_blocks_is_one_text():
    blocks = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    body, _ = chat_of(system=blocks)
    assert body["messages"][0] == {"role": "system", "content": "Be\nbrief."}


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (
            {"type": "base64", "media_type": "application/pdf", "data": PDF},
            {"type": "file", "file": {"filename": "A", "file_data": f"data:application/pdf;base64,{PDF}"}},
        ),
        ({"type": "text", "media_type": "text/plain", "data": "Hello."}, "A\nHello."),
        ({"type": "content", "content": [{"type": "text", "text": "Hello."}]}, "A\nHello."),
        ({"type": "content", "content": "Hello."}, "A\nHello."),
    ],
)
def test_documents_are_sent_as_files_or_as_their_text(source, part):
    document = {"type": "document", "title": "A", "source": source}
    body, _ = chat_of(messages=[{"role": "user", "content": [document, {"type": "text", "text": "?"}]}])
    content = body["messages"][0]["content"]
    assert content == (f"{part}\n?" if isinstance(part, str) else [part, {"type": "text", "text": "?"}])


@pytest.mark.parametrize("source", [{"type": "url", "url": "https://h/a.pdf"}, {"type": "file", "file_id": "f1"}])
def test_a_document_that_only_anthropic_could_find_is_refused_by_name(source):
    with pytest.raises(ApiError, match=r"document|address") as caught:
        chat_of(messages=[{"role": "user", "content": [{"type": "document", "source": source}]}])
    assert caught.value.param == "messages"


def test_forbidden_tools_are_sent_nevertheless():
    body, _ = chat_of(tools=[TOOL], tool_choice={"type": "none"})
    assert (len(body["tools"]), body["tool_choice"]) == (1, "none")
    body, _ = messages_of(tools=[ADD], tool_choice="none")
    assert (len(body["tools"]), body["tool_choice"]) == (1, {"type": "none"})


def test_what_says_nothing_of_the_answer_is_dropped_and_counted():
    fields = {"metadata": {"user_id": "u"}, "service_tier": "standard_only", "output_config": {"effort": "low"}}
    body, lost = chat_of(**fields, thinking={"type": "adaptive"}, speed="fast")
    assert body == {"model": "big-1", "messages": HI, "max_tokens": 9}
    assert sorted(lost) == ["metadata", "output_config.effort", "service_tier", "speed", "thinking"]


# -- responses to chat completions -------------------------------------------------------------------------------------


def test_a_responses_request_has_the_same_meaning_in_chat_completions():
    file = {"type": "input_file", "filename": "note.txt", "file_data": f"data:text/plain;base64,{NOTE}"}
    output = [{"type": "input_text", "text": "one"}, {"type": "input_image", "image_url": "https://h/a.png"}]
    fields = {
        "input": [
            {"role": "user", "content": [file, {"type": "input_text", "text": "?"}]},
            {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": output},
        ],
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "high"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
        "max_tool_calls": 3,
    }
    body, lost = put(RESPONSES, fields, OPENAI)
    messages = body.pop("messages")
    assert messages[0]["content"] == [{"type": "text", "text": "note.txt\nGrüße"}, {"type": "text", "text": "?"}]
    assert (messages[2]["content"], messages[3]["content"][0]["type"]) == ("one", "image_url")
    assert body == {
        "model": "big-1",
        "logprobs": True,
        "top_logprobs": 3,
        "reasoning_effort": "low",
        "verbosity": "high",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
    }
    assert lost == ("max_tool_calls",)


# -- chat completions and responses to Anthropic's messages ------------------------------------------------------------


def test_results_come_first_in_the_turn_that_answers_calls():
    conversation = [
        *HI,
        {"role": "assistant", "content": "Let me.", "tool_calls": CALLS[:1]},
        {"role": "assistant", "tool_calls": CALLS[1:]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "user", "content": "wait"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    body, _ = messages_of(messages=conversation, tools=[ADD])
    _, turn, answer = body["messages"]
    assert [block["type"] for block in turn["content"]] == ["text", "tool_use", "tool_use"]
    assert [block.get("tool_use_id", block["type"]) for block in answer["content"]] == ["a", "b", "text"]
    assert body["tools"][0]["input_schema"]["type"] == "object"


def test_files_are_sent_as_documents():
    parts = [
        {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}},
        {"type": "file", "file": {"filename": "b.txt", "file_data": f"data:text/plain;base64,{NOTE}"}},
    ]
    body, _ = messages_of(messages=[{"role": "user", "content": parts}])
    pdf, note = body["messages"][0]["content"]
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    assert pdf == {"type": "document", "source": source, "title": "a.pdf"}
    assert note["source"] == {"type": "text", "media_type": "text/plain", "data": "Grüße"}
    there = {"type": "input_file", "file_url": "https://h/a.pdf"}
    body, _ = put(RESPONSES, {"input": [{"role": "user", "content": [there]}]}, ANTHROPIC)
    assert body["messages"][0]["content"][0]["source"] == {"type": "url", "url": "https://h/a.pdf"}
    with pytest.raises(ApiError, match="file"):
        messages_of(messages=[{"role": "user", "content": [{"type": "file", "file": {"file_id": "f1"}}]}])


def test_reasoning_effort_is_sent_in_anthropics_terms():
    body, lost = messages_of(reasoning_effort="minimal", user="me", service_tier="default", store=True)
    assert (body["thinking"], body["output_config"]) == ({"type": "adaptive"}, {"effort": "low"})
    assert lost == ("service_tier", "store")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body, _ = messages_of(reasoning_effort="high", response_format=schema)
    assert (body["output_config"]["effort"], body["output_config"]["format"]["type"]) == ("high", "json_schema")
    body, lost = put(RESPONSES, {"input": "hi", "reasoning": {"effort": "none"}}, ANTHROPIC)
    assert (body["thinking"], "output_config" in body, lost) == ({"type": "disabled"}, False, ())
    with pytest.raises(ApiError, match="use none, minimal, low"):
        messages_of(reasoning_effort="some")


@pytest.mark.parametrize(
    ("model", "fields", "thinking"),
    [
        ("claude-sonnet-4-5-20250929", {}, {"type": "enabled", "budget_tokens": 8192}),
        ("claude-opus-4-1", {"max_tokens": 3000}, {"type": "enabled", "budget_tokens": 2999}),
        ("claude-3-7-sonnet-latest", {"max_tokens": 500}, None),
        ("claude-3-5-haiku-latest", {}, None),
        ("claude-opus-4-6", {}, {"type": "adaptive"}),
        ("claude-opus-4-6", {"tools": [ADD], "tool_choice": "required"}, None),
    ],
)
def test_thinking_is_requested_in_the_form_the_model_supports(model, fields, thinking):
    body, _ = put(CHAT, {"messages": HI, "reasoning_effort": "medium"} | fields, ANTHROPIC, model)
    assert body.get("thinking") == thinking
    assert ("output_config" in body) == (model == "claude-opus-4-6")
    if "max_tokens" not in fields:
        more = thinking.get("budget_tokens", 0) if thinking else 0
        assert body["max_tokens"] == ANTHROPIC.max_output_tokens + more


def test_thoughts_come_on_top_of_the_longest_answer_where_the_caller_sets_no_limit():
    thinking = {"type": "enabled", "budget_tokens": 2000}
    body, lost = messages_of(thinking=thinking, output_config={"effort": "max"})
    assert body["output_config"] == {"effort": "max"}
    assert (body["thinking"], body["max_tokens"], lost) == (thinking, ANTHROPIC.max_output_tokens + 2000, ())
    assert messages_of(thinking=thinking, max_tokens=3000)[0]["max_tokens"] == 3000


def test_stop_strings_and_choices_of_tools_have_anthropics_names():
    body, _ = messages_of(stop=["a", "b"], tools=[ADD], parallel_tool_calls=False)
    assert body["stop_sequences"] == ["a", "b"]
    assert body["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    named = {"type": "function", "function": {"name": "add"}}
    assert messages_of(tools=[ADD], tool_choice=named)[0]["tool_choice"] == {"type": "tool", "name": "add"}


@pytest.mark.parametrize(
    ("dialect", "fields", "param"),
    [
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": CALLS}]}, "messages"),
        (RESPONSES, {"input": "hi", "top_logprobs": 2}, "top_logprobs"),
        (RESPONSES, {"input": "hi", "include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"input": "hi", "temperature": 1.5}, "temperature"),
    ],
)
def test_fields_anthropic_does_not_support_are_rejected_by_the_callers_name(dialect, fields, param):
    with pytest.raises(ApiError) as caught:
        put(dialect, fields, ANTHROPIC)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_history_that_ends_with_the_assistant_is_answered_with_another_turn_at_anthropics():
    conversation = [
        {"role": "system", "content": "Review it."},
        *HI,
        {"role": "assistant", "content": "A poem.", "name": "poet"},
    ]
    body, _ = messages_of(messages=conversation)
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][-1]["content"] == [{"type": "text", "text": "Continue."}]
    assert "Continue." not in orjson.dumps(messages_of(messages=[*conversation, *HI])[0]).decode()


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}),
        (
            CHAT,
            {"messages": [{"role": "system", "content": "Be brief."}, *HI], "response_format": {"type": "json_object"}},
        ),
        (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_object"}}}),
    ],
)
def test_json_without_a_schema_is_requested_in_anthropics_system_prompt(dialect, fields):
    body, _ = put(dialect, fields, ANTHROPIC)
    assert "output_config" not in body
    assert body["system"].endswith("no text around it, and no code fence.")
    assert body["system"].startswith("Be brief." if len(fields.get("messages", "")) == 2 else "Answer with one JSON")


def test_stop_strings_of_whitespace_are_not_sent_to_anthropic():
    assert messages_of(stop=["\n\n", "END"])[0]["stop_sequences"] == ["END"]
    assert "stop_sequences" not in messages_of(stop=["\n"])[0]


MESSAGE = st.sampled_from(
    [
        {"role": "user", "content": "u"},
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
)


@settings(max_examples=30)
@given(st.lists(MESSAGE, max_size=8))
def test_turns_alternate_and_include_every_word_of_any_conversation(conversation):
    body, _ = messages_of(messages=[*conversation, *HI])
    roles = [turn["role"] for turn in body["messages"]]
    assert all(one != other for one, other in pairwise(roles))
    blocks = [block for turn in body["messages"] for block in turn["content"]]
    sent = body.get("system", "").split("\n\n") + [block["text"] for block in blocks if block["type"] == "text"]
    words = "".join(
        message["content"] for message in [*conversation, *HI] if message["content"] and message["role"] != "tool"
    )
    assert sorted("".join(sent)) == sorted(words)
    assert len([block for block in blocks if block["type"] == "tool_result"]) == sum(
        m["role"] == "tool" for m in conversation
    )


@pytest.mark.parametrize(
    "neutral", [{"repetition_penalty": 1.0}, {"min_tokens": 0}, {"stop_token_ids": []}, {"ignore_eos": False}]
)
def test_values_that_change_nothing_are_left_out_where_there_is_no_word_for_them(neutral):
    assert messages_of(**neutral) == messages_of()
    request = {"input": "hi", **neutral}
    read = RESPONSES.read(request, ResponseLookup())
    params = given_params(request, read.params, {})
    assert "temperature" not in body_of("responses", read, OPENAI, "big-1", params, lambda turn: [])[0]


@pytest.mark.parametrize("name", ["guided_json", "structured_outputs"])
def test_a_schema_in_the_words_of_vllm_is_not_dropped_silently(name):
    schema = {"type": "object"}
    with pytest.raises(ApiError) as caught:
        messages_of(**{name: {"json": schema} if name == "structured_outputs" else schema})
    assert caught.value.param == name


def test_token_fields_no_provider_supports_are_counted_as_ignored():
    body, lost = messages_of(return_token_ids=True)
    assert (body, lost) == (messages_of()[0], ("return_token_ids",))
