"""Translates requests for providers of another dialect: writes the bodies for chat completions, for Anthropic's
messages, and for OpenAI's responses, for models that no other API serves.

What a provider's dialect cannot express is rejected by name if it would change the answer, and otherwise dropped and
counted by the caller. Of responses nothing is stored at the provider (`store` is false): the history is sent whole,
with the reasoning items of earlier turns and their `encrypted_content`.
"""

from __future__ import annotations

import base64
import binascii
import mimetypes
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.answer import THOUGHTS, json_of, object_of
from agentlightning.gateway.config import Provider
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import MESSAGES_PARAMS, RESPONSES_PARAMS, ApiPath, Request, shorten
from agentlightning.gateway.dialects.chat import ECHOED
from agentlightning.gateway.dialects.content_parts import (
    Content,
    Part,
    has_attachments,
    merged_turns,
    non_empty_parts,
    same_meaning,
    turn_key,
)
from agentlightning.gateway.dialects.messages import RAW_ARGUMENTS
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import Json

TurnLookup = Callable[[bytes], list[Json]]
"""Finds a turn as its provider wrote it, by its key; empty if it is not known."""


_READERS: Final = {**RESPONSES_PARAMS, **MESSAGES_PARAMS}


def given_params(raw: Json, params: SamplingParams, forced: Json) -> Json:
    """The sampling parameters that were set, by their names in `SamplingParams`: our defaults are never sent."""
    named = {
        field for name, (field, _) in _READERS.items() if raw.get(name) is not None or forced.get(name) is not None
    }
    return {name: getattr(params, name) for name in sorted(named)}


# -- unsupported fields -----------------------------------------------------------------------------------------------

_PARAMS: Final = {
    "responses": {"max_tokens", "temperature", "top_p", "stop"},
    "messages": {"max_tokens", "temperature", "top_p", "top_k", "stop"},
}
"""The sampling parameters of paths that do not have all, by their names in `SamplingParams`."""
_LOGPROBS: Final = ("logprobs", "top_logprobs", "include")
"""Fields that ask for log-probabilities."""


def reject_unsupported(path: ApiPath, request: Request, provider: Provider, params: Json) -> None:
    """Raises ApiError 400 for the first field of a request that a path cannot express, by its name in the request.
    Parameters may have their default values."""
    if path not in _PARAMS:
        return
    wrong: Json = {"n": request.n} if request.n > 1 else {}
    if path == "messages" and request.logprobs:
        wrong[next((name for name in _LOGPROBS if request.raw.get(name)), "logprobs")] = True
    if path == "messages" and (temperature := params.get("temperature") or 0) > 1:
        wrong["temperature"] = temperature
    wrong |= {name: params[name] for name in request.params.changed(params) if name not in _PARAMS[path]}
    for name, value in wrong.items():
        message = f"{name}={shorten(value)} cannot be sent to the provider {provider.name!r}, which speaks /v1/{path}"
        raise bad_request(name, f"{message}; leave it out")


