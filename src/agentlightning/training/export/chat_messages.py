"""Recorded messages (OpenTelemetry: `role`, `parts`) as those of OpenAI's chat completions. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

Message = dict[str, Any]


def chat_messages(recorded: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages, in order. Thoughts are left out, as they are not part of what a model is given again.

    >>> chat_messages([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    [{'role': 'user', 'content': 'hi'}]
    """
    return [message for each in recorded for message in _messages(each)]


def _messages(recorded: Mapping[str, Any]) -> list[Message]:
    found: Any = recorded.get("parts")
    parts = [cast("dict[str, Any]", each) for each in found or () if isinstance(each, dict)]
    results = [
        {"role": "tool", "tool_call_id": each.get("id"), "content": _text(each.get("response", each.get("result")))}
        for each in parts
        if each.get("type") == "tool_call_response"
    ]
    if results:
        return results
    text = "".join(_text(each.get("content")) for each in parts if each.get("type") == "text")
    message: Message = {"role": str(recorded.get("role") or "user"), "content": text}
    calls = [
        {
            "id": each.get("id"),
            "type": "function",
            "function": {"name": each.get("name"), "arguments": _text(each.get("arguments"))},
        }
        for each in parts
        if each.get("type") == "tool_call"
    ]
    return [{**message, "tool_calls": calls} if calls else message]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
