"""Long prompts, each stored as what it adds to the prompt of an earlier call of its attempt.

The turns of a conversation, and the branches of an agent, begin with what was said before. A row of the table `prompts`
has the number of bytes that a prompt shares with another one (`base`), and its other tokens. Prompts that continue one
another, directly or not, have the same `root`, so that one query finds all that a prompt is put together from.

    first call    [5, 6, 7]         base None, keep 0, ids [5, 6, 7]
    second call   [5, 6, 7, 8, 9]   base first, keep 3, ids [8, 9]
    a branch      [5, 6, 4]         base first, keep 2, ids [4]

The place of a prompt follows from its pack and its index there. Tokens are int32, little endian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from agentlightning.store.sql.pack import LONG_PROMPT
from agentlightning.store.sql.schema import MAX_PACK
from agentlightning.store.sql.tx import Connection
from agentlightning.util.common_prefix import common_prefix_length

TOKEN_BYTES: Final = 4
CACHE_BYTES: Final = 32 << 20
LEAVES: Final = 8
"""Prompts of one attempt that are remembered: the ends of so many branches."""

_TREES: Final = (
    "SELECT place, base, keep, ids FROM prompts WHERE attempt_key = ? AND place <= ? "
    "AND root IN (SELECT root FROM prompts WHERE attempt_key = ? AND place BETWEEN ? AND ?)"
)
_LAST: Final = "SELECT max(place) FROM prompts WHERE attempt_key = ?"
_ROOT_OF: Final = "SELECT root FROM prompts WHERE place = ?"


AttemptIdentity = tuple[int, str, float]
"""(key, id, start time): another process may delete an attempt and make one with the same id, or with the same key."""


def place_of(pack_key: int, index: int) -> int:
    return pack_key * MAX_PACK + index


# -- reading -----------------------------------------------------------------------------------------------------------


class PromptReader:
    """Puts the prompts of an attempt together. What it needs is read when the first of them is asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: dict[int, tuple[int | None, int, bytes]] = {}
        """(base, keep, ids) by place."""
        self._whole: dict[int, bytes] = {}

    def of(self, attempt_key: int, packs: Sequence[int], pack_key: int) -> Callable[[int], bytes]:
        """The prompts of one pack, by the index of the span. packs: the keys of those that are read together."""

        def prompt(index: int) -> bytes:
            place = place_of(pack_key, index)
            if place not in self._rows:
                self.load_trees(attempt_key, place_of(min(packs), 0), place_of(max(packs), MAX_PACK - 1))
            return self.whole(place)

        return prompt

    def load_trees(self, attempt_key: int, first: int, last: int) -> None:
        """Read what the prompts of an attempt between two places are put together from."""
        rows = self._connection.all(_TREES, attempt_key, last, attempt_key, first, last)
        self._rows.update({place: (base, keep, bytes(ids)) for place, base, keep, ids in rows})

    def whole(self, place: int) -> bytes:
        """Raises LookupError where a part is missing."""
        found = self._whole.get(place)
        if found is None:
            parts: list[bytes] = []
            here, need = place, None
            while here not in self._whole:
                base, keep, ids = self._rows[here]
                parts.append(ids if need is None else ids[: max(0, need - keep)])
                if base is None:
                    break
                here, need = base, keep if need is None else min(need, keep)
            else:
                parts.append(self._whole[here][:need])
            found = self._whole[place] = b"".join(reversed(parts))
        return found


# -- writing -----------------------------------------------------------------------------------------------------------


class _Leaf:
    """A prompt that no later one has continued, and those that it continues."""

    __slots__ = ("ids", "path", "root")

    def __init__(self, root: int, ids: bytes, path: list[tuple[int, int]]) -> None:
        self.root = root
        self.ids = ids
        self.path = path
        """(place, bytes that it shares with the one before), the root first."""

    def find_base(self, shared: int) -> tuple[int, int]:
        """(how many there are, place) of the prompts on the path up to the first that has the first `shared` bytes."""
        count = len(self.path)
        while count > 1 and self.path[count - 1][1] >= shared:
            count -= 1
        return count, self.path[count - 1][0]


class PromptCache:
    """The last prompts of recent attempts: one of them is what the next prompt continues."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._attempts: dict[AttemptIdentity, list[_Leaf]] = {}
        self._outdated: set[AttemptIdentity] = set()
        self._bytes = 0

    def outdate(self) -> None:
        """Another process has written: it may have added prompts."""
        self._outdated.update(self._attempts)

    def clear(self) -> None:
        """After a command or a transaction was undone."""
        self._attempts.clear()
        self._bytes = 0

    def forget(self, attempt: AttemptIdentity) -> None:
        """The attempt is new."""
        self._bytes -= sum([len(leaf.ids) for leaf in self._attempts.pop(attempt, ())])

    def add(self, attempt: AttemptIdentity, place: int, ids: bytes, may_be_stored: bool) -> tuple[Any, ...]:
        """The row of a new prompt. may_be_stored: the database may have earlier ones of this attempt."""
        if self._bytes > CACHE_BYTES:
            self.clear()
        attempt_key = attempt[0]
        leaves = self._attempts.get(attempt)
        places = [leaf.path[-1][0] for leaf in leaves or ()]
        if places and attempt in self._outdated and self._last_place(attempt_key) != max(places):
            self.forget(attempt)
            leaves = None
        self._outdated.discard(attempt)
        if leaves is None:
            leaves = self._attempts[attempt] = self._read(attempt_key) if may_be_stored else []
        best, shared = None, LONG_PROMPT - 1
        for leaf in leaves:
            common = common_prefix_length(leaf.ids, ids) // TOKEN_BYTES * TOKEN_BYTES
            if common > shared:
                best, shared = leaf, common
        if best is None:
            new, base, shared = _Leaf(place, ids, [(place, 0)]), None, 0
        else:
            count, base = best.find_base(shared)
            new = _Leaf(best.root, ids, [*best.path[:count], (place, shared)])
            if shared == len(best.ids):  # it continues this one
                leaves.remove(best)
                self._bytes -= len(best.ids)
        leaves.append(new)
        self._bytes += len(ids)
        if len(leaves) > LEAVES:
            self._bytes -= len(leaves.pop(0).ids)
        return place, attempt_key, new.root, base, shared, ids[shared:]

    def _last_place(self, attempt_key: int) -> int | None:
        ((place,),) = self._connection.all(_LAST, attempt_key)
        return place

    def _read(self, attempt_key: int) -> list[_Leaf]:
        """The last prompt of an attempt, from the database."""
        place = self._last_place(attempt_key)
        if place is None:
            return []
        reader = PromptReader(self._connection)
        reader.load_trees(attempt_key, place, place)
        try:
            ids = reader.whole(place)
        except LookupError:  # damaged
            return []
        ((root,),) = self._connection.all(_ROOT_OF, place)
        self._bytes += len(ids)
        return [_Leaf(root, ids, [(place, 0)])]
