"""A chat format over a Hugging Face tokenizer: text by its chat template, tool calls as Hermes writes them.

Responsible for turning messages into text, text into tokens, and an answer back into content and tool calls. It
never samples and never guesses: a tokenizer without a chat template is refused, and what is not a well-formed tool
call stays in the content.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jinja2

from agentlightning.errors import ConfigError
from agentlightning.policy.base import Message, ParsedMessage, ParsedToolCall

CALL_START: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"

_PROBE: Final = "agentlightning_probe"
_TEMPLATE_ERRORS: Final = (jinja2.TemplateError, TypeError, ValueError, KeyError)
_decoder = json.JSONDecoder()


class HFChatFormat:
    """`ChatFormat` over a transformers tokenizer.

    `eos_token_ids` are added to what the tokenizer, the `generation_config.json` beside it and its template say.
    Raises ConfigError where the tokenizer has no chat template or no token that ends a turn.
    """

    tool_call_markers: tuple[str, str] = (CALL_START, CALL_END)

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> None:
        self._name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {self._name} has no chat template; use an instruction-tuned model, or set "
                "`chat_template` in its tokenizer_config.json (or put a chat_template.jinja beside it)"
            )
        # A fast tokenizer must not be used from two threads: ours is not the trainer's.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._backend = _fast(self._tokenizer)
        self.eos_token_ids: frozenset[int] = self._find_eos(eos_token_ids)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. Raises ConfigError, in the template's words, on messages it cannot hold."""
        if any("tool_calls" in message for message in messages) and self._wants_objects:
            messages = [_with_objects(message) for message in messages]
        try:
            return self._apply(messages, tools, add_generation_prompt)
        except _TEMPLATE_ERRORS as error:
            raise ConfigError(f"the chat template of {self._name} cannot hold these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Tokens of rendered text: special tokens are recognised, none is added."""
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def parse(self, text: str) -> ParsedMessage:
        """Content and Hermes tool calls of an answer; see `parse_hermes`."""
        return parse_hermes(text)

    def _apply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, generate: bool) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=generate, tokenize=False
        )

    @cached_property
    def _wants_objects(self) -> bool:
        """Whether the template writes tool-call arguments given as an object (most) or as JSON text (a few)."""
        function = {"name": "probe", "arguments": {_PROBE: 1}}
        call = {"id": "call_probe", "type": "function", "function": function}
        asked = {"role": "user", "content": "?"}
        try:
            text = self._apply([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], None, False)
        except _TEMPLATE_ERRORS:
            return False
        return f'"{_PROBE}"' in text

    def _find_eos(self, given: Iterable[int]) -> frozenset[int]:
        found = {*given, *self._generation_eos(), *self._template_eos()}
        if self._tokenizer.eos_token_id is not None:
            found.add(int(self._tokenizer.eos_token_id))
        if not found:
            raise ConfigError(
                f"the tokenizer of {self._name} names no token that ends a turn; set `eos_token` in its "
                "tokenizer_config.json"
            )
        return frozenset(found)

    def _generation_eos(self) -> list[int]:
        path = Path(self._name) / "generation_config.json"
        if not path.is_file():
            return []
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        return [] if eos is None else [int(token) for token in (eos if isinstance(eos, list) else [eos])]

    def _template_eos(self) -> list[int]:
        """The special token that the template writes right after an assistant's answer."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        _, found, after = self.render(turn, add_generation_prompt=False).partition(_PROBE)
        tokens = self.encode(after.lstrip()) if found else []
        return [token for token in tokens[:1] if token in self._tokenizer.added_tokens_decoder]


def _fast(tokenizer: Any) -> Any | None:
    """The Rust tokenizer inside, where there is one: called directly, it takes half the time for a short text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


def parse_hermes(text: str) -> ParsedMessage:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; whitespace beside a tool call is dropped.

    A call that is not closed, or whose body is not a JSON object with a name, stays in the content as it was written.
    """
    if CALL_START not in text:
        return ParsedMessage(content=text)
    content, calls, position = "", list[ParsedToolCall](), 0
    while (start := text.find(CALL_START, position)) >= 0 and (end := text.find(CALL_END, start)) >= 0:
        body = start + len(CALL_START)
        call = _read_call(text[body:end])
        if call is None:
            content += text[position:body]
            position = body
            continue
        content = (content + text[position:start]).rstrip()
        calls.append(call)
        position = len(text) - len(text[end + len(CALL_END) :].lstrip())
    content += text[position:]
    return ParsedMessage(content=content or None if calls else content, tool_calls=tuple(calls))


def _read_call(body: str) -> ParsedToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not _is_text(call.get("name")) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return ParsedToolCall(call["name"], arguments) if _is_text(arguments) else None
    return ParsedToolCall(call["name"], _raw_value(body, "arguments") or "{}")


def _is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can carry: JSON escapes can spell half a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _raw_value(body: str, key: str) -> str | None:
    """The text of a key's value in a JSON object known to be valid: spaces and number formats as they were written."""
    found, position = None, body.index("{") + 1
    while (position := _skip(body, position, " \t\n\r,")) < len(body) and body[position] != "}":
        name, position = _decoder.raw_decode(body, position)
        start = _skip(body, position, " \t\n\r:")
        _, position = _decoder.raw_decode(body, start)
        if name == key:
            found = body[start:position]
    return found


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _with_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    return message if not calls else {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object. What is not a JSON object stays the text it is: the model did write that."""
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": value}} if isinstance(value, dict) else call
