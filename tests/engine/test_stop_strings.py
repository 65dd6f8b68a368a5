"""Stop strings in an answer that arrives token by token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import model_tokenizer

from agentlightning.engine.base import StopScanner


@settings(max_examples=60)
@given(
    text=st.text("ab é漢🙂", min_size=1, max_size=30),
    stops=st.lists(st.text("ab é漢🙂", min_size=1, max_size=4), min_size=1),
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(text: str, stops: list[str]) -> None:
    tokenizer = model_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    scanner = StopScanner(stops, lambda ids: tokenizer.decode(list(ids)))
    for end in range(1, len(tokens) + 1):
        so_far = tokenizer.decode(tokens[:end])
        expected = any(stop in so_far for stop in stops)
        assert scanner.push(tokens[end - 1]) == expected
        if expected:
            break
