"""An answer while it is sampled: turns tokens into text, reasoning and tool calls, and emits nothing it may take back.

Ambiguous text is buffered: incomplete UTF-8, the possible beginning of a stop string or tool call, and whitespace or
text that may belong to a reasoning marker. The emitted events together are exactly `message`, however the tokens were
split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.chat.base import ChatFormat, Message, ParsedToolCall, ThoughtMarkers
from agentlightning.chat.tool_calls.format import partial_marker_length
from agentlightning.chat.tool_calls.template_probe import CallReader
from agentlightning.engine.base import Sample
from agentlightning.gateway.dialects.output import OutputEvent, ReasoningDelta, StopFilter, ToolCall, assistant_message
from agentlightning.gateway.local.logprobs import Token, TokenLogprobs, TopLogprobs, token_logprobs


class Detokenizer:
    """Decodes tokens incrementally.

    Each step decodes a window that starts where the text was last complete, so that tokenizers which treat the first
    token of a text differently do no harm.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._tokens: list[int] = []
        self._before = 0
        self._shown = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is complete now."""
        self._tokens.extend(token_ids)
        text = self._new_text()
        if text.endswith("�"):
            return ""
        self._before, self._shown = self._shown, len(self._tokens)
        return text

    def finish(self) -> str:
        """The rest of the text; incomplete characters become U+FFFD."""
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
    """Separates the reasoning at the start of an answer from its content; drops whitespace next to the markers."""

    def __init__(self, markers: ThoughtMarkers | None) -> None:
        self._markers = markers
        self._buffer = ""
        self._thinks = markers is not None and markers.opened
        self._begun = markers is None or self._thinks
        """Whether it is known if the answer begins with reasoning."""
        self._trims = self._thinks
        """The next whitespace is next to a marker."""

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that are complete now."""
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
    """One choice of a reply."""

    index: int
    chat: ChatFormat
    stops: tuple[str, ...] = ()
    prompt_token_ids: Sequence[int] = ()
    stop_tokens: tuple[int, ...] = ()
    """Further tokens that end the answer, besides those that end a turn; they are not part of the text."""
    reads_tool_calls: bool = True
    """If False, the request offers no tools, and a tool call is ordinary content."""
    single_tool_call: bool = False
    """The request allows at most one tool call."""
    call_prefix: str = "call_"
    """Prefix of the ids of tool calls."""
    tools: Sequence[dict[str, Any]] | None = None
    """The tools of the request; some formats read the types of arguments from them."""
    is_constrained: bool = False
    """The engine enforced the schema or grammar of the request."""
    prefill: str = ""
    """The beginning of the answer, written by the caller."""
    uses_functions: bool = False
    """The caller identifies tool calls by function name (`openai.legacy_functions`)."""
    top_logprobs: int = 0
    """The number of likeliest tokens that the caller is told; spans may keep more."""
    call_ids: Sequence[str] = ()
    """The ids of its tool calls where it is a recorded answer: prompts may contain them."""
    reasoning_markers: ThoughtMarkers | None = None
    """How the model marks reasoning; None if it does not."""
    reasoning: str = ""
    content: str = ""
    is_refusal: bool = False
    """The content is a refusal."""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    sample: Sample | None = None
    num_tokens: int = 0
    """Tokens fed so far."""
    token_ids: list[int] = field(default_factory=list[int])
    """The tokens fed so far; empty for the answer of a provider."""
    _written_ids: list[int] = field(default_factory=list[int])
    """Tokens of the log-probabilities written last."""
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
        """The events after more tokens, with their log-probabilities if the engine streams them."""
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        visible = [
            token for token in token_ids if token not in self.chat.eos_token_ids and token not in self.stop_tokens
        ]
        events = self._read_text(self._stop.feed(self._text.feed(visible)))
        if logprobs:
            self.token_logprobs.add(token_ids, logprobs, tops, len(events))
        return events

    def begin(self, token_ids: Sequence[int]) -> list[OutputEvent]:
        """The events of tokens that the answer begins with, and that were sampled for another."""
        events = self.feed(token_ids)
        self.num_tokens, self.token_ids = 0, []
        self.token_logprobs.add((), (), (), len(events))
        return events

    def finish(self, sample: Sample) -> list[OutputEvent]:
        """The remaining events, once the sample is complete."""
        events = self.feed(sample.token_ids[self.num_tokens :]) if self.num_tokens < len(sample.token_ids) else []
        self.sample = sample
        self.token_logprobs.complete(sample)
        rest = self._stop.feed(self._text.finish()) + self._stop.finish()
        events += self._read_text(rest)
        thought, content = self._reasoning_filter.finish()
        events += self._add_reasoning(thought) + self._read_content(content)
        return events + (self._add(self._calls.finish()) if self.reads_tool_calls else [])

    @property
    def finish_reason(self) -> str:
        """stop, length, or tool_calls if the answer ended by itself and calls tools."""
        reason = self.sample.finish_reason if self.sample else "stop"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stop.found

    @property
    def engine_stops(self) -> tuple[str, ...]:
        """Stop strings for the engine: those of the request, and the end of the only tool call."""
        closing = self.chat.tool_calls.closing
        return (*self.stops, closing) if closing and self.stops_after_tool_call else self.stops

    @property
    def stops_after_tool_call(self) -> bool:
        """Whether sampling stops after the first tool call. Not for a model that reasons, which may write calls in its
        reasoning; nor for a constrained answer, which ends by itself and may contain the end marker in an argument."""
        return (
            self.single_tool_call
            and not self.is_constrained
            and self.reasoning_markers is None
            and self.chat.tool_calls.closing is not None
        )

    @property
    def message(self) -> Message:
        """The answer as an assistant message."""
        return assistant_message(self.content, self.reasoning, self.tool_calls)

    def parts(self) -> list[OutputEvent]:
        """The complete answer, in order: reasoning, content, tool calls."""
        parts: list[OutputEvent] = [ReasoningDelta(self.reasoning)] if self.reasoning else []
        return [*parts, *([self.content] if self.content else []), *self.tool_calls]

    def next_logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of the next event to be written, in wire format."""
        return self._written(self.token_logprobs.take_event())

    def remaining_logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities that belong to no event, in wire format."""
        return self._written(self.token_logprobs.take_rest())

    def take_token_ids(self) -> list[int]:
        """The tokens of the log-probabilities returned last; empty the second time."""
        taken, self._written_ids = self._written_ids, []
        return taken

    def _written(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        self._written_ids = [token for token, _, _ in tokens]
        return token_logprobs(self.chat, tokens, self.top_logprobs)

    def all_logprobs(self) -> list[dict[str, Any]]:
        """All log-probabilities, in wire format."""
        return token_logprobs(self.chat, self.token_logprobs.tokens, self.top_logprobs)

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

    def _add(self, parts: Sequence[str | ParsedToolCall]) -> list[OutputEvent]:
        return [self._add_text(part) if isinstance(part, str) else self._add_tool_call(part) for part in parts]

    def _add_text(self, text: str) -> str:
        self.content += text
        return text

    def _add_tool_call(self, call: ParsedToolCall) -> ToolCall:
        tool_call = ToolCall(len(self.tool_calls), self._call_id(call), call.name, call.arguments)
        self.tool_calls.append(tool_call)
        return tool_call

    def _call_id(self, call: ParsedToolCall) -> str:
        if self.uses_functions:
            return f"call_{call.name}"
        if len(self.tool_calls) < len(self.call_ids):
            return self.call_ids[len(self.tool_calls)]
        # If the model wrote an id itself, it will refer to the call by it.
        taken = {known.id for known in self.tool_calls}
        return call.id if call.id and call.id not in taken else self.chat.tool_calls.new_id(self.call_prefix)
