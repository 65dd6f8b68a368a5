"""Reads messages of anybody as those of OpenTelemetry: `{"role": ..., "parts": [...]}`.

Parts of messages have the same few shapes wherever they come from (`message_part`). What agents hand over to `emit_*`
(`read_messages`, `read_result`) and what instrumentation libraries record (`recorded_messages`) has the same shapes:
those of LangChain, OpenAI (chat completions and responses), Anthropic, AutoGen and CrewAI, as objects or as JSON, known
by their fields, so that no framework is imported. Agents' values that have none of these shapes become text; recorded
ones are dropped. Pure, and nothing raises.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Final, cast

import orjson
from pydantic import BaseModel

from agentlightning.util.json_values import Json, dumps, loads

Message = Json

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
LISTS: Final = ("messages", "choices", "generations")
WRAPPERS: Final = ("message", "prompt", "completion", "message_content", "tool")
"""Fields that wrap the object itself."""
WHOLE: Final = frozenset({"role", "content", "parts", "tool_calls", "message", *LISTS})
"""An object with one of these fields is a message, or contains messages."""
CONTENT: Final = ("content", "contents", "text", "body")
REASONING: Final = ("reasoning", "reasoning_content", "thinking", "thought")
RESULTS: Final = ("raw", "final_output", "output_text")
"""Fields of a framework's result in which its text stands."""
BINARY: Final = ("blob", "uri", "file")
_THOUGHTS: Final = {"thinking", "reasoning"}
_CALLS: Final = {"tool_use", "function_call", "custom_tool_call"}
_RESULTS: Final = {
    "tool_result": ("tool_use_id", "content"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
}
"""Types of the results of tools -> the fields with the id of the call, and with the result."""
ITEMS: Final = ("reasoning", *_CALLS, *_RESULTS)
"""Items of OpenAI's responses that are no messages, and blocks of Anthropic's that never are."""
IMAGES: Final = ("image", "image_url", "input_image")
MAX_DEPTH: Final = 32


@dataclass(frozen=True, slots=True)
class ModelResult:
    """What a model has answered, and what the framework says of the call."""

    messages: list[Message]
    model: str | None = None
    response_id: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()


# -- of agents ---------------------------------------------------------------------------------------------------------


def read_messages(value: Any, role: str) -> list[Message]:
    """The messages of anything that a prompt may be; `role` is that of bare text."""
    with suppress(Exception):  # a property of an object of another library may raise anything
        if found := _messages(value, role):
            return found
    return [text_message(value if isinstance(value, str) else json_text(value), role)]


def read_result(value: Any) -> ModelResult:
    """The answer in anything that a framework returns for a model call."""
    if not isinstance(value, str):
        with suppress(Exception):  # see above
            return _result(value)
    return ModelResult(read_messages(value, "assistant"))


def _result(value: Any) -> ModelResult:
    source = _first_generation(value)
    choices, output, inner = (field(source, name) for name in ("choices", "output", "chat_message"))
    if isinstance(output, list | tuple) and not choices:  # OpenAI responses
        found = _merged(_messages(output, "assistant"))
    else:  # AutoGen's Response wraps its message
        found = _messages(source if inner is None else inner, "assistant")
    said = field(source, "response_metadata")
    usage = _first(source, "usage", "usage_metadata", "models_usage")
    model = field(source, "model") or _first(said, "model_name", "model")
    reason = _first(source, "stop_reason", "finish_reason") or field(said, "finish_reason")
    reasons = [field(each, "finish_reason") for each in _items(choices)] or [reason]
    return ModelResult(
        found or read_messages(json_text(value), "assistant"),
        _text_or_none(model),
        _text_or_none(field(source, "id")),
        _count(usage, "input_tokens", "prompt_tokens"),
        _count(usage, "output_tokens", "completion_tokens"),
        tuple(each for each in reasons if isinstance(each, str)),
    )


def _first_generation(value: Any) -> Any:
    """The message of LangChain's LLMResult and ChatResult; any other value unchanged."""
    rows = field(value, "generations")
    while items := _items(rows):
        rows = items[0]
    return value if rows is None or isinstance(rows, list | tuple) else field(rows, "message") or rows


def _merged(messages: list[Message]) -> list[Message]:
    """The items of one response as one message."""
    if len(messages) < 2 or any(message["role"] != "assistant" for message in messages):
        return messages
    return [{"role": "assistant", "parts": [part for message in messages for part in message["parts"]]}]


def _count(usage: Any, *names: str) -> int | None:
    return next((count for name in names if isinstance(count := field(usage, name), int)), None)


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def split_conversation(value: Any) -> tuple[list[Message], Any] | None:
    """(what came before, the last message) of a result that is a whole conversation, as LangGraph's state and AutoGen's
    TaskResult are; None for any other."""
    conversation = _items(field(value, "messages"))
    if not conversation:
        return None
    return read_messages(conversation[:-1], "user") if len(conversation) > 1 else [], conversation[-1]


def is_message(value: Any) -> bool:
    """Whether a value looks like a message of a framework, or like a list of them."""
    if items := _items(value):
        return all(is_message(item) for item in items)
    if isinstance(value, Mapping):
        return field(value, "role") is not None
    return (
        not isinstance(value, str | bytes) and _first(value, "content", "parts", "output", "choices", "raw") is not None
    )


def read_tool_call(value: Any) -> tuple[str, Any, str | None] | None:
    """(name, arguments, id) of a framework's tool call; None for what is none."""
    with suppress(Exception):  # see above
        call = tool_call(value)
        if isinstance(call["name"], str) and call["name"]:
            return call["name"], plain(call["arguments"]), call["id"]
    return None


# -- of instrumentation libraries --------------------------------------------------------------------------------------


def recorded_messages(value: Any, role: str) -> list[Message]:
    """The messages of a list, of an object that contains one, of its JSON, or of plain text. `role` is the default."""
    return _messages(parse_json(value), role, recorded=True)


def event_messages(body: Any, attributes: Mapping[str, Any], role: str) -> list[Message]:
    """The messages of a span event, whose `body` is the content or the whole message."""
    body = parse_json(body)
    if isinstance(body, list) or (isinstance(body, dict) and not WHOLE.isdisjoint(cast("Message", body))):
        found = recorded_messages(body, role)
        reason = _finish_reason(attributes)
        return [*found[:-1], {**reason, **found[-1]}] if found else found
    given = {"role": role, **attributes, "content": body}
    return _one({name: value for name, value in given.items() if value is not None}, role, recorded=True)


def tools(items: Iterable[Any]) -> list[Any]:
    """Tool definitions: JSON schemas unchanged, flattened ones nested again."""
    found: list[Any] = []
    for item in items:
        given: Any = _unwrapped(item)
        schema = parse_json(field(given, "json_schema"))
        if isinstance(schema, dict):
            found.append(schema)
        elif isinstance(given, dict) and given.get("name"):
            own = cast("Message", given)
            found.append({"type": "function", **own})
            if "parameters" in own:
                found[-1]["parameters"] = parse_json(own["parameters"])
    return found


def unflatten(pairs: Iterable[tuple[str, Any]]) -> list[Any]:
    """Nest flattened pairs such as ("0.role", ...) and ("0.calls.0.name", ...) into lists and objects."""
    root: Json = {}
    for path, value in pairs:
        place = root
        *steps, last = path.split(".")
        for step in steps[:MAX_DEPTH]:
            inner = place.setdefault(step, {})
            if not isinstance(inner, dict):  # Both `a` and `a.b` are set: `a` stays.
                break
            place = cast(Json, inner)
        else:
            place.setdefault(last, value)
    listed = _listed(root)
    return listed if isinstance(listed, list) else []


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _listed(item) for key, item in cast(Json, value).items()}
    if items and all(key.isascii() and key.isdecimal() and len(key) < 10 for key in items):
        return [items[key] for key in sorted(items, key=int)]
    return items


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(value: Any, role: str, depth: int = 0, *, recorded: bool = False) -> list[Message]:
    if type(value) is dict and value.keys() == PLAIN_FIELDS:  # most messages there are
        own, text = value["role"], value["content"]
        if own in SPEAKERS and isinstance(text, str) and text and not (recorded and text.startswith("[{")):
            return [text_message(text, own)]
    if value is None or depth > MAX_DEPTH:
        return []
    if isinstance(value, str):
        return [text_message(value, role)] if value else []
    if isinstance(value, list | tuple):
        pair = _role_and_text(_items(value))
        return pair or [each for item in value for each in _messages(item, role, depth + 1, recorded=recorded)]
    convert = getattr(value, "to_messages", None)  # LangChain's prompt values
    inner = convert() if callable(convert) else _first(value, *LISTS)
    if isinstance(inner, list | tuple):
        # Anthropic keeps the system's message beside the others.
        before = _messages(field(value, "system"), "system", depth + 1, recorded=recorded)
        return before + _messages(inner, role, depth + 1, recorded=recorded)
    return _one(value, role, recorded)


