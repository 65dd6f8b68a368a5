"""The head of a claim queue: complete up to its end, and bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.store.sql.session.claim_queue import HEAD_SIZE, ClaimQueue


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 10_000)), unique_by=lambda entry: entry[1]))
def test_a_head_holds_every_entry_before_its_end(places: list[tuple[int, int]]) -> None:
    queue = ClaimQueue("q", None)
    queue.head_end = (float("inf"), 0.0)
    entries = [(-priority, key, str(key)) for priority, key in places]
    for entry in entries:
        queue.push(entry)
    assert sorted(queue.head) == sorted(entry for entry in entries if entry[:2] < queue.head_end)


def test_a_head_that_grows_too_long_is_truncated() -> None:
    queue = ClaimQueue("q", None)
    queue.head_end = (float("inf"), 0.0)
    entries = [(0, key, str(key)) for key in range(5 * HEAD_SIZE, 0, -1)]
    for entry in entries:
        queue.push(entry)
    assert len(queue.head) <= 4 * HEAD_SIZE + 1
    assert sorted(queue.head) == sorted(entry for entry in entries if entry[:2] < queue.head_end)
