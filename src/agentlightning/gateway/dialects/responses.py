"""The dialect of OpenAI's `/v1/responses`, whose conversations are items instead of messages.

Replies are stored while their attempt runs, so that `previous_response_id` and item references find them. With
`store=false` a reply cannot be retrieved but still continued, since clients continue what they asked not to store.
Custom tools, whose input is free text, are functions with one argument. Hosted tools are ignored and counted; items
that only a hosted service can read are rejected by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.chat.messages import arguments_text
from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.answer import (
    CUSTOM_INPUT,
    Answer,
    Event,
    ProviderResponse,
    ReasoningDelta,
    RefusalDelta,
    ToolCall,
    custom_arguments,
    custom_input,
    logprob_entries,
    object_of,
)
from agentlightning.gateway.dialects.base import (
    FORMAT_UNSUPPORTED,
    OPENAI_UNSUPPORTED,
    RESPONSES_PARAMS,
    Dialect,
    ReplyWriter,
    Request,
    encode_event,
    kind_of,
    num_output_tokens,
    optional,
    read_shared,
    require_type,
    shorten,
    text_format,
    tool_choice,
    top_logprobs,
    with_tools,
)
from agentlightning.gateway.dialects.chat import chat_usage
from agentlightning.gateway.dialects.content_parts import has_attachments, merged_turns, message_digests, read_content
from agentlightning.gateway.dialects.response_store import Attempt, ResponseLookup, ResponseStore
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import Json, dumps

_PREFIX: Final = "resp_"
_KNOWN: Final = frozenset(
    {
        *("model", "input", "instructions", "previous_response_id", "store", "stream", "stream_options", "metadata"),
        *("tools", "tool_choice", "parallel_tool_calls", "text", "include", "user", "top_logprobs"),
    }
)
_UNSUPPORTED: Final = {
    **OPENAI_UNSUPPORTED,
    **FORMAT_UNSUPPORTED,
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
    "n": (1,),
}
_LOGPROBS: Final = "message.output_text.logprobs"
_ROLES: Final = ("assistant", "developer", "system", "user")
_TEXT_FIELDS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def read_request(data: Json, recall: ResponseLookup, attachments: bool = False) -> Request:
    """See `ReadRequest`. Also raises ApiError 400 for a reply that is not stored."""
    top = top_logprobs(data)
    logprobs = top > 0 or _LOGPROBS in (optional(data, "include", list) or ())
    base = SamplingParams(top_logprobs=top, stream_logprobs=logprobs)
    request = read_shared(data, RESPONSES_PARAMS, base, _KNOWN, _UNSUPPORTED)
    shape = text_format("text.format", (optional(data, "text", dict) or {}).get("format"), nested=False)
    instructions, messages = _conversation(data, recall, attachments)
    return replace(
        with_tools(request, _as_function, *tool_choice(data, nested=False), shape, "text"),
        messages=instructions + messages,
        custom_tools=frozenset(tool["name"] for tool in data.get("tools") or () if kind_of(tool) == "custom"),
        logprobs=logprobs,
        num_instructions=len(instructions),
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _as_function(tool: Any) -> Any:
    """A tool as chat completions has it, a custom one with its input as the one argument; a hosted one as it is."""
    kind = kind_of(tool)
    if kind == "function":
        known = ("name", "description", "parameters", "strict")
        return {"type": kind, "function": {key: tool[key] for key in known if tool.get(key) is not None}}
    if kind != "custom":
        return tool
    described, form = tool.get("description") or "", object_of(tool, "format")
    if form.get("type") == "grammar":
        described += f"\n\nThe input must match this {form.get('syntax')} grammar:\n{form.get('definition')}"
    schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    function = {"name": tool.get("name"), "description": described.strip(), "parameters": schema}
    return {"type": "function", "function": function}


def _conversation(data: Json, recall: ResponseLookup, attachments: bool) -> tuple[list[Message], list[Message]]:
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
    messages, thought = list[Message](), ""
    for index, item in enumerate(require_type(where, items, list)):
        place = f"{where}[{index}]"
        item = require_type(place, item, dict)
        if item.get("type") == "item_reference":
            item = recall.item(require_type(f"{place}.id", item.get("id"), str))
        if item.get("type") == "reasoning":
            thought += _reasoning_text(place, item)
            continue
        message, last = _message(place, item, attachments), messages[-1] if messages else {}
        if thought and message["role"] != "assistant":
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
        elif thought:
            message["reasoning_content"] = thought
        thought = ""
        # The calls of one turn, and the text before and after them, are one message.
        if message["role"] == last.get("role") == "assistant" and "tool_calls" in (*message, *last):
            messages[-1] = merged_turns(last, message)
        else:
            messages.append(message)
    return messages


def _reasoning_text(where: str, item: Json) -> str:
    """The readable text of a reasoning item."""
    parts = require_type(f"{where}.content", item.get("content") or [], list)
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def _message(where: str, item: Json, attachments: bool) -> Message:
    match item.get("type") or "message":
        case "message":
            return _spoken(where, item, attachments)
        case "function_call" | "custom_tool_call":
            return {"role": "assistant", "content": "", "tool_calls": [_call(where, item)]}
        case "function_call_output" | "custom_tool_call_output":
            call_id = require_type(f"{where}.call_id", item.get("call_id"), str)
            output = read_content(f"{where}.output", item.get("output"), _TEXT_FIELDS, attachments)
            return {"role": "tool", "content": output, "tool_call_id": call_id}
        case kind:
            raise bad_request(where, f"{where} is an item of type {shorten(kind)}, which cannot be read here")


def _spoken(where: str, item: Json, attachments: bool) -> Message:
    role, content = item.get("role"), read_content(f"{where}.content", item.get("content"), _TEXT_FIELDS, attachments)
    if role not in _ROLES:
        raise bad_request(where, f"{where} has the role {shorten(role)}; use {', '.join(_ROLES)}")
    message: Message = {"role": "system" if role == "developer" else role, "content": content}
    return message | ({"name": item["name"]} if isinstance(item.get("name"), str) else {})


def _call(where: str, item: Json) -> Json:
    call_id = require_type(f"{where}.call_id", item.get("call_id"), str)
    name = require_type(f"{where}.name", item.get("name"), str)
    if item["type"] == "custom_tool_call":
        arguments = custom_arguments(require_type(f"{where}.input", item.get("input"), str))
    else:
        arguments = arguments_text(item.get("arguments"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# -- writing -----------------------------------------------------------------------------------------------------------

_INCOMPLETE: Final = {"stop": None, "tool_calls": None, "length": "max_output_tokens"}
"""Finish reasons -> why a response is incomplete, where they differ; None: it is complete."""


class ResponsesReplyWriter(ReplyWriter):
    def __post_init__(self) -> None:
        self.items: list[Json] = []
        """The output items; all but the last are complete."""
        self._open: str | None = None
        """Type of the open item, if it takes deltas."""
        self._number = 0
        """Sequence number of the next event."""

    def body(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        if not self.items:
            for event in answer.events:  # Each takes its own log-probabilities.
                self.event(answer, event)
            self.end(answers)
        return dumps(self._final(answer))

    def start(self, answers: Sequence[Answer]) -> bytes:
        started = self._response("in_progress")
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def event(self, answer: Answer, event: Event) -> bytes:
        logprobs = answer.next_logprobs() if self.request.logprobs else []
        match event:
            case str():
                return self._extend("output_text", event, logprobs=logprobs)
            case ReasoningDelta():
                return self._extend("reasoning_text", event.text)
            case RefusalDelta():
                return self._extend("refusal", event.text)
            case ToolCall():
                return self._close() + self._add_call(event)
            case _:
                return b""

    def end(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        started = b""
        if all(item["type"] == "reasoning" for item in self.items):  # A turn without text is still a message.
            started = self._close() + self._start("output_text")
        parts = [item["content"][0] for item in self.items if item["type"] == "message"]
        if self.request.logprobs and len(parts) == 1 and parts[0]["type"] == "output_text":
            parts[0]["logprobs"] = answer.all_logprobs()
        closed = self._close("incomplete" if answer.finish_reason == "length" else "completed")
        final = self._final(answer)
        return started + closed + self._event(f"response.{final['status']}", response=final)

    def store(
        self, store: ResponseStore, attempt: Attempt, answer: Answer, body: bytes = b"", digests: Sequence[bytes] = ()
    ) -> None:
        request = self.request
        is_stored = request.raw.get("store") is not False
        store.add(
            attempt,
            self.id,
            digests or message_digests(request.messages),
            request.messages,
            answer.message,
            (body or self.body([answer])) if is_stored else None,
            self.items if is_stored else (),
            request.num_instructions,
        )

    # -- text, refusals and reasoning --------------------------------------------------------------------------------

    def _extend(self, kind: str, text: str, **more: list[Json]) -> bytes:
        """More of a part of one kind, which is started unless it is open; `more`: its log-probabilities."""
        started = b"" if self._open == kind else self._close() + self._start(kind)
        part = self.items[-1]["content"][0]
        part["refusal" if kind == "refusal" else "text"] += text
        for name, values in more.items():
            part[name] += values
        return started + self._event(f"response.{kind}.delta", **self._place(), delta=text, **more)

    def _start(self, kind: str) -> bytes:
        """Start the item of a part: reasoning, or a message."""
        self._open, is_message = kind, kind != "reasoning_text"
        own = {"type": "message", "role": "assistant"} if is_message else {"type": "reasoning", "summary": []}
        name = f"{'msg_' if is_message else 'rs_'}{self.id.removeprefix(_PREFIX)}{len(self.items)}"
        started = self._add({"id": name} | own | {"content": []})
        part: Json = {"type": kind} | ({"refusal": ""} if kind == "refusal" else {"text": ""})
        part |= {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        self.items[-1]["content"].append(part)
        if is_message:
            started += self._event("response.content_part.added", **self._place(), part=part)
        return started

    def _close(self, status: str = "completed") -> bytes:
        """End the open text or reasoning."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        item = self.items[-1]
        item["status"], (part,) = status, item["content"]
        shown = {name: part[name] for name in ("text", "refusal", "logprobs") if name in part}
        done = self._event(f"response.{kind}.done", **self._place(), **shown)
        if kind != "reasoning_text":
            done += self._event("response.content_part.done", **self._place(), part=part)
        return done + self._item_event("done")

    # -- tool calls ------------------------------------------------------------------------------------------------

    def _add_call(self, call: ToolCall) -> bytes:
        prefix, kind, given, text = "fc_", "function_call", "arguments", call.arguments
        named = {"name": call.name}
        if call.name in self.request.custom_tools:
            prefix, kind, given, text, named = "ctc_", "custom_tool_call", "input", custom_input(text), {}
        name = call.id.partition("_")[2] or call.id
        started = self._add({"id": prefix + name, "type": kind, "call_id": call.id, "name": call.name, given: ""})
        self.items[-1] |= {"status": "completed", given: text}
        delta = self._event(f"response.{kind}_{given}.delta", **self._item(), delta=text)
        done = self._event(f"response.{kind}_{given}.done", **self._item(), **named, **{given: text})
        return started + delta + done + self._item_event("done")

    # -- parts of events ---------------------------------------------------------------------------------------------

    def _item(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _place(self) -> Json:
        return self._item() | {"content_index": 0}

    def _add(self, item: Json) -> bytes:
        """Start an item."""
        self.items.append(item | {"status": "in_progress"})
        return self._item_event("added")

    def _item_event(self, kind: str) -> bytes:
        """The start or the end of the last item."""
        return self._event(f"response.output_item.{kind}", output_index=len(self.items) - 1, item=self.items[-1])

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return encode_event(event, kind)

    def _final(self, answer: Answer) -> Json:
        cut = _INCOMPLETE.get(answer.finish_reason, answer.finish_reason)
        response = self._response("incomplete" if cut else "completed")
        usage, num_sampled = self.usage, num_output_tokens([answer])
        written = usage.written_tokens + usage.written_hour_tokens
        return response | {
            "incomplete_details": {"reason": cut} if cut else None,
            "output": self.items,
            "usage": {
                "input_tokens": usage.input_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.input_tokens + num_sampled,
            },
        }

    def _response(self, status: str) -> Json:
        raw, params = self.request.raw, self.request.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_output_tokens": params.max_tokens,
            "truncation": "disabled",
            "usage": None,
            **{name: default if raw.get(name) is None else raw[name] for name, default in _REPEATED.items()},
        }


