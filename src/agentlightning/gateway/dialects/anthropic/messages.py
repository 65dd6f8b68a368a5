"""The messages dialect: Anthropic's `/v1/messages` and its `count_tokens`.

Thinking that a client sends back is kept apart from what was said (`reasoning_content`), for templates that show it.
Hosted tools are left out and counted; content the model cannot read is refused by name. A tool call whose arguments
are no JSON object, which this wire cannot carry, travels as `{"_raw_arguments": TEXT}`, after what was shown of it as
an object, and comes back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import orjson

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.anthropic.partial_json import ObjectText
from agentlightning.gateway.dialects.base import Body, Dialect, ReplyMetadata, Request, num_output_tokens
from agentlightning.gateway.dialects.content import (
    AnswerView,
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    SignedReasoning,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from agentlightning.gateway.dialects.content_parts import read_content
from agentlightning.gateway.dialects.message_digest import text_of
from agentlightning.gateway.dialects.openai import common
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.sampling import MESSAGES_PARAMS, sampling_params
from agentlightning.gateway.dialects.sse import encode_event
from agentlightning.gateway.dialects.validation import (
    as_arguments,
    kind_of,
    optional,
    read_json,
    reject_unsupported,
    require_type,
    shorten,
    unknown_fields,
)
from agentlightning.gateway.errors import ApiError, bad_request

RAW_ARGUMENTS: Final = "_raw_arguments"

_KNOWN: Final = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "stream", "thread", "output_config", "output_format"}
)
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {"mcp_servers": ([],), "container": ()}
_TEXT_FIELDS: Final = {"text": "text"}
_BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code opens its system prompt with a line that differs between calls and says nothing to the model."""