def _role_and_text(value: Sequence[Any]) -> list[Message]:
    """LangChain's ("human", "text")."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(item, str) for item in value):
        name = ROLES.get(value[0], value[0])
        if name in KNOWN_ROLES:
            return [text_message(value[1], name)]
    return []


def _one(outer: Any, default: str, recorded: bool) -> list[Message]:
    value = _unwrapped(outer)
    own_role, kind = field(value, "role"), field(value, "type")
    if kind in ITEMS and own_role is None:
        return [_message("assistant", parts)] if (parts := _part(value)) else []
    role = _role(value, default)
    parts = _parts(value, role, recorded)
    if not parts and not own_role:
        return []
    parts = parts or ([] if recorded else [_text("")])
    message = _message(role, parts)
    name = _first(value, "name", "source")
    if isinstance(name, str) and role != "tool":
        message["name"] = name
    if recorded or value is not outer:
        message |= _finish_reason(value) or _finish_reason(outer)
    return [message]


def _message(role: str, parts: Sequence[Message]) -> Message:
    own = [{name: plain(value) for name, value in part.items()} for part in parts]
    return {"role": "tool" if parts and all(map(_is_response, parts)) else role, "parts": own}


def _unwrapped(value: Any) -> Any:
    for name in WRAPPERS:
        inner = field(value, name)
        if isinstance(inner, Mapping) or (name == "message" and inner is not None and not isinstance(inner, str)):
            return inner
    return value


def _role(value: Any, default: str) -> str:
    role, kind, source = (field(value, name) for name in ("role", "type", "source"))
    if isinstance(role, str) and role:
        return ROLES.get(role, role)
    if isinstance(kind, str) and ROLES.get(kind, kind) in KNOWN_ROLES:
        return ROLES.get(kind, kind)
    if isinstance(source, str) and kind is not None:  # AutoGen's chat messages
        return "user" if source == "user" else "assistant"
    return default


def _finish_reason(value: Any) -> Message:
    """OpenTelemetry's finish reason of a message is singular."""
    reason = field(value, "finish_reason")
    if not isinstance(reason, str) or not reason:
        return {}
    return {"finish_reason": "tool_call" if reason == "tool_calls" else reason}


