"""The plan of an update: which rows are computed, which share a prefix, and how they are cut into micro-batches.

Pure Python over token trees; `policy.update` carries the plan out. Every trained token of a tree is a target of exactly
one row, so that any plan has the same gradient; plans differ in cost only. Three ways to compute a tree:

- *rows*: one row for each call. What a trainer without trees does; here for tests and benchmarks.
- *merged*: one row for each leaf path. Calls that are prefixes of one another become one row.
- *shared*: the path down to one node of the tree is computed once and its keys and values are used by every row
  through that node.

Tokens behind the last trained one of a path are not computed. A worked example: a group of two answers to one prompt
`a b c`, sampled `X Y` and `Z`, is two merged rows, `a b c X` -> X Y and `a b c` -> Z (the last token is a target and
never an input), 7 tokens; or shared, cut=2: a prefix `a b` and rows `c X`, `c`, 5 tokens (6 with padding).
The last prefix token stays in the rows, because the first answer token is predicted there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agentlightning.errors import PolicyError
from agentlightning.trajectory import TokenTree, TrainingSample

Sharing = Literal["auto", "rows", "merged", "shared"]


@dataclass(frozen=True, slots=True)
class Row:
    """A path through a tree, down to its last target."""

    token_ids: tuple[int, ...]
    targets: tuple[int, ...]
    """Ascending indices into `token_ids` of the tokens trained here; each is predicted by the token before it."""
    logprobs: tuple[float, ...]
    """For each target, when it was sampled; likewise the next three."""
    advantages: tuple[float, ...]
    weights: tuple[float, ...]
    temperatures: tuple[float, ...]

    @property
    def length(self) -> int:
        """Tokens to compute: the last one is only a target."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows computed in one forward and backward pass."""

    rows: tuple[Row, ...]
    cut: int = 0
    """How many tokens of each row are computed once per family and shared; 0: none."""
    families: tuple[int, ...] = ()
    """Where cut > 0: how many consecutive rows share each prefix."""

    @property
    def width(self) -> int:
        """Length of the padded rows, without the shared part."""
        return max(row.length for row in self.rows) - self.cut

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.families) * self.cut + len(self.rows) * self.width


@dataclass(frozen=True, slots=True)
class Predictions:
    """Where in the computed tokens of a micro-batch the targets are predicted."""

    prefix: list[int]
    """Flat positions in [families, cut]."""
    rows: list[int]
    """Flat positions in [rows, width]."""
    order: list[int]
    """For each target, rows by rows, its place in `prefix + rows`."""


def predictions(batch: MicroBatch) -> Predictions:
    """Say where each target is predicted: one token before it, in the shared prefix or in its row."""
    prefix: list[int] = []
    rows: list[int] = []
    owners = [family for family, count in enumerate(batch.families) for _ in range(count)]
    early: list[tuple[bool, int]] = []
    width = batch.width
    for b, row in enumerate(batch.rows):
        for target in row.targets:
            if target <= batch.cut:
                early.append((True, len(prefix)))
                prefix.append(owners[b] * batch.cut + target - 1)
            else:
                early.append((False, len(rows)))
                rows.append(b * width + target - 1 - batch.cut)
    return Predictions(prefix, rows, [place if is_early else len(prefix) + place for is_early, place in early])


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicted time of a micro-batch, in units of one token's time without attention.

        rows     B W (1 + pair W / 2) + launch                    B rows of width W, causal attention
        shared   G C (1 + pair C / 2) + launch                    G prefixes of C tokens
                 + B W (1 + pair (C + W)) + B C copy + launch     B rows of W tokens after them, dense mask

    Forward and backward scale alike, so only ratios matter.
    """

    pair: float = 1e-3
    """Attention of one token to one other."""
    copy: float = 0.02
    """Handing one prefix token's keys and values to one row."""
    launch: float = 50.0
    """Fixed time of a pass, whatever its size."""

    def rows(self, count: int, width: int) -> float:
        return count * width * (1 + self.pair * width / 2) + self.launch

    def shared(self, families: int, cut: int, count: int, width: int) -> float:
        branches = count * width * (1 + self.pair * (cut + width)) + count * cut * self.copy + self.launch
        return self.rows(families, cut) + branches


@dataclass(frozen=True, slots=True)
class _Family:
    """Rows with a common prefix of `cut` tokens."""

    rows: tuple[Row, ...]
    cut: int

    @property
    def width(self) -> int:
        return max(row.length for row in self.rows) - self.cut