def own_stops(path: str, stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings to apply here: the responses API has none, and Anthropic takes none of whitespace only."""
    return tuple(stop for stop in stops if path == "responses" or (path == "messages" and not stop.strip()))


_NAMES: Final = {("stop", "messages"): "stop_sequences", ("max_tokens", "responses"): "max_output_tokens"}


def wire_name(name: str, path: str, provider: Provider) -> str:
    """The name of a sampling parameter in a request to a provider."""
    is_limit = name == "max_tokens" and path == "chat/completions"
    return provider.limit_name if is_limit else _NAMES.get((name, path), name)


def _wire_params(path: str, provider: Provider, params: Json) -> Json:
    """The sampling parameters as a path has them, without stop strings that are applied here."""
    found: Json = {}
    for name, value in params.items():
        if name not in _PARAMS.get(path, params):
            continue
        if name == "stop":
            value = [stop for stop in value if stop not in own_stops(path, value)]
        elif name == "logit_bias":
            value = {str(token): bias for token, bias in value}
        found |= {} if value == [] else {wire_name(name, path, provider): value}
    return found


# -- tools of OpenAI's APIs --------------------------------------------------------------------------------------------


def openai_tools(request: Request, written: Callable[[Json], Json], nested: bool) -> Json:
    """The tools of a request, each as it is `written`, and their choice; chat completions nests the details of a choice
    below the name of its kind (`nested`), responses does not."""
    tools, constraint = request.forbidden_tools or request.tools, request.constraint
    if not tools:
        return {}
    found: Json = {"tools": [written(tool) for tool in tools]}
    if request.forbidden_tools:
        return found | {"tool_choice": "none"}
    mode = "required" if constraint.requires_tool_call else "auto"
    names = [_choice("function", {"name": name}, nested) for name in sorted(constraint.names or ())]
    if constraint.names is None:
        found |= {"tool_choice": mode} if constraint.requires_tool_call else {}
    elif constraint.requires_tool_call and len(names) == 1:
        found["tool_choice"] = names[0]
    else:
        found["tool_choice"] = _choice("allowed_tools", {"mode": mode, "tools": names}, nested)
    return found | ({"parallel_tool_calls": False} if constraint.single_tool_call else {})


def _choice(kind: str, details: Json, nested: bool) -> Json:
    return {"type": kind, **({kind: details} if nested else details)}


# -- the order of turns ------------------------------------------------------------------------------------------------


def results_first(messages: Sequence[Message]) -> list[Message]:
    """The messages with tool results right after the turn that called the tools, as every provider requires."""
    sorted_, others = list[Message](), list[Message]()
    for message in messages:
        if message["role"] == "assistant":
            sorted_ += [*others, message]
            others = []
        else:
            (sorted_ if sorted_ and message["role"] == "tool" else others).append(message)
    return sorted_ + others


def turns_of(messages: Sequence[Message]) -> list[Message]:
    """A conversation with one message for each turn of the assistant, whose text and calls clients may send apart, and
    tool results right after it."""
    merged: list[Message] = []
    for message in results_first(messages):
        last = merged[-1] if merged else None
        if last is not None and message["role"] == last["role"] == "assistant":
            merged[-1] = merged_turns(last, message)
        else:
            merged.append(message)
    return merged


def known_turn(
    path: ApiPath, previous: Message | None, turn: Message, find_turn: TurnLookup
) -> tuple[list[Json] | None, list[Json]]:
    """(the blocks or items that the provider wrote of a turn of the assistant, if it still means the same; what to send
    back of the turn if it does not)."""
    before = find_turn(turn_key(previous, turn))
    response, is_blocks = DIALECTS[path].response(), path == "messages"
    response.read({"type": "message", "content": before} if is_blocks else {"object": "response", "output": before})
    answer = response.choice()
    answer.take_new(done=True)
    is_unchanged = bool(before) and same_meaning(answer.message) == same_meaning(turn)
    kinds = THOUGHTS if is_blocks else ("reasoning",)
    thoughts = [block for block in before if block["type"] in kinds]
    return before if is_unchanged else None, thoughts


# -- content -----------------------------------------------------------------------------------------------------------


class UnsupportedContentError(ValueError):
    """A conversation that the provider's dialect cannot express; the message says why, and what to do."""


def openai_content(content: Content, written: Callable[[Part], Json]) -> str | list[Json]:
    """The content of a message for OpenAI's APIs, each part as it is `written`."""
    return content if isinstance(content, str) else [written(part) for part in non_empty_parts(content)]


def split_system(messages: Sequence[Message]) -> tuple[str, list[tuple[Message | None, Message]]]:
    """(the text of the first system messages, each later message with the one before it). Raises
    UnsupportedContentError if they have more than text."""
    system = list(takewhile(lambda message: message["role"] == "system", messages))
    if any(has_attachments(message.get("content")) for message in system):
        raise UnsupportedContentError(
            "the system prompt has an image or a file, which this provider accepts from a user only"
        )
    texts = [text for message in system if (text := message.get("content"))]
    return "\n\n".join(texts), list(zip([None, *messages], messages, strict=False))[len(system) :]


def chat_part(part: Part) -> Json:
    """For chat completions. Raises UnsupportedContentError for a file given by its address."""
    if part["type"] == "text":
        return {**part}
    url = part["url"]
    if part["type"] == "image":
        detail = {} if part["detail"] is None else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": url} | detail}
    name = part["name"]
    if not url.startswith("data:"):
        raise UnsupportedContentError(
            f"the file {url!r} is given by its address, which chat completions does not take; send its bytes"
        )
    if (text := _text_of(url)) is not None:
        return {"type": "text", "text": f"{name}\n{text}" if name else text}
    return {"type": "file", "file": _file(url, name)}


def _item_part(part: Part) -> Json:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    url = part["url"]
    if part["type"] == "image":
        return {"type": "input_image", "image_url": url, "detail": part["detail"] or "auto"}
    if not url.startswith("data:"):
        return {"type": "input_file", "file_url": url}
    return {"type": "input_file"} | _file(url, part["name"])


def _block(part: Part) -> Json:
    if part["type"] == "text":
        return {**part}
    url = part["url"]
    if part["type"] == "image":
        return {"type": "image", "source": _source(url)}
    title, text = {"title": part["name"]} if part["name"] else {}, _text_of(url)
    source = _source(url) if text is None else {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source} | title


def _source(url: str) -> Json:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url[len("data:") :].partition(",")
    return {"type": "base64", "media_type": head.partition(";")[0], "data": data}


def _text_of(url: str) -> str | None:
    """The text of a text file; None for any other file."""
    head, _, data = url.partition(",")
    if not head.startswith("data:text/"):
        return None
    try:
        return base64.b64decode(data, validate=True).decode() if head.endswith(";base64") else None
    except (binascii.Error, UnicodeDecodeError):
        return None


def _file(url: str, name: str | None) -> Json:
    """A file for OpenAI's APIs, of a data URL."""
    suffix = mimetypes.guess_extension(_source(url)["media_type"]) or ".pdf"
    return {"filename": name or f"document{suffix}", "file_data": url}


# -- chat completions --------------------------------------------------------------------------------------------------


def chat_body(request: Request, provider: Provider, model: str, find_turn: TurnLookup) -> Json:
    """The body of POST /v1/chat/completions. Raises UnsupportedContentError."""
    messages = _chat_messages(request.messages, provider, find_turn)
    body: Json = {"model": model, "messages": messages} | openai_tools(request, lambda tool: tool, nested=True)
    if content := request.constraint.content:
        body["response_format"] = content.given
    if request.n > 1:
        body["n"] = request.n
    if request.logprobs:
        body["logprobs"] = True
    return body


def _chat_messages(messages: Sequence[Message], provider: Provider, find_turn: TurnLookup) -> list[Json]:
    """Images in a tool result follow it as a user message, since tool messages hold text only."""
    known = _CHAT_KEYS | ({"reasoning_content"} if provider.token_ids else set())
    sent, attachments = list[Json](), list[Json]()
    sorted_ = results_first(messages)
    for previous, message in zip([None, *sorted_], sorted_, strict=False):
        if message["role"] != "tool" and attachments:
            sent.append({"role": "user", "content": attachments})
            attachments = []
        content = message.get("content") or ""
        if message["role"] == "tool":
            parts = non_empty_parts(content)
            attachments += [chat_part(part) for part in parts if part["type"] != "text"]
            content = "\n".join([part["text"] for part in parts if part["type"] == "text"])
        fields = {key: value for key, value in message.items() if key in known}
        fields["content"] = None if not content and message.get("tool_calls") else openai_content(content, chat_part)
        if message["role"] == "assistant":
            blocks = find_turn(turn_key(previous, message))
            fields |= _echoed(fields, [block for block in blocks if block.get("provider") == provider.name])
        sent.append(fields)
    return [*sent, {"role": "user", "content": attachments}] if attachments else sent


def _echoed(fields: Json, blocks: Sequence[Json]) -> Json:
    """What this provider wants back with a turn that it wrote (`answer.CHAT_TURN`)."""
    found: Json = {}
    for block in blocks:
        found |= {name: value for name, value in object_of(block, "message").items() if name in ECHOED}
        if extra := object_of(block, "calls"):
            calls = found.get("tool_calls") or fields.get("tool_calls") or ()
            found["tool_calls"] = [
                call | ({"extra_content": extra[call["id"]]} if call.get("id") in extra else {}) for call in calls
            ]
    return found


_CHAT_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


# -- responses ---------------------------------------------------------------------------------------------------------


def responses_body(request: Request, provider: Provider, model: str, find_turn: TurnLookup) -> Json:
    """The body of POST /v1/responses. Raises UnsupportedContentError."""
    instructions, items = _items(turns_of(request.messages), find_turn)
    body: Json = {"model": model, "input": items, "store": False}
    if instructions:
        body["instructions"] = instructions
    body |= openai_tools(request, _tool, nested=False)
    if content := request.constraint.content:
        body["text"] = {"format": {"type": content.given["type"], **object_of(content.given, "json_schema")}}
    if request.logprobs:
        body["include"] = ["message.output_text.logprobs"]
    return body


def _items(messages: Sequence[Message], find_turn: TurnLookup) -> tuple[str, list[Json]]:
    """(system prompt, items of the conversation)."""
    (instructions, turns), items = split_system(messages), list[Json]()
    for previous, message in turns:
        role, content = message["role"], openai_content(message.get("content") or "", _item_part)
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": content})
        elif role == "assistant":
            written, parts = known_turn("responses", previous, message, find_turn)
            parts += [{"role": role, "content": content}] if content else []
            items += written or [*parts, *map(_call, message.get("tool_calls") or ())]
        else:
            items.append({"role": role, "content": content})
    return instructions, items


def _call(call: Json) -> Json:
    function = call["function"]
    named = {"type": "function_call", "call_id": call.get("id"), "name": function["name"]}
    return named | {"arguments": function["arguments"]}


def _tool(tool: Json) -> Json:
    """Tools default to strict here, unlike in chat completions, so that `strict` is always set."""
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    found: Json = {"type": "function", "strict": bool(function.get("strict")), "parameters": parameters}
    return found | {key: function[key] for key in ("name", "description") if function.get(key) is not None}


# -- Anthropic's messages ----------------------------------------------------------------------------------------------

_EFFORTS: Final = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 32768, "max": 32768}
"""Reasoning effort -> the thinking budget for models that take a number of tokens."""
_ANTHROPIC_FIELDS: Final = ("thinking", "output_config", "cache_control")
"""Anthropic's fields that callers of other dialects may send as well."""
_BUDGET_MODELS: Final = re.compile(r"claude-(3-7-|(opus|sonnet|haiku)-4(-[015])?(-\d{8}|-latest)?$)")
"""Models with a thinking budget instead of adaptive thinking."""
_NON_THINKING_MODELS: Final = re.compile(r"claude-(2|instant|3-(opus|sonnet|haiku|5)-)")
_MIN_THINKING_TOKENS: Final = 1024
"""Anthropic's smallest thinking budget."""


