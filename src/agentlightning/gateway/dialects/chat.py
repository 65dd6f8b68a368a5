"""The dialects of OpenAI's `/v1/chat/completions`, and of `/v1/completions` and `/v1/embeddings`, which share much.

Fields that would change what is sampled and are not supported are rejected by name. Unknown fields are accepted,
ignored and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, groupby
from typing import Annotated, Any, Final, NoReturn, cast

from msgspec import DecodeError, Meta, Struct
from msgspec.json import Decoder

from agentlightning.chat.base import Message
from agentlightning.chat.messages import read_message
from agentlightning.engine.base import SamplingParams
from agentlightning.errors import DatasetError
from agentlightning.gateway.answer import (
    CHAT_TURN,
    Answer,
    Event,
    ProviderResponse,
    ReasoningDelta,
    RefusalDelta,
    ToolCall,
    Usage,
    logprob_entries,
    object_of,
)
from agentlightning.gateway.dialects.base import (
    DONE,
    FORMAT_UNSUPPORTED,
    OPENAI_PARAMS,
    OPENAI_UNSUPPORTED,
    VLLM_FORMAT_FIELDS,
    Dialect,
    ReplyWriter,
    Request,
    content_format,
    encode_event,
    given_messages,
    integer,
    is_token_list,
    loads_tolerantly,
    num_output_tokens,
    optional,
    read_shared,
    require_type,
    shorten,
    tool_choice,
    top_logprobs,
    with_tools,
)
from agentlightning.gateway.dialects.content_parts import read_content
from agentlightning.gateway.dialects.response_store import ResponseLookup
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.util.json_values import Json, dumps

_KNOWN: Final = frozenset(
    {
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "user"),
        *("stream", "stream_options", "n", "logprobs", "top_logprobs", "chat_template_kwargs"),
        *("return_token_ids", "continue_final_message", "add_generation_prompt", *VLLM_FORMAT_FIELDS),
    }
)

_ROLES: Final = ("assistant", "system", "tool", "user")
_MESSAGE_FIELDS: Final = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
_TEXT_FIELDS: Final = {"text": "text", "refusal": "refusal"}

_UNSUPPORTED: Final = {
    **OPENAI_UNSUPPORTED,
    "best_of": (1,),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
}


_LOCAL_ONLY: Final = {"continue_final_message": (False,), "add_generation_prompt": (True,), **FORMAT_UNSUPPORTED}
"""Fields that only our own engines support, for `reject_unsupported` in a request that is translated."""


def read_request(data: Json, recall: ResponseLookup, attachments: bool = False) -> Request:
    """See `ReadRequest`."""
    if data.get("functions"):
        raise bad_request("functions", "functions are not read here; send them as tools")
    logprobs, top = bool(optional(data, "logprobs", bool)), top_logprobs(data)
    if top and not logprobs:
        raise bad_request("top_logprobs", f"top_logprobs={top} needs logprobs=true")
    token_ids = bool(optional(data, "return_token_ids", bool)) and not attachments
    request = read_shared(
        data,
        OPENAI_PARAMS,
        SamplingParams(top_logprobs=top, stream_logprobs=logprobs or token_ids),
        _KNOWN - {"return_token_ids"} if attachments else _KNOWN,  # providers of other dialects return none
        _UNSUPPORTED | _LOCAL_ONLY if attachments else _UNSUPPORTED,
    )
    request = with_tools(request, lambda tool: tool, *tool_choice(data, nested=True), *content_format(data))
    _include_usage(data)
    messages = [_message(index, message, attachments) for index, message in enumerate(given_messages(data))]
    messages, prefill = _split_prefill(data, messages)
    return replace(
        request,
        messages=messages,
        n=integer(data, "n", 1, 128) or 1,
        logprobs=logprobs,
        prefill=prefill,
        template=optional(data, "chat_template_kwargs", dict) or {},
        token_ids=token_ids,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def _include_usage(data: Json) -> bool:
    """Whether a stream ends with an extra chunk that has the usage and no choice. Raises ApiError 400 for an invalid
    option."""
    wanted = (optional(data, "stream_options", dict) or {}).get("include_usage")
    return wanted is not None and require_type("stream_options.include_usage", wanted, bool)


def _split_prefill(data: Json, messages: list[Message]) -> tuple[list[Message], str]:
    """(messages, prefill of the answer): with vLLM's `continue_final_message`, the answer continues the last message.
    Raises ApiError 400 if that is not text of the assistant."""
    goes_on = bool(optional(data, "continue_final_message", bool))
    generate = optional(data, "add_generation_prompt", bool)
    if generate is not None and generate is goes_on:
        message = f"add_generation_prompt={shorten(generate)} contradicts continue_final_message={shorten(goes_on)}"
        raise bad_request("add_generation_prompt", f"{message}; leave it out")
    if not goes_on:
        return messages, ""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(last["content"], str):
        raise bad_request(
            "continue_final_message", "continue_final_message asks for a last message of the assistant, of text"
        )
    return messages[:-1], last["content"]


def _message(index: int, message: Any, attachments: bool) -> Message:
    where = f"messages[{index}]"
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise bad_request("messages", f"{where} has the role {shorten(role)}; use {', '.join(_ROLES)} or developer")
    known = {key: each for key, each in message.items() if key in _MESSAGE_FIELDS}
    content = partial(read_content, text_fields=_TEXT_FIELDS, attachments=attachments)
    try:
        return read_message(where, known, content)
    except DatasetError as error:
        raise bad_request("messages", str(error)) from None


# -- writing ---------------------------------------------------------------------------------------------------------


class ChatReplyWriter(ReplyWriter):
    def body(self, answers: Sequence[Answer]) -> bytes:
        choices = [
            self._choice(answer, self._whole(answer), answer.all_logprobs, answer.finish_reason, answer.token_ids)
            for answer in answers
        ]
        return dumps(self._head(choices) | {"usage": self._usage(answers)} | self._prompt(answers))

    def start(self, answers: Sequence[Answer]) -> bytes:
        delta = {"delta": {"role": "assistant", "content": ""}}
        opened = [self._chunk(self._choice(answer, delta, list)) for answer in answers]
        return b"".join([encode_event(chunk | self._prompt(answers)) for chunk in opened])

    def event(self, answer: Answer, event: Event) -> bytes:
        return encode_event(self._chunk(self._choice(answer, self._delta(event), answer.next_logprobs)))

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The usage gets a chunk of its own only if that was asked for, since a plain loop over `chunk.choices[0]`
        fails on it. Otherwise it is part of the last chunk with a choice, since some frameworks count tokens by it."""
        chunks = [
            self._chunk(self._choice(answer, self._delta(None), answer.remaining_logprobs, answer.finish_reason))
            for answer in answers
        ]
        usage = {"usage": self._usage(answers)}
        if _include_usage(self.request.raw):
            chunks.append(chunks[-1] | {"choices": []} | usage)
        else:
            chunks[-1] |= usage
        return b"".join(map(encode_event, chunks)) + DONE

    def _usage(self, answers: Sequence[Answer]) -> Json:
        usage, sampled = self.usage, num_output_tokens(answers)
        used: Json = {"prompt_tokens": usage.input_tokens, "completion_tokens": sampled}
        used["total_tokens"] = usage.input_tokens + sampled
        used["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
        used["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        return used

    def _choice(
        self,
        answer: Answer,
        shown: Json,
        list_logprobs: Callable[[], list[Json]],
        reason: str | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> Json:
        """`token_ids`: those of a whole answer; None for those of the listed log-probabilities."""
        listed = list_logprobs() if self.request.logprobs or self.request.token_ids else []
        choice: Json = {"index": answer.index, **shown, "finish_reason": reason, "logprobs": None}
        if listed and self.request.logprobs:
            choice["logprobs"] = self._logprobs(answer, listed)
        if self.request.token_ids:
            choice["token_ids"] = answer.take_token_ids() if token_ids is None else token_ids
        return choice

    def _chunk(self, choice: Json) -> Json:
        return self._head([choice], ".chunk")

    # -- what completions write in another way -----------------------------------------------------------------------

    def _head(self, choices: Sequence[Json], kind: str = "") -> Json:
        head = {"id": self.id, "object": f"chat.completion{kind}", "created": self.created}
        return head | {"model": self.model, "choices": choices}

    def _whole(self, answer: Answer) -> Json:
        return {"message": {**answer.message, "refusal": None}}

    def _delta(self, event: Event | None) -> Json:
        """What an event adds to its choice; None: its end."""
        match event:
            case str():
                return {"delta": {"content": event}}
            case ReasoningDelta():
                return {"delta": {"reasoning_content": event.text}}
            case RefusalDelta():
                return {"delta": {"refusal": event.text}}
            case ToolCall():
                return {"delta": {"tool_calls": [{"index": event.index, **event.wire()}]}}
            case _:
                return {"delta": {}}

    def _prompt(self, answers: Sequence[Answer]) -> Json:
        return {"prompt_token_ids": answers[0].prompt_token_ids} if self.request.token_ids and answers else {}

    def _logprobs(self, answer: Answer, listed: list[Json]) -> Json:
        return {"content": listed, "refusal": None}


# -- reading answers ---------------------------------------------------------------------------------------------------

# Servers of this format differ in much: content may be a list of parts, reasoning has three names, tool calls may lack
# an index, the usage may stand in a choice.

ECHOED: Final = ("reasoning_content", "reasoning", "reasoning_details", "extra_content")
"""Fields of an assistant's message that its provider wants back unchanged, so that they are collected as they were
written (DeepSeek, Kimi, OpenRouter, Gemini)."""


class ChatResponse(ProviderResponse):
    """What a provider answers to chat completions, completions and embeddings, whole or chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self._echoed: dict[int, dict[str, list[Any]]] = {}
        """By choice, the values of each of `ECHOED`, in the order they came."""

    def merge(self, events: bytes) -> Json | None:
        """Events that have nothing but more text of one choice, perhaps with its tokens, as one: most of a stream, in a
        tenth of the time."""
        lines = events.replace(b"\r\n", b"\n")
        if not lines.startswith(b"data: ") or lines.find(b"\n\n") == len(lines) - 2:  # A single event is read as it is.
            return None
        try:
            chunks = _TEXT_CHUNKS.decode(b"[%b]" % lines[6:-2].replace(b"\n\ndata: ", b","))
            data: Json = loads_tolerantly(lines[6 : lines.index(b"\n")])
        except (DecodeError, ValueError, RecursionError):
            return None
        choices = [chunk.choices[0] for chunk in chunks]
        if len({(chunk.id, chunk.model, chunk.choices[0].index) for chunk in chunks}) != 1:
            return None
        choice = data["choices"][0]
        choice["delta"]["content"] = "".join([each.delta.content for each in choices])
        if ids := list(chain.from_iterable(each.token_ids or () for each in choices)):
            choice["token_ids"] = ids
        if logged := list(chain.from_iterable(each.logprobs.content for each in choices if each.logprobs)):
            choice["logprobs"] = {"content": logged}
        return data

    def _read(self, data: Json) -> None:
        if not (self.id and self.model):  # Each chunk names both.
            self._identify(data)
        self.prompt_token_ids = data.get("prompt_token_ids") or self.prompt_token_ids
        if error := data.get("error"):
            self.error = error.get("message") if isinstance(error, dict) else str(error)
        for place, choice in enumerate(data.get("choices") or ()):
            self._read_choice(place, choice)
        if usage := data.get("usage") or object_of(data, "x_groq").get("usage"):
            self._add_usage(chat_usage(usage))

    def _read_choice(self, place: int, choice: Json) -> None:
        given, whole = choice.get("index"), choice.get("message")
        index = given if isinstance(given, int) and given >= 0 else place
        answer = self.choice(index)
        _add_tokens(choice, answer)
        message, reason = whole or choice.get("delta"), choice.get("finish_reason")
        if message is not None:
            self._read_message(message, answer, bool(whole))
        else:
            answer.add_text(choice.get("text"))
        if reason or whole or message is None:
            if echoed := self._echoed.pop(index, None):
                message = {name: _joined(values) for name, values in echoed.items()}
                answer.add_block({"type": CHAT_TURN, "message": message})
            # vLLM and SGLang name the stop string that ended an answer.
            answer.end(reason, choice.get("matched_stop"), choice.get("stop_reason"))
        if usage := choice.get("usage"):
            self._add_usage(chat_usage(usage))

    def _read_message(self, message: Json, answer: Answer, whole: bool) -> None:
        for name in ECHOED:
            if value := message.get(name):
                self._echoed.setdefault(answer.index, {}).setdefault(name, []).append(value)
        thoughts = [message.get("reasoning_content") or message.get("reasoning")]
        if not isinstance(thoughts[0], str):
            thoughts = [each.get("text") or each.get("summary") for each in message.get("reasoning_details") or ()]
        for thought in thoughts:
            answer.add_reasoning(thought)
        calls, refusal = message.get("tool_calls") or (), message.get("refusal")
        if legacy := message.get("function_call"):
            calls = [*calls, {"function": legacy}]
        self._read_content(message.get("content"), answer)
        answer.add_refusal(refusal)
        for place, call in enumerate(calls):
            _add_call(place, call, answer, whole)

    def _read_content(self, content: Any, answer: Answer) -> None:
        """A text, or a list of texts, text parts and thinking parts."""
        for part in cast("list[Any]", content) if isinstance(content, list) else [content]:
            known = cast("Json", part) if isinstance(part, dict) else {"text": part}
            answer.add_text(known.get("text"))
            thought = known.get("thinking")
            for each in cast("list[Any]", thought) if isinstance(thought, list) else [thought]:
                answer.add_reasoning(each.get("text") if isinstance(each, dict) else each)


class _Text(Struct, forbid_unknown_fields=True):
    content: str


class _Logprobs(Struct):
    content: list[Any]


class _TextChoice(Struct, forbid_unknown_fields=True):
    index: Annotated[int, Meta(ge=0)]
    delta: _Text
    finish_reason: None = None
    logprobs: _Logprobs | None = None
    token_ids: list[Any] | None = None


class _TextChunk(Struct):
    """A chunk whose only choice has more text, perhaps with its tokens, and nothing else."""

    choices: tuple[_TextChoice]
    id: str | None = None
    model: str | None = None
    usage: None = None
    error: None = None
    x_groq: None = None
    prompt_token_ids: None = None


_TEXT_CHUNKS: Final = Decoder(list[_TextChunk])


def chat_usage(usage: Json) -> Usage:
    """Of chat completions, or with the names of responses."""
    prompt, output = (usage.get(f"{old}_tokens") or usage.get(f"{new}_tokens") for old, new in _SIDES)
    given, spent = (
        usage.get(f"{old}_tokens_details") or usage.get(f"{new}_tokens_details") or {} for old, new in _SIDES
    )
    cached = given.get("cached_tokens") or usage.get("cached_tokens")
    return Usage.counted(prompt, output, cached, given.get("cache_write_tokens"), 0, spent.get("reasoning_tokens"))


_SIDES: Final = (("prompt", "input"), ("completion", "output"))
"""What chat completions and responses call the two sides of a call."""


def _add_call(place: int, call: Json, answer: Answer, whole: bool) -> None:
    """The calls of a whole message are told apart by their places alone."""
    custom = call.get("custom")
    function = custom or call.get("function") or {}
    given = place if whole else call.get("index")
    answer.add_call(
        -1 - place if given is None else given,
        call.get("id"),
        function.get("name"),
        function.get("input" if custom else "arguments"),
        bool(custom),
        call.get("extra_content"),
    )


def _joined(values: list[Any]) -> Any:
    """A field whose value came in pieces, as one."""
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, str) for value in values):
        return "".join(values)
    if not all(isinstance(value, list) for value in values):
        return values[-1]
    details: list[Json] = []
    # Pieces of OpenRouter's `reasoning_details` that follow each other belong together, by their type and index.
    for (kind, _), run in groupby(chain.from_iterable(values), lambda piece: (piece.get("type"), piece.get("index"))):
        pieces: list[Json] = list(run)
        if kind == "reasoning.encrypted" or len(pieces) == 1:
            details += pieces
            continue
        whole = {name: value for piece in pieces for name, value in piece.items() if value is not None}
        texts = {name: "".join([piece.get(name) or "" for piece in pieces]) for name in ("text", "summary")}
        details.append(pieces[0] | whole | {name: text for name, text in texts.items() if text})
    return details


def _add_tokens(choice: Json, answer: Answer) -> None:
    prompt, token_ids, given = choice.get("prompt_token_ids"), choice.get("token_ids"), choice.get("logprobs")
    if not prompt and token_ids is None and not given:
        return
    given = given if isinstance(given, dict) else {}
    listed: Any = given.get("content")
    entries = logprob_entries(listed)
    values = [entry["logprob"] for entry in entries] if listed is not None else given.get("token_logprobs")
    answer.add_tokens(prompt, token_ids, values, entries)


CHAT: Final = Dialect("chatcmpl-", read_request, ChatReplyWriter, ChatResponse)


# -- completions -------------------------------------------------------------------------------------------------------

_COMPLETIONS_KNOWN: Final = frozenset(
    {"model", "prompt", "stream", "stream_options", "n", "logprobs", "user", "return_token_ids"}
)
_COMPLETIONS_UNSUPPORTED: Final = {
    **OPENAI_UNSUPPORTED,
    **FORMAT_UNSUPPORTED,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (0,),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "add_special_tokens": (False,),
}
_DEFAULT: Final = SamplingParams(max_tokens=16)
_MAX_PROMPTS: Final = 1024


def read_completion(data: Json, recall: ResponseLookup, attachments: bool = False) -> Request:
    """See `ReadRequest`."""
    _include_usage(data)
    prompts = _prompts(data.get("prompt"))
    asked = optional(data, "return_token_ids", bool)
    # Whoever sends token ids reads them, too: agents of Agent Lightning 1.0 do so without asking for them.
    token_ids = any(isinstance(each, list) for each in prompts) if asked is None else asked
    logprobs = None if data.get("logprobs") is False else data.get("logprobs")
    top = top_logprobs(data, "logprobs") if logprobs is not None else 0
    base = replace(_DEFAULT, top_logprobs=top, stream_logprobs=logprobs is not None or token_ids)
    return replace(
        read_shared(data, OPENAI_PARAMS, base, _COMPLETIONS_KNOWN, _COMPLETIONS_UNSUPPORTED),
        prompts=prompts,
        n=integer(data, "n", 1, 128) or 1,
        logprobs=logprobs is not None,
        token_ids=token_ids,
    )


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    prompts = [value] if _is_prompt(value) else value
    if not isinstance(prompts, list) or not 0 < len(prompts) <= _MAX_PROMPTS or not all(map(_is_prompt, prompts)):
        shapes = f"a text, a list of token ids, or a list of at most {_MAX_PROMPTS} of either, none of them empty"
        raise bad_request("prompt", f"prompt={shorten(value)} must be {shapes}")
    return tuple(prompts)


def _is_prompt(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or is_token_list(value))


class CompletionReplyWriter(ChatReplyWriter):
    def __post_init__(self) -> None:
        self._offsets: dict[int, int] = {}
        """For each answer, the text offset of its next token."""
        self._with_prompt: set[int] = set()
        """The answers whose prompt was written."""

    def start(self, answers: Sequence[Answer]) -> bytes:
        return b""

    def _head(self, choices: Sequence[Json], kind: str = "") -> Json:
        return ChatReplyWriter._head(self, choices) | {"object": "text_completion"}

    def _whole(self, answer: Answer) -> Json:
        return {"text": answer.content}

    def _delta(self, event: Event | None) -> Json:
        return {"text": event if isinstance(event, str) else ""}

    def _prompt(self, answers: Sequence[Answer]) -> Json:
        return {}

    def _choice(
        self,
        answer: Answer,
        shown: Json,
        list_logprobs: Callable[[], list[Json]],
        reason: str | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> Json:
        choice = ChatReplyWriter._choice(self, answer, shown, list_logprobs, reason, token_ids)
        if self.request.token_ids and answer.index not in self._with_prompt:
            self._with_prompt.add(answer.index)  # Once in a stream: the prompt may be far longer than an event.
            choice["prompt_token_ids"] = answer.prompt_token_ids
        return choice

    def _logprobs(self, answer: Answer, listed: list[Json]) -> Json:
        texts, tops = [entry["token"] for entry in listed], [entry["top_logprobs"] for entry in listed]
        # Of two likely tokens with the same text, the likelier one.
        likeliest = [{top["token"]: top["logprob"] for top in reversed(each)} for each in tops]
        *offsets, self._offsets[answer.index] = accumulate(map(len, texts), initial=self._offsets.get(answer.index, 0))
        return {
            "tokens": texts,
            "token_logprobs": [entry["logprob"] for entry in listed],
            "top_logprobs": likeliest if any(tops) else None,
            "text_offset": offsets,
        }


COMPLETIONS: Final = Dialect("cmpl-", read_completion, CompletionReplyWriter, ChatResponse, "text_completion")


# -- embeddings --------------------------------------------------------------------------------------------------------


def _read_embedding(data: Json, recall: ResponseLookup, attachments: bool = False) -> NoReturn:
    """Raises ApiError 404: requests that are read are those for our engines."""
    model = optional(data, "model", str)
    message = f"the model {model!r} makes no embeddings here; add a route that leads it to a provider that does"
    raise ApiError(404, message, code="model_not_supported", param="model")


EMBEDDINGS: Final = Dialect("embd-", _read_embedding, CompletionReplyWriter, ChatResponse, "embeddings")
