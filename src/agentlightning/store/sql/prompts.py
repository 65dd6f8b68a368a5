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
from typing import Any, Final, NamedTuple

from agentlightning.store.sql.pack import LONG_PROMPT
from agentlightning.store.sql.schema import MAX_PACK
from agentlightning.store.sql.tx import Connection, Tx
from agentlightning.util.common_prefix import common_prefix_length

TOKEN_BYTES: Final = 4
LEAVES: Final = 8
"""Prompts of one attempt that are remembered: the ends of so many branches."""

_TREES: Final = (
    "SELECT place, base, keep, ids FROM prompts WHERE attempt_key = ? AND place <= ? "
    "AND root IN (SELECT root FROM prompts WHERE attempt_key = ? AND place BETWEEN ? AND ?)"
)


def place_of(pack_key: int, index: int) -> int:
    return pack_key * MAX_PACK + index


# -- reading -----------------------------------------------------------------------------------------------------------


class PromptReader:
    """Puts the prompts of an attempt together. What it needs is read when the first of them is asked for."""

    def __init__(self, connection: Connection | Tx) -> None:
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


class Leaf(NamedTuple):
    """A prompt that no later one has continued."""

    root: int
    ids: bytes
    path: tuple[tuple[int, int], ...]
    """The prompts that it continues, and itself: (place, bytes that it shares with the one before)."""


def add_prompt(leaves: list[Leaf], attempt_key: int, place: int, ids: bytes) -> tuple[Any, ...]:
    """The row of a new prompt of an attempt, which becomes one of its leaves."""
    best, shared = None, LONG_PROMPT - 1
    for leaf in leaves:
        common = common_prefix_length(leaf.ids, ids) // TOKEN_BYTES * TOKEN_BYTES
        if common > shared:
            best, shared = leaf, common
    if best is None:
        root, base, path, shared = place, None, (), 0
    else:
        root, path = best.root, list(best.path)
        while len(path) > 1 and path[-1][1] >= shared:  # the one before has all that is shared
            path.pop()
        base = path[-1][0]
        if shared == len(best.ids):  # it continues this one
            leaves.remove(best)
    leaves.append(Leaf(root, ids, (*path, (place, shared))))
    del leaves[:-LEAVES]
    return place, attempt_key, root, base, shared, ids[shared:]


def read_leaves(database: Connection | Tx, attempt_key: int, known: list[Leaf], end: int) -> list[Leaf]:
    """The last prompt of an attempt before the place `end`, from the database; `known` if that is one of them. Other
    servers may have stored some after it, which those who read what is there do not see."""
    ((place,),) = database.all("SELECT max(place) FROM prompts WHERE attempt_key = ? AND place < ?", attempt_key, end)
    if place is None or (known and place == known[-1].path[-1][0]):
        return known
    reader = PromptReader(database)
    reader.load_trees(attempt_key, place, place)
    try:
        ids = reader.whole(place)
    except LookupError:  # damaged
        return []
    ((root,),) = database.all("SELECT root FROM prompts WHERE place = ?", place)
    return [Leaf(root, ids, ((place, 0),))]