_REPEATED: Final = {
    **{"instructions": None, "metadata": {}, "parallel_tool_calls": True, "previous_response_id": None, "store": True},
    **{"text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": []},
}
"""Fields of a request that its reply repeats -> what they are if they are not given."""


# -- reading answers ---------------------------------------------------------------------------------------------------

LAST_EVENTS: Final = ("response.completed", "response.incomplete", "response.failed")
"""Types of the events that end a stream; each repeats the whole response."""
_CALLS: Final = ("function_call", "custom_tool_call")
_OWN: Final = (*_CALLS, "message", "reasoning")
"""Types of the items that the model writes; hosted tools write the others."""


class ResponsesResponse(ProviderResponse):
    """What a provider answers to `/v1/responses`, whole or event by event: text as it comes, all else once its item is
    complete. Items that were streamed are not read again where the last event repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: set[Any] = set()
        """Output indexes and ids, of which a server may give one, of the items whose text was read, perhaps in part."""
        self._whole: set[Any] = set()
        """Output indexes and ids of the items that were read."""

    def _read(self, data: Json) -> None:
        kind = data.get("type")
        if isinstance(kind, str) and kind.endswith(".delta"):
            self._begun |= _names(data.get("output_index"), data.get("item_id"))
        match kind:
            case "response.output_text.delta":
                _add_text(self.choice(), data["delta"], data.get("logprobs"))
            case "response.refusal.delta":
                self.choice().add_refusal(data["delta"])
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self.choice().add_reasoning(data["delta"])
            case "response.reasoning_summary_part.added":
                self.choice().add_reasoning("\n\n" if data.get("summary_index") else "")
            case "response.output_item.done":
                known = _names(data.get("output_index"), data["item"].get("id"))
                if not known or known - self._whole:  # Some servers give all items one index, or one id.
                    self._read_item(data.get("output_index"), data["item"])
            case "error":
                self.error = str(data.get("message"))
            case _:
                response = data.get("response", data if data.get("object") == "response" else None)
                if response is not None:
                    self._read_response(response, kind is None or kind in LAST_EVENTS)

    def _read_response(self, response: Json, whole: bool) -> None:
        self._identify(response)
        if not whole:
            return
        if usage := response.get("usage"):
            self._add_usage(chat_usage(usage))
        items = response.get("output") or ()
        streamed = set(self._whole)
        for place, item in enumerate(items):
            if not _names(place, item.get("id")) & streamed:
                self._read_item(place, item)
        status = response.get("status") or "completed"
        if status == "failed":
            self.error = str((response.get("error") or {}).get("message"))
        reason = (response.get("incomplete_details") or {}).get("reason") or status
        called = reason == "completed" and any(item.get("type") in _CALLS for item in items)
        self.choice().end("tool_calls" if called else str(reason))

    def _read_item(self, place: Any, item: Json) -> None:
        """A complete item, whose text is not read twice."""
        kind, answer, known = item.get("type"), self.choice(), _names(place, item.get("id"))
        self._whole |= known
        for part in () if known & self._begun else item.get("content") or item.get("summary") or ():
            if kind == "reasoning":
                answer.add_reasoning(part.get("text"))
            else:
                _add_text(answer, part.get("text"), part.get("logprobs"))
                answer.add_refusal(part.get("refusal"))
        if kind in _CALLS:
            is_custom = kind == "custom_tool_call"
            arguments = item.get("input" if is_custom else "arguments")
            answer.add_call(place, item.get("call_id"), item.get("name"), arguments, is_custom)
            answer.end_call(place)
        (answer.add_block if kind in _OWN else answer.add_hosted_call)(item)


def _names(place: Any, item_id: Any) -> set[Any]:
    return {name for name in (place, item_id) if name is not None}


def _add_text(answer: Answer, text: Any, logprobs: Any) -> None:
    if entries := logprob_entries(logprobs):
        answer.add_tokens(None, None, None, entries)
    answer.add_text(text)


def error_event(api_error: ApiError) -> bytes:
    """An error in the middle of a stream. The official SDK raises APIError on the `error` object; other clients read
    the fields of the event."""
    error = api_error.error_object()
    fields = {key: error[key] for key in ("code", "message", "param")}
    return encode_event({"type": "error", "sequence_number": 0, **fields, "error": error}, "error")


RESPONSES: Final = Dialect(_PREFIX, read_request, ResponsesReplyWriter, ResponsesResponse, error_event=error_event)
