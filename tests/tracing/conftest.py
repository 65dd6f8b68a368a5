from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from agentlightning.span import Span
from agentlightning.tracing.scope import scope


class Recorded(list[Span]):
    """A sink that keeps what it is given."""

    def put(self, spans: Sequence[Span]) -> None:
        self.extend(spans)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """The test runs inside a scope; here is what it emitted."""
    spans = Recorded()
    with scope("ro-1", "at-1", spans):
        yield spans
