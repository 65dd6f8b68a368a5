"""The plan of an update: which rows are computed, which share a prefix, and how they fill micro-batches.

Every trained token of a tree is a target of exactly one row, and all tokens of a call of the same row, so that any plan
has the same gradient; plans differ in cost only. Three ways to compute a tree:

- *rows*: one row for each call. What a trainer without trees does; here for tests and benchmarks.
- *merged*: one row for each leaf path. Calls that are prefixes of one another become one row.
- *shared*: the path down to one node of the tree is computed once and its keys and values are used by every row
  through that node. Rows of different lengths are joined to one line where that is cheaper than padding: then each
  attends to the shared part and to itself.

Tokens behind the last trained one of a path are not computed. A worked example: a group of two answers to one prompt
`a b c`, sampled `X Y` and `Z`, is two merged rows, `a b c X` -> X Y and `a b c` -> Z (the last token is a target and
never an input), 7 tokens; or shared, with a shared length of 2: a prefix `a b` and rows `c X`, `c`, 5 tokens (6 with
padding). The last prefix token stays in the rows, because the first answer token is predicted there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from agentlightning.errors import PolicyError
from agentlightning.policy.update.micro_batch import NOT_SAMPLED, IntArray, MicroBatch, Row, TokenTable, token_table
from agentlightning.trajectory import TokenTree, TrainingSample

Sharing = Literal["auto", "rows", "merged", "shared"]

TRAINED = "trained"
"""A column that is 1 for each token that counts in a loss. Samples without it: those with a weight and an advantage."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicted time of a micro-batch, in units of one token's time without attention.

        rows     B W (1 + pair W / 2) + launch                    B rows of width W, causal attention
        shared   G C (1 + pair C / 2) + launch                    G prefixes of C tokens
                 + B W (1 + pair (C + W)) + B C copy + launch     B rows of W tokens after them, dense mask
        joined   the same with one line of W tokens for each prefix, and no copy

    Forward and backward scale alike, so only ratios matter.
    """

    pair: float = 1e-3
    """Attention of one token to one other."""
    copy: float = 0.02
    """Copying one prefix token's keys and values to one row."""
    launch: float = 50.0
    """Fixed time of a pass, whatever its size."""

    def rows(self, count: int, width: int) -> float:
        return count * width * (1 + self.pair * width / 2) + self.launch

    def shared(self, families: int, shared_length: int, count: int, width: int) -> float:
        branches = count * width * (1 + self.pair * (shared_length + width))
        return self.rows(families, shared_length) + branches + count * shared_length * self.copy + self.launch

    def joined(self, families: int, shared_length: int, width: int) -> float:
        lines = families * width * (1 + self.pair * (shared_length + width))
        return self.rows(families, shared_length) + lines + self.launch

    def price(self, batch: MicroBatch) -> float:
        if batch.joined:
            return self.joined(len(batch.families), batch.shared_length, batch.width)
        if batch.shared_length:
            return self.shared(len(batch.families), batch.shared_length, len(batch.rows), batch.width)
        return self.rows(len(batch.rows), batch.width)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFamily:
    """Rows with a common prefix of `shared_length` tokens."""

    rows: tuple[Row, ...]
    shared_length: int

    @property
    def width(self) -> int:
        return max(row.length for row in self.rows) - self.shared_length

    @property
    def joined_width(self) -> int:
        """Of its rows, one behind the other."""
        return sum(row.length - self.shared_length for row in self.rows)


def plan(
    samples: Iterable[TrainingSample],
    *,
    token_budget: int,
    cost: CostModel | None = None,
    sharing: Sharing = "auto",
    trains_zero_advantage: bool = False,
    join: bool = True,
) -> list[MicroBatch]:
    """Divide samples into micro-batches of at most `token_budget` computed tokens; a longer single row goes alone.

    "auto" takes the cheapest by `cost` of three plans: nothing shared; shared where that is cheaper for a tree alone;
    shared where it is cheaper once several trees share a launch. A call is trained if one of its tokens has a weight
    and, unless `trains_zero_advantage`, an advantage; all of its tokens are then targets. Without `join` no rows are
    joined, for models that take no mask. Raises PolicyError for a
    trained token without a prompt.
    """
    cost, samples = cost or CostModel(), list(samples)
    packer = _Packer(token_table(samples), token_budget, cost, join)
    trees = [
        _Paths(sample, packer.table, number, trains_zero_advantage, by_call=sharing == "rows", join=join)
        for number, sample in enumerate(samples)
    ]
    if sharing in ("rows", "merged"):
        return packer.pack_rows([row for tree in trees for row in tree.rows])
    if sharing == "shared":
        return packer.pack([tree.best_family(cost, force=True) for tree in trees])
    choices: list[list[tuple[PrefixFamily | None, list[Row]]]] = [[(None, tree.rows) for tree in trees]]
    choices += [[tree.best_family(each, force=False) for tree in trees] for each in (cost, replace(cost, launch=0.0))]
    plans = [packer.pack(choice) for choice in choices]
    return min(plans, key=lambda batches: sum(cost.price(batch) for batch in batches))