def read_request(body: Body, recall: ResponseLookup | None = None, attachments: bool = False) -> Request:
    """See `Read`."""
    data = read_json(body)
    _refuse_thread(data)
    reject_unsupported(data, _REFUSED)
    dropped: list[str] = []
    tools = _tools(data, dropped)
    choice = optional(data, "tool_choice", dict) or {}
    tools, forbidden_tools = (None, tools) if choice.get("type") == "none" else (tools, None)
    name, shape = _format(data)
    constraint = common.read_constraint(
        tools,
        _tool_choice(choice),
        False if choice.get("disable_parallel_tool_use") is True else None,
        common.text_format(name, shape, nested=False),
        name.partition(".")[0],
    )
    messages, prefill = _begun(_conversation(data, dropped, attachments), attachments)
    return Request(
        model=optional(data, "model", str),
        messages=messages,
        tools=tools,
        forbidden_tools=forbidden_tools,
        params=sampling_params(data, MESSAGES_PARAMS, SamplingParams(), "the request"),
        stream=bool(optional(data, "stream", bool)),
        constraint=constraint,
        prefill=prefill,
        ignored_fields=(*unknown_fields(data, _KNOWN, _REFUSED, MESSAGES_PARAMS), *dropped),
        raw=data,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _refuse_thread(data: Mapping[str, Any]) -> None:
    """A thread holds history on the server. The SDK's tool runner takes this refusal as: send everything."""
    if data.get("thread") is not None:
        details = {"error_code": "thread_unsupported_request"}
        raise ApiError(400, "threads are not kept here; send the full conversation", param="thread", details=details)


def _tools(data: Mapping[str, Any], dropped: list[str]) -> common.Tools | None:
    tools: common.Tools = []
    for index, tool in enumerate(optional(data, "tools", list) or ()):
        kind = require_type(f"tools[{index}]", tool, dict).get("type")
        if kind not in (None, "custom"):
            dropped.append(f"tools.{kind}")
            continue
        function: dict[str, Any] = {"name": require_type(f"tools[{index}].name", tool.get("name"), str)}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        tools.append({"type": "function", "function": function | {"parameters": tool.get("input_schema") or {}}})
    return tools or None


def _tool_choice(choice: Mapping[str, Any]) -> tuple[bool, frozenset[str] | None]:
    match choice.get("type"):
        case None | "auto" | "none":
            return False, None
        case "any":
            return True, None
        case "tool":
            return True, frozenset({require_type("tool_choice.name", choice.get("name"), str)})
        case _:
            raise bad_request(
                "tool_choice", f"tool_choice={shorten(choice)} is not known; use the type auto, any, tool or none"
            )


def _format(data: Mapping[str, Any]) -> tuple[str, Any]:
    """(where it stands, the format of the content): by its name, or by the one it had before."""
    if shape := (optional(data, "output_config", dict) or {}).get("format"):
        return "output_config.format", shape
    return "output_format", data.get("output_format")


def _conversation(data: Mapping[str, Any], dropped: list[str], attachments: bool) -> list[Message]:
    given = data.get("messages")
    if not isinstance(given, list) or not given:
        raise bad_request("messages", "messages must be a list with at least one message")
    system = _system(data.get("system"))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(given):
        messages += _message(f"messages[{index}]", message, dropped, attachments)
    return messages


def _begun(messages: list[Message], attachments: bool) -> tuple[list[Message], str]:
    """(the messages, what the answer is to begin with): the last one, where it is the assistant's. `attachments`: the
    request is to be translated, and other dialects have no way to say this. Raises ApiError 400 where it cannot be."""
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, ""
    if attachments:
        raise bad_request(
            "messages", "the last message is the assistant's; an answer that begins with it cannot be drawn here"
        )
    if last.get("tool_calls") or last.get("reasoning_content") or not messages[:-1]:
        raise bad_request(
            "messages", "the last message is the assistant's, and not text alone; no answer can begin with it"
        )
    return messages[:-1], text_of(last["content"])


def _system(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = [_text("system", block) for block in require_type("system", value, list)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


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


def _user(
    where: str, role: str, blocks: Sequence[dict[str, Any]], dropped: list[str], attachments: bool
) -> list[Message]:
    """Results of tools become messages of their own; what stands between them one message each."""
    messages: list[Message] = []
    for is_result, run in groupby(blocks, lambda block: block.get("type") == "tool_result"):
        if is_result:
            messages += [_result(where, block, dropped, attachments) for block in run]
        else:
            messages.append(
                {"role": role, "content": read_content(f"{where}.content", list(run), _TEXT_FIELDS, attachments, "\n")}
            )
    return messages or [{"role": role, "content": ""}]


def _result(where: str, block: Mapping[str, Any], dropped: list[str], attachments: bool) -> Message:
    if block.get("is_error"):
        dropped.append("tool_result.is_error")
    content = read_content(f"{where}.tool_result.content", block.get("content"), _TEXT_FIELDS, attachments, "\n")
    call_id = require_type(f"{where}.tool_result.tool_use_id", block.get("tool_use_id"), str)
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _assistant(where: str, blocks: Sequence[dict[str, Any]]) -> Message:
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
                message["content"] += _text(where, block)
    return message


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if isinstance(given, dict) and isinstance(given.get(RAW_ARGUMENTS), str):
        given = given[RAW_ARGUMENTS]
    name = require_type(f"{where}.tool_use.name", block.get("name"), str)
    arguments = given if isinstance(given, str) else as_arguments(given)
    return {"id": optional(block, "id", str), "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(where: str, block: Any) -> str:
    kind = kind_of(block)
    if kind != "text" or not isinstance(block.get("text"), str):
        name = where.partition("[")[0]
        raise bad_request(
            name, f"{where} has a block of type {shorten(kind)}, which cannot be read here; this model reads text"
        )
    return block["text"]


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MessagesReplyWriter:
    """Writes the reply to one request."""

    head: ReplyMetadata
    _index: int = field(default=-1, init=False)
    """Of the last block begun."""
    _open: str | None = field(default=None, init=False)
    """Type of the block that is under way, where it grows."""
    _call: ToolCallStart | None = field(default=None, init=False)
    """The call whose arguments are coming, until the first of them is shown."""
    _arguments: ObjectText = field(default_factory=ObjectText, init=False)

    def body(self, answers: Sequence[AnswerView]) -> bytes:
        (answer,) = answers
        content = [block for part in answer.parts() if (block := self._block(part)) is not None]
        return orjson.dumps(self._message(content) | _stop(answer) | {"usage": self._usage(num_output_tokens(answers))})

    def start(self, answers: Sequence[AnswerView]) -> bytes:
        stop = {"stop_reason": None, "stop_sequence": None}
        message = self._message([]) | stop | {"usage": self._usage(0)}
        return _event("message_start", {"message": message})

    def event(self, answer: AnswerView, piece: OutputEvent) -> bytes:
        match piece:
            case ToolCall():
                return self._close() + self._whole_call(piece)
            case ReasoningDelta():
                begun = self._open_block({"type": "thinking", "thinking": "", "signature": ""})
                return begun + self._delta({"type": "thinking_delta", "thinking": piece.text})
            case str() | RefusalDelta():
                text = piece if isinstance(piece, str) else piece.text
                return self._open_block({"type": "text", "text": ""}) + self._delta(
                    {"type": "text_delta", "text": text}
                )
            case ToolCallStart():
                self._call, self._arguments = piece, ObjectText()
                return self._close()
            case ToolCallDelta():
                return self._more_arguments(self._arguments.feed(piece.text))
            case ToolCallEnd():
                return self._end_call(piece.call)
            case SignedReasoning():
                return self._close()

    def end(self, answers: Sequence[AnswerView]) -> bytes:
        (answer,) = answers
        used = {"delta": _stop(answer), "usage": self._usage(num_output_tokens(answers))}
        return self._close() + _event("message_delta", used) + _event("message_stop", {})

    def _block(self, part: OutputEvent) -> dict[str, Any] | None:
        match part:
            case ReasoningDelta():
                return {"type": "thinking", "thinking": part.text, "signature": self._signature}
            case ToolCall():
                return _tool_use(part, _input(part))
            case str() | RefusalDelta():
                return {"type": "text", "text": part if isinstance(part, str) else part.text}
            case _:
                return None

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}
        return head | {"content": content}

    def _usage(self, drawn: int) -> dict[str, Any]:
        """Here, what was cached is not counted as input."""
        head = self.head
        read, written = head.cached_tokens or 0, head.cache_write_tokens or 0
        cache = {"cache_creation_input_tokens": written, "cache_read_input_tokens": read}
        used = {"input_tokens": max(0, head.prompt_tokens - read - written), "output_tokens": drawn} | cache
        thought = head.reasoning_tokens
        return used if thought is None else used | {"output_tokens_details": {"thinking_tokens": thought}}

    def _whole_call(self, call: ToolCall) -> bytes:
        arguments = {"type": "input_json_delta", "partial_json": orjson.dumps(_input(call)).decode()}
        return self._begin(_tool_use(call, {})) + self._delta(arguments) + self._end()

    def _more_arguments(self, shown: str) -> bytes:
        """The block begins when it is seen that they begin as an object."""
        begun = b""
        if (call := self._call) is not None:
            if not shown.strip():
                return b""
            self._call, self._open = None, "tool_use"
            begun = self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        return begun + self._delta({"type": "input_json_delta", "partial_json": shown}) if shown else begun

    def _end_call(self, call: ToolCall) -> bytes:
        begun, self._call = self._call is None, None
        if not begun:
            return self._whole_call(call)
        return self._more_arguments(self._arguments.finish(RAW_ARGUMENTS)) + self._close()

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _end(self) -> bytes:
        return _event("content_block_stop", {"index": self._index})

    def _open_block(self, block: dict[str, Any]) -> bytes:
        """Begin a block that grows, unless one of its type is under way."""
        if self._open == block["type"]:
            return b""
        closed, self._open = self._close(), block["type"]
        return closed + self._begin(block)

    def _close(self) -> bytes:
        """End the block that is under way."""
        opened, self._open = self._open, None
        signed = {"type": "signature_delta", "signature": self._signature}
        return (self._delta(signed) if opened == "thinking" else b"") + (self._end() if opened else b"")

    @property
    def _signature(self) -> str:
        """Of a thought: clients send one without a signature back as text, or not at all. Nobody checks it."""
        return self.head.id


def _stop(answer: AnswerView) -> dict[str, str | None]:
    reason = answer.finish_reason
    if answer.is_refusal:
        return {"stop_reason": "refusal", "stop_sequence": None}
    if reason == "stop" and answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": _REASONS[reason], "stop_sequence": None}


_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def _tool_use(call: ToolCall, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": input}


def _input(call: ToolCall) -> Any:
    """The arguments as they were spelled, where they are an object."""
    try:
        is_object = isinstance(orjson.loads(call.arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(call.arguments) if is_object else {RAW_ARGUMENTS: call.arguments}


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return encode_event({"type": kind, **data}, kind)


def count_reply(tokens: int) -> bytes:
    """The reply to `count_tokens`."""
    return orjson.dumps({"input_tokens": tokens})


def error_body(api_error: ApiError) -> bytes:
    """The body of an error reply."""
    return orjson.dumps({"type": "error", "error": _error(api_error)})


def error_event(api_error: ApiError) -> bytes:
    """A failure after the stream has begun; the official SDK raises APIStatusError on it."""
    return _event("error", {"error": _error(api_error)})


def _error(api_error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(api_error.status, "invalid_request_error" if api_error.status < 500 else "api_error")
    message = api_error.message
    if api_error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # Claude Code looks for these words, and shortens.
    return {"type": kind, "message": message, "details": dict(api_error.details) or None}


_TYPES: Final = {
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


def _reply(request: Request, head: ReplyMetadata) -> MessagesReplyWriter:
    return MessagesReplyWriter(head)


MESSAGES: Final = Dialect(
    operation="chat",
    id_prefix="msg_",
    call_prefix="toolu_",
    read=read_request,
    reply=_reply,
    error_body=error_body,
    error_event=error_event,
)
