"""The score of sampled tokens in log-linear models with counted probabilities, and gradients made of it.

Two models with a weight for each pair of a context x and a token y: in one the context is the state of the call with
the answer so far, in the other the agent with the last two tokens. With a factor f_t for each token, a group has

    g = sum over tokens t   f_t (e(x_t, y_t) - sum_y p(y | x_t) e(x_t, y)),        p: the shares counted in all groups

compressed to a few thousand numbers by a count sketch: a random place and sign for each weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from agentlightning.credit import is_target
from agentlightning.trajectory import Trajectory, Transition

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatMatrix: TypeAlias = NDArray[np.float64]
    IntVector: TypeAlias = NDArray[np.int64]
else:
    FloatMatrix = IntVector = Any

Groups: TypeAlias = Sequence[Sequence[Trajectory]]

SKETCH = 2048
"""Numbers of a compressed gradient."""
MOST_TERMS = 10_000_000
"""Terms of the expectations, which bound memory: rarer contexts are left out where there are more."""


class ScoreFeatures:
    """Every sampled token with the weights of the log-linear models that it bears on."""

    def __init__(self, groups: Groups, target_agent: str | None) -> None:
        import numpy as np

        self.calls: dict[tuple[int, str, str], slice] = {}
        """By group, rollout and span, the places of its tokens."""
        self.shares: list[float] = []
        """Of each token: 1 over the tokens of its rollout."""
        self._contexts: dict[tuple[int, ...], int] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        self._names: dict[str, int] = {}
        entries: list[tuple[int, int, int, int]] = []
        for number, group in enumerate(groups):
            for trajectory in group:
                calls = [call for call in trajectory.transitions if is_target(call.agent, target_agent)]
                tokens = sum(len(call.response_token_ids) for call in calls)
                for call in calls:
                    start = len(self.shares)
                    entries += self._entries(number, start, call)
                    self.shares += [1 / tokens] * len(call.response_token_ids)
                    place = slice(start, len(self.shares))
                    self.calls[number, call.rollout_id, call.span_id] = place
        table = np.array(entries, np.int64).reshape(-1, 4)
        self.count = len(self.shares)
        self.groups = len(groups)
        self.rollouts_per_group = sum(map(len, groups)) / len(groups)
        self._arrange(table, np.random.default_rng(0))

    def _entries(self, group: int, start: int, call: Transition) -> list[tuple[int, int, int, int]]:
        """(group, token, context, pair) for both contexts of each token."""
        found: list[tuple[int, int, int, int]] = []
        agent = self._number(f"agent {call.agent or ''}")
        prefix = self._number(f"state {call.agent or ''} {call.state}")
        last = (-1, -1, *call.prompt_token_ids[-2:])[-2:]
        for place, token in enumerate(call.response_token_ids):
            for key in ((prefix,), (agent, *last)):
                context = self._contexts.setdefault(key, len(self._contexts))
                pair = self._pairs.setdefault((context, token), len(self._pairs))
                found.append((group, start + place, context, pair))
            prefix, last = hash((prefix, token)), (last[1], token)
        return found

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, -1 - len(self._names))

    def _arrange(self, table: IntVector, rng: Any) -> None:
        import numpy as np

        pair_context = np.array([context for context, _ in self._pairs], np.int64)
        actions = np.bincount(pair_context, minlength=len(self._contexts))
        occurrences = np.bincount(table[:, 2], minlength=len(self._contexts))
        pair_count = np.bincount(table[:, 3], minlength=len(self._pairs))
        kept = _affordable(actions, occurrences, np.unique(table[:, [0, 2]], axis=0)[:, 1])
        table = table[kept[table[:, 2]]]
        self._token, self._pair, self._group = table[:, 1], table[:, 3], table[:, 0]
        seen, self._seen = np.unique(table[:, [0, 2]], axis=0, return_inverse=True)
        self._share = pair_count / np.maximum(1, occurrences[pair_context])
        self._bucket = rng.integers(0, SKETCH, len(self._pairs))
        self._sign = rng.choice((-1.0, 1.0), len(self._pairs))
        by_context = np.argsort(pair_context, kind="stable")
        starts = np.concatenate([[0], np.cumsum(actions)])
        sizes = actions[seen[:, 1]]
        self._of_seen = np.repeat(np.arange(len(seen)), sizes)
        offsets = np.arange(len(self._of_seen)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self._expanded = by_context[starts[seen[:, 1]][self._of_seen] + offsets]
        self._expanded_group = seen[self._of_seen, 0]

    def gradients(self, factors: FloatMatrix) -> FloatMatrix:
        """g of each group [groups, SKETCH], for a factor of each token."""
        import numpy as np

        size = self.groups * SKETCH
        own = factors[self._token]
        places = self._group * SKETCH + self._bucket[self._pair]
        chosen = np.bincount(places, own * self._sign[self._pair], minlength=size)
        totals = np.bincount(self._seen, own, minlength=int(self._seen.max(initial=-1)) + 1)
        expected = totals[self._of_seen] * (self._share * self._sign)[self._expanded]
        places = self._expanded_group * SKETCH + self._bucket[self._expanded]
        difference: Any = chosen - np.bincount(places, expected, minlength=size)  # NumPy types counts as integers
        return difference.reshape(self.groups, SKETCH)


def _affordable(actions: IntVector, occurrences: IntVector, seen: IntVector) -> Any:
    """Which contexts are used: those with two actions or more, the most frequent first, as far as memory allows."""
    import numpy as np

    cost = actions * np.bincount(seen, minlength=len(actions))
    order = np.argsort(-occurrences, kind="stable")
    order = order[actions[order] > 1]
    kept = np.zeros(len(actions), bool)
    kept[order[np.cumsum(cost[order]) <= MOST_TERMS]] = True
    return kept