class _Paths:
    """The rows of one tree."""

    def __init__(
        self,
        sample: TrainingSample,
        table: TokenTable,
        number: int,
        trains_zero_advantage: bool,
        by_call: bool,
        join: bool,
    ) -> None:
        self._tree, self._join = sample.tree, join
        self._starts = table.starts[number]
        self._depths = _depths(sample.tree)
        self._calls = _trained_calls(sample, table.calls[number], trains_zero_advantage)
        self.paths = self._call_paths() if by_call else self._leaf_paths()
        self.rows = [self._row(path, owned) for path, owned in self.paths]

    def _leaf_paths(self) -> list[tuple[list[int], set[int]]]:
        """Paths to the deepest trained nodes, each with the nodes of the calls that are its own to train: a call
        belongs to the first path through its last node."""
        inner: set[int] = set()
        for nodes in self._calls:
            inner.update(self._tree.path(nodes[-1])[:-1])
        free = {nodes[-1]: nodes for nodes in self._calls}
        paths: list[tuple[list[int], set[int]]] = []
        for leaf in [last for last in free if last not in inner]:
            path = self._tree.path(leaf)
            paths.append((path, {node for index in path for node in free.pop(index, ())}))
        return paths

    def _call_paths(self) -> list[tuple[list[int], set[int]]]:
        return [(self._tree.path(nodes[-1]), set(nodes)) for nodes in self._calls]

    def _row(self, path: list[int], owned: set[int]) -> Row:
        tokens: list[int] = []
        targets: list[IntArray] = []
        places: list[IntArray] = []
        for index in path:
            start, node = len(tokens), self._tree.nodes[index]
            tokens += node.token_ids
            if index in owned:
                offsets = np.arange(len(node.token_ids), dtype=np.int64)
                targets.append(start + offsets)
                places.append(self._starts[index] + offsets)
        joined = np.concatenate(targets)
        if joined[0] == 0:
            raise PolicyError(f"the first token of call {self._tree.nodes[path[0]].call} has no prompt before it")
        return Row(tuple(tokens[: joined[-1] + 1]), joined, np.concatenate(places))

    def best_family(self, cost: CostModel, force: bool) -> tuple[PrefixFamily | None, list[Row]]:
        """The cheapest way to share the prefix of one node, and the other rows; (None, all rows) if none is cheaper."""
        best: tuple[float, PrefixFamily | None, list[Row]] = (_rows_cost(self.rows, cost), None, self.rows)
        if force:
            best = (float("inf"), None, self.rows)
        for shared_length, members in self._candidates():
            inside = tuple(row for i, row in enumerate(self.rows) if i in members)
            outside = [row for i, row in enumerate(self.rows) if i not in members]
            family = PrefixFamily(inside, shared_length)
            price = self._family_cost(family, cost) + _rows_cost(outside, cost)
            if price < best[0]:
                best = (price, family, outside)
        return best[1], best[2]

    def _family_cost(self, family: PrefixFamily, cost: CostModel) -> float:
        padded = cost.shared(1, family.shared_length, len(family.rows), family.width)
        return min(padded, cost.joined(1, family.shared_length, family.joined_width)) if self._join else padded

    def _candidates(self) -> list[tuple[int, frozenset[int]]]:
        """(shared length, indices of rows) for each set of at least two rows, at the deepest node common to them."""
        through: dict[int, list[int]] = {}
        for i, (path, _) in enumerate(self.paths):
            for index in path:
                through.setdefault(index, []).append(i)
        deepest: dict[frozenset[int], int] = {}
        for index, members in through.items():
            if len(members) > 1:
                key = frozenset(members)
                deepest[key] = max(deepest.get(key, 0), self._depths[index] - 1)
        return [(length, members) for members, length in deepest.items() if length > 0]


