"""An answer as a provider tells it, for the writers of another dialect: in pieces as they come, and whole.

Pieces are shown one after the other: while a tool call is under way, what belongs behind it waits until the call is
seen to be whole, so that calls whose arguments come mixed arrive one by one. `gateway.telling` reads the provider's
words and tells; `gateway.translate` takes the pieces.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, cast

import orjson

from agentlightning.chat.base import ChatFormat
from agentlightning.gateway.dialects.content import (
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    SignedReasoning,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from agentlightning.gateway.dialects.signed_reasoning import Block, is_sealed
from agentlightning.gateway.local.answer import Answer, StopFilter

Json = dict[str, Any]

_NOBODYS: Final = cast("ChatFormat", None)
"""There are no tokens to be read."""
_ENDS_OF_JSON: Final = frozenset('}]"0123456789el')
_REASONS: Final = ("stop", "length", "tool_calls", "content_filter")
"""Why an answer ended, as far as every dialect has a word for it."""


@dataclass(slots=True)
class _Growing:
    """A tool call while it is told."""

    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list[str])
    shown: int = 0
    """How many of them."""
    begun: ToolCallStart | None = None
    ended: bool = False
    """Its provider says so."""
    closed: bool = False
    """Its end was shown."""

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    def is_whole(self) -> bool:
        last = self.pieces[-1].rstrip() if self.pieces else ""
        if last and last[-1] not in _ENDS_OF_JSON:  # as most pieces do, it ends in the middle
            return False
        try:
            orjson.loads(self.arguments)
        except orjson.JSONDecodeError:
            return False
        return True


_Piece = tuple[OutputEvent | _Growing, list[Json]]
"""Something to show, with the log-probabilities of its tokens."""


@dataclass(slots=True)
class Told(Answer):
    """The answer of a provider."""

    chat: ChatFormat = _NOBODYS
    reason: str | None = None
    """Why it ended, by chat completions' names; None: not said yet."""
    stopped_by: str | None = None
    """The stop string that ended it, where its provider says."""
    broken: str = ""
    """What its provider did that cannot be shown any more."""
    blocks: list[Block] = field(default_factory=list[Block])
    """All of it as its provider said it, where it wants something of it back."""
    _waiting: deque[_Piece] = field(default_factory=deque[_Piece], init=False)
    _growing: dict[Hashable, _Growing] = field(default_factory=dict[Hashable, _Growing], init=False)
    _shown: list[OutputEvent] = field(default_factory=list[OutputEvent], init=False)
    _logprobs: list[Json] = field(default_factory=list[Json], init=False)
    _loose: list[Json] = field(default_factory=list[Json], init=False)
    """Log-probabilities that no piece has shown yet."""
    _contents: list[str] = field(default_factory=list[str], init=False)
    _thoughts_told: list[str] = field(default_factory=list[str], init=False)
    """Pieces of content and thought, put together when all has been shown."""
    _logprobs_of_pieces: deque[list[Json]] = field(default_factory=deque[list[Json]], init=False)
    """Log-probabilities of each piece that was taken and is not written yet."""

    def __post_init__(self) -> None:
        """It comes as text, with its thoughts and calls told apart. `stops` are those its provider does not know."""
        self._stop = StopFilter(self.stops)

    # -- telling ---------------------------------------------------------------------------------------------------

    def say(self, text: Any, logprobs: Sequence[Json] = ()) -> None:
        """Some more content, and what is known of its tokens. Nothing is heard after a stop string."""
        if self.stopped:
            return
        self._logprobs += logprobs
        self._loose += logprobs
        if isinstance(text, str) and text:
            self._show_text(self._stop.feed(text))

    def _show_text(self, text: str) -> None:
        if text:
            self._waiting.append((text, self._loose))
            self._loose = []

    @property
    def stopped(self) -> bool:
        """Whether it was ended here, at a stop string."""
        return self._stop.stopped

    def _goes_on(self) -> bool:
        """Whether something other than text may be told; text that could have begun a stop string is shown first."""
        self._show_text(self._stop.finish())
        return not self.stopped

    def think(self, text: Any) -> None:
        """Some more of a thought."""
        if isinstance(text, str) and text and self._goes_on():
            self._waiting.append((ReasoningDelta(text), []))

    def refuse(self, text: Any) -> None:
        """Some more of why it does not answer."""
        if isinstance(text, str) and text and self._goes_on():
            self.refused = True
            self._waiting.append((RefusalDelta(text), []))

    def keep(self, block: Block) -> None:
        """A whole block or item, as its provider said it."""
        if self.stopped:
            return
        self.blocks.append(block)
        if is_sealed(block):
            self._waiting.append((SignedReasoning(block), []))

    def call(self, place: Hashable, id: Any, name: Any, arguments: Any) -> None:
        """A tool call, or some more of one."""
        if not self._goes_on():
            return
        call = self._growing.get(place)
        if call is None:
            call = self._growing[place] = _Growing()
            self._waiting.append((call, []))
        if isinstance(id, str):
            call.id = call.id or id
        if isinstance(name, str) and call.begun is None:
            call.name += name
        if arguments is None or arguments == "":
            return
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        if not call.closed:
            call.pieces.append(text)
        elif text.strip():
            self.broken = f"it went on with the tool call {call.name!r} after its end"

    def end_call(self, place: Hashable) -> None:
        """Nothing more will come of a call."""
        if call := self._growing.get(place):
            call.ended = True

    # -- showing ---------------------------------------------------------------------------------------------------

    def news(self, done: bool = False) -> list[OutputEvent]:
        """What can be shown since the last time; all the rest where it is `done`. Content and thought are there when
        it is."""
        pieces: list[OutputEvent] = []
        if done:
            self._goes_on()
        while self._waiting:
            first, logprobs = self._waiting[0]
            if not isinstance(first, _Growing):
                pieces.append(first)
                self._logprobs_of_pieces.append(logprobs)
                self._remember(first)
                self._waiting.popleft()
                continue
            ends = done or first.ended or (len(self._waiting) > 1 and first.is_whole())
            shown = self._grow(first, ends)
            pieces += shown
            self._logprobs_of_pieces += [[] for _ in shown]
            if not ends:
                break
            self._waiting.popleft()
        self._shown += pieces
        if done:
            self.content, self.thought = "".join(self._contents), "".join(self._thoughts_told)
        return pieces

    def _remember(self, piece: OutputEvent) -> None:
        if isinstance(piece, str):
            self._contents.append(piece)
        elif isinstance(piece, RefusalDelta):
            self._contents.append(piece.text)
        elif isinstance(piece, ReasoningDelta):
            self._thoughts_told.append(piece.text)

    def _grow(self, call: _Growing, ends: bool) -> list[OutputEvent]:
        """Begun with the first of its arguments: its name is whole by then."""
        pieces: list[OutputEvent] = []
        if ends and not call.arguments.strip():
            call.pieces.append("{}")
        if call.begun is None and call.pieces:
            call.begun = ToolCallStart(len(self.tool_calls), self._new_id(call.id), call.name)
            pieces.append(call.begun)
        if call.begun is None:
            return pieces
        index, news = call.begun.index, "".join(call.pieces[call.shown :])
        call.shown = len(call.pieces)
        pieces += [ToolCallDelta(index, news)] if news else []
        if ends:
            call.closed = True
            self.tool_calls.append(ToolCall(index, call.begun.id, call.name, call.arguments))
            pieces.append(ToolCallEnd(self.tool_calls[-1]))
        return pieces

    def _new_id(self, given: str) -> str:
        """Its own, where no other call of the answer has it."""
        taken = any(call.begun is not None and call.begun.id == given for call in self._growing.values())
        return given if given and not taken else self.call_prefix + secrets.token_hex(12)

    # -- what is known of it -----------------------------------------------------------------------------------------

    def parts(self) -> list[OutputEvent]:
        parts: list[OutputEvent] = []
        for kind, run in groupby(self._shown, type):
            pieces = list(run)
            if kind is ToolCallEnd:
                parts += [piece.call for piece in pieces if isinstance(piece, ToolCallEnd)]
            elif kind in (ToolCallStart, ToolCallDelta):
                continue
            elif kind is SignedReasoning:
                parts += pieces
            else:
                parts.append(_joined(pieces))
        return parts

    @property
    def finish_reason(self) -> str:
        reason = self.reason if self.reason in _REASONS and not self.stopped else "stop"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason or "stop"

    @property
    def stop_string(self) -> str | None:
        return self._stop.found or self.stopped_by

    def logprobs_of_piece(self) -> list[Json]:
        return self._logprobs_of_pieces.popleft() if self._logprobs_of_pieces else []

    def logprobs_of_rest(self) -> list[Json]:
        rest, self._loose = self._loose, []
        return rest

    def logprobs_of_all(self) -> list[Json]:
        return self._logprobs


def _joined(pieces: Sequence[OutputEvent]) -> OutputEvent:
    """Pieces of one kind as one."""
    if isinstance(pieces[0], str):
        return "".join(piece for piece in pieces if isinstance(piece, str))
    text = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta | RefusalDelta))
    return ReasoningDelta(text) if isinstance(pieces[0], ReasoningDelta) else RefusalDelta(text)
