"""Token-faithful continuation: what the model said is never tokenised again.

For each attempt we keep *paths*: the exact tokens, prompt and sampled, behind every answer we gave. A request whose
messages begin with the messages of a path and its answer gets those tokens, followed by a fresh encoding of only
the messages after them. That text is taken from the template's rendering of the whole conversation, and only where
the template is shown to write the earlier part as it did before (`_suffix`). Otherwise the call starts a new path;
where it had looked like a continuation, that is drift.

Worked example, `|` between tokens, capitals sampled:

    call 1   messages  user "hi"                       prompt  <s>|user|hi|</s>|assistant
             answer    "HELLO" (length: no </s>)       sampled HEL|LO
    call 2   messages  user "hi", assistant "HELLO", user "you"
             prompt    <s>|user|hi|</s>|assistant|HEL|LO|</s>|user|you|</s>|assistant
                       `------------- as it was -------------' `-- encoded now: the end of the turn, then the rest

Messages are compared by meaning, not by bytes (`same_meaning`), since clients write them anew. Raw prompts are compared
as they are: one that begins with an earlier prompt and what was drawn after it gets those tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.engine.base import Sample
from agentlightning.gateway.dialects.message_digest import (
    extend_digest,
    message_digests,
    normalized_arguments,
    text_of,
)
from agentlightning.gateway.local.prompt_limit import encode_within
from agentlightning.gateway.local.prompt_prefixes import PrefixIndex
from agentlightning.gateway.local.reasoning import find_reasoning_markers, strip_opening_marker, strip_reasoning


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The tokens behind one answer, without those of the path it continues."""

    parent: TokenPath | None
    tokens: array[int]
    span_id: str
    ended: bool
    """Whether the sample closed its turn."""
    is_complete: bool = True
    """False: without the last of what was drawn, which the caller was not shown."""

    def all_tokens(self) -> list[int]:
        parts: list[array[int]] = []
        path: TokenPath | None = self
        while path is not None:
            parts.append(path.tokens)
            path = path.parent
        tokens = array("i")
        for part in reversed(parts):
            tokens.extend(part)
        return tokens.tolist()


DriftReason = Literal["template", "tools", "edited"]
"""See `span.DRIFT_REASON`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is given, and where it comes from."""

    token_ids: list[int]
    continues: TokenPath | None = None
    num_reused: int = 0
    """How many of the tokens are those of `continues`."""
    drift: bool = False
    digests: tuple[bytes, ...] = ()
    """Of the first 0, 1, 2, ... messages."""
    variant: bytes = b""
    """Of everything besides the messages that a rendering depends on."""
    reason: DriftReason | None = None
    """Of the drift."""
    raw: bytes | None = None
    """A raw prompt as `Conversations` compares it."""
    prefill: str = ""
    """What the answer begins with, as its caller wrote it: the last of the tokens."""

    @property
    def continued_span(self) -> str | None:
        """The span whose tokens, all of them, the prompt begins with."""
        return self.continues.span_id if self.continues and self.continues.is_complete else None


@dataclass(slots=True)
class _AttemptPaths:
    """What we know of one attempt."""

    paths: dict[tuple[bytes, bytes], TokenPath] = field(default_factory=dict[tuple[bytes, bytes], TokenPath])
    """(digest of messages and answer, variant) -> path."""
    answered: set[bytes] = field(default_factory=set[bytes])
    """Digests of messages that an answer of ours followed."""
    call_ids: set[str] = field(default_factory=set[str])
    """Ids of tool calls we handed out."""
    raw: PrefixIndex[TokenPath] = field(default_factory=PrefixIndex[TokenPath])
    """Raw prompts, each with what was drawn after it -> path."""
    tokens: int = 0


