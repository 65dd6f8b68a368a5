"""A request, read in any dialect, as the body that a provider of another one takes.

Pure. What the provider's dialect has no word for, and would change what is answered, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from agentlightning.gateway.attachments import as_blocks, as_chat, has_attachments, without
from agentlightning.gateway.constraint import Constraint
from agentlightning.gateway.conversation import same_meaning
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.fields import MESSAGES_PARAMS, RESPONSES_PARAMS, short
from agentlightning.gateway.dialects.messages import RAW_ARGUMENTS
from agentlightning.gateway.extras import EXTRAS
from agentlightning.gateway.problems import bad
from agentlightning.gateway.provider import Provider
from agentlightning.gateway.sealed import turn_key
from agentlightning.policy.base import Message, SamplingParams

Json = dict[str, Any]
Blocks = Callable[[bytes], list[Json]]
"""A turn as the provider said it, by its key; empty where nobody knows."""

_READERS: Final = {**RESPONSES_PARAMS, **MESSAGES_PARAMS}
_NEW_NAME: Final = ("api.openai.com", ".openai.azure.com")
"""Hosts that know `max_tokens` only by its later name; servers of others may know only the first."""


def given_params(asked: Mapping[str, Any], params: SamplingParams, forced: Mapping[str, Any]) -> Json:
    """The sampling parameters that somebody set, by the names of `SamplingParams`: no default of ours is sent."""
    named = {_READERS[name][0] for name in (*asked, *forced) if name in _READERS and _set(asked, forced, name)}
    return {name: getattr(params, name) for name in sorted(named)}


def _set(asked: Mapping[str, Any], forced: Mapping[str, Any], name: str) -> bool:
    return asked.get(name) is not None or forced.get(name) is not None


def shape_of(asked: Mapping[str, Any]) -> Json | None:
    """The format of the content that a request asks for, as chat completions has it; None for plain text."""
    flat = _object(asked, "text").get("format") or _object(asked, "output_config").get("format")
    shape = asked.get("response_format") or flat or asked.get("output_format")
    if not isinstance(shape, dict) or shape.get("type") in (None, "text"):
        return None
    if shape["type"] != "json_schema" or "json_schema" in shape:
        return dict(shape)
    named = {key: shape[key] for key in ("name", "schema", "strict", "description") if shape.get(key) is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True} | named}


def _object(data: Mapping[str, Any], name: str) -> Json:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


# -- chat completions ------------------------------------------------------------------------------------------------


def chat_body(request: Request, provider: Provider, model: str, params: Json, blocks: Blocks) -> Json:
    """The body of POST /v1/chat/completions. Raises Problem 400 naming what it cannot be asked."""
    try:
        messages = _chat_messages(request.messages, thoughts=provider.token_ids)
    except ValueError as error:
        raise bad("messages" if "messages" in request.asked else "input", str(error)) from None
    body: Json = {"model": model, "messages": messages}
    names = {"max_tokens": _limit_name(provider)}
    body |= {names.get(name, name): _on_the_wire(name, value) for name, value in params.items()}
    body |= _chat_tools(request)
    if (shape := shape_of(request.asked)) is not None:
        body["response_format"] = shape
    if request.n > 1:
        body["n"] = request.n
    if request.logprobs:
        body["logprobs"] = True
        body |= {"top_logprobs": top} if (top := request.params.top_logprobs) else {}
    if request.stream:
        body["stream"] = True
    return body


def _chat_tools(request: Request) -> Json:
    if request.barred:
        return {"tools": request.barred, "tool_choice": "none"}
    if not request.tools:
        return {}
    found: Json = {"tools": request.tools}
    if (choice := _chat_choice(request.constraint)) is not None:
        found["tool_choice"] = choice
    if request.constraint.one_call:
        found["parallel_tool_calls"] = False
    return found


def _on_the_wire(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token): bias for token, bias in value}
    return list(value) if name == "stop" else value


def _limit_name(provider: Provider) -> str:
    host = urlsplit(provider.base_urls[0]).hostname or ""
    return "max_completion_tokens" if host.endswith(_NEW_NAME) else "max_tokens"


def _chat_messages(messages: Sequence[Message], thoughts: bool) -> list[Json]:
    """Images in the result of a tool follow it as a message of the user: a tool's message holds text only."""
    known = _CHAT_KEYS | ({"reasoning_content"} if thoughts else set())
    sent: list[Json] = []
    shown: list[Json] = []
    for message in _results_first(messages):
        if message["role"] != "tool" and shown:
            sent.append({"role": "user", "content": shown})
            shown = []
        content = message.get("content") or ""
        if message["role"] == "tool":
            content, images = without(content)
            shown += images
        kept = {key: value for key, value in message.items() if key in known}
        sent.append(kept | {"content": _chat_content(message, content)})
    return [*sent, {"role": "user", "content": shown}] if shown else sent


