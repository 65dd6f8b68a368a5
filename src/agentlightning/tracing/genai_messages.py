"""Converts messages as instrumentation libraries record them to OpenTelemetry's: `{"role": ..., "parts": [...]}`.

Reads OpenAI's format and its variants, as objects or flattened into indexed attributes. Pure; malformed values are
dropped, and nothing raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import orjson

from agentlightning.util.json_values import loads

Message = dict[str, Any]

WRAPPERS: Final = ("message", "prompt", "completion", "message_content", "tool")
"""Fields that wrap the object itself."""
CONTENT: Final = ("content", "contents", "text", "body")
REASONING: Final = ("reasoning", "reasoning_content", "thinking")
LISTS: Final = ("messages", "choices", "generations")
WHOLE: Final = frozenset({"role", "content", "parts", "tool_calls", "message", *LISTS})
"""An object with one of these fields is a message, or contains messages."""
MAX_DEPTH: Final = 32


def unflatten(pairs: Iterable[tuple[str, Any]]) -> list[Any]:
    """Nest flattened pairs such as ("0.role", ...) and ("0.calls.0.name", ...) into lists and objects."""
    root: dict[str, Any] = {}
    for path, value in pairs:
        place = root
        *steps, last = path.split(".")
        for step in steps[:MAX_DEPTH]:
            inner = place.setdefault(step, {})
            if not isinstance(inner, dict):  # Both `a` and `a.b` are set: `a` stays.
                break
            place = cast("dict[str, Any]", inner)
        else:
            place.setdefault(last, value)
    listed = _listed(root)
    return listed if isinstance(listed, list) else []


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _listed(item) for key, item in cast("dict[str, Any]", value).items()}
    if items and all(key.isascii() and key.isdecimal() and len(key) < 10 for key in items):
        return [items[key] for key in sorted(items, key=int)]
    return items


def messages(value: Any, role: str, depth: int = 0) -> list[Message]:
    """The messages of a list, of an object that contains one, of its JSON, or of plain text. `role` is the default."""
    value = parse_json(value)
    if isinstance(value, str):
        return [{"role": role, "parts": [_text(value)]}] if value else []
    if isinstance(value, dict):
        inner = next((value[name] for name in LISTS if isinstance(value.get(name), list)), None)
        return messages(inner, role, depth + 1) if inner is not None else _one(cast("Message", value), role)
    items = cast("list[Any]", value) if isinstance(value, list) and depth < MAX_DEPTH else []
    found: list[Message] = []
    for item in items:
        if isinstance(item, dict):
            found += _one(cast("Message", item), role)
        elif isinstance(item, list | str):
            found += messages(item, role, depth + 1)
    return found


def _one(given: Message, role: str) -> list[Message]:
    outer, given = given, _unwrapped(given)
    found = given.get("role")
    role = found if isinstance(found, str) and found else role
    message: Message = {"role": role, "parts": _parts(given, role)}
    reason = given.get("finish_reason", outer.get("finish_reason"))
    if isinstance(given.get("name"), str) and role != "tool":
        message["name"] = given["name"]
    if isinstance(reason, str) and reason:
        # OpenTelemetry's finish reason of a message is singular.
        message["finish_reason"] = "tool_call" if reason == "tool_calls" else reason
    return [message] if message["parts"] or isinstance(found, str) else []


def _parts(given: Message, role: str) -> list[Message]:
    if isinstance(given.get("parts"), list):
        return [part for part in given["parts"] if isinstance(part, dict)]
    if role == "tool":
        response = next((given[name] for name in CONTENT if given.get(name) is not None), None)
        return [{"type": "tool_call_response", "id": given.get("tool_call_id", given.get("id")), "response": response}]
    parts = [{"type": "reasoning", "content": given[name]} for name in REASONING if isinstance(given.get(name), str)]
    for name in CONTENT:
        parts += _content(given.get(name))
    return parts + _calls(given)


def _content(value: Any) -> list[Message]:
    if isinstance(value, str):
        inner = parse_json(value) if value.startswith("[{") else value
        return _content(inner) if isinstance(inner, list) else [_text(value)] if value else []
    items = cast("list[Any]", value) if isinstance(value, list) else [value] if isinstance(value, dict) else []
    return [part for item in items for part in _part(item)]


def _part(item: Any) -> list[Message]:
    if isinstance(item, str):
        return [_text(item)] if item else []
    if not isinstance(item, dict):
        return []
    given = _unwrapped(cast("Message", item))
    text = given.get("text", given.get("content"))
    if isinstance(text, str) and given.get("type", "text") in ("text", "input_text", "output_text"):
        return [_text(text)] if text else []
    if url := _image(given):
        return [{"type": "uri", "modality": "image", "uri": url}]
    return [given]


def _image(given: Message) -> str | None:
    """The address of an image, which may be nested."""
    value: Any = given.get("image_url", given.get("image"))
    for _ in range(3):
        if not isinstance(value, dict):
            break
        value = cast("Message", value).get("url", cast("Message", value).get("image"))
    return value if isinstance(value, str) else None


def _calls(given: Message) -> list[Message]:
    calls: Any = parse_json(given.get("tool_calls"))
    items = cast("list[Any]", calls) if isinstance(calls, list) else []
    found = [_call(cast("Message", item)) for item in items if isinstance(item, dict)]
    single = given.get("function_call")
    if isinstance(single, dict):
        found.append(_call(cast("Message", single)))
    elif isinstance(given.get("function_call_name"), str):
        arguments = parse_json(given.get("function_call_arguments_json"))
        found.append({"type": "tool_call", "id": None, "name": given["function_call_name"], "arguments": arguments})
    return found


def _call(given: Message) -> Message:
    outer = given["tool_call"] if isinstance(given.get("tool_call"), dict) else given
    inner = outer["function"] if isinstance(outer.get("function"), dict) else outer
    return {
        "type": "tool_call",
        "id": outer.get("id"),
        "name": inner.get("name"),
        "arguments": parse_json(inner.get("arguments")),
    }


def tools(items: Iterable[Any]) -> list[Any]:
    """Tool definitions: JSON schemas unchanged, flattened ones nested again."""
    found: list[Any] = []
    for item in items:
        if not isinstance(item, dict):
            continue
        given = _unwrapped(cast("Message", item))
        schema = parse_json(given.get("json_schema"))
        if isinstance(schema, dict):
            found.append(schema)
        elif given.get("name"):
            given = {name: parse_json(value) if name == "parameters" else value for name, value in given.items()}
            found.append({"type": "function", **given})
    return found


def from_event(body: Any, attributes: Mapping[str, Any], role: str) -> list[Message]:
    """The messages of a span event, whose `body` is the content or the whole message."""
    body = parse_json(body)
    if isinstance(body, list) or (isinstance(body, dict) and not WHOLE.isdisjoint(cast("Message", body))):
        found = messages(body, role)
        reason = attributes.get("finish_reason")
        if found and isinstance(reason, str):
            found[-1].setdefault("finish_reason", "tool_call" if reason == "tool_calls" else reason)
        return found
    given = {"role": role, **attributes, "content": body}
    return _one({name: value for name, value in given.items() if value is not None}, role)


def _unwrapped(given: Message) -> Message:
    for name in WRAPPERS:
        inner = given.get(name)
        if isinstance(inner, dict):
            return cast("Message", inner)
    return given


def _text(text: str) -> Message:
    return {"type": "text", "content": text}


def parse_json(value: Any) -> Any:
    """Text parsed as JSON if it is an object or a list; any other value unchanged."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return loads(value)
    except orjson.JSONDecodeError:
        return value
