"""The exact tokens behind earlier answers, so that a continued conversation is never tokenized again.

For each attempt this keeps *paths*: the tokens, prompt and sampled, of every answer. A request whose messages begin
with those of a path and its answer gets the tokens of the path, followed by an encoding of the remaining messages only.
That text is cut from the template's rendering of the whole conversation, if the template is proven to write the earlier
part as before (`_suffix_after`), and encoded as it is within the whole. Otherwise the call starts a new
path; if it looked like a continuation, that is drift.

Worked example, `|` between tokens, sampled tokens in capitals:

    call 1   messages  user "hi"                       prompt  <s>|user|hi|</s>|assistant
             answer    "HELLO" (length: no </s>)       sampled HEL|LO
    call 2   messages  user "hi", assistant "HELLO", user "you"
             prompt    <s>|user|hi|</s>|assistant|HEL|LO|</s>|user|you|</s>|assistant
                       `------------- as it was -------------' `-- encoded now: the end of the turn, then the rest

Messages are compared by meaning, not by bytes (`same_meaning`), since clients serialize them again. Raw prompts are
compared as they are: one that begins with an earlier prompt and its answer gets those tokens.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import orjson

from agentlightning.chat.base import ChatFormat, Message
from agentlightning.chat.reasoning import find_reasoning_markers, strip_opening_marker, strip_reasoning
from agentlightning.chat.tool_calls.format import Tools
from agentlightning.engine.base import Sample
from agentlightning.errors import ContextLengthError
from agentlightning.gateway.callers import AttemptIds
from agentlightning.gateway.dialects.content_parts import extend_digest, message_digests, normalized_arguments, text_of
from agentlightning.util.json_values import dumps

_AT_ONCE = 65536
"""Tokens that are packed at once: meanwhile no other thread runs."""


@dataclass(frozen=True, slots=True)
class TokenPath:
    """The tokens of one answer and its prompt, without those of the path it continues."""

    parent: TokenPath | None
    tokens: array[int]
    span_id: str
    ended: bool
    """Whether the sample ended its turn."""
    is_complete: bool = True
    """If False, the last sampled tokens are missing: the caller did not get their text."""

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


@dataclass(slots=True)
class Prompt:
    """A prompt and its origin."""

    token_ids: list[int]
    continues: TokenPath | None = None
    num_reused: int = 0
    """Number of tokens that are those of `continues`."""
    drift: DriftReason | None = None
    """Why no path is continued, although the request looks like a continuation."""
    digests: tuple[bytes, ...] = ()
    """Digests of the first 0, 1, 2, ... messages."""
    variant: bytes = b""
    """Digest of what a rendering depends on besides the messages."""

    raw: bytes | None = None
    """The raw prompt in the form that `Conversations` compares."""
    prefill: str = ""
    """The beginning of the answer, written by the caller; it is the end of the prompt."""
    own: array[int] = field(init=False, repr=False, compare=False)
    """The tokens after the reused ones, as a `TokenPath` holds them; packed in the thread that makes the prompt."""

    def __post_init__(self) -> None:
        self.own = array("i")
        for start in range(self.num_reused, len(self.token_ids), _AT_ONCE):
            self.own.extend(self.token_ids[start : start + _AT_ONCE])


class PrefixIndex:
    """Finds the longest known prefix of a byte string. Stores only lengths and digests."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, bytes], TokenPath] = {}

    def add(self, data: bytes, value: TokenPath) -> None:
        self._values[len(data), _hasher(data).digest()] = value

    def longest(self, data: bytes) -> tuple[int, TokenPath] | None:
        """(length, value) of the longest known prefix of `data`. Reads `data` once."""
        longest: tuple[int, TokenPath] | None = None
        hasher, start = _hasher(b""), 0
        known = list(self._values)  # A copy: another thread may add prompts.
        for length in sorted({length for length, _ in known if length <= len(data)}):
            hasher.update(data[start:length])
            start = length
            value = self._values.get((length, hasher.copy().digest()))
            longest = longest if value is None else (length, value)
        return longest


