"""Reads what agent frameworks hand over as messages of OpenTelemetry: `{"role": ..., "parts": [...]}`.

Knows the shapes of LangChain, OpenAI (chat completions and responses), Anthropic, AutoGen and CrewAI by their fields,
so that no framework is imported. What has none of these shapes becomes text. Pure, and nothing raises.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Final, cast

import orjson
from pydantic import BaseModel

from agentlightning.tracing.genai_messages import MAX_DEPTH, Message, parse_json
from agentlightning.util.json_values import dumps

ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "model": "assistant",
    "developer": "system",
    "function": "tool",
    "HumanMessageChunk": "user",
    "AIMessageChunk": "assistant",
    "SystemMessageChunk": "system",
    "ToolMessageChunk": "tool",
    "UserMessage": "user",
    "AssistantMessage": "assistant",
    "SystemMessage": "system",
    "FunctionExecutionResultMessage": "tool",
    "ThoughtEvent": "assistant",
}
"""Names of roles and kinds of messages -> the roles of OpenTelemetry."""
KNOWN_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
SPEAKERS: Final = ("user", "assistant", "system")
PLAIN_FIELDS: Final = frozenset({"role", "content"})
RESULTS: Final = ("raw", "final_output", "output_text", "text", "content")
"""Fields of a framework's result in which its text stands."""


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What a model has answered, and what the framework says of the call."""

    messages: list[Message]
    model: str | None = None
    response_id: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()


def read_messages(value: Any, role: str) -> list[Message]:
    """The messages of anything that a prompt may be; `role` is that of bare text."""
    if isinstance(value, str):
        return [text_message(value, role)]
    try:
        return _messages(value, role, 0) or [text_message(_fallback(value), role)]
    except Exception:  # noqa: BLE001  a property of an object of another library may raise anything
        return [text_message(_fallback(value), role)]


def read_result(value: Any) -> ModelResult:
    """The answer in anything that a framework returns for a model call."""
    if isinstance(value, str):
        return ModelResult([text_message(value, "assistant")])
    try:
        return _result(value)
    except Exception:  # noqa: BLE001  see above
        return ModelResult([text_message(_fallback(value), "assistant")])


def split_conversation(value: Any) -> tuple[list[Message], Any] | None:
    """(what came before, the last message) of a result that is a whole conversation, as LangGraph's state and AutoGen's
    TaskResult are; None for any other."""
    items = field(value, "messages")
    if not isinstance(items, list | tuple) or not items:
        return None
    conversation = cast("Sequence[Any]", items)
    return read_messages(list(conversation[:-1]), "user") if len(conversation) > 1 else [], conversation[-1]


def is_message(value: Any) -> bool:
    """Whether a value looks like a message of a framework, or like a list of them."""
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return bool(items) and all(is_message(item) for item in items)
    if isinstance(value, Mapping):
        return field(value, "role") is not None
    return not isinstance(value, str | bytes) and any(
        field(value, name) is not None for name in ("content", "parts", "output", "choices", "raw")
    )


def text_message(text: str, role: str) -> Message:
    return {"role": role, "parts": [_text(text)]}


def message_text(messages: Sequence[Message]) -> str:
    """The text of messages; their JSON where they hold none."""
    texts = [part["content"] for message in messages for part in message["parts"] if part.get("type") == "text"]
    return "\n".join(texts) if texts else json_text(messages)


def messages_json(messages: Sequence[Message]) -> str:
    """Messages as an attribute holds them."""
    try:
        return dumps(messages).decode()
    except orjson.JSONEncodeError:  # half of an emoji, say
        return json_text(messages)


def read_tool_call(value: Any) -> tuple[str, Any, str | None] | None:
    """(name, arguments, id) of a framework's tool call; None for what is none."""
    try:
        call = _call(value)
    except Exception:  # noqa: BLE001  see above
        return None
    name = call["name"]
    return (name, call["arguments"], call["id"]) if isinstance(name, str) and name else None