class Conversations:
    """The paths of the attempts that called lately; the least recently used are forgotten when there are too many."""

    def __init__(self, max_attempts: int = 16384, max_tokens: int = 100_000_000) -> None:
        self._max_attempts = max_attempts
        self._max_tokens = max_tokens
        self._attempts: OrderedDict[tuple[str, str], _AttemptPaths] = OrderedDict()
        self._tokens = 0
        self.num_evicted = 0
        """Attempts dropped for want of room; their next calls start new paths."""

    def __len__(self) -> int:
        return len(self._attempts)

    @property
    def tokens(self) -> int:
        """Tokens kept."""
        return self._tokens

    def prompt(
        self,
        attempt: tuple[str, str],
        model: str,
        chat: ChatFormat,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        context: int | None = None,
        prefill: str = "",
    ) -> Prompt:
        """The prompt of a call, whose answer begins with `prefill`; may be called from any thread. Raises ConfigError
        where the template cannot hold the messages, ContextLengthError where `context` tokens are surely too few."""
        digests, variant = message_digests(messages), _variant(model, chat, tools)
        memory = self._paths_of(attempt)
        if memory is None:
            tokens = encode_within(chat, chat.render(messages, tools) + chat.escape(prefill), context)
            return Prompt(tokens, digests=digests, variant=variant, prefill=prefill)
        length, path = _longest_path(memory, digests, variant, messages)
        suffix = _suffix_of(chat, messages, tools, length, path.ended) if path else None
        if path is None or suffix is None:
            drift = _resembles_known_answer(memory, digests, messages, 0)
            text = chat.render(messages, tools) + chat.escape(prefill)
            reason = _drift_reason(memory, digests, path is not None) if drift else None
            tokens = encode_within(chat, text, context)
            return Prompt(tokens, None, 0, drift, digests, variant, reason, prefill=prefill)
        known, drift = path.all_tokens(), _resembles_known_answer(memory, digests, messages, length)
        reason = "edited" if drift else None
        suffix += chat.escape(prefill)
        tokens = known + encode_within(chat, suffix, context and context - len(known), context)
        return Prompt(tokens, path, len(known), drift, digests, variant, reason, prefill=prefill)

    def _paths_of(self, attempt: tuple[str, str]) -> _AttemptPaths | None:
        """What is known of an attempt that calls now."""
        with suppress(KeyError):  # Another thread may forget it meanwhile.
            self._attempts.move_to_end(attempt)
        return self._attempts.get(attempt)

    def raw_prompt(
        self,
        attempt: tuple[str, str],
        model: str,
        chat: ChatFormat,
        given: str | list[int],
        context: int | None = None,
    ) -> Prompt:
        """The prompt of a call that gives text, or tokens: the tokens are then exactly those."""
        raw = _raw(model, given)
        memory = self._paths_of(attempt)
        found = memory.raw.longest(raw) if memory else None
        if found is None:
            return Prompt(encode_within(chat, given, context) if isinstance(given, str) else given, raw=raw)
        length, path = found
        known = path.all_tokens()
        if isinstance(given, str):
            rest = raw[length:].decode("utf-8", "surrogatepass")
            given = known + encode_within(chat, rest, context and context - len(known), context)
        return Prompt(given, path, len(known), raw=raw)

    def add_answer(
        self,
        attempt: tuple[str, str],
        prompt: Prompt,
        answer: Message,
        sample: Sample,
        eos_token_ids: frozenset[int],
        span_id: str,
    ) -> None:
        """Keep the path of an answer, so that a later call may continue it."""
        memory = self._attempts.setdefault(attempt, _AttemptPaths())
        self._attempts.move_to_end(attempt)
        tokens = array("i", prompt.token_ids[prompt.num_reused :])
        tokens.extend(sample.token_ids)
        ended = bool(sample.token_ids) and sample.token_ids[-1] in eos_token_ids
        path = TokenPath(prompt.continues, tokens, span_id, ended)
        if prompt.prefill:  # The caller has it as one message.
            answer = {**answer, "content": prompt.prefill + (answer.get("content") or "")}
        memory.paths[extend_digest(prompt.digests[-1], answer), prompt.variant] = path
        memory.answered.add(prompt.digests[-1])
        memory.call_ids.update(call["id"] for call in answer.get("tool_calls") or ())
        self._add_tokens(memory, len(tokens))

    def add_raw_answer(
        self, attempt: tuple[str, str], prompt: Prompt, chat: ChatFormat, shown: str, sample: Sample, span_id: str
    ) -> None:
        """Keep the path of an answer to a raw prompt, of which the caller was shown the text `shown`."""
        memory = self._attempts.setdefault(attempt, _AttemptPaths())
        self._attempts.move_to_end(attempt)
        raw, before = prompt.raw or b"", array("i", prompt.token_ids[prompt.num_reused :])
        drawn = array("i", sample.token_ids)
        path = TokenPath(prompt.continues, before + drawn, span_id, ended=True)
        if raw.startswith(_RAW_TOKENS):
            memory.raw.add(raw + drawn.tobytes(), path)
        else:
            # The text that was not shown goes on in the next prompt, word for word, or is left out of it.
            length, text = _within(chat, sample.token_ids, shown)
            part = TokenPath(prompt.continues, before + drawn[:length], span_id, ended=True, is_complete=False)
            memory.raw.add(raw + _utf8(text), part)
            memory.raw.add(raw + _utf8(chat.decode(sample.token_ids)), path)
        self._add_tokens(memory, len(path.tokens))

    def _add_tokens(self, memory: _AttemptPaths, tokens: int) -> None:
        memory.tokens += tokens
        self._tokens += tokens
        self._evict()

    def forget(self, attempt: tuple[str, str]) -> None:
        """Drop what is known of an attempt, once it has ended."""
        if memory := self._attempts.pop(attempt, None):
            self._tokens -= memory.tokens

    def _evict(self) -> None:
        while self._attempts and (len(self._attempts) > self._max_attempts or self._tokens > self._max_tokens):
            _, memory = self._attempts.popitem(last=False)
            self._tokens -= memory.tokens
            self.num_evicted += 1


