"""The dialect of OpenAI's `/v1/responses`, whose conversations are items instead of messages.

Replies are stored while their attempt runs, so that `previous_response_id` and item references find them. With
`store=false` a reply cannot be retrieved but still continued, since clients continue what they asked not to store.
Custom tools, whose input is free text, are functions with one argument. Hosted tools are ignored and counted; items
that only a hosted service can read are rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.chat.messages import arguments_text
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.anthropic.signed_reasoning import decode_signed_reasoning
from agentlightning.gateway.dialects.base import Body, Dialect, ReplyMetadata, Request
from agentlightning.gateway.dialects.content_parts import has_attachments, joined, object_of, read_content
from agentlightning.gateway.dialects.openai import common
from agentlightning.gateway.dialects.openai.responses_reply import ID_PREFIX, ResponsesReplyWriter
from agentlightning.gateway.dialects.output import CUSTOM_INPUT, custom_arguments
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.sampling import OPENAI_UNSUPPORTED, RESPONSES_PARAMS, sampling_params
from agentlightning.gateway.dialects.sse import encode_event
from agentlightning.gateway.dialects.validation import (
    kind_of,
    optional,
    read_json,
    reject_unsupported,
    require_type,
    shorten,
    top_logprobs,
    unknown_fields,
)
from agentlightning.gateway.errors import ApiError, bad_request

_KNOWN: Final = frozenset(
    {
        *("model", "input", "instructions", "previous_response_id", "store", "stream", "stream_options", "metadata"),
        *("tools", "tool_choice", "parallel_tool_calls", "text", "include", "user", "top_logprobs"),
    }
)
_UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    **OPENAI_UNSUPPORTED,
    **dict.fromkeys(common.VLLM_FORMAT_FIELDS, ()),
    "chat_template_kwargs": ({},),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "n": (1,),
}
_LOGPROBS: Final = "message.output_text.logprobs"
_ROLES: Final = ("assistant", "developer", "system", "user")
_TEXT_FIELDS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def read_request(body: Body, recall: ResponseLookup, attachments: bool = False) -> Request:
    """See `ReadRequest`. Also raises ApiError 400 for a reply that is not stored."""
    data = read_json(body)
    reject_unsupported(data, _UNSUPPORTED)
    offered = [_as_function(tool) for tool in optional(data, "tools", list) or ()]
    tools, dropped = common.function_tools({"tools": offered}, _function)
    choice = data.get("tool_choice")
    tools, forbidden_tools = (None, tools) if choice == "none" else (tools, None)
    constraint = common.read_constraint(
        tools,
        common.tool_choice(choice, nested=False),
        optional(data, "parallel_tool_calls", bool),
        common.text_format("text.format", (optional(data, "text", dict) or {}).get("format"), nested=False),
        "text",
    )
    top = top_logprobs(data)
    logprobs = top > 0 or _LOGPROBS in (optional(data, "include", list) or ())
    instructions, messages = _conversation(data, recall, attachments)
    return Request(
        model=optional(data, "model", str),
        messages=instructions + messages,
        tools=tools,
        forbidden_tools=forbidden_tools,
        custom_tools=frozenset(tool["name"] for tool in data.get("tools") or () if kind_of(tool) == "custom"),
        params=sampling_params(
            data, RESPONSES_PARAMS, SamplingParams(top_logprobs=top, stream_logprobs=logprobs), "the request"
        ),
        stream=bool(optional(data, "stream", bool)),
        logprobs=logprobs,
        constraint=constraint,
        num_instructions=len(instructions),
        ignored_fields=(*unknown_fields(data, _KNOWN, _UNSUPPORTED, RESPONSES_PARAMS), *dropped),
        raw=data,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _as_function(tool: Any) -> Any:
    """A custom tool as a function with its input as the one argument; any other tool as it is."""
    if kind_of(tool) != "custom":
        return tool
    described, form = tool.get("description") or "", object_of(tool, "format")
    if form.get("type") == "grammar":
        described += f"\n\nThe input must match this {form.get('syntax')} grammar:\n{form.get('definition')}"
    schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return {"type": "function", "name": tool.get("name"), "description": described.strip(), "parameters": schema}


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}


def _conversation(
    data: Mapping[str, Any], recall: ResponseLookup, attachments: bool
) -> tuple[list[Message], list[Message]]:
    """(instructions of this request alone, conversation)."""
    instructions, given, previous = data.get("instructions"), data.get("input"), data.get("previous_response_id")
    num_instructions = _read_items("instructions", _as_items(instructions, "system"), recall, attachments)
    messages = recall.messages(require_type("previous_response_id", previous, str)) if previous is not None else []
    if not attachments and any(has_attachments(message.get("content")) for message in messages):
        message = "continues a conversation with images or files; this model reads text"
        raise bad_request("previous_response_id", f"previous_response_id={previous!r} {message}")
    messages = messages + _read_items("input", _as_items(given, "user"), recall, attachments)
    if not messages:
        raise bad_request("input", "input must be a text or a list with at least one item")
    return num_instructions, messages


def _as_items(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value or []


def _read_items(where: str, items: Any, recall: ResponseLookup, attachments: bool) -> list[Message]:
    messages: list[Message] = []
    reasoning, sealed = "", list[dict[str, Any]]()
    for index, item in enumerate(require_type(where, items, list)):
        place = f"{where}[{index}]"
        item = require_type(place, item, dict)
        if item.get("type") == "item_reference":
            item = recall.item(require_type(f"{place}.id", item.get("id"), str))
        if item.get("type") == "reasoning":
            reasoning += _reasoning_text(place, item)
            sealed += decode_signed_reasoning(item.get("encrypted_content"))
            continue
        first = len(messages)
        _add_item(place, messages, item, attachments)
        if reasoning or sealed:
            _add_reasoning(messages, first, reasoning, sealed)
        reasoning, sealed = "", []
    return messages


def _add_reasoning(messages: list[Message], first: int, reasoning: str, sealed: list[dict[str, Any]]) -> None:
    """Add reasoning to the assistant's turn that follows it, or as a turn of its own."""
    if messages[-1]["role"] != "assistant":
        messages.insert(first, {"role": "assistant", "content": ""})
        turn = messages[first]
    else:
        turn = messages[-1]
    if reasoning:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + reasoning
    if sealed:
        turn["sealed"] = [*turn.get("sealed", ()), *sealed]