def field(value: Any, name: str) -> Any:
    """A field of an object or an entry of a mapping; None where it is missing, or a method."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).get(name)
    found = getattr(value, name, None)
    return None if callable(found) else found


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(value: Any, role: str, depth: int) -> list[Message]:
    if value is None or depth > MAX_DEPTH:
        return []
    if isinstance(value, str):
        return [text_message(value, role)]
    if isinstance(value, list | tuple):
        pair = _role_and_text(cast("Sequence[Any]", value))
        return pair or [each for item in value for each in _messages(item, role, depth + 1)]
    convert = getattr(value, "to_messages", None)  # LangChain's prompt values
    if callable(convert):
        return _messages(convert(), role, depth + 1)
    inner = field(value, "messages")
    if isinstance(inner, list | tuple):
        system = field(value, "system")  # Anthropic keeps it beside the messages
        return [*_messages(system, "system", depth + 1), *_messages(inner, role, depth + 1)]
    return _one(value, role)


def _role_and_text(value: Sequence[Any]) -> list[Message]:
    """LangChain's ("human", "text")."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(item, str) for item in value):
        name = ROLES.get(value[0], value[0])
        if name in KNOWN_ROLES:
            return [text_message(value[1], name)]
    return []


def _one(value: Any, default: str) -> list[Message]:
    if type(value) is dict and value.keys() == PLAIN_FIELDS:  # most messages there are
        role, text = value["role"], value["content"]
        if role in SPEAKERS and isinstance(text, str) and text:
            return [text_message(text, role)]
    kind = field(value, "type")
    if kind in ("function_call", "function_call_output", "reasoning") and field(value, "role") is None:
        return [_response_item(value, kind)]
    role = _role(value, default)
    content = field(value, "content")
    if field(value, "parts") is not None and content is None:
        content = field(value, "parts")
    if role == "tool" and not isinstance(content, list):
        call_id = field(value, "tool_call_id") or field(value, "id")
        return [{"role": role, "parts": [tool_response_part(call_id, content)]}]
    parts = _reasoning(value) + _content(content) + _calls(value)
    if not parts:
        parts = [_text(text)] if (text := _result_text(value)) else []
    if not parts:
        return []
    message: Message = {"role": "tool" if _all_responses(parts) else role, "parts": parts}
    name = field(value, "name") or field(value, "source")
    if isinstance(name, str) and role != "tool":
        message["name"] = name
    return [message]


def _role(value: Any, default: str) -> str:
    for name in (field(value, "role"), field(value, "type")):
        if isinstance(name, str) and (role := ROLES.get(name, name)) in KNOWN_ROLES:
            return role
    source = field(value, "source")
    if isinstance(source, str) and field(value, "type") is not None:  # AutoGen's chat messages
        return "user" if source == "user" else "assistant"
    return default


def _reasoning(value: Any) -> list[Message]:
    found = (field(value, name) for name in ("reasoning_content", "reasoning", "thought"))
    return [{"type": "reasoning", "content": text} for text in found if isinstance(text, str) and text]


def _content(value: Any) -> list[Message]:
    if isinstance(value, str):
        return [_text(value)] if value else []
    if isinstance(value, list | tuple):
        return [part for item in cast("Sequence[Any]", value) for part in _part(item)]
    return [] if value is None else _part(value)


def _part(item: Any) -> list[Message]:
    if isinstance(item, str):
        return [_text(item)] if item else []
    kind = field(item, "type")
    if kind == "tool_use":  # Anthropic
        return [tool_call_part(field(item, "id"), field(item, "name"), field(item, "input"))]
    if kind == "tool_result":
        return [tool_response_part(field(item, "tool_use_id"), _plain(field(item, "content")))]
    if kind in ("thinking", "reasoning"):
        text = field(item, "thinking") or field(item, "content") or field(item, "text")
        return [{"type": "reasoning", "content": text}] if isinstance(text, str) else []
    if field(item, "call_id") is not None and field(item, "content") is not None:  # AutoGen
        return [tool_response_part(field(item, "call_id"), field(item, "content"))]
    if field(item, "arguments") is not None and field(item, "name") is not None:
        return [_call(item)]
    text = field(item, "text") or field(item, "content") or field(item, "refusal")
    if isinstance(text, str):
        return [_text(text)]
    image = field(item, "image_url")
    url = field(image, "url") if isinstance(image, Mapping) else image
    if isinstance(url, str):
        return [{"type": "uri", "modality": "image", "uri": url}]
    return [_plain(item)] if isinstance(item, Mapping) else [_text(_fallback(item))]


def _calls(value: Any) -> list[Message]:
    calls = field(value, "tool_calls")
    found = [_call(call) for call in cast("Sequence[Any]", calls)] if isinstance(calls, list | tuple) else []
    single = field(value, "function_call")
    return [*found, _call(single)] if single is not None and not found else found


def _call(value: Any) -> Message:
    inner = field(value, "function") or value
    arguments = next((a for n in ("arguments", "args", "input") if (a := field(inner, n)) is not None), None)
    return tool_call_part(field(value, "call_id") or field(value, "id"), field(inner, "name"), parse_json(arguments))