def plan(
    samples: Iterable[TrainingSample],
    *,
    token_budget: int,
    cost: CostModel | None = None,
    sharing: Sharing = "auto",
    uses_advantages: bool = True,
) -> list[MicroBatch]:
    """Cut samples into micro-batches of at most `token_budget` computed tokens; a longer single row goes alone.

    "auto" takes the cheapest by `cost` of three plans: nothing shared, shared where it pays for a tree alone, shared
    where it pays once trees split the launch. Tokens of weight 0, and where `uses_advantages` of advantage 0, are not
    trained. Raises PolicyError for a trained token that nothing comes before.
    """
    cost = cost or CostModel()
    trees = [_Paths(sample, uses_advantages, by_call=sharing == "rows") for sample in samples]
    if sharing in ("rows", "merged"):
        return _pack_rows([row for tree in trees for row in tree.rows], token_budget, cost)
    if sharing == "shared":
        return _pack([tree.best_family(cost, force=True) for tree in trees], token_budget, cost)
    choices: list[list[tuple[_Family | None, list[Row]]]] = [[(None, tree.rows) for tree in trees]]
    choices += [[tree.best_family(each, force=False) for tree in trees] for each in (cost, replace(cost, launch=0.0))]
    plans = [_pack(choice, token_budget, cost) for choice in choices]
    return min(plans, key=lambda batches: sum(_price(batch, cost) for batch in batches))


def _pack(trees: Sequence[tuple[_Family | None, list[Row]]], token_budget: int, cost: CostModel) -> list[MicroBatch]:
    families: list[_Family] = []
    plain: list[Row] = []
    for family, rest in trees:
        parts, whole = _fit(family, token_budget) if family else ([], [])
        families += parts
        plain += [*rest, *whole]
    return [*_pack_families(families, token_budget, cost), *_pack_rows(plain, token_budget, cost)]


class _Paths:
    """The rows of one tree."""

    def __init__(self, sample: TrainingSample, uses_advantages: bool, by_call: bool) -> None:
        self._sample = sample
        self._depths = _depths(sample.tree)
        self._trained = _trained(sample, uses_advantages)
        self.paths = self._call_paths() if by_call else self._leaf_paths()
        self.rows = [self._row(path, owned) for path, owned in self.paths]

    def _leaf_paths(self) -> list[tuple[list[int], set[int]]]:
        """Paths to the deepest trained nodes, each with the trained nodes that are its own to train."""
        tree = self._sample.tree
        inner: set[int] = set()
        for index in self._trained:
            inner.update(tree.path(index)[:-1])
        free, paths = set(self._trained), list[tuple[list[int], set[int]]]()
        for leaf in (index for index in self._trained if index not in inner):
            path = tree.path(leaf)
            paths.append((path, free.intersection(path)))
            free.difference_update(path)
        return paths

    def _call_paths(self) -> list[tuple[list[int], set[int]]]:
        """One path for each call: a call's nodes may be several where a later prompt split them."""
        tree, calls = self._sample.tree, dict[tuple[str | None, str | None], list[int]]()
        for index in self._trained:
            calls.setdefault((tree.nodes[index].rollout_id, tree.nodes[index].call), []).append(index)
        return [(tree.path(nodes[-1]), set(nodes)) for nodes in calls.values()]

    def _row(self, path: list[int], owned: set[int]) -> Row:
        tokens: list[int] = []
        targets: list[int] = []
        logprobs: list[float] = []
        advantages: list[float] = []
        weights: list[float] = []
        temperatures: list[float] = []
        for index in path:
            node, start = self._sample.tree.nodes[index], len(tokens)
            tokens += node.token_ids
            for offset in self._trained[index] if index in owned else ():
                targets.append(start + offset)
                logprobs.append(node.logprobs[offset])
                advantages.append(self._sample.advantages[index][offset])
                weights.append(self._sample.weights[index][offset])
                temperatures.append(node.temperature)
        if targets[0] == 0:
            raise PolicyError(
                f"the first token of call {self._sample.tree.nodes[path[0]].call} has no prompt before it"
            )
        return Row(
            token_ids=tuple(tokens[: targets[-1] + 1]),
            targets=tuple(targets),
            logprobs=tuple(logprobs),
            advantages=tuple(advantages),
            weights=tuple(weights),
            temperatures=tuple(temperatures),
        )

    def best_family(self, cost: CostModel, force: bool) -> tuple[_Family | None, list[Row]]:
        """The cheapest way to share one node's prefix, and the rows not through it; (None, all) where none pays."""
        best: tuple[float, _Family | None, list[Row]] = (_rows_cost(self.rows, cost), None, self.rows)
        if force:
            best = (float("inf"), None, self.rows)
        for cut, members in self._candidates():
            inside = tuple(row for i, row in enumerate(self.rows) if i in members)
            outside = [row for i, row in enumerate(self.rows) if i not in members]
            family = _Family(inside, cut)
            price = cost.shared(1, cut, len(inside), family.width) + _rows_cost(outside, cost)
            if price < best[0]:
                best = (price, family, outside)
        return best[1], best[2]

    def _candidates(self) -> list[tuple[int, frozenset[int]]]:
        """(cut, indices of rows) for each set of at least two rows, at the deepest node they all run through."""
        through: dict[int, list[int]] = {}
        for i, (path, _) in enumerate(self.paths):
            for index in path:
                through.setdefault(index, []).append(i)
        deepest: dict[frozenset[int], int] = {}
        for index, members in through.items():
            if len(members) > 1:
                key = frozenset(members)
                deepest[key] = max(deepest.get(key, 0), self._depths[index] - 1)
        return [(cut, members) for members, cut in deepest.items() if cut > 0]


