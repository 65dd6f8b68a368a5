"""Reads requests as they come, of any dialect, for what the gateway does with requests that it passes on: recognize the
agent, bound the tokens, and show the request on a span.

What it does not know of a dialect stays as it is. It never rejects a request: the provider does, and the readers of the
dialects for what is served or translated here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, cast

import orjson

from agentlightning import span as names
from agentlightning.gateway.answer import CUSTOM_INPUT, objects
from agentlightning.gateway.dialects.content_parts import IMAGE_TYPES, image_url
from agentlightning.util.json_values import dumps, loads

Json = Mapping[str, Any]
Part = dict[str, Any]

OPERATIONS: Final = {
    "chat/completions": "chat",
    "completions": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
}
"""Path -> OpenTelemetry's name for the operation."""

LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields with the limit of output tokens."""
_PARAMS: Final = (
    (names.REQUEST_TEMPERATURE, ("temperature",), (int, float)),
    (names.REQUEST_TOP_P, ("top_p",), (int, float)),
    (names.REQUEST_TOP_K, ("top_k",), (int,)),
    (names.REQUEST_MAX_TOKENS, LIMITS, (int,)),
    (names.REQUEST_SEED, ("seed",), (int,)),
)

_DISTRIBUTION_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), (0,)),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "structured_outputs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Fields that change the sampling distribution beyond temperature, top_p and top_k -> the values with which they do
not."""


def distribution_changes(data: Json) -> list[str]:
    """The fields of a request that change the distribution in a way that no loss can correct for."""
    return [
        name
        for name, neutral in _DISTRIBUTION_FIELDS.items()
        if data.get(name) is not None and data[name] not in neutral
    ]


def request_attributes(data: Json) -> dict[str, Any]:
    """The sampling parameters of a request, and the tools it offers."""
    found: dict[str, Any] = {}
    for name, fields, kinds in _PARAMS:
        for field in fields:
            value = data.get(field)
            if isinstance(value, kinds) and not isinstance(value, bool):
                found[name] = value
                break
    stop = data.get("stop", data.get("stop_sequences"))
    if isinstance(stop, str):
        found[names.REQUEST_STOP] = [stop]
    elif isinstance(stop, list) and stop:
        found[names.REQUEST_STOP] = [text for text in cast("list[Any]", stop) if isinstance(text, str)]
    if tools := data.get("tools"):
        found[names.TOOL_DEFINITIONS] = as_json(tools)
    return found


def input_messages(path: str, data: Json, index: int = 0) -> str:
    """The messages of a request as JSON; of several raw prompts, the one at `index`."""
    return as_json(_READERS[path](data, index))


def as_json(value: Any) -> str:
    """JSON for a span. Requests may be nested as deeply as orjson can write, and their messages are nested a little
    deeper."""
    try:
        return dumps(value).decode()
    except TypeError:
        pass
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return "[]"


def num_sampled(request: Json) -> int:
    """The number of choices that a provider samples in all, and charges for."""
    prompts, best = request.get("prompt"), request.get("best_of")
    several = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
    each = num_choices(request)
    return (max(each, best) if isinstance(best, int) else each) * (len(cast("list[Any]", prompts)) if several else 1)


def num_choices(request: Json) -> int:
    """How many answers a request asks for to each of its prompts."""
    several = request.get("n")
    return max(1, several) if isinstance(several, int) else 1


# -- the agent's -------------------------------------------------------------------------------------------------------

BILLING: Final = "x-anthropic-billing-header:"
"""The first block of Claude Code's system prompt, which differs between calls of one agent and means nothing to the
model."""


def system_prompt(body: Json) -> str:
    """The system prompt of a request in any dialect; "" if it has none."""
    if prompt := body.get("system") or body.get("instructions"):
        return _text(prompt)
    turns = turns_of(body)
    parts: list[str] = []
    for turn in cast("list[Any]", turns) if isinstance(turns, list) else ():
        if not isinstance(turn, dict) or cast("Json", turn).get("role") not in ("system", "developer"):
            break
        parts.append(_text(cast("Json", turn).get("content")))
    return "\n".join(parts)


def turns_of(body: Json) -> Any:
    """The messages or items of a request."""
    return body.get("messages") or body.get("input")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = [block.get("text") for block in objects(content)]
    return "\n".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING))


def tool_names(body: Json) -> list[str]:
    """The names of the tools of a request, sorted; the type of a tool without a name."""
    found: list[Any] = []
    for tool in objects(body.get("tools")):
        function = tool.get("function")
        found.append((cast("Json", function) if isinstance(function, dict) else tool).get("name") or tool.get("type"))
    return sorted(name for name in found if isinstance(name, str) and name)


