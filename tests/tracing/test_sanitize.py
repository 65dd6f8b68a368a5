"""Any span can be made one that a store takes, and one that is taken already stays as it is."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.span import Span, SpanEvent
from agentlightning.store.sql import pack as codec
from agentlightning.tracing.agent_spans import sanitize_span

texts = st.text(st.characters(codec=None))
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary() | st.complex_numbers()
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=8)
objects = st.dictionaries(texts, values, max_size=4)


def span_of(name: str, attributes: Any, events: Any = (), message: str | None = None) -> Span:
    return Span("ro", "at", name, 1.0, 2.0, span_id="s", attributes=attributes, events=events, status_message=message)


@settings(max_examples=15)
@given(texts, objects, texts, objects, st.none() | texts)
def test_every_span_becomes_one_that_is_stored(
    name: str, attributes: Any, event: str, details: Any, message: str | None
) -> None:
    mended = sanitize_span(span_of(name, attributes, (SpanEvent(event, 1.0, details),), message))
    codec.pack([mended])
    assert sanitize_span(mended) == mended


def test_a_span_that_is_stored_as_it_is_stays_as_it_is() -> None:
    span = span_of("chat 🤖", {"ids": [1, 2], "deep": {"a": [0.5, None, True, "\0"]}, "big": 2**63 - 1}, message="ok")
    assert sanitize_span(span) == span


def test_a_pair_that_was_cut_apart_is_one_character_again() -> None:
    assert sanitize_span(span_of("a", {"x": "\ud83e\udd16", "y": "\ud83e!"})).attributes == {"x": "🤖", "y": "\ufffd!"}
