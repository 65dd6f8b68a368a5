"""Reads messages and tools, of requests and of recorded data, into the one form that chat formats take. Pure.

Content is text: a list of text parts is joined, null is empty. Arguments of calls are JSON text, whether they came as
text or as an object. A thought is in `reasoning_content`, whether it came so, under another name or as a part of the
content. A call in the form from before tools (`function_call`) becomes a tool call. Nothing is dropped: what cannot be
read raises a DatasetError that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from agentlightning.chat.base import Message
from agentlightning.errors import DatasetError

ReadContent = Callable[[str, Any], Any]
"""Reads the content at a place, such as `messages[0].content`, into what a message holds."""

TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a text part -> the field with its text."""
_THOUGHT_FIELDS = {"thinking": "thinking", "reasoning": "text"}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def read_conversation(messages: Any, tools: Any = None, where: str = "") -> tuple[list[Message], list[Message] | None]:
    """Recorded messages and the tools they were offered. `where` begins the names of places in errors."""
    turns = cast("list[Any]", messages) if isinstance(messages, list | tuple) else []
    return [read_message(f"{where}messages[{at}]", each) for at, each in enumerate(turns)], read_tools(
        f"{where}tools", tools
    )


def read_text(where: str, content: Any) -> str:
    """Content that is text, or a list of text parts."""
    return "".join(read_parts(where, content, TEXT_FIELDS, str))