# -- parts -------------------------------------------------------------------------------------------------------------


def _parts(value: Any, role: str, recorded: bool) -> list[Message]:
    given = field(value, "parts")  # those of OpenTelemetry, and of Gemini
    found = [field(value, name) for name in REASONING]
    parts = [{"type": "reasoning", "content": text} for text in found if isinstance(text, str) and text]
    for name in CONTENT if not isinstance(given, list | tuple) else ("parts",):
        parts += _content(field(value, name), recorded)
    parts += _calls(value)
    if role == "tool" and given is None and not any(map(_is_response, parts)):
        return [tool_response_part(_first(value, "tool_call_id", "id"), _first(value, *CONTENT))]
    result = _first(value, *RESULTS)
    return [_text(result)] if not parts and isinstance(result, str) and result else parts


def _content(value: Any, recorded: bool) -> list[Message]:
    if isinstance(value, str):
        inner = parse_json(value) if recorded and value.startswith("[{") else value
        return _content(inner, False) if isinstance(inner, list) else [_text(value)] if value else []
    if isinstance(value, list | tuple):
        return [part for item in _items(value) for part in _part(item)]
    return [] if value is None else _part(value)


def _part(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [_text(given)] if given else []
    item = _unwrapped(given)
    if (part := message_part(item)) is None:
        return [plain(item)] if isinstance(item, Mapping) else [_text(json_text(item))]
    return [part] if part.get("content") != "" else []


def message_part(item: Any) -> Message | None:
    """A part, block or item of any API or framework; None for one that is not known. Values in it stay as they are."""
    kind = _text_or_none(field(item, "type")) or ""
    if kind in _THOUGHTS:
        return {"type": "reasoning", "content": _thought(item)}
    if isinstance(text := field(item, "text"), str):
        return _text(text)
    if kind in _CALLS:
        return tool_call(item)
    if fields := _RESULTS.get(kind):
        return tool_response_part(field(item, fields[0]), field(item, fields[1]))
    call_id, content = field(item, "call_id"), field(item, "content")
    if call_id is not None and content is not None:  # AutoGen's
        return tool_response_part(call_id, content)
    if field(item, "name") is not None and field(item, "arguments") is not None:
        return tool_call(item)
    text = None if kind in BINARY else _first(item, "content", "refusal")
    return _text(text) if isinstance(text, str) else _image(item, kind)


def _thought(item: Any) -> str:
    """The text of reasoning, and of its parts."""
    given = [field(item, name) for name in ("thinking", "text", "summary", "content")]
    each = [field(part, "text") for value in given for part in _items(value)]
    return "\n".join(text for text in (*given, *each) if isinstance(text, str))


def _image(item: Any, kind: str) -> Message | None:
    """An image, by its address, or by its bytes where they were sent."""
    url = image_url(item)
    if url is None:
        return {"type": "file", "modality": "image", "file_id": field(item, "file_id")} if kind in IMAGES else None
    if not url.startswith("data:"):
        return {"type": "uri", "modality": "image", "uri": url}
    head, _, content = url[len("data:") :].partition(",")
    return {"type": "blob", "modality": "image", "mime_type": head.partition(";")[0], "content": content}


def image_url(item: Any) -> str | None:
    """The address or the data URL of an image, which may be nested; None for one that only its provider can find."""
    return url_of(_first(item, "image_url", "image", *(("source",) if field(item, "type") == "image" else ())))


def url_of(value: Any) -> str | None:
    """The address in a value, which may be nested, or its bytes in base64 as a data URL."""
    for _ in range(3):
        if field(value, "type") == "base64":
            return f"data:{field(value, 'media_type')};base64,{field(value, 'data')}"
        value = _first(value, "url", "image") if isinstance(value, Mapping) else value
    return _text_or_none(value)


def _calls(value: Any) -> list[Message]:
    found = [tool_call(call) for call in _items(parse_json(field(value, "tool_calls")))]
    single, name = field(value, "function_call"), field(value, "function_call_name")
    if isinstance(name, str):
        single = {"name": name, "arguments": field(value, "function_call_arguments_json")}
    return [*found, tool_call(single)] if single is not None and not found else found


def tool_call(given: Any) -> Message:
    """A tool call of any API or framework."""
    value = field(given, "tool_call") or given
    inner = field(value, "function") or field(value, "custom") or value
    arguments = _first(inner, "arguments", "args")
    if arguments is None and isinstance(arguments := field(inner, "input"), str):  # of a custom tool
        arguments = {"input": arguments}
    return tool_call_part(_first(value, "call_id", "id"), field(inner, "name"), arguments)


def text_message(text: str, role: str) -> Message:
    return {"role": role, "parts": [_text(text)]}


def _text(text: str) -> Message:
    return {"type": "text", "content": text}


def tool_call_part(call_id: Any, name: Any, arguments: Any) -> Message:
    """Arguments that are JSON text become an object."""
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": parse_json(arguments)}


def tool_response_part(call_id: Any, response: Any) -> Message:
    return {"type": "tool_call_response", "id": call_id, "response": response}


def _is_response(part: Message) -> bool:
    return part.get("type") == "tool_call_response"


# -- values ------------------------------------------------------------------------------------------------------------

PLAIN: Final = (str, int, float, bool, type(None))
_short = reprlib.Repr()
_short.maxother = _short.maxstring = 1000


def field(value: Any, name: str) -> Any:
    """A field of an object or an entry of a mapping; None where it is missing, or a method."""
    if type(value) is dict or isinstance(value, Mapping):
        entries: Mapping[str, Any] = value
        return entries.get(name)
    found = getattr(value, name, None)
    return None if callable(found) else found


def _items(value: Any) -> Sequence[Any]:
    """The items of a list; none of any other value."""
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()


def _first(value: Any, *names: str) -> Any:
    """The first of several fields that is there."""
    for name in names:
        if (found := field(value, name)) is not None:
            return found
    return None


def plain(value: Any) -> Any:
    """The value as JSON has it, independent of later changes to it; what has no JSON form becomes its `repr`."""
    if isinstance(value, PLAIN):
        return value
    try:
        return loads(dumps(value))
    except (orjson.JSONEncodeError, RecursionError):
        return loads(json_text(value).encode(errors="replace"))


def parse_json(value: Any) -> Any:
    """Text parsed as JSON if it is an object or a list; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return loads(value)
    except orjson.JSONDecodeError:
        return value


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
