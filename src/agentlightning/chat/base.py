"""The contract of a chat format: messages to text, text to tokens, and an answer back to content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from agentlightning.chat.tool_calls.format import CallFormat, ParsedMessage, ParsedToolCall, Tools, parse_answer
from agentlightning.errors import ConfigError

__all__ = ["CallFormat", "ChatFormat", "Message", "ParsedMessage", "ParsedToolCall", "ThoughtMarkers"]

Message = dict[str, Any]
"""A chat message of the OpenAI chat completions API: role, content, tool_calls, tool_call_id, name."""


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """The texts around the thought of a reasoning model, such as `<think>` and `</think>`."""

    start: str
    end: str
    opened: bool
    """Whether the chat template begins the thought, so that an answer starts inside it."""


class ChatFormat(Protocol):
    """A model's chat template, tokenizer and tool-call format. Subclass it to inherit the defaults of the optional
    members: `markers`, `template_kwargs`, `tools_in_messages`, `takes_thoughts`, `end_of_turn`, `with_template_kwargs`,
    `min_token_count`, `encode_after`, `parse`, `escape` and `unescape`."""

    eos_token_ids: frozenset[int]
    """Tokens that end a turn."""
    tool_calls: CallFormat
    """How the model writes tool calls."""
    markers: Mapping[str, int] | None = None
    """Text -> id of the tokens outside ordinary text, such as `<tool_call>`; None: unknown, so no grammar for answers
    can be written."""
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    """Variables passed to the chat template."""
    tools_in_messages: bool = False
    """Whether tools, calls and results are written into messages, as the template has no place for them
    (`chat.hf`)."""
    takes_thoughts: bool = True
    """Whether the template writes `reasoning_content` anywhere."""

    def render(self, messages: Sequence[Message], tools: Tools = None, add_generation_prompt: bool = True) -> str:
        """The conversation as text, by the model's chat template. Raises ConfigError on messages it cannot render."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of rendered text: special tokens are recognised, none is added."""
        ...

    @property
    def end_of_turn(self) -> int:
        """The token that ends an answer where the template writes none."""
        return min(self.eos_token_ids)

    def encode_after(self, before: str, text: str) -> tuple[list[int], bool]:
        """(tokens of `text` where it follows `before`, whether the tokens of both together end in them)."""
        head, whole = self.encode(before), self.encode(before + text)
        if whole[: len(head)] == head:
            return whole[len(head) :], True
        # A token spans the border. Some tokenizers write a space before a text that begins anew, so it does not.
        for anchor in (*(self.decode([token]) for token in sorted(self.eos_token_ids)), "\n", "x"):
            start, both = self.encode(anchor), self.encode(anchor + text)
            if both[: len(start)] == start and self.decode(both) == self.decode(start) + self.unescape(text):
                return both[len(start) :], False
        return self.encode(text), False

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def parse(self, text: str, tools: Tools = None) -> ParsedMessage:
        """Content and tool calls of an answer without its end-of-turn token; `tools` are those it was offered, and give
        the types of arguments whose text is ambiguous. Never raises: a malformed tool call stays in the content."""
        return parse_answer(self.tool_calls, self.unescape(text), tools)

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> ChatFormat:
        """This format with variables for its template, such as `enable_thinking`. Raises ConfigError for a variable
        that the template cannot take."""
        raise ConfigError("chat_template_kwargs cannot be used with this model: its chat format takes none")

    def min_token_count(self, text: str, limit: int) -> int:
        """A lower bound on the number of tokens of rendered text, found without encoding much more than `limit`
        tokens."""
        return 0

    def escape(self, text: str) -> str:
        """Text to insert into rendered text such that nothing in it is encoded as a special token."""
        return text

    def unescape(self, text: str) -> str:
        """Rendered text with everything that `escape` replaced restored."""
        return text
