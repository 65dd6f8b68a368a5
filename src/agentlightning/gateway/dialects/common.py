"""What OpenAI's dialects share: function tools, tool choice, response formats, errors and chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from agentlightning.gateway.dialects.fields import kind_of, optional, require_type, shorten
from agentlightning.gateway.dialects.output_constraint import (
    JSON_OBJECT,
    Constraint,
    OutputSchema,
    json_schema,
    strict_arguments,
)
from agentlightning.gateway.dialects.sse import DONE, encode_event
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import dumps, loads

Tools = list[dict[str, Any]]
"""Function tools, as chat completions has them."""


def function_tools(
    data: Mapping[str, Any], function_of: Callable[[dict[str, Any]], Any]
) -> tuple[Tools | None, tuple[str, ...]]:
    """(function tools, names of the ignored kinds of tools, which only a hosted service offers).

    `function_of` returns the function of a tool in the request.
    """
    tools: Tools = []
    dropped: list[str] = []
    for index, tool in enumerate(optional(data, "tools", list) or ()):
        kind = kind_of(tool)
        if kind is None:
            raise bad_request("tools", f"tools[{index}] must be an object with the type function")
        if kind != "function":
            dropped.append(f"tools.{kind}")
            continue
        function = function_of(tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request("tools", f"tools[{index}] must have a function with a name")
        tools.append(
            {**tool, "function": function} if "function" in tool else {"type": "function", "function": function}
        )
    return tools or None, tuple(dropped)


def read_constraint(
    tools: Tools | None,
    choice: tuple[bool, frozenset[str] | None],
    parallel: bool | None,
    content: OutputSchema | None,
    content_field: str,
) -> Constraint:
    """The constraint on an answer. `choice`: whether a tool call is required, and of which tools."""
    requires_tool_call, names = choice
    known = {tool["function"]["name"] for tool in tools or ()}
    if requires_tool_call and not tools:
        raise bad_request("tool_choice", "tool_choice asks for a tool call, and the request offers no function tools")
    if missing := sorted((names or frozenset()) - known):
        raise bad_request(
            "tool_choice", f"tool_choice names {', '.join(missing)}, which is not among the request's tools"
        )
    return Constraint(
        requires_tool_call=requires_tool_call,
        names=names,
        single_tool_call=parallel is False and bool(tools),
        arguments=strict_arguments(tools),
        content=content,
        content_field=content_field,
    )


def tool_choice(value: Any, nested: bool) -> tuple[bool, frozenset[str] | None]:
    """(whether a tool call is required, the only tools that may be called). `nested`: chat completions nests the
    details of a choice below the name of its kind, responses does not."""
    if value in (None, "auto", "none"):
        return False, None
    if value == "required":
        return True, None
    kind = kind_of(value)
    details = value.get(kind) if nested and kind else value
    if (
        (kind == "function" or (kind == "custom" and not nested))
        and isinstance(details, dict)
        and isinstance(details.get("name"), str)
    ):
        return True, frozenset({details["name"]})
    if kind == "allowed_tools" and isinstance(details, dict) and details.get("mode") in ("auto", "required"):
        names = [_allowed_name(tool) for tool in require_type("tool_choice.tools", details.get("tools"), list)]
        return details["mode"] == "required", frozenset(names)
    raise bad_request(
        "tool_choice", f"tool_choice={shorten(value)} cannot be honoured here; use auto, none, required or a function"
    )


def _allowed_name(tool: Any) -> str:
    details = tool.get("function", tool) if isinstance(tool, dict) else None
    name = details.get("name") if isinstance(details, dict) else None
    return require_type("tool_choice.tools.name", name, str)


def text_format(where: str, value: Any, nested: bool) -> OutputSchema | None:
    """The schema that a `response_format` or `text.format` asks for; None for plain text. `nested` as in
    `tool_choice`."""
    kind = kind_of(value)
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    details = value.get("json_schema") if kind == "json_schema" and nested else value
    if kind == "json_schema" and isinstance(details, dict):
        return json_schema(f"{where}.schema", details.get("schema"))
    name = where.partition(".")[0]
    raise bad_request(
        name, f"{where}={shorten(value)} cannot be honoured here; use the type text, json_object or json_schema"
    )


VLLM_FORMAT_FIELDS = ("structured_outputs", "guided_json")
"""vLLM's fields for the format of the content."""


def content_format(data: Mapping[str, Any]) -> tuple[OutputSchema | None, str]:
    """(schema of the content, the field that sets it): `response_format`, or what vLLM's clients send instead. Raises
    ApiError 400 for formats that are not supported."""
    guided, outputs = data.get("guided_json"), optional(data, "structured_outputs", dict) or {}
    details = {name: value for name, value in outputs.items() if value is not None and value is not False}
    if other := sorted(details.keys() - {"json", "json_object"}):
        raise bad_request("structured_outputs", f"structured_outputs.{other[0]} cannot be honoured here; use json")
    if guided is None and not details:
        return text_format("response_format", data.get("response_format"), nested=True), "response_format"
    name, schema = ("guided_json", guided) if guided is not None else ("structured_outputs", details.get("json"))
    if schema is None:
        return JSON_OBJECT, name
    return json_schema(f"{name}.json", _parsed(schema)), name


def _parsed(schema: Any) -> Any:
    """The schema, which may come as JSON text."""
    try:
        return loads(schema) if isinstance(schema, str) else schema
    except orjson.JSONDecodeError:
        return schema


# -- writing ---------------------------------------------------------------------------------------------------------


def error_body(api_error: ApiError) -> bytes:
    """The body of an error reply."""
    return dumps({"error": api_error.error_object()})


def error_event(api_error: ApiError) -> bytes:
    """An error in the middle of a stream, on which the official SDK raises APIError."""
    return encode_event({"error": api_error.error_object()})


def include_usage(data: Mapping[str, Any]) -> bool:
    """Whether a stream ends with an extra chunk that has the usage and no choice. Raises ApiError 400 for an invalid
    option."""
    wanted = (optional(data, "stream_options", dict) or {}).get("include_usage")
    return bool(require_type("stream_options.include_usage", wanted, bool)) if wanted is not None else False


def end_of_stream(chunks: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], *, apart: bool) -> bytes:
    """The last chunks of a stream. The usage gets a chunk of its own (`apart`) only if that was asked for, since a
    plain loop over `chunk.choices[0]` fails on it. Otherwise it is part of the last chunk with a choice, since some
    frameworks count tokens by it."""
    *others, last = chunks
    final = [last, {**last, "choices": [], "usage": usage}] if apart else [{**last, "usage": usage}]
    return b"".join(map(encode_event, [*others, *final])) + DONE


def usage(prompt_tokens: int, sampled: int) -> dict[str, int]:
    """The usage: tokens of the prompts, each counted once, and of all answers."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
