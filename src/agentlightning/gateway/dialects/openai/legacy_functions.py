"""OpenAI's function calling from before tools: `functions`, `function_call`, and messages with the role `function`.

Requests are converted to tools, and replies back. Calls had no id at that time, so their name takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentlightning.gateway.dialects.validation import optional, require_type
from agentlightning.gateway.errors import bad_request

Json = dict[str, Any]


def call_id(name: str) -> str:
    """The id for a call without one."""
    return f"call_{name}"


def with_tools(data: Json) -> tuple[Json, bool]:
    """(the request in terms of tools, whether it offers functions). Raises ApiError 400 for an invalid one."""
    functions, choice = optional(data, "functions", list), data.get("function_call")
    found = {name: value for name, value in data.items() if name not in ("functions", "function_call")}
    if isinstance(messages := data.get("messages"), list):
        found["messages"] = [_message(message) for message in cast("list[Any]", messages)]
    if not functions:
        return found, False
    if data.get("tools"):
        raise bad_request("functions", "functions and tools are both set; give tools alone")
    found["tools"] = [{"type": "function", "function": function} for function in functions]
    if isinstance(choice, dict):
        name = require_type("function_call.name", cast("Json", choice).get("name"), str)
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif choice is not None:
        found["tool_choice"] = choice
    return found | {"parallel_tool_calls": False}, True


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    known = cast("Json", message)
    if known.get("role") == "function":
        name = require_type("messages.name", known.get("name"), str)
        return {"role": "tool", "tool_call_id": call_id(name), "content": known.get("content")}
    called = known.get("function_call")
    if not isinstance(called, dict):
        return known
    call = {"id": call_id(str(cast("Json", called).get("name"))), "type": "function", "function": called}
    return {key: value for key, value in known.items() if key != "function_call"} | {"tool_calls": [call]}


def with_function_call(message: Mapping[str, Any]) -> Json:
    """A message or a delta with its first tool call as `function_call`."""
    calls = cast("Sequence[Json]", message.get("tool_calls") or ())
    found = {key: value for key, value in message.items() if key != "tool_calls"}
    return found | {"function_call": calls[0]["function"]} if calls else found