def _response_item(value: Any, kind: str) -> Message:
    """An item of OpenAI's responses that is no message."""
    if kind == "function_call":
        return {"role": "assistant", "parts": [_call(value)]}
    if kind == "function_call_output":
        return {"role": "tool", "parts": [tool_response_part(field(value, "call_id"), _plain(field(value, "output")))]}
    summary = cast("Sequence[Any]", field(value, "summary") or field(value, "content") or ())
    text = "\n".join(str(field(each, "text") or "") for each in summary)
    return {"role": "assistant", "parts": [{"type": "reasoning", "content": text}]}


# -- results -----------------------------------------------------------------------------------------------------------


def _result(value: Any) -> ModelResult:
    first = _first_generation(value)
    source = value if first is None else first
    choices = field(source, "choices")
    output = field(source, "output")
    if isinstance(choices, list | tuple) and choices:  # OpenAI chat completions, and completions
        found = [each for choice in choices for each in _choice(choice)]
    elif isinstance(output, list | tuple):  # OpenAI responses
        found = _merged(_messages(output, "assistant", 0))
    else:
        inner = field(source, "chat_message")  # AutoGen's Response
        found = _messages(source if inner is None else inner, "assistant", 0)
    reasons = tuple(message["finish_reason"] for message in found if "finish_reason" in message)
    said = field(source, "response_metadata")
    usage = field(source, "usage") or field(source, "usage_metadata") or field(source, "models_usage")
    model = field(source, "model") or field(said, "model_name") or field(said, "model")
    reason = field(source, "stop_reason") or field(source, "finish_reason") or field(said, "finish_reason")
    response_id = field(source, "id")
    return ModelResult(
        found or [text_message(_fallback(value), "assistant")],
        model if isinstance(model, str) else None,
        response_id if isinstance(response_id, str) else None,
        _count(usage, "input_tokens", "prompt_tokens"),
        _count(usage, "output_tokens", "completion_tokens"),
        reasons or ((reason,) if isinstance(reason, str) else ()),
    )


def _first_generation(value: Any) -> Any:
    """The message of LangChain's LLMResult and ChatResult."""
    rows = field(value, "generations")
    while isinstance(rows, list | tuple) and rows:
        rows = cast("Sequence[Any]", rows)[0]
    return None if rows is None or isinstance(rows, list | tuple) else field(rows, "message") or rows


def _choice(choice: Any) -> list[Message]:
    message = field(choice, "message")
    found = _messages(choice if message is None else message, "assistant", 0)
    reason = field(choice, "finish_reason")
    return [{**each, "finish_reason": reason} if isinstance(reason, str) else each for each in found]


def _merged(messages: list[Message]) -> list[Message]:
    """The items of one response as one message."""
    if len(messages) < 2 or any(message["role"] != "assistant" for message in messages):
        return messages
    return [{"role": "assistant", "parts": [part for message in messages for part in message["parts"]]}]


def _count(usage: Any, *names: str) -> int | None:
    found = (field(usage, name) for name in names)
    return next((count for count in found if isinstance(count, int)), None)


# -- parts -------------------------------------------------------------------------------------------------------------


def _text(text: str) -> Message:
    return {"type": "text", "content": text}


def tool_call_part(call_id: Any, name: Any, arguments: Any) -> Message:
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": _plain(arguments)}


def tool_response_part(call_id: Any, response: Any) -> Message:
    return {"type": "tool_call_response", "id": call_id, "response": _plain(response)}


def _all_responses(parts: Sequence[Message]) -> bool:
    return all(part.get("type") == "tool_call_response" for part in parts)


def _result_text(value: Any) -> str:
    """The text of a result such as CrewAI's, or of a completion."""
    return next((text for name in RESULTS if isinstance(text := field(value, name), str)), "")


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return parse_json(json_text(value))


def _fallback(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


# -- values as text ----------------------------------------------------------------------------------------------------

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 1000


def json_text(value: Any) -> str:
    """The value as JSON text; values without a JSON form become their shortened `repr`. Never fails."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_json_or_repr)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_short.repr(value))


def _json_or_repr(value: Any) -> Any:
    try:
        return to_jsonable(value)
    except (TypeError, ValueError):
        return _short.repr(value)


def to_jsonable(value: Any) -> Any:
    """`default` of a JSON encoder: pydantic models and dataclasses. Raises TypeError for other values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__qualname__} has no JSON form")
