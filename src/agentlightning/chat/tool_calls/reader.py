"""Incremental parsing of an answer into content and tool calls, for any tool-call format."""

from __future__ import annotations

from agentlightning.chat.tool_calls.format import (
    CallFormat,
    Parsed,
    ParsedMessage,
    ParsedToolCall,
    Preceding,
    Tools,
)


class CallReader:
    """Incremental parser of content and tool calls; whitespace next to a call is dropped."""

    def __init__(self, format: CallFormat, tools: Tools = None) -> None:
        self._format = format
        self._tools = tools
        self._pending = ""
        self._preceding: Preceding = "start"
        self._ended = False
        """No further call is parsed."""

    def feed(self, text: str) -> list[str | ParsedToolCall]:
        """The content and calls that have become certain."""
        self._pending += text
        return self._take(final=False)

    def finish(self) -> list[str | ParsedToolCall]:
        """The rest."""
        return self._take(final=True)

    def _take(self, final: bool) -> list[str | ParsedToolCall]:
        pieces: list[str | ParsedToolCall] = []
        while (parsed := self._parse(final)).end:
            pieces += [*self._content(self._pending[: parsed.content].rstrip()), *parsed.calls]
            self._pending = self._pending[parsed.end :]
            self._preceding = "call"
            self._ended |= bool(parsed.calls) and not self._format.parallel
        certain = self._pending[: parsed.content]
        certain = certain if final else certain.rstrip()
        self._pending = self._pending[len(certain) :]
        return pieces + self._content(certain)

    def _parse(self, final: bool) -> Parsed:
        if self._preceding == "call":
            self._pending, end = self._pending.lstrip(), self._format.end
            if end and self._pending.startswith(end):
                return Parsed(0, (), len(end))
            if end.startswith(self._pending) and not final:
                return Parsed(0)
        if self._ended:
            return Parsed(len(self._pending))
        return self._format.parse(self._pending, self._preceding, final, self._tools)

    def _content(self, text: str) -> list[str | ParsedToolCall]:
        if text:
            self._preceding = "content"
        return [text] if text else []


def parse_answer(format: CallFormat, text: str, tools: Tools = None) -> ParsedMessage:
    """Content and tool calls of a complete answer."""
    reader = CallReader(format, tools)
    pieces = reader.feed(text) + reader.finish()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = tuple(piece for piece in pieces if isinstance(piece, ParsedToolCall))
    return ParsedMessage(content or None if calls else content, calls)