def _depths(tree: TokenTree) -> list[int]:
    """For each node, the number of tokens from the root to its end."""
    depths: list[int] = []
    for node in tree.nodes:
        depths.append(len(node.token_ids) + (depths[node.parent] if node.parent >= 0 else 0))
    return depths


def _trained_calls(sample: TrainingSample, calls: IntArray, trains_zero_advantage: bool) -> list[list[int]]:
    """The nodes of each call that has a trained token, from the root down."""
    weights = sample.columns.get(TRAINED, sample.columns.get("weights", ()))
    advantages = None if TRAINED in sample.columns else sample.columns.get("advantages")
    nodes: dict[int, list[int]] = {}
    trained: set[int] = set()
    for index, call in enumerate(calls.tolist()):
        if call == NOT_SAMPLED or not len(weights[index]):
            continue
        nodes.setdefault(call, []).append(index)
        counts = weights[index] != 0
        if not trains_zero_advantage and advantages is not None:
            counts = counts & (advantages[index] != 0)
        if counts.any():
            trained.add(call)
    return [own for call, own in nodes.items() if call in trained]


def _rows_cost(rows: Sequence[Row], cost: CostModel) -> float:
    if not rows:
        return 0.0
    return sum(cost.rows(1, row.length) - cost.launch for row in rows) + cost.launch


class _Packer:
    """Puts rows of one table into micro-batches."""

    def __init__(self, table: TokenTable, token_budget: int, cost: CostModel, join: bool) -> None:
        self.table = table
        self._join = join
        self._token_budget = token_budget
        self._cost = cost

    def pack(self, trees: Sequence[tuple[PrefixFamily | None, list[Row]]]) -> list[MicroBatch]:
        families: list[PrefixFamily] = []
        plain: list[Row] = []
        for family, rest in trees:
            parts, whole = self._divide(family) if family else ([], [])
            families += parts
            plain += [*rest, *whole]
        return [*self._pack_families(families), *self.pack_rows(plain)]

    def pack_rows(self, rows: list[Row]) -> list[MicroBatch]:
        """Rows by length, a new batch where the budget ends or padding has cost as much as another pass would."""
        batches: list[MicroBatch] = []
        current: list[Row] = []
        wasted = 0
        for row in sorted(rows, key=lambda row: row.length, reverse=True):
            width = current[0].length if current else row.length
            wasted += width - row.length
            if current and ((len(current) + 1) * width > self._token_budget or wasted > self._cost.launch):
                batches.append(MicroBatch(tuple(current), self.table))
                current, wasted = [], 0
            current.append(row)
        return [*batches, MicroBatch(tuple(current), self.table)] if current else batches

    def _divide(self, family: PrefixFamily) -> tuple[list[PrefixFamily], list[Row]]:
        """Families within the budget, each of which computes the prefix; rows that fit none have no prefix."""
        if family.shared_length + 2 * family.width > self._token_budget:
            return [], list(family.rows)
        size = (self._token_budget - family.shared_length) // family.width
        rows = sorted(family.rows, key=lambda row: row.length, reverse=True)
        parts = [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
        families = [PrefixFamily(part, family.shared_length) for part in parts if len(part) > 1]
        return families, [part[0] for part in parts if len(part) == 1]

    def _pack_families(self, families: list[PrefixFamily]) -> list[MicroBatch]:
        """Join families while one pass over both is cheaper than two, at the length of the shortest prefix."""
        batches: list[MicroBatch] = []
        for family in sorted(families, key=lambda each: (each.shared_length, each.width), reverse=True):
            alone = self._cheapest(MicroBatch(family.rows, self.table, family.shared_length, (len(family.rows),)))
            if batches:
                last = batches[-1]
                both = replace(alone, rows=last.rows + alone.rows, families=last.families + alone.families)
                both = self._cheapest(both)
                cheaper = self._cost.price(both) <= self._cost.price(last) + self._cost.price(alone)
                if both.tokens <= self._token_budget and cheaper:
                    batches[-1] = both
                    continue
            batches.append(alone)
        return batches

    def _cheapest(self, batch: MicroBatch) -> MicroBatch:
        """With the rows of each family joined or not."""
        ways = [replace(batch, joined=joined) for joined in ((False, True) if self._join else (False,))]
        return min(ways, key=self._cost.price)