# -- raw prompts -----------------------------------------------------------------------------------------------------

_RAW_TEXT, _RAW_TOKENS = b"text:", b"tokens:"


def _raw(model: str, given: str | list[int]) -> bytes:
    """A raw prompt as bytes; two begin alike where their models, and their texts or tokens, do."""
    kind, data = (_RAW_TEXT, _utf8(given)) if isinstance(given, str) else (_RAW_TOKENS, array("i", given).tobytes())
    return kind + orjson.dumps(model) + data


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _within(chat: ChatFormat, token_ids: Sequence[int], shown: str) -> tuple[int, str]:
    """(how many tokens, their text) of the most tokens from the start that say nothing beyond `shown`."""
    length = len(token_ids)
    while not shown.startswith(text := chat.decode(token_ids[:length])):
        length -= 1
    return length, text


def _variant(model: str, chat: ChatFormat, tools: Sequence[dict[str, Any]] | None) -> bytes:
    kwargs = dict(chat.template_kwargs) or None
    data = orjson.dumps([model, kwargs, list(tools) if tools else None], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()


# -- which path a request continues ----------------------------------------------------------------------------------


def _longest_path(
    memory: _AttemptPaths, digests: Sequence[bytes], variant: bytes, messages: Sequence[Message]
) -> tuple[int, TokenPath | None]:
    """(number of messages it covers, path) of the longest known path the messages begin with."""
    for length in range(len(messages), 0, -1):
        if messages[length - 1]["role"] == "assistant" and (path := memory.paths.get((digests[length], variant))):
            return length, path
    return 0, None


def _drift_reason(memory: _AttemptPaths, digests: Sequence[bytes], same: bool) -> DriftReason:
    """Why no path is continued. `same`: the very conversation is known, only its template writes it otherwise."""
    if same:
        return "template"
    known = {digest for digest, _ in list(memory.paths)}  # A copy: answers are learned in another thread.
    return "tools" if known & set(digests[1:]) else "edited"


def _resembles_known_answer(
    memory: _AttemptPaths, digests: Sequence[bytes], messages: Sequence[Message], start: int
) -> bool:
    """Whether an assistant's message from `start` on stands where an answer of ours stood, or calls tools by our
    ids."""
    for place in range(start, len(messages)):
        if messages[place]["role"] != "assistant":
            continue
        ids = {call.get("id") for call in messages[place].get("tool_calls") or ()}
        if digests[place] in memory.answered or ids & memory.call_ids:
            return True
    return False


# -- what is encoded after it ----------------------------------------------------------------------------------------


def _suffix_of(
    chat: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    length: int,
    ended: bool,
) -> str | None:
    """The text after `messages[length - 1]`, the answer of a known path; see `_suffix`. What was thought on the path is
    in its tokens: what the template does with old thoughts, and whether the client sent them back, is all one."""
    said = [_unthought(message) for message in messages[:length]]
    messages = [*said, *messages[length:]]
    return _suffix(chat, chat.render(messages, tools), messages, tools, length, ended)


def _unthought(message: Message) -> Message:
    if "reasoning_content" not in message:
        return message
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _suffix(
    chat: ChatFormat,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    length: int,
    ended: bool,
) -> str | None:
    """The text after the answer `messages[length - 1]` within `text`, the rendering of all messages.

    None unless one of two things shows that the template writes the earlier part as it did. First: the rendering
    that stops after the answer is where the rendering of everything begins. Some templates write the last message
    otherwise than earlier ones, so second: everything before the answer is the same, and the answer reads the same.
    """
    ends = _end_of_turn_texts(chat)
    found = _by_prefix(chat, text, messages[:length], tools, ends)
    found = found or _by_reading(chat, text, messages[:length], tools, ends)
    if found is None:
        return None
    end_of_turn, rest = found
    return rest if ended else end_of_turn + rest


def _end_of_turn_texts(chat: ChatFormat) -> list[str]:
    return [text for token in chat.eos_token_ids if (text := chat.decode([token]))]


def _by_prefix(
    chat: ChatFormat, text: str, history: Sequence[Message], tools: Sequence[dict[str, Any]] | None, ends: list[str]
) -> tuple[str, str] | None:
    prefix = chat.render(history, tools, add_generation_prompt=False)
    if not text.startswith(prefix):
        return None
    place, end = max(((prefix.rfind(end), end) for end in ends), default=(-1, ""))
    after = place + len(end)
    if place < 0 or prefix[after:].strip():
        return None
    return end, text[after:]


def _by_reading(
    chat: ChatFormat, text: str, history: Sequence[Message], tools: Sequence[dict[str, Any]] | None, ends: list[str]
) -> tuple[str, str] | None:
    markers = find_reasoning_markers(chat)
    before = strip_opening_marker(markers, chat.render(history[:-1], tools, add_generation_prompt=True))
    if not text.startswith(before):
        return None
    places = [(place, end) for end in ends if (place := text.find(end, len(before))) >= 0]
    if not places:
        return None
    place, end = min(places)
    written = chat.unescape(text[len(before) : place])
    readings = {written, strip_reasoning(markers, written)}
    return (
        (end, text[place + len(end) :]) if any(_reads_as(chat, said, history[-1], tools) for said in readings) else None
    )


def _reads_as(chat: ChatFormat, written: str, answer: Message, tools: Sequence[dict[str, Any]] | None) -> bool:
    parsed = chat.parse(written, tools)
    calls = [(call.name, normalized_arguments(call.arguments)) for call in parsed.tool_calls]
    meant = [call["function"] for call in answer.get("tool_calls") or ()]
    if calls != [(function["name"], normalized_arguments(function["arguments"])) for function in meant]:
        return not meant and written.strip() == text_of(answer.get("content")).strip()
    return (parsed.content or "").strip() == text_of(answer.get("content")).strip()