def messages_body(request: Request, provider: Provider, model: str, find_turn: TurnLookup) -> Json:
    """The body of POST /v1/messages. Raises ApiError 400, and UnsupportedContentError."""
    system, messages = _turns(turns_of(request.messages), find_turn)
    if messages and messages[-1]["role"] == "assistant":
        if any(block.get("type") == "tool_use" for block in messages[-1]["content"]):
            message = "the last message calls tools, and their results do not follow, as the provider"
            raise UnsupportedContentError(f"{message} {provider.name!r} demands; add them")
        messages.append({"role": "user", "content": [{"type": "text", "text": _CONTINUE}]})
    body: Json = {"model": model, "messages": messages, "max_tokens": provider.max_output_tokens}
    shape = request.constraint.content.given if request.constraint.content else {}
    if shape.get("type") == "json_object":
        system = "\n\n".join(filter(None, (system, _JSON_INSTRUCTION)))
    if system:
        body["system"] = system
    body |= _message_tools(request)
    if named := object_of(shape, "json_schema"):
        body["output_config"] = {"format": {"type": "json_schema", "schema": named.get("schema")}}
    return body


_CONTINUE: Final = "Continue."
"""A user message after a last turn of the assistant: other APIs answer such a conversation with a new turn, whereas
Anthropic's would continue the last one, which later models reject."""
_JSON_INSTRUCTION: Final = "Answer with one JSON object and nothing else: no text around it, and no code fence."
"""Anthropic supports JSON output only with a schema that names all fields."""


