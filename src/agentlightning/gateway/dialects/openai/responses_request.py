"""The responses dialect: OpenAI's `/v1/responses`, over items instead of messages.

A reply is kept while its attempt goes on, so that `previous_response_id` and item references find it; `store=false`
keeps it from being retrieved, not from being continued, since clients continue what they asked not to store. Hosted
tools are left out and counted; items that only a hosted service can read are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.dialects.base import Body, Dialect, ReplyMetadata, Request
from agentlightning.gateway.dialects.content_parts import has_attachments, joined, read_content
from agentlightning.gateway.dialects.openai import common
from agentlightning.gateway.dialects.openai.responses_reply import ID_PREFIX, ResponsesReplyWriter
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.dialects.sampling import OPENAI_REFUSED, RESPONSES_PARAMS, sampling_params
from agentlightning.gateway.dialects.signed_reasoning import decode_signed_reasoning
from agentlightning.gateway.dialects.sse import encode_event
from agentlightning.gateway.dialects.validation import (
    as_arguments,
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
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    **OPENAI_REFUSED,
    **dict.fromkeys(common.HELD_FIELDS, ()),
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
    """See `Read`. Raises ApiError 400 for a reply that is not kept as well."""
    data = read_json(body)
    reject_unsupported(data, _REFUSED)
    tools, dropped = common.function_tools(data, _function)
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
        params=sampling_params(
            data, RESPONSES_PARAMS, SamplingParams(top_logprobs=top, stream_logprobs=logprobs), "the request"
        ),
        stream=bool(optional(data, "stream", bool)),
        logprobs=logprobs,
        constraint=constraint,
        num_instructions=len(instructions),
        ignored_fields=(*unknown_fields(data, _KNOWN, _REFUSED, RESPONSES_PARAMS), *dropped),
        raw=data,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}


def _conversation(
    data: Mapping[str, Any], recall: ResponseLookup, attachments: bool
) -> tuple[list[Message], list[Message]]:
    """(the instructions of this request alone, the conversation)."""
    instructions, given, previous = data.get("instructions"), data.get("input"), data.get("previous_response_id")
    num_instructions = _read_items("instructions", _as_items(instructions, "system"), recall, attachments)
    messages = recall.messages(require_type("previous_response_id", previous, str)) if previous is not None else []
    if not attachments and any(has_attachments(message.get("content")) for message in messages):
        said = f"previous_response_id={previous!r} goes on from images or files; this model reads text"
        raise bad_request("previous_response_id", said)
    messages = messages + _read_items("input", _as_items(given, "user"), recall, attachments)
    if not messages:
        raise bad_request("input", "input must be a text or a list with at least one item")
    return num_instructions, messages


def _as_items(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value or []


def _read_items(where: str, items: Any, recall: ResponseLookup, attachments: bool) -> list[Message]:
    messages: list[Message] = []
    thought, sealed = "", list[dict[str, Any]]()
    for index, item in enumerate(require_type(where, items, list)):
        place = f"{where}[{index}]"
        item = require_type(place, item, dict)
        if item.get("type") == "item_reference":
            item = recall.item(require_type(f"{place}.id", item.get("id"), str))
        if item.get("type") == "reasoning":
            thought += _thought(place, item)
            sealed += decode_signed_reasoning(item.get("encrypted_content"))
            continue
        begun = len(messages)
        _add_item(place, messages, item, attachments)
        if thought or sealed:
            _add_thought(messages, begun, thought, sealed)
        thought, sealed = "", []
    return messages


def _add_thought(messages: list[Message], begun: int, thought: str, sealed: list[dict[str, Any]]) -> None:
    """To the turn that follows it, which is at the end of the messages, or else before it."""
    if messages[-1]["role"] != "assistant":
        messages.insert(begun, {"role": "assistant", "content": ""})
        said = messages[begun]
    else:
        said = messages[-1]
    if thought:
        said["reasoning_content"] = said.get("reasoning_content", "") + thought
    if sealed:
        said["sealed"] = [*said.get("sealed", ()), *sealed]


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """What a reasoning item says openly."""
    parts = require_type(f"{where}.content", item.get("content") or [], list)
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _add_item(where: str, messages: list[Message], item: Mapping[str, Any], attachments: bool) -> None:
    match item.get("type") or "message":
        case "message":
            _add_message(where, messages, item, attachments)
        case "function_call":
            _add_call(where, messages, item)
        case "function_call_output":
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
        messages[-1]["content"] = joined(messages[-1]["content"], content)  # Text after a tool call of the same turn.
        return
    message: Message = {"role": "system" if role == "developer" else role, "content": content}
    if isinstance(name := item.get("name"), str):
        message["name"] = name
    messages.append(message)


def _add_call(where: str, messages: list[Message], item: Mapping[str, Any]) -> None:
    """The calls of one turn, and the text before them, are one message."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call_id = require_type(f"{where}.call_id", item.get("call_id"), str)
    name = require_type(f"{where}.name", item.get("name"), str)
    function = {"name": name, "arguments": as_arguments(item.get("arguments"))}
    message = messages[-1] = dict(messages[-1])
    call = {"id": call_id, "type": "function", "function": function}
    message["tool_calls"] = [*message.get("tool_calls", ()), call]


# -- writing ---------------------------------------------------------------------------------------------------------


def error_event(api_error: ApiError) -> bytes:
    """A failure after the stream has begun. The official SDK raises APIError on the `error` object; other clients
    read the fields of the event."""
    error = api_error.error_object()
    said = {key: error[key] for key in ("code", "message", "param")}
    return encode_event({"type": "error", "sequence_number": 0, **said, "error": error}, "error")


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
