"""Recorded messages in OpenTelemetry's form, as messages of the OpenAI chat API, which chat templates render. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agentlightning.chat.base import Message


def parsed(text: object) -> list[Any]:
    """A recorded list: JSON text, or a list. Empty for anything else."""
    if isinstance(text, str):
        try:
            text = json.loads(text)
        except ValueError:
            return []
    return cast("list[Any]", text) if isinstance(text, list) else []


def chat_messages(recorded: Sequence[Any]) -> list[Message]:
    """Messages `{"role": ..., "parts": [...]}` as `{"role": ..., "content": ...}`; others stay as they are."""
    found: list[Message] = []
    for each in recorded:
        if isinstance(each, dict):
            found += _messages(cast("dict[str, Any]", each))
    return found


def _messages(given: Mapping[str, Any]) -> Iterator[Message]:
    parts = given.get("parts")
    role = str(given.get("role", "user"))
    if not isinstance(parts, list):
        if given.get("content") is not None or given.get("tool_calls"):
            yield {name: value for name, value in given.items() if name != "finish_reason"}
        return
    own = [cast("dict[str, Any]", part) for part in parts if isinstance(part, dict)]
    results = [part for part in own if part.get("type") == "tool_call_response"]
    for part in results:
        response = part.get("response", part.get("result"))
        yield {"role": "tool", "tool_call_id": str(part.get("id") or "call"), "content": _text(response)}
    rest = [part for part in own if part not in results]
    if rest or not results:
        yield _message(role, rest)


def _message(role: str, parts: Sequence[Mapping[str, Any]]) -> Message:
    text = "".join(_text(part.get("content")) for part in parts if part.get("type", "text") == "text")
    calls = [_call(part) for part in parts if part.get("type") == "tool_call"]
    thought = "".join(_text(part.get("content")) for part in parts if part.get("type") == "reasoning")
    message: Message = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = calls
    if thought:
        message["reasoning_content"] = thought
    return message


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    function = {"name": str(part.get("name")), "arguments": text}
    return {"id": str(part.get("id") or "call"), "type": "function", "function": function}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