_CHAT_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


def _results_first(messages: Sequence[Message]) -> list[Message]:
    """Results of tools right behind the turn that called them, as every provider demands; all else in its order."""
    sorted_: list[Message] = []
    answered: list[Message] | None = None
    others: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            sorted_ += [*others, message]
            answered, others = [], []
        elif answered is not None and message["role"] == "tool":
            sorted_.append(message)
        else:
            others.append(message)
    return sorted_ + others


def _chat_content(message: Message, content: str) -> Any:
    return None if not content and message.get("tool_calls") else as_chat(content)


def _chat_choice(constraint: Constraint) -> Any:
    names = sorted(constraint.names) if constraint.names is not None else []
    if constraint.needs_call and len(names) == 1:
        return {"type": "function", "function": {"name": names[0]}}
    if constraint.names is None:
        return "required" if constraint.needs_call else None
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    mode = "required" if constraint.needs_call else "auto"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# -- Anthropic's messages --------------------------------------------------------------------------------------------


def messages_body(request: Request, provider: Provider, model: str, params: Json, blocks: Blocks) -> Json:
    """The body of POST /v1/messages. Raises Problem 400 naming what Anthropic cannot be asked."""
    _refuse_foreign(request, provider, params)
    system, messages = _turns(turns_of(request.messages), blocks)
    if messages and messages[-1]["role"] == "assistant":
        message = f"the last message is the assistant's, which the provider {provider.name!r} would go on with instead"
        raise bad(
            "messages" if "messages" in request.asked else "input", f"{message} of answering; add one of the user"
        )
    most = params.get("max_tokens") or provider.max_output_tokens
    body: Json = {"model": model, "messages": messages, "max_tokens": most}
    if system:
        body["system"] = system
    body |= {name: params[name] for name in ("temperature", "top_p", "top_k") if name in params}
    if params.get("stop"):
        body["stop_sequences"] = list(params["stop"])
    body |= _tools(request)
    if (shape := shape_of(request.asked)) is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": shape["json_schema"].get("schema")}}
    if request.stream:
        body["stream"] = True
    return body


_ANTHROPICS: Final = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop"})
"""Sampling parameters it has a word for."""


def _refuse_foreign(request: Request, provider: Provider, params: Json) -> None:
    shape = shape_of(request.asked)
    asked: list[tuple[str, Any, bool]] = [
        ("n", request.n, request.n == 1),
        ("logprobs", request.logprobs, not request.logprobs),
        ("temperature", params.get("temperature"), (params.get("temperature") or 0) <= 1),
        ("response_format", shape, shape is None or shape["type"] == "json_schema"),
    ]
    asked += [(name, value, not value and name != "seed") for name, value in params.items() if name not in _ANTHROPICS]
    for meant, value, fine in asked:
        if not fine:
            name = _name_of(meant, request.asked)
            message = (
                f"{name}={short(value)} cannot be asked of the provider {provider.name!r}, which speaks Anthropic's"
            )
            raise bad(name, f"{message} /v1/messages; leave it out")


_ELSEWHERE: Final = {
    "response_format": ("response_format", "text"),
    "logprobs": ("logprobs", "top_logprobs", "include"),
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
}


def _name_of(meant: str, asked: Mapping[str, Any]) -> str:
    """What the request calls it."""
    return next((name for name in _ELSEWHERE.get(meant, ()) if asked.get(name)), meant)


def turns_of(messages: Sequence[Message]) -> list[Message]:
    """A conversation with the messages of one turn of the assistant as one, since clients may send its words and its
    calls apart, and the results of its calls right behind it."""
    merged: list[Message] = []
    for message in _results_first(messages):
        last = merged[-1] if merged else None
        if last is None or message["role"] != "assistant" or last["role"] != "assistant":
            merged.append(message)
            continue
        both = {"content": (last.get("content") or "") + (message.get("content") or "")}
        lists = {
            key: [*last.get(key, ()), *message.get(key, ())]
            for key in ("tool_calls", "sealed")
            if key in last or key in message
        }
        merged[-1] = {**last, **both, **lists}
    return merged


