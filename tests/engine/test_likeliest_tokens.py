"""The likeliest tokens survive as text, and nothing else is taken for them."""

from __future__ import annotations

import math
import random
from base64 import b64decode, b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.engine.likeliest_tokens import likeliest_from_text, likeliest_to_text

PAIRS = st.tuples(st.integers(0, 2**31 - 1), st.integers(-200, 0).map(lambda n: n / 8))
ROWS = st.lists(st.lists(PAIRS, max_size=5).map(tuple), max_size=6)


@given(ROWS)
def test_rows_are_read_back_from_text_as_they_were(rows):
    assert likeliest_from_text(likeliest_to_text(rows), len(rows)) == rows


def test_a_log_probability_keeps_three_digits_and_one_below_all_numbers_stays_one():
    ((first, last),) = likeliest_from_text(likeliest_to_text([((3, -1.23456), (4, -math.inf))]), 1)
    assert first[1] == pytest.approx(-1.23456, rel=1e-3)
    assert last == (4, -60000.0)


def test_text_takes_about_five_bytes_for_each_token_of_a_large_vocabulary():
    draw = random.Random(0)
    rows = [tuple((draw.randrange(151_936), -draw.expovariate(0.3)) for _ in range(5)) for _ in range(400)]
    assert len(likeliest_to_text(rows)) < 7 * 5 * 400


@given(st.text(max_size=40), st.integers(0, 3))
def test_other_text_is_refused(text, tokens):
    with pytest.raises(ValueError, match=r"^th(ey|ere) are "):
        likeliest_from_text(text, tokens)


@given(ROWS, st.integers(0, 8))
def test_text_of_an_answer_of_another_length_is_refused(rows, tokens):
    if tokens != len(rows):
        with pytest.raises(ValueError, match=r"^th(ey|ere) are "):
            likeliest_from_text(likeliest_to_text(rows), tokens)


@given(ROWS, st.data())
def test_text_that_is_cut_is_refused(rows, data):
    whole = b64decode(likeliest_to_text(rows))
    cut = whole[: data.draw(st.integers(0, len(whole) - 6))]
    with pytest.raises(ValueError, match=r"^th(ey|ere) are "):
        likeliest_from_text(b64encode(cut).decode(), len(rows))
