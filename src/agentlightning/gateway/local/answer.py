"""One answer while it is drawn: tokens in, text and tool calls out, nothing shown that may have to be taken back.

Held back until it is known what it is: UTF-8 cut over tokens, text that may begin a stop string, whitespace and text
that may begin or end a thought or begin a tool call. What has been shown piece by piece is in the end exactly
`message`, however the tokens were cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.chat.base import ChatFormat, Message, ParsedToolCall, ThoughtMarkers
from agentlightning.chat.tool_calls.format import partial_marker_length
from agentlightning.chat.tool_calls.reader import CallReader
from agentlightning.engine.base import Sample
from agentlightning.gateway.dialects.output import OutputEvent, ReasoningDelta, StopFilter, ToolCall, assistant_message
from agentlightning.gateway.local.logprobs import Token, TokenLogprobs, TopLogprobs, token_logprobs


class Detokenizer:
    """Text of tokens that arrive one by one.

    Each step decodes a window that starts at a place where the text was whole, so that tokenizers which treat the
    first token of a text differently do no harm.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._tokens: list[int] = []
        self._before = 0
        self._shown = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain."""
        self._tokens.extend(token_ids)
        text = self._new_text()
        if text.endswith("�"):
            return ""
        self._before, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """What is left: bytes that never became a character are shown as U+FFFD."""
        text = self._new_text()
        self._before = self._shown = len(self._tokens)
        return text

    def _new_text(self) -> str:
        if self._shown == len(self._tokens):
            return ""
        whole = self._chat.decode(self._tokens[self._before :])
        if self._shown == self._before:
            return whole
        return whole[len(self._chat.decode(self._tokens[self._before : self._shown])) :]


class ReasoningFilter:
    """Tells the thought an answer may begin with from the rest; whitespace beside the markers is dropped."""

    def __init__(self, markers: ThoughtMarkers | None) -> None:
        self._markers = markers
        self._buffer = ""
        self._thinks = markers is not None and markers.opened
        self._begun = markers is None or self._thinks
        """Whether it is known what the answer begins with."""
        self._trims = self._thinks
        """Whitespace that comes next is beside a marker."""

    def feed(self, text: str) -> tuple[str, str]:
        """(thought, content) that have become certain."""
        self._buffer += text
        if not self._begun:
            self._begin()
        self._trim()
        thought = self._think() if self._thinks else ""
        self._trim()
        content = self._take(len(self._buffer)) if self._begun and not self._thinks else ""
        return thought, content

    def finish(self) -> tuple[str, str]:
        rest = self._take(len(self._buffer))
        return (rest.rstrip(), "") if self._thinks else ("", rest)

    def _begin(self) -> None:
        start, begins = self._markers.start if self._markers else "", self._buffer.lstrip()
        if begins.startswith(start):
            self._begun = self._thinks = self._trims = True
            self._buffer = begins[len(start) :]
        elif not start.startswith(begins):
            self._begun = True

    def _think(self) -> str:
        end = self._markers.end if self._markers else ""
        place = self._buffer.find(end)
        if place < 0:
            return self._take(
                len(self._buffer[: len(self._buffer) - partial_marker_length(self._buffer, end)].rstrip())
            )
        thought = self._take(place).rstrip()
        self._buffer = self._buffer[len(end) :]
        self._thinks, self._trims = False, True
        return thought

    def _trim(self) -> None:
        if self._trims and self._begun:
            self._buffer = self._buffer.lstrip()
            self._trims = not self._buffer

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


@dataclass(slots=True)
class Answer:
    """One choice of a reply while it grows."""

    index: int
    chat: ChatFormat
    stops: tuple[str, ...] = ()
    prompt_token_ids: Sequence[int] = ()
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end it beside those that end a turn; they are not shown."""
    reads_tool_calls: bool = True
    """False where the request offered no tools: a tool call is then content like any other."""
    single_tool_call: bool = False
    """At most one tool call was asked for."""
    call_prefix: str = "call_"
    """What the ids of its tool calls begin with."""
    tools: Sequence[dict[str, Any]] | None = None
    """Those the request offered: in some formats they say what type an argument has."""
    is_constrained: bool = False
    """No token was drawn that what was asked for forbids."""
    prefill: str = ""
    """What the caller wrote of it: it goes on after that."""
    uses_functions: bool = False
    """The caller knows calls by their names alone (`dialects.legacy`)."""
    reasoning_markers: ThoughtMarkers | None = None
    """How the model marks a thought; None: nothing is told apart."""
    reasoning: str = ""
    content: str = ""
    is_refusal: bool = False
    """The content is why the model does not answer."""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    sample: Sample | None = None
    num_tokens: int = 0
    """Tokens fed so far."""
    token_ids: list[int] = field(default_factory=list[int])
    """These tokens; of a provider's answer nothing."""
    _written_ids: list[int] = field(default_factory=list[int])
    """Of what was written last, where log-probabilities were asked for with it."""
    token_logprobs: TokenLogprobs = field(default_factory=TokenLogprobs, init=False)
    _text: Detokenizer = field(init=False)
    _stop: StopFilter = field(init=False)
    _reasoning_filter: ReasoningFilter = field(init=False)
    _calls: CallReader = field(init=False)

    def __post_init__(self) -> None:
        self._text = Detokenizer(self.chat)
        self._stop = StopFilter(self.stops)
        self._reasoning_filter = ReasoningFilter(self.reasoning_markers)
        self._calls = CallReader(self.chat.tool_calls, self.tools)

    def feed(
        self, token_ids: Sequence[int], logprobs: Sequence[float] = (), tops: Sequence[TopLogprobs] = ()
    ) -> list[OutputEvent]:
        """What can be shown after some more tokens; their log-probabilities, where they are known by now."""
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        shown = [token for token in token_ids if token not in self.chat.eos_token_ids and token not in self.stop_tokens]
        pieces = self._read_text(self._stop.feed(self._text.feed(shown)))
        if logprobs:
            self.token_logprobs.add(token_ids, logprobs, tops, len(pieces))
        return pieces

    def finish(self, sample: Sample) -> list[OutputEvent]:
        """What is left to show once the sample is whole."""
        pieces = self.feed(sample.token_ids[self.num_tokens :]) if self.num_tokens < len(sample.token_ids) else []
        self.sample = sample
        self.token_logprobs.complete(sample)
        rest = self._stop.feed(self._text.finish()) + self._stop.finish()
        pieces += self._read_text(rest)
        thought, content = self._reasoning_filter.finish()
        pieces += self._add_reasoning(thought) + self._read_content(content)
        return pieces + (self._add(self._calls.finish()) if self.reads_tool_calls else [])

    @property
    def finish_reason(self) -> str:
        """stop, length, or tool_calls where the answer ended by itself and calls tools."""
        reason = self.sample.finish_reason if self.sample else "stop"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    @property
    def stop_string(self) -> str | None:
        """The one that ended the answer."""
        return self._stop.found

    @property
    def engine_stops(self) -> tuple[str, ...]:
        """Strings that end the drawing: those asked for, and what closes the only tool call."""
        closing = self.chat.tool_calls.closing
        return (*self.stops, closing) if closing and self.stops_after_tool_call else self.stops

    @property
    def stops_after_tool_call(self) -> bool:
        """The first tool call ends the drawing. A model that thinks may write calls in its thoughts: it is let finish.
        So is an answer that is held, which ends by itself and may say in its arguments what ends a call."""
        return (
            self.single_tool_call
            and not self.is_constrained
            and self.reasoning_markers is None
            and self.chat.tool_calls.closing is not None
        )

    @property
    def message(self) -> Message:
        """The answer as an assistant message on the wire."""
        return assistant_message(self.content, self.reasoning, self.tool_calls)

    def parts(self) -> list[OutputEvent]:
        """A whole answer, in order: thoughts, content, whole tool calls."""
        parts: list[OutputEvent] = [ReasoningDelta(self.reasoning)] if self.reasoning else []
        return [*parts, *([self.content] if self.content else []), *self.tool_calls]

    def next_logprobs(self) -> list[dict[str, Any]]:
        """On the wire, of the next piece to be written."""
        return self._written(self.token_logprobs.take_event())

    def remaining_logprobs(self) -> list[dict[str, Any]]:
        """On the wire, of what no piece has shown."""
        return self._written(self.token_logprobs.take_rest())

    def take_token_ids(self) -> list[int]:
        """The tokens of the log-probabilities that were asked for last, once."""
        taken, self._written_ids = self._written_ids, []
        return taken

    def _written(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        self._written_ids = [token for token, _, _ in tokens]
        return token_logprobs(self.chat, tokens)

    def all_logprobs(self) -> list[dict[str, Any]]:
        """On the wire."""
        return token_logprobs(self.chat, self.token_logprobs.tokens)

    def _read_text(self, text: str) -> list[OutputEvent]:
        thought, content = self._reasoning_filter.feed(text)
        return self._add_reasoning(thought) + self._read_content(content)

    def _add_reasoning(self, text: str) -> list[OutputEvent]:
        self.reasoning += text
        return [ReasoningDelta(text)] if text else []

    def _read_content(self, text: str) -> list[OutputEvent]:
        if not self.reads_tool_calls:
            return self._add([text] if text else [])
        return self._add(self._calls.feed(text))

    def _add(self, pieces: Sequence[str | ParsedToolCall]) -> list[OutputEvent]:
        return [self._add_text(piece) if isinstance(piece, str) else self._add_tool_call(piece) for piece in pieces]

    def _add_text(self, text: str) -> str:
        self.content += text
        return text

    def _add_tool_call(self, call: ParsedToolCall) -> ToolCall:
        # The model refers to a call by the id it wrote itself, where it wrote one.
        taken = {known.id for known in self.tool_calls}
        name = call.id if call.id and call.id not in taken else self.chat.tool_calls.new_id(self.call_prefix)
        name = f"call_{call.name}" if self.uses_functions else name
        kept = ToolCall(len(self.tool_calls), name, call.name, call.arguments)
        self.tool_calls.append(kept)
        return kept