def _reasoning_text(where: str, item: Mapping[str, Any]) -> str:
    """The readable text of a reasoning item."""
    parts = require_type(f"{where}.content", item.get("content") or [], list)
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _add_item(where: str, messages: list[Message], item: Mapping[str, Any], attachments: bool) -> None:
    match item.get("type") or "message":
        case "message":
            _add_message(where, messages, item, attachments)
        case "function_call" | "custom_tool_call":
            _add_call(where, messages, item)
        case "function_call_output" | "custom_tool_call_output":
            call_id = require_type(f"{where}.call_id", item.get("call_id"), str)
            output = read_content(f"{where}.output", item.get("output"), _TEXT_FIELDS, attachments)
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
        case kind:
            raise bad_request(
                where.partition("[")[0], f"{where} is an item of type {shorten(kind)}, which cannot be read here"
            )


def _add_message(where: str, messages: list[Message], item: Mapping[str, Any], attachments: bool) -> None:
    role, content = item.get("role"), read_content(f"{where}.content", item.get("content"), _TEXT_FIELDS, attachments)
    if role not in _ROLES:
        raise bad_request(where.partition("[")[0], f"{where} has the role {shorten(role)}; use {', '.join(_ROLES)}")
    if role == "assistant" and messages and messages[-1].get("tool_calls"):
        messages[-1]["content"] = joined(messages[-1]["content"], content)  # Text after a tool call in the same turn.
        return
    message: Message = {"role": "system" if role == "developer" else role, "content": content}
    if isinstance(name := item.get("name"), str):
        message["name"] = name
    messages.append(message)


def _add_call(where: str, messages: list[Message], item: Mapping[str, Any]) -> None:
    """The calls of one turn and the text before them become one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call_id = require_type(f"{where}.call_id", item.get("call_id"), str)
    name = require_type(f"{where}.name", item.get("name"), str)
    if item["type"] == "custom_tool_call":
        arguments = custom_arguments(require_type(f"{where}.input", item.get("input"), str))
    else:
        arguments = arguments_text(item.get("arguments"))
    function = {"name": name, "arguments": arguments}
    message = messages[-1] = dict(messages[-1])
    call = {"id": call_id, "type": "function", "function": function}
    message["tool_calls"] = [*message.get("tool_calls", ()), call]


# -- writing ---------------------------------------------------------------------------------------------------------


def error_event(api_error: ApiError) -> bytes:
    """An error in the middle of a stream. The official SDK raises APIError on the `error` object; other clients read
    the fields of the event."""
    error = api_error.error_object()
    fields = {key: error[key] for key in ("code", "message", "param")}
    return encode_event({"type": "error", "sequence_number": 0, **fields, "error": error}, "error")


def _reply(request: Request, head: ReplyMetadata) -> ResponsesReplyWriter:
    return ResponsesReplyWriter(head, request)


RESPONSES: Final = Dialect(
    operation="chat",
    id_prefix=ID_PREFIX,
    call_prefix="call_",
    read=read_request,
    reply=_reply,
    error_body=common.error_body,
    error_event=error_event,
)