# -- messages by path --------------------------------------------------------------------------------------------------


def _chat_messages(data: Json, index: int) -> list[Part]:
    return [chat_message(message) for message in objects(data.get("messages"))]


def chat_message(message: Json) -> Part:
    role = message.get("role")
    if role == "tool":
        answer = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}
        return {"role": role, "parts": [answer]}
    parts: list[Part] = []
    if thought := message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": thought})
    parts += _parts(message.get("content"))
    for call in objects(message.get("tool_calls")):
        function = call.get("function") or call.get("custom")
        if isinstance(function, dict):
            parts.append(_call(call.get("id"), function))
    shown = {"role": "system" if role == "developer" else role, "parts": parts}
    return shown | {"name": message["name"]} if "name" in message else shown


def _raw_prompt(data: Json, index: int) -> list[Part]:
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[index] if index < len(prompt) else prompt[0]
    return [_user(prompt if isinstance(prompt, str) else dumps(prompt).decode())]


def _embedding_inputs(data: Json, index: int) -> list[Part]:
    given = data.get("input")
    texts: Sequence[Any] = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    return [_user(text if isinstance(text, str) else dumps(text).decode()) for text in texts]


def _anthropic_messages(data: Json, index: int) -> list[Part]:
    turns = objects(data.get("messages"))
    read = [{"role": turn.get("role"), "parts": _parts(turn.get("content"))} for turn in turns]
    system = data.get("system")
    return [{"role": "system", "parts": _parts(system)}, *read] if system else read


def _response_items(data: Json, index: int) -> list[Part]:
    given, instructions = data.get("input"), data.get("instructions")
    read = [{"role": "system", "parts": _parts(instructions)}] if instructions else []
    if isinstance(given, str):
        return [*read, _user(given)]
    return read + [_item(item) for item in objects(given)]


def _item(item: Json) -> Part:
    kind = item.get("type", "message")
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "parts": [_call(item.get("call_id"), item)]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        answer = {"type": "tool_call_response", "id": item.get("call_id"), "response": item.get("output")}
        return {"role": "tool", "parts": [answer]}
    if kind == "message":
        role = item.get("role")
        return {"role": "system" if role == "developer" else role, "parts": _parts(item.get("content"))}
    return {"role": "assistant", "parts": [message_part(item)]}


_READERS: Final[Mapping[str, Callable[[Json, int], list[Part]]]] = {
    "chat/completions": _chat_messages,
    "completions": _raw_prompt,
    "responses": _response_items,
    "messages": _anthropic_messages,
    "embeddings": _embedding_inputs,
}


# -- parts -----------------------------------------------------------------------------------------------------------


def tool_call(call_id: Any, name: Any, arguments: Any) -> Part:
    """A tool call whose arguments are an object if they can be parsed."""
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):
            arguments = loads(arguments)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": arguments}


def _call(call_id: Any, call: Json) -> Part:
    """A call of a function, or of a custom tool as of a function with one argument."""
    given = {CUSTOM_INPUT: call["input"]} if "input" in call else call.get("arguments")
    return tool_call(call_id, call.get("name"), given)


def _user(text: str) -> Part:
    return {"role": "user", "parts": [{"type": "text", "content": text}]}


def _parts(content: Any) -> list[Part]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}] if content else []
    return [message_part(part) for part in objects(content)]


def message_part(part: Json) -> Part:
    """A part, block or item of any dialect. One of an unknown type, such as a call of a hosted tool, stays as it is."""
    kind = part.get("type")
    if isinstance(text := part.get("text", part.get("refusal")), str):
        return {"type": "text", "content": text}
    if kind == "thinking":
        return {"type": "reasoning", "content": part.get("thinking")}
    if kind == "reasoning":
        texts = [each.get("text") for each in objects(part.get("summary")) + objects(part.get("content"))]
        return {"type": "reasoning", "content": "\n".join(text for text in texts if isinstance(text, str))}
    if kind == "tool_use":
        return tool_call(part.get("id"), part.get("name"), part.get("input"))
    if kind == "tool_result":
        return {"type": "tool_call_response", "id": part.get("tool_use_id"), "response": part.get("content")}
    if kind in IMAGE_TYPES:
        return _image(part)
    return {**part, "type": kind or "generic"}


def _image(part: Json) -> Part:
    """By its address, or by its bytes where they were sent."""
    url = image_url(part)
    if url is None:
        return {"type": "file", "modality": "image", "file_id": part.get("file_id")}
    if not url.startswith("data:"):
        return {"type": "uri", "modality": "image", "uri": url}
    head, _, content = url[len("data:") :].partition(",")
    return {"type": "blob", "modality": "image", "mime_type": head.partition(";")[0], "content": content}