def _turns(messages: Sequence[Message], find_turn: TurnLookup) -> tuple[str, list[Json]]:
    """(system prompt, alternating turns of user and assistant). Tool results and later system messages become part of
    the user's turns."""
    (system, pairs), turns = split_system(messages), list[Json]()
    for previous, message in pairs:
        given, role = message.get("content"), "user"
        content = [_block(part) for part in non_empty_parts(given)]
        if message["role"] == "assistant":
            role, (written, thoughts) = "assistant", known_turn("messages", previous, message, find_turn)
            content = written or [*thoughts, *content, *map(_tool_use, message.get("tool_calls") or ())]
        elif message["role"] == "tool":
            result = content if has_attachments(given) else given or ""
            content = [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": result}]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += content
        elif content:
            turns.append({"role": role, "content": [*content]})  # A copy: stored turns must not grow.
    return system, turns


def _tool_use(call: Json) -> Json:
    function = call["function"]
    given = json_of(function["arguments"])
    arguments = given if isinstance(given, dict) else {RAW_ARGUMENTS: function["arguments"]}
    return {"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": arguments}


def _message_tools(request: Request) -> Json:
    """A conversation with tool calls must define the tools, even if none may be called now."""
    tools = [tool["function"] for tool in request.forbidden_tools or request.tools or ()]
    if not tools:
        calls = [call for message in request.messages for call in message.get("tool_calls") or ()]
        tools = [{"name": name} for name in dict.fromkeys(call["function"]["name"] for call in calls)]
    constraint = request.constraint
    choice: Json = {"type": "auto" if request.tools else "none"}
    if constraint.names is not None:
        tools = [tool for tool in tools if tool["name"] in constraint.names]
    if constraint.requires_tool_call:
        choice = {"type": "tool", "name": tools[0]["name"]} if len(tools) == 1 else {"type": "any"}
    if constraint.single_tool_call:
        choice["disable_parallel_tool_use"] = True
    shown = {"tools": [_message_tool(tool) for tool in tools]}
    return shown | ({} if choice == {"type": "auto"} else {"tool_choice": choice}) if tools else {}


def _message_tool(function: Json) -> Json:
    schema = {"type": "object"} | (function.get("parameters") or {})
    tool: Json = {"name": function["name"], "input_schema": schema}
    return tool | {key: function[key] for key in ("description", "strict") if function.get(key) is not None}


def _thinking(name: str, effort: Any, request: Request, model: str) -> Json:
    """The reasoning effort as the model takes it: by name, as a number of tokens, or not at all. Anthropic rejects
    thinking before a required tool call."""
    if effort != "none" and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise bad_request(name, f"{name}={effort!r} is not known; use none, {', '.join(_EFFORTS)}")
    if _NON_THINKING_MODELS.match(model):
        return {}
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    free = not request.constraint.requires_tool_call
    if not _BUDGET_MODELS.match(model):
        word = "low" if effort == "minimal" else effort
        return ({"thinking": {"type": "adaptive"}} if free else {}) | {"output_config": {"effort": word}}
    limit = request.params.max_tokens
    most = _EFFORTS[effort] if limit is None else min(_EFFORTS[effort], limit - 1)
    return {"thinking": {"type": "enabled", "budget_tokens": most}} if free and most >= _MIN_THINKING_TOKENS else {}


# -- settings: what else a request says of its user and of its answer -------------------------------------------------

_SAME: Final = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user")
"""Fields that OpenAI's APIs have in common."""
_INSIDE: Final = {"reasoning_effort": ("reasoning", "effort"), "verbosity": ("text", "verbosity")}
"""Field of chat completions -> where a request for a response has it."""


def _settings(path: ApiPath, request: Request, model: str) -> tuple[Json, set[str]]:
    """(fields of the body, the fields of the request that say it; others are dropped). Raises ApiError 400 for an
    effort that is not known."""
    raw, (known, kind) = request.raw, (_ANTHROPIC_FIELDS, dict) if path == "messages" else (_SAME, str)
    body: Json = {name: raw[name] for name in known if isinstance(raw.get(name), kind) and raw[name] != "standard_only"}
    taken = set(body)
    for name, (outer, inner) in _INSIDE.items():
        field, value = (name, raw[name]) if raw.get(name) else (outer, object_of(raw, outer).get(inner))
        found: Json = {outer: {inner: value}}
        if path == "chat/completions":
            found = {name: value}
        elif path == "messages":
            found = _thinking(field, value, request, model) if value and name == "reasoning_effort" else {}
        if value and found:
            body = _merged(body, found)
            taken.add(field)
    return body, taken


# -- the targets -------------------------------------------------------------------------------------------------------

_WRITERS: Final[dict[ApiPath, Callable[..., Json]]] = {
    "chat/completions": chat_body,
    "messages": messages_body,
    "responses": responses_body,
}
"""What writes the body for each path at a provider, without sampling parameters. Raises ApiError 400, and
UnsupportedContentError."""
_UNTRANSLATED: Final = frozenset({"completions", "embeddings"})


def translation_target(path: ApiPath, provider: Provider) -> ApiPath:
    """The path at the provider. Raises ApiError 400 if there is none."""
    for target in _WRITERS:
        if path not in _UNTRANSLATED and provider.serves(target):
            return target
    message = f"the provider {provider.name!r} serves no /v1/{path}, and calls to it cannot be translated"
    raise ApiError(400, message, code="path_not_supported", param="model")


def body_of(
    path: ApiPath, request: Request, provider: Provider, model: str, params: Json, find_turn: TurnLookup
) -> tuple[Json, tuple[str, ...]]:
    """(body for a path, names of the fields that were dropped). Raises ApiError 400 naming a field that must not be
    dropped."""
    settings, taken = _settings(path, request, model)
    reject_unsupported(path, request, provider, params)
    try:
        body = _WRITERS[path](request, provider, model, find_turn)
    except UnsupportedContentError as error:
        raise bad_request("messages" if "messages" in request.raw else "input", str(error)) from None
    body |= _wire_params(path, provider, params)
    if request.logprobs and request.params.top_logprobs:
        body["top_logprobs"] = request.params.top_logprobs
    if request.stream:
        body["stream"] = True
    body = _merged(body, settings)
    if "max_tokens" not in params:  # Reasoning counts as output: its budget comes on top of our default limit.
        budget = object_of(body, "thinking").get("budget_tokens")
        body |= {"max_tokens": body["max_tokens"] + budget} if type(budget) is int and budget > 0 else {}
    dropped = [name for name in request.ignored_fields if name not in taken]
    if path != "messages" and "effort" in object_of(request.raw, "output_config"):
        dropped.append("output_config.effort")
    if path != "chat/completions" and any("name" in message for message in request.messages):
        dropped.append("messages.name")
    return body, tuple(dropped)


def _merged(body: Json, others: Json) -> Json:
    """`body` with other fields; objects with the same name are merged."""
    for name, value in others.items():
        known = body.get(name)
        body[name] = {**value, **known} if isinstance(known, dict) else value
    return body
