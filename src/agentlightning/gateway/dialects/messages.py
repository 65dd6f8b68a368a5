"""The dialect of Anthropic's `/v1/messages` and its `count_tokens`.

Thinking that a client sends back is separate from the content (`reasoning_content`), for templates that show it. Hosted
tools are ignored and counted; content that the model cannot read is rejected by name. A tool call whose arguments are
no JSON object, which this format cannot carry, is written as `{"_raw_arguments": TEXT}`, and read back unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

import orjson

from agentlightning.chat.base import Message
from agentlightning.chat.messages import arguments_text
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.answer import (
    THOUGHTS,
    Answer,
    Event,
    ProviderResponse,
    ReasoningDelta,
    RefusalDelta,
    ToolCall,
    Usage,
    json_of,
    object_of,
)
from agentlightning.gateway.dialects.base import (
    MESSAGES_PARAMS,
    Choice,
    Dialect,
    ReplyWriter,
    Request,
    encode_event,
    given_messages,
    loads_tolerantly,
    num_output_tokens,
    optional,
    read_shared,
    require_type,
    shorten,
    text_format,
    with_tools,
)
from agentlightning.gateway.dialects.content_parts import BILLING, read_content, text_of
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import Json, dumps

RAW_ARGUMENTS: Final = "_raw_arguments"
"""The field for the arguments of a tool call that are no JSON object, which this format cannot carry otherwise."""
_KNOWN: Final = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "stream", "thread", "output_config", "output_format"}
)
_UNSUPPORTED: Final = {"mcp_servers": ([],), "container": ()}
_TEXT_FIELDS: Final = {"text": "text"}


def read_request(data: Json, recall: ResponseLookup, attachments: bool = False) -> Request:
    """See `ReadRequest`."""
    if data.get("thread") is not None:  # On this error, the SDK's tool runner sends the whole history instead.
        details = {"error_code": "thread_unsupported_request"}
        raise ApiError(400, "threads are not stored here; send the full conversation", param="thread", details=details)
    request = read_shared(data, MESSAGES_PARAMS, SamplingParams(), _KNOWN, _UNSUPPORTED)
    (name, shape), dropped = _format(data), list[str]()
    content, choice = text_format(name, shape, nested=False), optional(data, "tool_choice", dict) or {}
    parallel = choice.get("disable_parallel_tool_use") is not True
    request = with_tools(request, _as_function, _tool_choice(choice), parallel, content, name.partition(".")[0])
    messages, prefill = _split_prefill(_conversation(data, dropped, attachments), attachments)
    ignored = (*request.ignored_fields, *dropped)
    return replace(request, messages=messages, prefill=prefill, ignored_fields=ignored)


# -- reading ---------------------------------------------------------------------------------------------------------


def _as_function(tool: Any) -> Any:
    """A tool of the caller as chat completions has it; a hosted one as it is."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        return tool
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema") or {}}}


def _tool_choice(choice: Json) -> Choice:
    match choice.get("type"):
        case "none":
            return None
        case None | "auto":
            return False, None
        case "any":
            return True, None
        case "tool":
            return True, frozenset({require_type("tool_choice.name", choice.get("name"), str)})
        case _:
            raise bad_request(
                "tool_choice", f"tool_choice={shorten(choice)} is not known; use the type auto, any, tool or none"
            )


def _format(data: Json) -> tuple[str, Any]:
    """(path of the field, response format), under its current or its earlier name."""
    if shape := (optional(data, "output_config", dict) or {}).get("format"):
        return "output_config.format", shape
    return "output_format", data.get("output_format")


def _conversation(data: Json, dropped: list[str], attachments: bool) -> list[Message]:
    given, system = given_messages(data), _system(data.get("system"))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(given):
        messages += _message(f"messages[{index}]", message, dropped, attachments)
    return messages


