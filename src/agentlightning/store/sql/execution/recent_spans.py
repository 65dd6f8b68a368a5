"""Cache of spans that were just committed, so that reading them soon needs neither the database nor its thread.

The writer adds packs after each commit; readers unpack them in their own threads. The cache answers only for rollouts
of which it holds every span, and only while no other process has written to the database.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from agentlightning.span import Span
from agentlightning.store.sql.session.rows import PendingPack
from agentlightning.store.sql.spans import codec

CACHE_BYTES: Final = 8 << 20
"""Estimated size of the packs in memory."""
_OVERHEAD: Final = 600


class _RecentPack(Struct, frozen=True, gc=False):
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


def _recent(pending: PendingPack) -> _RecentPack:
    attempt, pack = pending.attempt, pending.pack
    return _RecentPack(
        attempt.attempt_id,
        attempt.sequence_id,
        pack.span_ids,
        pending.sequence_ids,
        bool(pending.superseded),
        pending.body,
        {chain.head: chain.ids for chain in pack.chains} if pack.chains else {},
    )


class _RecentRollout(Struct, gc=False):
    """The packs of one rollout, by attempt."""

    attempts: dict[str, list[_RecentPack]] = field(default_factory=dict)
    spans: int = 0
    size: int = _OVERHEAD

    def add(self, pack: _RecentPack) -> bool:
        """Returns False where the spans do not follow those of the packs before: merging is left to the database."""
        numbers = pack.sequence_ids
        if type(numbers) is not range and list(numbers) != sorted(set(numbers)):
            return False
        packs = self.attempts.get(pack.attempt_id)
        if packs is None:
            self.attempts[pack.attempt_id] = [pack]
            if len(self.attempts) > 1:
                self.attempts = dict(sorted(self.attempts.items(), key=lambda item: item[1][0].attempt_number))
        elif numbers[0] <= packs[-1].sequence_ids[-1]:
            return False
        else:
            packs.append(pack)
        self.spans += len(numbers)
        self.size += _OVERHEAD + len(pack.body) + 60 * len(numbers)
        if pack.chains:
            self.size += sum(map(len, pack.chains.values()))
        return True


class RecentSpans:
    """`fresh` tells, from any thread, whether no other process has written since the writer's last transaction."""

    def __init__(self, fresh: Callable[[], bool]) -> None:
        self._fresh = fresh
        self._rollouts: OrderedDict[str, _RecentRollout] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    # -- used by the writer ----------------------------------------------------------------------------------------

    def clear(self) -> None:
        """To be called when another process has written."""
        with self._lock:
            self._rollouts.clear()
            self._size = 0

    def committed(self, packs: Iterable[PendingPack], deleted_rollouts: Iterable[str]) -> None:
        """To be called before the results of a transaction are delivered."""
        with self._lock:
            for rollout_id in deleted_rollouts:
                self._evict(rollout_id)
            for pack in packs:
                self._add(pack)
            while self._size > CACHE_BYTES and self._rollouts:
                _, oldest = self._rollouts.popitem(last=False)
                self._size -= oldest.size

    def _add(self, pending: PendingPack) -> None:
        rollout_id = pending.attempt.rollout.rollout_id
        recent = self._rollouts.get(rollout_id)
        if recent is None:
            if pending.spans_before:  # it has other spans, which are not in the cache
                return
            recent = self._rollouts[rollout_id] = _RecentRollout()
            self._size += recent.size
        size_before = recent.size
        if recent.spans == pending.spans_before and recent.add(_recent(pending)):
            self._size += recent.size - size_before
        else:
            self._evict(rollout_id)

    def _evict(self, rollout_id: str) -> None:
        recent = self._rollouts.pop(rollout_id, None)
        if recent is not None:
            self._size -= recent.size

    # -- used by readers -------------------------------------------------------------------------------------------

    def spans(self, rollout_id: str, attempt_id: str | None) -> list[Span] | None:
        """Every span of a rollout, or of one of its attempts, in order; None if the database has to be queried."""
        with self._lock:
            recent = self._rollouts.get(rollout_id)
            if recent is None:
                return None
            if attempt_id is None:
                packs: list[_RecentPack] = [pack for some in recent.attempts.values() for pack in some]
            else:
                packs = recent.attempts.get(attempt_id, [])[:]
        if not packs or not self._fresh():
            return None
        if len(packs) == 1:
            return packs[0].spans(rollout_id)
        return [span for pack in packs for span in pack.spans(rollout_id)]
