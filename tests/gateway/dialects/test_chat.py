"""Chat completions on the wire: what is read, what is refused, what is ignored."""

import pytest

from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.base import apply_resource_params, read_json
from agentlightning.gateway.dialects.chat import read_request
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError

USER = {"role": "user", "content": "hi"}


def read(**fields):
    return read_request({"model": "m", "messages": [USER]} | fields, ResponseLookup())


REFUSED = {
    "response_format": {"type": "grammar"},
    "logit_bias": {"a": 1},
    "frequency_penalty": 2.5,
    "presence_penalty": -3,
    "min_p": 2,
    "repetition_penalty": 0,
    "min_tokens": -1,
    "stop_token_ids": "x",
    "ignore_eos": 1,
    "bad_words": ["x"],
    "structured_outputs": {"regex": "a+"},
    "guided_regex": "a+",
    "chat_template_kwargs": [],
    "continue_final_message": True,
    "add_generation_prompt": False,
    "tool_choice": "required",
    "top_logprobs": 3,
    "temperature": -1,
    "top_p": 0,
    "max_tokens": 0,
    "n": 0,
    "seed": 1.5,
    "stop": [""],
    "tools": [{"type": "function", "function": {}}],
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_would_change_the_sample_and_cannot_be_honoured_is_refused_by_name(field):
    with pytest.raises(ApiError, match=field) as refused:
        read(**{field: REFUSED[field]})
    assert (refused.value.status, refused.value.param) == (400, field)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b"\xff", b'{"messages": []}', b'{"messages": [{"role": "king"}]}']
)
def test_a_body_that_is_no_request_is_refused(body):
    with pytest.raises(ApiError) as refused:
        read_request(read_json(body), ResponseLookup())
    assert refused.value.status == 400


def test_null_means_not_given():
    nothing = dict.fromkeys([*REFUSED, "stream", "logprobs", "model", "stop"], None) | {"messages": [USER]}
    assert read(**nothing).params == SamplingParams()


def test_neutral_values_are_accepted():
    request = read(n=1, logit_bias={}, frequency_penalty=0.0, tool_choice="auto", top_logprobs=0, top_k=-1, tools=[])
    assert (request.params, request.tools, request.ignored_fields) == (SamplingParams(), None, ())


def test_both_names_of_the_token_limit_are_read():
    assert read(max_tokens=5).params.max_tokens == read(max_completion_tokens=5).params.max_tokens == 5


def test_messages_are_read_as_one_shape_whatever_the_client_writes():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    developer, assistant, tool = read(
        messages=[
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ]
    ).messages
    assert developer == {"role": "system", "content": "ab"}
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert tool == {"role": "tool", "content": "42", "tool_call_id": "call_1"}


def test_tools_only_a_hosted_service_has_are_left_out_and_counted():
    function = {"type": "function", "function": {"name": "f"}}
    request = read(tools=[{"type": "web_search"}, function], store=True)
    assert (request.tools, request.ignored_fields) == ([function], ("store", "tools.web_search"))


def test_forced_parameters_win_and_unknown_ones_are_named():
    asked = SamplingParams(temperature=0.1, top_p=0.5)
    assert apply_resource_params(asked, "llm", {"temperature": 1}) == SamplingParams(temperature=1.0, top_p=0.5)
    with pytest.raises(ApiError, match="the LLM resource 'llm' sets typical_p"):
        apply_resource_params(asked, "llm", {"typical_p": 0.1})
    with pytest.raises(ApiError, match="the LLM resource 'llm' sets temperature=-1; use a number from 0"):
        apply_resource_params(asked, "llm", {"temperature": -1})