def _split_prefill(messages: list[Message], attachments: bool) -> tuple[list[Message], str]:
    """(the messages, prefill of the answer): the answer continues a last message of the assistant. Raises ApiError 400
    if it cannot, as in a request that is translated (`attachments`): other dialects have no prefill."""
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, ""
    if attachments:
        raise bad_request("messages", "the last message is the assistant's; this model cannot continue it")
    if last.get("tool_calls") or last.get("reasoning_content") or not messages[:-1]:
        raise bad_request(
            "messages", "the last message is the assistant's, and not only text; no answer can continue it"
        )
    return messages[:-1], text_of(last["content"])


def _system(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    blocks = require_type("system", value, list)
    texts = [block for block in blocks if not str(require_type("system", block, dict).get("text")).startswith(BILLING)]
    return text_of(read_content("system", texts, _TEXT_FIELDS, attachments=False, between="\n"))


def _message(where: str, message: Any, dropped: list[str], attachments: bool) -> list[Message]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise bad_request("messages", f"{where} has the role {shorten(role)}; use user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [
        require_type(f"{where}.content", block, dict) for block in require_type(f"{where}.content", content, list)
    ]
    if role == "assistant":
        return [_assistant(where, blocks)]
    return _user(where, role, blocks, dropped, attachments)


def _user(where: str, role: str, blocks: Sequence[Json], dropped: list[str], attachments: bool) -> list[Message]:
    """Each tool result becomes a message of its own, and so does each run of other blocks."""
    messages: list[Message] = []
    for is_result, run in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if is_result:
            messages += [_result(where, block, dropped, attachments) for block in run]
        else:
            messages.append(
                {"role": role, "content": read_content(f"{where}.content", list(run), _TEXT_FIELDS, attachments, "\n")}
            )
    return messages or [{"role": role, "content": ""}]


def _result(where: str, block: Json, dropped: list[str], attachments: bool) -> Message:
    if block.get("is_error"):
        dropped.append("tool_result.is_error")
    content = read_content(f"{where}.tool_result.content", block.get("content"), _TEXT_FIELDS, attachments, "\n")
    call_id = require_type(f"{where}.tool_result.tool_use_id", block.get("tool_use_id"), str)
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _assistant(where: str, blocks: Sequence[Json]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(where, block))
            case "thinking":
                thought = require_type(f"{where}.thinking", block.get("thinking"), str)
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case "redacted_thinking":
                pass
            case _:
                message["content"] += text_of(read_content(where, [block], _TEXT_FIELDS, attachments=False))
    return message


def _call(where: str, block: Json) -> Json:
    given = block.get("input")
    if isinstance(given, dict) and isinstance(given.get(RAW_ARGUMENTS), str):
        given = given[RAW_ARGUMENTS]
    name = require_type(f"{where}.tool_use.name", block.get("name"), str)
    arguments = given if isinstance(given, str) else arguments_text(given)
    return {"id": optional(block, "id", str), "type": "function", "function": {"name": name, "arguments": arguments}}


# -- writing -----------------------------------------------------------------------------------------------------------


class MessagesReplyWriter(ReplyWriter):
    _index = -1
    """Index of the last block that was started."""
    _open: str | None = None
    """Type of the open block, if it takes deltas."""
    _blocks: list[Json] | None = None
    """The blocks of a reply that is written at once."""

    def body(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        blocks = self._blocks = list[Json]()
        for part in answer.parts():
            self.event(answer, part)
        self._close()
        return dumps(self._message(blocks) | _stop_fields(answer) | {"usage": self._usage(num_output_tokens(answers))})

    def start(self, answers: Sequence[Answer]) -> bytes:
        stop = {"stop_reason": None, "stop_sequence": None}
        message = self._message([]) | stop | {"usage": self._usage(0)}
        return _event("message_start", {"message": message})

    def event(self, answer: Answer, event: Event) -> bytes:
        match event:
            case ToolCall():
                arguments = _input(event)
                delta = {"type": "input_json_delta", "partial_json": dumps(arguments).decode()}
                started = self._close() + self._begin(_tool_use(event, {}), _tool_use(event, arguments))
                return started + self._delta(delta) + self._end()
            case ReasoningDelta():
                started = self._open_block({"type": "thinking", "thinking": "", "signature": ""})
                return started + self._extend("thinking", event.text)
            case str() | RefusalDelta():
                text = event if isinstance(event, str) else event.text
                return self._open_block({"type": "text", "text": ""}) + self._extend("text", text)
            case _:
                return b""

    def end(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        used = {"delta": _stop_fields(answer), "usage": self._usage(num_output_tokens(answers))}
        return self._close() + _event("message_delta", used) + _event("message_stop", {})

    def _message(self, content: list[Json]) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content}

    def _usage(self, num_sampled: int) -> Json:
        """Here, cached tokens are not part of the input tokens."""
        usage = self.usage
        read, written = usage.cached_tokens, usage.written_tokens + usage.written_hour_tokens
        cache = {"cache_creation_input_tokens": written, "cache_read_input_tokens": read}
        used = {"input_tokens": max(0, usage.input_tokens - read - written), "output_tokens": num_sampled} | cache
        thought = {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}
        return used | (thought if usage.reasoning_tokens else {})

    def _begin(self, block: Json, whole: Json | None = None) -> bytes:
        """Start a block; `whole`: as it will be, if it takes no deltas of text."""
        self._index += 1
        if self._blocks is not None:
            self._blocks.append(dict(whole or block))
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _extend(self, name: str, text: str) -> bytes:
        """More of a field of the open block."""
        if self._blocks is not None:
            self._blocks[-1][name] += text
        return self._delta({"type": f"{name}_delta", name: text})

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _end(self) -> bytes:
        return _event("content_block_stop", {"index": self._index})

    def _open_block(self, block: Json) -> bytes:
        """Start a block that takes deltas, unless one of its type is open."""
        if self._open == block["type"]:
            return b""
        closed, self._open = self._close(), block["type"]
        return closed + self._begin(block)

    def _close(self) -> bytes:
        """End the open block."""
        kind, self._open = self._open, None
        # Clients send thinking without a signature back as text, or not at all; this one means nothing.
        signed = self._extend("signature", self.id) if kind == "thinking" else b""
        return signed + self._end() if kind else b""


def _stop_fields(answer: Answer) -> dict[str, str | None]:
    stop = answer.stop_string if answer.finish_reason == "stop" and not answer.is_refusal else None
    kind = "content_filter" if answer.is_refusal else answer.finish_reason
    return {"stop_reason": _STOP_REASONS.get(kind) if stop is None else "stop_sequence", "stop_sequence": stop}


_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def _tool_use(call: ToolCall, input: Any) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input}


def _input(call: ToolCall) -> Any:
    """The arguments as they were written, if they are a JSON object."""
    is_object = isinstance(json_of(call.arguments), dict)
    return orjson.Fragment(call.arguments) if is_object else {RAW_ARGUMENTS: call.arguments}


def _event(kind: str, data: Json) -> bytes:
    return encode_event({"type": kind, **data}, kind)


def count_reply(tokens: int) -> bytes:
    """The reply to `count_tokens`."""
    return dumps({"input_tokens": tokens})


def error_body(api_error: ApiError) -> bytes:
    """The body of an error reply."""
    return dumps({"type": "error", "error": _error(api_error)})


def error_event(api_error: ApiError) -> bytes:
    """An error in the middle of a stream, on which the official SDK raises APIStatusError."""
    return _event("error", {"error": _error(api_error)})


def _error(api_error: ApiError) -> Json:
    kind = _ERROR_TYPES.get(api_error.status, "invalid_request_error" if api_error.status < 500 else "api_error")
    message = api_error.message
    if api_error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # Claude Code shortens the conversation on these words.
    return {"type": kind, "message": message, "details": dict(api_error.details) or None}


_ERROR_TYPES: Final = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# -- reading answers ---------------------------------------------------------------------------------------------------


_OWN: Final = (*THOUGHTS, "text", "tool_use")
"""Types of the blocks that the model writes; hosted tools write the others."""
_DELTA_FIELDS: Final = {"text": "text", "thinking": "thinking", "input_json": "partial_json"}
"""Kind of a delta -> its field."""


class MessagesResponse(ProviderResponse):
    """What a provider answers to `/v1/messages`, whole or event by event."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[Any, Json] = {}
        """Content blocks that are not complete, by their index."""
        self._deltas: dict[Any, dict[str, list[str]]] = {}
        """The deltas of each, by the field they extend: joined once, at the end of the block."""
        self._used: Json = {}
        """What was reported last of each part of the usage: the end may report its output alone, or in less detail."""

    def _read(self, data: Json) -> None:
        place = data.get("index")
        match data.get("type"):
            case "message" | "message_start":
                message = data.get("message", data)
                self._identify(message)
                for index, block in enumerate(message.get("content") or ()):
                    self._start(index, block)
                    self._end(index)
                self._finish(message, message.get("usage"))
            case "content_block_start":
                self._start(place, data["content_block"])
            case "content_block_delta":
                self._delta(place, data["delta"])
            case "content_block_stop":
                self._end(place)
            case "message_delta":
                self._finish(data["delta"], data.get("usage"))
            case "error":
                self.error = str((data.get("error") or {}).get("message"))
            case _:
                pass

    def _finish(self, message: Json, usage: Any) -> None:
        self.choice().end(message.get("stop_reason"), message.get("stop_sequence"))
        if usage:
            self._used |= {name: value for name, value in usage.items() if value and isinstance(value, int | dict)}
            self._add_usage(messages_usage(self._used))

    def _start(self, place: Any, block: Json) -> None:
        self._blocks[place] = dict(block)
        self._add_text(block.get("type"), block)

    def _add_text(self, kind: Any, data: Json) -> None:
        if kind == "text":
            self.choice().add_text(data.get(kind))
        elif kind == "thinking":
            self.choice().add_reasoning(data.get(kind))

    def _delta(self, place: Any, delta: Json) -> None:
        kind = str(delta.get("type")).removesuffix("_delta")
        if kind == "signature":
            self._blocks[place][kind] = delta[kind]
        elif name := _DELTA_FIELDS.get(kind):
            self._deltas.setdefault(place, {}).setdefault(name, []).append(delta[name])
            self._add_text(kind, delta)

    def _end(self, place: Any) -> None:
        block, answer = self._blocks.pop(place), self.choice()
        texts = {name: "".join(deltas) for name, deltas in self._deltas.pop(place, {}).items()}
        arguments = texts.pop("partial_json", "")
        block |= {name: block.get(name, "") + text for name, text in texts.items()}
        if block.get("type") == "tool_use":
            answer.add_call(place, block.get("id"), block.get("name"), arguments or block.get("input"))
            answer.end_call(place)
        if arguments:
            try:
                block["input"] = loads_tolerantly(arguments.encode())
            except ValueError:
                return  # A call that was cut off cannot be sent back.
        (answer.add_block if block.get("type") in _OWN else answer.add_hosted_call)(block)


def messages_usage(usage: Json) -> Usage:
    read, written = (usage.get(f"cache_{kind}_input_tokens", 0) for kind in ("read", "creation"))
    hour = object_of(usage, "cache_creation").get("ephemeral_1h_input_tokens") or 0
    thought = object_of(usage, "output_tokens_details").get("thinking_tokens")
    prompt = usage.get("input_tokens", 0) + read + written
    return Usage.counted(prompt, usage.get("output_tokens"), read, written - hour, hour, thought)


MESSAGES: Final = Dialect(
    "msg_",
    read_request,
    MessagesReplyWriter,
    MessagesResponse,
    call_prefix="toolu_",
    error_body=error_body,
    error_event=error_event,
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
)
