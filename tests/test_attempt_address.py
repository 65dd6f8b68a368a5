"""Promises about attempt keys and trace ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.attempt_address import attempt_of_trace, read_attempt_key, read_worker_key, trace_id_of

SECRET = "secret"


@given(st.text("0123456789abcdef", min_size=24, max_size=24))
def test_an_attempt_and_its_trace_find_one_another(digits: str) -> None:
    trace_id = trace_id_of(f"at-{digits}")
    assert trace_id is not None
    assert len(trace_id) == 32
    assert attempt_of_trace(trace_id) == f"at-{digits}"


@given(st.text("0123456789abcdef", min_size=32, max_size=32))
def test_a_trace_of_somebody_else_is_no_attempt(trace_id: str) -> None:
    attempt_id = attempt_of_trace(trace_id)
    assert attempt_id is None or trace_id_of(attempt_id) == trace_id


@pytest.mark.parametrize("key", ["agl-ro-1.at-1.é", "agl-é.é.x", "agl-worker-YQ.é", "agl-worker-é.x", "agl-..", "agl-"])
def test_a_key_of_odd_characters_is_nobodys(key):
    assert read_attempt_key(SECRET, key) is None
    assert read_worker_key(SECRET, key) is None
