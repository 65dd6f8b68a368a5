"""Whatever a body holds, it is read or refused with a 400 that names a field; nothing else comes of it."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError

FUNCTION = {"name": "f", "parameters": {"type": "object"}, "strict": True}
SHAPE = {"name": "x", "schema": {"type": "object"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHARED = {"model": "m", "temperature": 1, "top_p": 0.5, "stream": True}
BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "bob"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CALL]}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": SHAPE},
        "stop": ["a"],
        "seed": 1,
        "n": 2,
        "logprobs": True,
        "max_tokens": 5,
    },
    "/v1/completions": {"prompt": [[1, 2], "a"], "n": 2, "logprobs": 0, "max_tokens": 5, "stop": "a"},
    "/v1/responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "42"},
        ],
        "previous_response_id": None,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", **SHAPE}},
        "include": ["x"],
        "store": True,
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "42"}]},
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", **SHAPE}},
        "stop_sequences": ["a"],
        "max_tokens": 5,
    },
}
ODD = st.sampled_from(
    [None, True, False, 0, -1, 1.5, 10**30, "", "x", "type", [], [None], [[]], ["x"], {}, {"type": 1}]
)


def places(value, path=()):
    """Every place in a body, as the keys that lead to it."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(body, path, value):
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=150)
@given(st.data())
def test_a_body_with_anything_anywhere_is_read_or_refused(path, data):
    body = SHARED | BODIES[path]
    where = data.draw(st.sampled_from([place for place in places(body) if place]))
    body = replaced(body, where, data.draw(ODD))
    try:
        request = DIALECTS[path.removeprefix("/v1/")].read(body, ResponseLookup())
    except ApiError as api_error:
        refused = api_error
    else:
        assert request.messages or request.prompts
        return
    assert refused.status == 400
    assert refused.message