def _turns(messages: Sequence[Message], blocks: Blocks) -> tuple[str, list[Json]]:
    """(the system prompt, turns of user and assistant by turns). Results of tools are the user's; what the system says
    later on is told by the user."""
    system: list[str] = []
    turns: list[Json] = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and not turns:
            system.append(message.get("content") or "")
            continue
        if message["role"] == "assistant":
            previous = messages[index - 1] if index else None
            role, content = "assistant", _said(message, blocks(turn_key(previous, message)))
        else:
            role, content = "user", _heard(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += content
        elif content:
            turns.append({"role": role, "content": [*content]})  # A turn that is kept is not to grow.
    return "\n\n".join(filter(None, system)), turns


def _heard(message: Message) -> list[Json]:
    content = message.get("content") or ""
    if message["role"] != "tool":
        return as_blocks(content)
    result: Any = as_blocks(content) if has_attachments(content) else content
    return [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": result}]


def _said(message: Message, before: list[Json]) -> list[Json]:
    """A turn of the assistant: as the provider said it, where it is still the same; else with its thoughts first."""
    if before and same_meaning(_message_of(before)) == same_meaning(message):
        return before
    thoughts = [block for block in before if block["type"] in _THOUGHTS] or message.get("sealed") or []
    content = as_blocks(message.get("content") or "")
    return [*thoughts, *content, *(_tool_use(call) for call in message.get("tool_calls") or ())]


_THOUGHTS: Final = ("thinking", "redacted_thinking")


def _message_of(blocks: Sequence[Json]) -> Message:
    """Anthropic's blocks as a message: its words and its calls."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    calls = [
        {"id": use["id"], "function": {"name": use["name"], "arguments": orjson.dumps(use["input"]).decode()}}
        for use in uses
    ]
    return {"role": "assistant", "content": "".join(texts), "tool_calls": calls}


def _tool_use(call: Json) -> Json:
    function = call["function"]
    try:
        given = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        given = None
    arguments = given if isinstance(given, dict) else {RAW_ARGUMENTS: function["arguments"]}
    return {"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": arguments}


def _tools(request: Request) -> Json:
    if request.barred:
        tools = [_tool(tool["function"]) for tool in request.barred]
        return {"tools": tools, "tool_choice": {"type": "none"}}
    if not request.tools:
        return _tools_of_old(request.messages)
    constraint = request.constraint
    tools = [tool["function"] for tool in request.tools]
    if constraint.names is not None:
        tools = [tool for tool in tools if tool["name"] in constraint.names]
    choice: Json = {"type": "any" if constraint.needs_call else "auto"}
    if constraint.needs_call and len(tools) == 1:
        choice = {"type": "tool", "name": tools[0]["name"]}
    if constraint.one_call:
        choice["disable_parallel_tool_use"] = True
    asked = {"tool_choice": choice} if choice != {"type": "auto"} else {}
    return {"tools": [_tool(tool) for tool in tools]} | asked


def _tools_of_old(messages: Sequence[Message]) -> Json:
    """A conversation in which tools were called must name them, even where none may be called now."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = dict.fromkeys(call["function"]["name"] for call in calls)
    if not names:
        return {}
    return {"tools": [_tool({"name": name}) for name in names], "tool_choice": {"type": "none"}}


def _tool(function: Mapping[str, Any]) -> Json:
    schema = {"type": "object"} | (function.get("parameters") or {})
    tool: Json = {"name": function["name"], "input_schema": schema}
    return tool | {key: function[key] for key in ("description", "strict") if function.get(key) is not None}


_WRITERS: Final[Mapping[str, Callable[[Request, Provider, str, Json, Blocks], Json]]] = {
    "chat/completions": chat_body,
    "messages": messages_body,
}
"""By the path that is asked instead."""


def body_of(
    path: str, request: Request, provider: Provider, model: str, params: Json, blocks: Blocks
) -> tuple[Json, tuple[str, ...]]:
    """(the body for a path, the names of what was left out of it). Raises Problem 400 naming what cannot be left
    out."""
    extras, taken = EXTRAS[path](request, model)
    body = _with(_WRITERS[path](request, provider, model, params, blocks), extras)
    if "max_tokens" not in params:  # Thoughts are part of an answer: they come on top of the limit that is ours.
        budget = _object(body, "thinking").get("budget_tokens")
        body |= {"max_tokens": body["max_tokens"] + budget} if type(budget) is int and budget > 0 else {}
    lost = tuple(name for name in request.unknown if name not in taken)
    return body, lost + _lost_inside(path, request)


def _with(body: Json, extras: Json) -> Json:
    """Objects of one name are put together."""
    for name, value in extras.items():
        known = body.get(name)
        body[name] = {**value, **known} if isinstance(known, dict) else value
    return body


def _lost_inside(path: str, request: Request) -> tuple[str, ...]:
    """What is not passed on of fields that are."""
    lost: list[str] = []
    if path != "messages" and "effort" in _object(request.asked, "output_config"):
        lost.append("output_config.effort")
    if path == "messages" and any("name" in message for message in request.messages):
        lost.append("messages.name")
    return tuple(lost)
