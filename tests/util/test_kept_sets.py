"""Sets of kept tokens survive as text, in parts, and nothing else is taken for them."""

from __future__ import annotations

import random
import zlib
from base64 import b64decode, b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.util.kept_sets import MAX_SET, KeptSets

SETS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5, unique=True).map(sorted), max_size=6)


@given(SETS)
def test_sets_are_read_back_from_text_as_they_were(sets: list[list[int]]) -> None:
    kept = KeptSets.of(sets)
    assert len(kept) == len(sets)
    assert kept.lists() == sets
    assert KeptSets.from_text(kept.to_text(), len(sets)) == kept


@given(SETS, st.data())
def test_a_part_has_the_sets_of_its_tokens(sets: list[list[int]], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(sets)))
    start = data.draw(st.integers(0, stop))
    assert KeptSets.of(sets).part(start, stop).lists() == sets[start:stop]


def test_text_takes_about_two_bytes_for_each_id_of_a_large_vocabulary() -> None:
    draw = random.Random(0)
    kept = KeptSets.of([sorted(draw.sample(range(151_936), 100)) for _ in range(200)])
    assert len(kept.to_text()) < 2.4 * 100 * 200


@given(st.text(max_size=40), st.integers(0, 3))
def test_other_text_is_refused(text: str, tokens: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        KeptSets.from_text(text, tokens)


def test_text_that_is_not_of_these_tokens_is_refused() -> None:
    text = KeptSets.of([(4, 9), (7,)]).to_text()
    with pytest.raises(ValueError, match="2 sets for 3 tokens"):
        KeptSets.from_text(text, 3)
    with pytest.raises(ValueError, match="cut off"):
        KeptSets.from_text(b64encode(b64decode(text)[:-3]).decode(), 2)


def test_no_more_is_expanded_than_sets_can_hold() -> None:
    bomb = b64encode(zlib.compress(bytes(64 * MAX_SET))).decode()
    with pytest.raises(ValueError, match=f"more than {MAX_SET} for each of 2 tokens"):
        KeptSets.from_text(bomb, 2)
