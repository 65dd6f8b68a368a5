"""The dialect of Anthropic's `/v1/messages` and its `count_tokens`.

Thinking that a client sends back is separate from the content (`reasoning_content`), for templates that show it. Hosted
tools are ignored and counted; content that the model cannot read is rejected by name. A tool call whose arguments are
no JSON object, which this format cannot carry, is written as `{"_raw_arguments": TEXT}`, after the part of it that was
streamed as an object, and read back unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.chat.messages import arguments_text
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.anthropic.reply import RAW_ARGUMENTS, MessagesReplyWriter, error_body, error_event
from agentlightning.gateway.dialects.anthropic.signed_reasoning import decode_signed_reasoning
from agentlightning.gateway.dialects.base import Body, Dialect, ReplyMetadata, Request
from agentlightning.gateway.dialects.content_parts import read_content
from agentlightning.gateway.dialects.message_digest import text_of
from agentlightning.gateway.dialects.openai import common
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.sampling import MESSAGES_PARAMS, sampling_params
from agentlightning.gateway.dialects.validation import (
    kind_of,
    optional,
    read_json,
    reject_unsupported,
    require_type,
    shorten,
    unknown_fields,
)
from agentlightning.gateway.errors import ApiError, bad_request

_KNOWN: Final = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "stream", "thread", "output_config", "output_format"}
)
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {"mcp_servers": ([],), "container": ()}
_TEXT_FIELDS: Final = {"text": "text"}
_BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code starts its system prompt with a line that differs between calls and means nothing to the model."""


def read_request(body: Body, recall: ResponseLookup | None = None, attachments: bool = False) -> Request:
    """See `ReadRequest`."""
    data = read_json(body)
    _reject_thread(data)
    reject_unsupported(data, _UNSUPPORTED)
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
    messages, prefill = _split_prefill(_conversation(data, dropped, attachments), attachments)
    return Request(
        model=optional(data, "model", str),
        messages=messages,
        tools=tools,
        forbidden_tools=forbidden_tools,
        params=sampling_params(data, MESSAGES_PARAMS, SamplingParams(), "the request"),
        stream=bool(optional(data, "stream", bool)),
        constraint=constraint,
        prefill=prefill,
        ignored_fields=(*unknown_fields(data, _KNOWN, _UNSUPPORTED, MESSAGES_PARAMS), *dropped),
        raw=data,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _reject_thread(data: Mapping[str, Any]) -> None:
    """A thread stores history on the server. On this error, the SDK's tool runner sends the whole history instead."""
    if data.get("thread") is not None:
        details = {"error_code": "thread_unsupported_request"}
        raise ApiError(400, "threads are not stored here; send the full conversation", param="thread", details=details)


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
    """(path of the field, response format), under its current or its earlier name."""
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


def _result(where: str, block: Mapping[str, Any], dropped: list[str], attachments: bool) -> Message:
    if block.get("is_error"):
        dropped.append("tool_result.is_error")
    content = read_content(f"{where}.tool_result.content", block.get("content"), _TEXT_FIELDS, attachments, "\n")
    call_id = require_type(f"{where}.tool_result.tool_use_id", block.get("tool_use_id"), str)
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _assistant(where: str, blocks: Sequence[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    sealed: list[dict[str, Any]] = []
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                message.setdefault("tool_calls", []).append(_call(where, block))
            case "thinking":
                thought = require_type(f"{where}.thinking", block.get("thinking"), str)
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
                sealed += decode_signed_reasoning(block.get("signature"))
            case "redacted_thinking":
                sealed += decode_signed_reasoning(block.get("data"))
            case _:
                message["content"] += _text(where, block)
    return message | ({"sealed": sealed} if sealed else {})


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if isinstance(given, dict) and isinstance(given.get(RAW_ARGUMENTS), str):
        given = given[RAW_ARGUMENTS]
    name = require_type(f"{where}.tool_use.name", block.get("name"), str)
    arguments = given if isinstance(given, str) else arguments_text(given)
    return {"id": optional(block, "id", str), "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(where: str, block: Any) -> str:
    kind = kind_of(block)
    if kind != "text" or not isinstance(block.get("text"), str):
        name = where.partition("[")[0]
        raise bad_request(
            name, f"{where} has a block of type {shorten(kind)}, which cannot be read here; this model reads text"
        )
    return block["text"]


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
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
)
