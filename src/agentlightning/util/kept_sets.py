"""The tokens that top-k and top-p kept at each position of an answer: the only ones that could be sampled there.

A loss needs them: weights that have moved would keep other tokens, so that the probability with which a token was
sampled can only be computed again over the recorded set (DeepSeek-V3.2, 2025, arXiv:2512.02556, keep sampling mask):

    p(token) = exp(z[token] / T) / sum over v in the set of exp(z[v] / T)

A worked example, the sets {4, 9} and {7}, and a position at which every token was kept:

    sizes 2 1 0    ids 4 9 7    differences 4 5 -2, which `util.ragged_text` writes, int32
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from agentlightning.util.ragged_text import ragged_from_text, ragged_to_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids: TypeAlias = NDArray[np.int64]
else:  # A machine that only serves or runs agents need not have NumPy.
    Ids = Any

MAX_SET: Final = 4096
"""The most tokens of a set."""
_INT: Final = "<i4"


@dataclass(frozen=True, slots=True)
class KeptSets:
    """A set of token ids for each token of an answer.

    >>> from agentlightning.util.kept_sets import KeptSets
    >>> KeptSets.of([(4, 9), (7,), ()]).part(1, 3).lists()
    [[7], []]
    """

    sizes: bytes
    """The number of ids of each set, int32; 0: every token was kept."""
    ids: bytes
    """Those of all sets, one behind the other, int32."""

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]]) -> KeptSets:
        return cls.joined([_int32([*each]) for each in sets])

    @classmethod
    def joined(cls, sets: list[bytes]) -> KeptSets:
        """From the ids of each set, int32."""
        return cls(_int32([len(each) // 4 for each in sets]), b"".join(sets))

    def __len__(self) -> int:
        return len(self.sizes) // 4

    def part(self, start: int, stop: int) -> KeptSets:
        """Those of the tokens from `start` to `stop`."""
        ends = [0, *self.size_array().cumsum().tolist()]
        return KeptSets(self.sizes[4 * start : 4 * stop], self.ids[4 * ends[start] : 4 * ends[stop]])

    def size_array(self) -> Ids:
        return _int64(self.sizes)

    def id_array(self) -> Ids:
        return _int64(self.ids)

    def lists(self) -> list[list[int]]:
        ids, ends = self.id_array().tolist(), self.size_array().cumsum().tolist()
        return [ids[end - size : end] for end, size in zip(ends, self.size_array().tolist(), strict=True)]

    # -- as text ---------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """For an attribute of a span: with sets of a hundred tokens, about 2 bytes for each id."""
        ids = self.id_array()
        ids[1:] -= ids[:-1].copy()
        return ragged_to_text(self.sizes, (4, _int32(ids)))

    @classmethod
    def from_text(cls, text: str, tokens: int) -> KeptSets:
        """The sets of an answer of so many tokens. Raises ValueError for what `to_text` did not write."""
        sizes, differences = ragged_from_text(text, tokens, MAX_SET, 4)
        return cls(sizes, _int32(_int64(differences).cumsum()))


def _int32(values: Any) -> bytes:
    import numpy as np

    return np.array(values, _INT).tobytes()


def _int64(data: bytes) -> Ids:
    import numpy as np

    return np.frombuffer(data, _INT).astype(np.int64)