def read_parts(
    where: str,
    content: Any,
    text_fields: Mapping[str, str],
    of_text: Callable[[str], Any],
    of_other: Callable[[Any], Sequence[Any] | None] | None = None,
) -> Iterator[Any]:
    """The parts of a message's content: those of text by `of_text`, others by `of_other`, which gives None for what it
    cannot read."""
    if content is None or isinstance(content, str):
        yield of_text(content or "")
        return
    if not isinstance(content, list | tuple):
        raise DatasetError(f"{where}={_shown(content)} must be a list of parts, or a text")
    for part in cast("Sequence[Any]", content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type", "text") if isinstance(part, dict) else None
        field = text_fields.get(kind) if isinstance(kind, str) else None
        text = part.get(field) if field is not None else None
        if isinstance(text, str):
            yield of_text(text)
        elif of_other is not None and (found := of_other(part)) is not None:
            yield from found
        else:
            raise DatasetError(
                f"{where} has a part of type {_shown(kind)}, which cannot be read here; this model reads text"
            )


def read_message(where: str, value: Any, content: ReadContent = read_text) -> Message:
    """One message in the form of OpenAI's chat API; fields that are not known stay as they are, unless null."""
    given = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    role = given.get("role")
    if not isinstance(role, str):
        raise DatasetError(f"{where} is {_shown(value)}; a message is an object with a role and content")
    parts, thoughts = _split_thoughts(given.get("content"))
    thoughts += [text for key in _THOUGHTS if isinstance(text := given.get(key), str)]
    read: Message = {key: each for key, each in given.items() if each is not None and key not in _THOUGHTS}
    read |= {"role": "system" if role == "developer" else role, "content": content(f"{where}.content", parts)}
    calls = given.get("tool_calls")
    if isinstance(called := read.pop("function_call", None), dict):
        calls = [{"id": f"call_{called.get('name')}", "function": called}]
    if role == "function":
        read |= {"role": "tool", "tool_call_id": f"call_{given.get('name')}"}
    read.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple):
            raise DatasetError(f"{where}.tool_calls={_shown(calls)} must be a list")
        read["tool_calls"] = [_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    for key in ("tool_call_id", "name"):
        if not isinstance(read.get(key, ""), str):
            raise DatasetError(f"{where}.{key}={_shown(read[key])} must be a str")
    if role == "assistant" and (thought := "".join(thoughts)):
        read["reasoning_content"] = thought
    return read


def _split_thoughts(content: Any) -> tuple[Any, list[str]]:
    """The parts of content that are no thoughts, and the thoughts."""
    if not isinstance(content, list):
        return content, []
    rest: list[Any] = []
    thoughts: list[str] = []
    for part in cast("list[Any]", content):
        field = _THOUGHT_FIELDS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if field and isinstance(text := part.get(field), str):
            thoughts.append(text)
        else:
            rest.append(part)
    return rest, thoughts


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DatasetError(f"{where} must be an object with function.name and function.arguments")
    called = {"name": function["name"], "arguments": arguments_text(function.get("arguments"), _SPACED)}
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise DatasetError(f"{where}.id={_shown(call_id)} must be a str")
    return {"id": call_id, "type": "function", "function": called}


_SPACED = (", ", ": ")


def arguments_text(value: Any, separators: tuple[str, str] = (",", ":")) -> str:
    """The arguments of a tool call as JSON text, whether they came as text or as an object."""
    if isinstance(value, str):
        return value or "{}"
    return "{}" if value is None else json.dumps(value, ensure_ascii=False, separators=separators)


def read_tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """Tools as a list of objects or as JSON text of one; a bare function is one of OpenAI's form."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DatasetError(f"{where} is {value[:80]!r}, which is not JSON: {error}") from error
    if not value:
        return None
    given = [_parsed(tool) for tool in cast("list[Any]", value)] if isinstance(value, list | tuple) else [None]
    if not all(isinstance(tool, dict) for tool in given):
        raise DatasetError(f"{where} is {_shown(value)}, not a list of tools in OpenAI's form")
    tools = cast("list[dict[str, Any]]", given)
    bare = [tool for tool in tools if "name" in tool and "parameters" in tool and "function" not in tool]
    return [{"type": "function", "function": tool} if tool in bare else tool for tool in tools]


def _parsed(tool: Any) -> Any:
    try:
        return json.loads(tool) if isinstance(tool, str) else tool
    except ValueError:
        return tool


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


_SPOKEN = ("text", "reasoning")


# -- recorded in spans -------------------------------------------------------------------------------------------------


def chat_messages(recorded: Sequence[Any], *, thoughts: bool = False) -> list[Message]:
    """OpenTelemetry's messages `{"role": ..., "parts": [...]}` as `{"role": ..., "content": ...}`; those that have no
    parts are read as they are. `thoughts`: with those of the model, which is not given them again,
    and a DatasetError for content that is no text.

    >>> chat_messages([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    [{'role': 'user', 'content': 'hi'}]
    """
    content = read_text if thoughts else _as_it_is
    found = [message for each in recorded if isinstance(each, dict) for message in _of_span(each, content)]
    return found if thoughts else [{key: each[key] for key in each if key != _THOUGHTS[0]} for each in found]


def _as_it_is(where: str, content: Any) -> Any:
    try:
        return read_text(where, content)
    except DatasetError:
        return content


def _of_span(given: Mapping[str, Any], content_of: ReadContent) -> Iterator[Message]:
    parts = given.get("parts")
    role = str(given.get("role", "user"))
    if not isinstance(parts, list):
        if given.get("content") is not None or given.get("tool_calls"):
            named = {name: value for name, value in given.items() if name != "finish_reason"}
            yield read_message("a recorded message", {"role": role, **named}, content_of)
        return
    own = [cast("dict[str, Any]", part) for part in parts if isinstance(part, dict)]
    results = [part for part in own if part.get("type") == "tool_call_response"]
    for part in results:
        response = part.get("response", part.get("result"))
        yield {"role": "tool", "tool_call_id": str(part.get("id") or "call"), "content": _text(response)}
    rest = [part for part in own if part not in results]
    if rest or not results:
        kinds = [(part, part.get("type", "text")) for part in rest]
        content = [{"type": kind, "text": _text(part.get("content"))} for part, kind in kinds if kind in _SPOKEN]
        called = [_recorded_call(part) for part, kind in kinds if kind == "tool_call"]
        yield read_message("a recorded message", {"role": role, "content": content, "tool_calls": called})


def _recorded_call(part: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": str(part.get("name")), "arguments": part.get("arguments")}
    return {"id": str(part.get("id") or "call"), "function": function}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