def _depths(tree: TokenTree) -> list[int]:
    """For each node, the number of tokens from the root to its end."""
    depths: list[int] = []
    for node in tree.nodes:
        depths.append(len(node.token_ids) + (depths[node.parent] if node.parent >= 0 else 0))
    return depths


def _trained(sample: TrainingSample, uses_advantages: bool) -> dict[int, list[int]]:
    """Offsets of the trained tokens of each node that has any."""
    trained: dict[int, list[int]] = {}
    for index, (advantages, weights) in enumerate(zip(sample.advantages, sample.weights, strict=True)):
        offsets = [i for i, w in enumerate(weights) if w and (advantages[i] or not uses_advantages)]
        if offsets:
            trained[index] = offsets
    return trained


def _rows_cost(rows: Sequence[Row], cost: CostModel) -> float:
    if not rows:
        return 0.0
    return sum(cost.rows(1, row.length) - cost.launch for row in rows) + cost.launch


def _fit(family: _Family, token_budget: int) -> tuple[list[_Family], list[Row]]:
    """Families within the budget, each computing the prefix again; rows that fit no such family are plain."""
    if family.cut + 2 * family.width > token_budget:
        return [], list(family.rows)
    size = (token_budget - family.cut) // family.width
    rows = sorted(family.rows, key=lambda row: row.length, reverse=True)
    parts = [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
    return [_Family(part, family.cut) for part in parts if len(part) > 1], [p[0] for p in parts if len(p) == 1]


def _pack_families(families: list[_Family], token_budget: int, cost: CostModel) -> list[MicroBatch]:
    """Join families while one pass over both is cheaper than two; the shared part is as long as the shortest prefix."""
    batches: list[MicroBatch] = []
    for family in sorted(families, key=lambda each: (each.cut, each.width), reverse=True):
        alone = MicroBatch(family.rows, family.cut, (len(family.rows),))
        if batches:
            last = batches[-1]
            joined = MicroBatch(last.rows + alone.rows, alone.cut, last.families + alone.families)
            if joined.tokens <= token_budget and _price(joined, cost) <= _price(last, cost) + _price(alone, cost):
                batches[-1] = joined
                continue
        batches.append(alone)
    return batches


def _pack_rows(rows: list[Row], token_budget: int, cost: CostModel) -> list[MicroBatch]:
    """Rows by length, cut where the budget ends or where padding has cost as much as another pass would."""
    batches: list[MicroBatch] = []
    current: list[Row] = []
    wasted = 0
    for row in sorted(rows, key=lambda row: row.length, reverse=True):
        width = current[0].length if current else row.length
        wasted += width - row.length
        if current and ((len(current) + 1) * width > token_budget or wasted > cost.launch):
            batches.append(MicroBatch(tuple(current)))
            current, wasted = [], 0
        current.append(row)
    return [*batches, MicroBatch(tuple(current))] if current else batches


def _price(batch: MicroBatch, cost: CostModel) -> float:
    if batch.cut:
        return cost.shared(len(batch.families), batch.cut, len(batch.rows), batch.width)
    return cost.rows(len(batch.rows), batch.width)