def _hasher(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


@dataclass(slots=True)
class _AttemptPaths:
    """The paths of one attempt."""

    paths: dict[tuple[bytes, bytes], TokenPath] = field(default_factory=dict)
    """(digest of messages and answer, variant) -> path."""
    answered: set[bytes] = field(default_factory=set)
    """Digests of the messages before each answer."""
    call_ids: set[str] = field(default_factory=set)
    """Ids of the tool calls in answers."""
    raw: PrefixIndex = field(default_factory=PrefixIndex)
    """Raw prompt with its answer -> path."""
    tokens: int = 0


class Conversations:
    """The paths of attempts, in an LRU cache."""

    def __init__(self, max_attempts: int = 16384, max_tokens: int = 100_000_000) -> None:
        self._max_attempts = max_attempts
        self._max_tokens = max_tokens
        self._attempts: OrderedDict[AttemptIds, _AttemptPaths] = OrderedDict()
        self.tokens = 0
        """Number of tokens in the cache."""
        self.num_evicted = 0
        """Attempts evicted; their next calls start new paths."""

    def __len__(self) -> int:
        return len(self._attempts)

    def prompt(
        self,
        attempt: AttemptIds | None,
        model: str,
        chat: ChatFormat,
        messages: Sequence[Message],
        tools: Tools,
        context: int | None = None,
        prefill: str = "",
    ) -> Prompt:
        """The prompt of a call whose answer begins with `prefill`. May be called from any thread. Raises ConfigError if
        the template cannot render the messages, ContextLengthError if they certainly exceed `context` tokens."""
        identity = [model, dict(chat.template_kwargs) or None, list(tools) if tools else None]
        variant = hashlib.blake2b(dumps(identity, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
        digests = message_digests(messages)
        memory = self._paths_of(attempt) or _AttemptPaths()
        length, path = _longest_path(memory, digests, variant, messages)
        cut = _suffix_after(chat, messages, tools, length, path.ended) if path else None
        known = path.all_tokens() if path and cut else []
        drift = None
        added = cut and _encode(chat, cut[1] + chat.escape(prefill), context, cut[0], len(known))
        continues = path
        if added and added[1]:
            tokens = known + added[0]
        else:
            text = chat.render(messages, tools) + chat.escape(prefill)
            (tokens, _), known, continues, length = _encode(chat, text, context), [], None, 0
        if _resembles_known_answer(memory, digests, messages, length):
            drift = "edited" if continues else _drift_reason(memory, digests, path is not None)
        return Prompt(tokens, continues, len(known), drift, digests, variant, prefill=prefill)

    def _paths_of(self, attempt: AttemptIds | None) -> _AttemptPaths | None:
        """The paths of an attempt, marked as recently used; None without an attempt."""
        if attempt is None:
            return None
        with suppress(KeyError):  # Another thread may remove it meanwhile.
            self._attempts.move_to_end(attempt)
        return self._attempts.get(attempt)

    def raw_prompt(
        self,
        attempt: AttemptIds | None,
        model: str,
        chat: ChatFormat,
        prompt: str | list[int],
        context: int | None = None,
    ) -> Prompt:
        """The prompt of a call with raw text or tokens; given tokens are used as they are."""
        raw = _raw(model, prompt)
        memory = self._paths_of(attempt)
        found = memory.raw.longest(raw) if memory else None
        if found is None:
            return Prompt(_encode(chat, prompt, context)[0] if isinstance(prompt, str) else prompt, raw=raw)
        length, path = found
        known = path.all_tokens()
        if isinstance(prompt, str):
            rest = raw[length:].decode("utf-8", "surrogatepass")
            before = raw[len(_raw(model, "")) : length].decode("utf-8", "surrogatepass")
            prompt = known + _encode(chat, rest, context, before, len(known))[0]
        return Prompt(prompt, path, len(known), raw=raw)

    def add_answer(
        self, attempt: AttemptIds, prompt: Prompt, chat: ChatFormat, answer: Message, sample: Sample, span_id: str
    ) -> None:
        """Store the path of an answer, as the caller got it, so that a later call can continue it."""
        memory = self._attempts.setdefault(attempt, _AttemptPaths())
        self._attempts.move_to_end(attempt)
        drawn, shown = array("i", sample.token_ids), prompt.prefill + (answer.get("content") or "")
        ended = prompt.raw is not None or (bool(drawn) and drawn[-1] in chat.eos_token_ids)
        path = TokenPath(prompt.continues, prompt.own + drawn, span_id, ended)
        if prompt.raw is None:
            if prompt.prefill:  # The caller sees prefill and answer as one message.
                answer = {**answer, "content": shown}
            memory.paths[extend_digest(prompt.digests[-1], answer), prompt.variant] = path
            memory.answered.add(prompt.digests[-1])
            memory.call_ids.update(call["id"] for call in answer.get("tool_calls") or ())
        elif prompt.raw.startswith(_RAW_TOKENS):
            memory.raw.add(prompt.raw + drawn.tobytes(), path)
        else:
            # The next prompt may contain the text that the caller did not get, or may not.
            length, text = _within(chat, sample.token_ids, shown)
            part = TokenPath(prompt.continues, prompt.own + drawn[:length], span_id, ended=True, is_complete=False)
            memory.raw.add(prompt.raw + _utf8(text), part)
            memory.raw.add(prompt.raw + _utf8(chat.decode(sample.token_ids)), path)
        memory.tokens += len(path.tokens)
        self.tokens += len(path.tokens)
        while self._attempts and (len(self._attempts) > self._max_attempts or self.tokens > self._max_tokens):
            self.forget(next(iter(self._attempts)))
            self.num_evicted += 1

    def forget(self, attempt: AttemptIds) -> None:
        """Drop the paths of an attempt that has ended."""
        if memory := self._attempts.pop(attempt, None):
            self.tokens -= memory.tokens


def _encode(
    chat: ChatFormat, text: str, context: int | None, before: str | None = None, known: int = 0
) -> tuple[list[int], bool]:
    """The tokens of a text; of one after the text `before`, which has `known` tokens, as `ChatFormat.encode_after`.
    Raises ContextLengthError, before encoding, if all tokens certainly exceed `context`."""
    if context is not None and (count := known + chat.min_token_count(text, context - known)) > context:
        raise ContextLengthError(
            f"the prompt has more than {count} tokens and the context holds {context}; shorten the prompt, or use a "
            "model with a longer context"
        )
    return (chat.encode(text), True) if before is None else chat.encode_after(before, text)


# -- raw prompts -----------------------------------------------------------------------------------------------------

_RAW_TEXT, _RAW_TOKENS = b"text:", b"tokens:"


def _raw(model: str, prompt: str | list[int]) -> bytes:
    """A raw prompt as bytes; one is a prefix of another if model and text or tokens are."""
    kind, data = (_RAW_TEXT, _utf8(prompt)) if isinstance(prompt, str) else (_RAW_TOKENS, array("i", prompt).tobytes())
    return kind + dumps(model) + data


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _within(chat: ChatFormat, token_ids: Sequence[int], shown: str) -> tuple[int, str]:
    """(length, text) of the longest run of tokens from the start whose text is within `shown`."""
    length = len(token_ids)
    while not shown.startswith(text := chat.decode(token_ids[:length])):
        length -= 1
    return length, text


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
    """Why no path is continued. `same`: the conversation is known, but the template renders it differently."""
    if same:
        return "template"
    known = {digest for digest, _ in list(memory.paths)}  # A copy: another thread may add answers.
    return "tools" if known & set(digests[1:]) else "edited"


def _resembles_known_answer(
    memory: _AttemptPaths, digests: Sequence[bytes], messages: Sequence[Message], start: int
) -> bool:
    """Whether an assistant message from `start` on stands in the place of a known answer, or has an id of its tool
    calls."""
    for place in range(start, len(messages)):
        if messages[place]["role"] != "assistant":
            continue
        ids = {call.get("id") for call in messages[place].get("tool_calls") or ()}
        if digests[place] in memory.answered or ids & memory.call_ids:
            return True
    return False


# -- the text after a known answer -------------------------------------------------------------------------------------


def _suffix_after(
    chat: ChatFormat, messages: Sequence[Message], tools: Tools, length: int, ended: bool
) -> tuple[str, str] | None:
    """The texts up to `messages[length - 1]`, the answer of a known path, and after it within the rendering of all
    messages. The token that ends the answer is before, if it `ended`. The reasoning of earlier answers is in the tokens
    of the path, so it does not matter whether the template or the client leaves it out.

    None unless the template provably writes the earlier part as before. Either the rendering up to the answer is a
    prefix of the whole rendering; or, since some templates write the last message differently, everything before the
    answer is the same, and the answer parses to the same message.
    """
    history = [{key: each[key] for key in each if key != "reasoning_content"} for each in messages[:length]]
    text = chat.render([*history, *messages[length:]], tools)
    ends = [end for token in chat.eos_token_ids if (end := chat.decode([token]))]
    parts = _by_prefix(chat, text, history, tools, ends) or _by_reading(chat, text, history, tools, ends)
    if parts is None:
        return None
    start, after = parts
    return text[: after if ended else start], text[after if ended else start :]


def _by_prefix(
    chat: ChatFormat, text: str, history: Sequence[Message], tools: Tools, ends: list[str]
) -> tuple[int, int] | None:
    """Where the token that ends the answer starts and ends in `text`."""
    prefix = chat.render(history, tools, add_generation_prompt=False)
    # At the first of several ends the sampler stops.
    found = re.search(rf"({'|'.join(map(re.escape, ends))}|\s)+\Z", prefix) if text.startswith(prefix) else None
    places = [(place, place + len(end)) for end in ends if found and (place := prefix.find(end, found.start())) >= 0]
    return min(places, default=None)


def _by_reading(
    chat: ChatFormat, text: str, history: Sequence[Message], tools: Tools, ends: list[str]
) -> tuple[int, int] | None:
    markers = find_reasoning_markers(chat)
    before = strip_opening_marker(markers, chat.render(history[:-1], tools, add_generation_prompt=True))
    if not text.startswith(before):
        return None
    places = [(place, end) for end in ends if (place := text.find(end, len(before))) >= 0]
    if not places:
        return None
    place, end = min(places)
    written = chat.unescape(text[len(before) : place])
    candidates = {written, strip_reasoning(markers, written)}
    return (
        (place, place + len(end))
        if any(_reads_as(chat, candidate, history[-1], tools) for candidate in candidates)
        else None
    )


def _reads_as(chat: ChatFormat, written: str, answer: Message, tools: Tools) -> bool:
    parsed = chat.parse(written, tools)
    calls = [(call.name, normalized_arguments(call.arguments)) for call in parsed.tool_calls]
    meant = [call["function"] for call in answer.get("tool_calls") or ()]
    if calls != [(function["name"], normalized_arguments(function["arguments"])) for function in meant]:
        return not meant and written.strip() == text_of(answer.get("content")).strip()
    return (parsed.content or "").strip() == text_of(answer.get("content")).strip()
