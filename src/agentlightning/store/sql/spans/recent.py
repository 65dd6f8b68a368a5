"""Spans that were just written, kept in memory so that reading them soon needs neither the database nor its thread.

The writer adds packs once they are committed; readers in any thread unpack what they ask for. Only rollouts of
which every span is here are answered for, and only while no other process has written to the database.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from agentlightning.span import Span
from agentlightning.store.sql.spans import codec
from agentlightning.store.sql.spans.write import WrittenPack

HOT_BYTES: Final = 8 << 20
"""Of packs in memory, about."""
_OVERHEAD: Final = 600


class _HotPack(Struct, frozen=True, gc=False):
    attempt_id: str
    attempt_number: int
    span_ids: Sequence[str]
    sequence_ids: Sequence[int]
    superseded: bool
    body: bytes
    chains: Mapping[bytes, bytes]

    def spans(self, rollout_id: str) -> list[Span]:
        return codec.unpack(
            self.body,
            rollout_id=rollout_id,
            attempt_id=self.attempt_id,
            span_ids=self.span_ids,
            sequence_ids=self.sequence_ids,
            superseded=self.superseded,
            chains=self.chains,
        )


def _hot(written: WrittenPack) -> _HotPack:
    attempt, pack = written.attempt, written.pack
    return _HotPack(
        attempt.attempt_id,
        attempt.sequence_id,
        pack.span_ids,
        written.sequence_ids,
        bool(written.superseded),
        written.body,
        {chain.head: chain.ids for chain in pack.chains} if pack.chains else {},
    )


class _HotRollout(Struct, gc=False):
    """The packs of one rollout, by attempt."""

    attempts: dict[str, list[_HotPack]] = field(default_factory=dict)
    spans: int = 0
    size: int = _OVERHEAD

    def add(self, pack: _HotPack) -> bool:
        """False where its spans do not come after those that are here: merging them is not for here."""
        numbers = pack.sequence_ids
        if type(numbers) is not range and list(numbers) != sorted(set(numbers)):
            return False
        found = self.attempts.get(pack.attempt_id)
        if found is None:
            self.attempts[pack.attempt_id] = [pack]
            if len(self.attempts) > 1:
                self.attempts = dict(sorted(self.attempts.items(), key=lambda item: item[1][0].attempt_number))
        elif numbers[0] <= found[-1].sequence_ids[-1]:
            return False
        else:
            found.append(pack)
        self.spans += len(numbers)
        self.size += _OVERHEAD + len(pack.body) + 60 * len(numbers)
        if pack.chains:
            self.size += sum(map(len, pack.chains.values()))
        return True


class HotSpans:
    """`fresh` tells, from any thread, whether no other process has written since the writer's last transaction."""

    def __init__(self, fresh: Callable[[], bool]) -> None:
        self._fresh = fresh
        self._rollouts: OrderedDict[str, _HotRollout] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    # -- the writer ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Another process has written."""
        with self._lock:
            self._rollouts.clear()
            self._size = 0

    def committed(self, written: Iterable[WrittenPack], removed: Iterable[str]) -> None:
        """Before the callers are answered."""
        with self._lock:
            for rollout_id in removed:
                self._forget(rollout_id)
            for pack in written:
                self._add(pack)
            while self._size > HOT_BYTES and self._rollouts:
                _, hot = self._rollouts.popitem(last=False)
                self._size -= hot.size

    def _add(self, written: WrittenPack) -> None:
        attempt = written.attempt
        rollout_id = attempt.rollout.rollout_id
        hot = self._rollouts.get(rollout_id)
        if hot is None:
            if written.before:  # there are others that are not here
                return
            hot = self._rollouts[rollout_id] = _HotRollout()
            self._size += hot.size
        before = hot.size
        if hot.spans == written.before and hot.add(_hot(written)):
            self._size += hot.size - before
        else:
            self._forget(rollout_id)

    def _forget(self, rollout_id: str) -> None:
        hot = self._rollouts.pop(rollout_id, None)
        if hot is not None:
            self._size -= hot.size

    # -- readers ---------------------------------------------------------------------------------------------------

    def spans(self, rollout_id: str, attempt_id: str | None) -> list[Span] | None:
        """Every span of a rollout, or of one of its attempts, in order; None where the database has to be asked."""
        with self._lock:
            hot = self._rollouts.get(rollout_id)
            if hot is None:
                return None
            if attempt_id is None:
                found: list[_HotPack] = [pack for some in hot.attempts.values() for pack in some]
            else:
                found = hot.attempts.get(attempt_id, [])[:]
        if not found or not self._fresh():
            return None
        if len(found) == 1:
            return found[0].spans(rollout_id)
        return [span for pack in found for span in pack.spans(rollout_id)]
