"""The plan of an update: which rows of tokens are computed, which share a prefix, and how they fill micro-batches.
`forward` computes these. Nothing here needs torch.

Every trained token of a tree is a target of exactly one row, and all tokens of a call of the same row, so that any plan
has the same gradient; plans differ in cost only. Three ways to compute a tree:

- *rows*: one row for each call. What a trainer without trees does; here for tests and benchmarks.
- *merged*: one row for each leaf path. Calls that are prefixes of one another become one row.
- *shared*: the path down to one node of the tree is computed once, in a pass before, and its keys and values are used
  by every row through that node.
- *joined*: all rows one behind the other in a line, every common token once; a mask lets each token see its own path
  alone. One pass, whatever the shape of the tree, with attention computed between all tokens of the line.

Tokens behind the last trained one of a path are not computed. A worked example: a group of two answers to one prompt
`a b c`, sampled `X Y` and `Z`, is two merged rows, `a b c X` -> X Y and `a b c` -> Z (the last token is a target and
never an input), 7 tokens; or shared, with a shared length of 2: a prefix `a b` and rows `c X`, `c`, 5 tokens (6 with
padding), the last prefix token in the rows, because the first answer token is predicted there; or joined, one line
`a b c X`, 4 tokens.

Shapes: S sampled tokens of all samples of a batch, N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from agentlightning.errors import PolicyError
from agentlightning.policy.base import Sharing
from agentlightning.policy.mismatch import Correction
from agentlightning.trajectory import FloatArray, Node, TokenTree, TrainingSample
from agentlightning.util.common_prefix import common_prefix_length
from agentlightning.util.kept_sets import KeptSets

# -- micro-batches ---------------------------------------------------------------------------------------------------

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class KeptTokens:
    """For each of some tokens the ids that alone could be sampled in its place, ragged."""

    sizes: IntArray
    """The number of ids of each token; 0: every token of the vocabulary."""
    ids: IntArray
    """Those of all tokens, one behind the other."""

    @cached_property
    def ends(self) -> IntArray:
        """Where the ids of each token begin, and where the last ones end."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def at(self, places: IntArray) -> KeptTokens:
        """Those of the tokens at `places`."""
        sizes = self.sizes[places]
        index = np.repeat(self.ends[places] - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
        return KeptTokens(sizes, self.ids[index])

    def part(self, part: slice) -> KeptTokens:
        """Those of consecutive tokens."""
        return KeptTokens(self.sizes[part], self.ids[self.ends[part.start] : self.ends[part.stop]])


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The sampled tokens of a batch, sample by sample and node by node, as flat arrays [S]."""

    samples: tuple[TrainingSample, ...]
    part: tuple[int, ...]
    """The samples that are trained now: those of a minibatch, or of a rank."""
    nodes: tuple[Node, ...]
    """The sampled nodes of all trees."""
    columns: Mapping[str, FloatArray]
    """The columns of all samples, 0 where a sample lacks one, and `sampled_logprobs`."""
    temperatures: FloatArray
    sample: IntArray
    """The sample of each token."""
    node: IntArray
    """Its node, by the place in `nodes`."""
    call: IntArray
    """Its call, numbered within the batch."""
    rollout: IntArray
    """Its rollout, numbered likewise."""
    starts: IntArray
    """Of each of `nodes`, where its tokens begin."""
    calls: IntArray
    """Of each of `nodes`, its call."""
    places: tuple[Mapping[int, int], ...]
    """For each sample, by the index in its tree, the place in `nodes` of each sampled node."""
    kept: KeptTokens | None = None
    """None: every token could be sampled everywhere."""
    corrections: tuple[Correction, ...] = ()
    """Of weights, against proximal log-probabilities that are interpolated in each micro-batch."""

    @property
    def within(self) -> NDArray[np.bool_]:
        """Which tokens are of the samples in `part`."""
        return np.isin(self.sample, self.part)

    def has(self, name: str) -> NDArray[np.bool_]:
        """Which tokens are of samples with a column."""
        return np.array([name in sample.columns for sample in self.samples], bool)[self.sample]

    def by_node(self, values: FloatArray) -> list[tuple[FloatArray, ...]]:
        """Of each sample a column, as `TrainingSample` has it, from one number for each token."""
        ends = np.cumsum([len(node.token_ids) for node in self.nodes])
        parts = iter(np.split(values, ends[:-1]))
        return [
            tuple(next(parts) if node.sampled else values[:0] for node in sample.tree.nodes) for sample in self.samples
        ]

    def with_columns(self, columns: Mapping[str, FloatArray]) -> TokenTable:
        """The same with these columns."""
        return replace(self, columns={**self.columns, **columns})


def token_table(samples: Iterable[TrainingSample]) -> TokenTable:
    """The sampled tokens of `samples`, numbered."""
    samples = tuple(samples)
    nodes, owners, calls, count = list[Node](), list[int](), list[int](), 0
    places: list[dict[int, int]] = []
    for number, sample in enumerate(samples):
        own: dict[int, int] = {}
        for index, node in enumerate(sample.tree.nodes):
            if node.sampled:
                continues = _continues(sample.tree, index)
                calls.append(calls[own[node.parent]] if continues else count)
                count += not continues
                own[index] = len(nodes)
                nodes.append(node)
                owners.append(number)
        places.append(own)
    lengths = np.array([len(node.token_ids) for node in nodes], np.int64)
    rollouts: dict[tuple[int, object], int] = {}
    rollout = [
        rollouts.setdefault((owner, node.rollout_id or call), len(rollouts))
        for owner, node, call in zip(owners, nodes, calls, strict=True)
    ]

    def of_tokens(values: Sequence[int]) -> IntArray:
        return np.repeat(np.array(values, np.int64), lengths)

    columns = {name: _column(samples, name) for name in set[str]().union(*(each.columns for each in samples))}
    columns["sampled_logprobs"] = _join([np.array(node.logprobs, np.float32) for node in nodes])
    return TokenTable(
        samples=samples,
        part=tuple(range(len(samples))),
        nodes=tuple(nodes),
        columns=columns,
        temperatures=np.repeat(np.array([node.temperature for node in nodes], np.float32), lengths),
        sample=of_tokens(owners),
        node=of_tokens(range(len(nodes))),
        call=of_tokens(calls),
        rollout=of_tokens(rollout),
        starts=np.cumsum(lengths) - lengths,
        calls=np.array(calls, np.int64),
        places=tuple(places),
        kept=_kept_tokens(nodes),
    )


def _column(samples: Sequence[TrainingSample], name: str) -> FloatArray:
    columns = (sample.columns.get(name) or [np.zeros(sample.tree.num_sampled, np.float32)] for sample in samples)
    return _join([*chain.from_iterable(columns)])


def _kept_tokens(nodes: Sequence[Node]) -> KeptTokens | None:
    if all(node.kept_sets is None for node in nodes):
        return None
    sets = [node.kept_sets or KeptSets(bytes(4 * len(node.token_ids)), b"") for node in nodes]
    return KeptTokens(
        np.concatenate([each.size_array() for each in sets]), np.concatenate([each.id_array() for each in sets])
    )


def _join(arrays: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)


def _continues(tree: TokenTree, index: int) -> bool:
    """Whether a sampled node belongs to the same call as the one above it: a later prompt or an update of the weights
    has split it."""
    node = tree.nodes[index]
    if node.parent < 0 or node.call is None:
        return False
    above = tree.nodes[node.parent]
    return above.sampled and (above.rollout_id, above.call) == (node.rollout_id, node.call)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A path through a tree, down to its last target."""

    token_ids: tuple[int, ...]
    targets: IntArray
    """Ascending places in `token_ids` of the tokens trained here; each is predicted by the token before it."""
    places: IntArray
    """For each target, its place in the table."""

    @property
    def length(self) -> int:
        """Tokens to compute: the last one is only a target."""
        return len(self.token_ids) - 1


@dataclass(slots=True, eq=False)
class Line:
    """A row, or rows of one tree that are computed as one: their common tokens once, each seen by what is below it
    alone."""

    rows: list[Row] = field(default_factory=list["Row"])
    token_ids: list[int] = field(default_factory=list[int])
    index: list[IntArray] = field(default_factory=list[IntArray])
    """For each row, where its tokens stand in the line."""
    begins: list[int] = field(default_factory=list[int])
    """For each row, how many of its tokens stand there for an earlier row."""

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def joined(self) -> bool:
        return len(self.rows) > 1

    def add(self, row: Row, common: int) -> Line:
        """Append a row that has so many tokens in common with the last one."""
        own = np.arange(self.length, self.length + row.length - common)
        self.index.append(np.concatenate([self.index[-1][:common], own]) if common else own)
        self.token_ids += row.token_ids[common:-1]
        self.rows.append(row)
        self.begins.append(common)
        return self


def join_rows(rows: Iterable[Row], limit: int) -> list[Line]:
    """The rows in lines of at most `limit` tokens; a longer row has one for itself."""
    lines: list[Line] = []
    before = ()
    for row in sorted(rows, key=lambda row: row.token_ids[:-1]):
        own = row.token_ids[:-1]
        common = common_prefix_length(own, before)
        if not lines or lines[-1].length + len(own) - common > limit:
            lines.append(Line())
            common = 0
        lines[-1].add(row, common)
        before = own
    return lines


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Lines computed in one forward and backward pass. The targets of a call are all in it."""

    lines: tuple[Line, ...]
    table: TokenTable
    shared_length: int = 0
    """How many tokens of each line are computed once per family, in a pass before; 0: none."""
    families: tuple[int, ...] = ()
    """Where `shared_length` > 0: how many consecutive lines share each prefix."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for line in self.lines for row in line.rows)

    @property
    def joined(self) -> bool:
        """Whether a mask keeps rows of a line apart."""
        return any(line.joined for line in self.lines)

    @property
    def width(self) -> int:
        """Length of the padded lines, without the shared part."""
        return max(line.length for line in self.lines) - self.shared_length

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.families) * self.shared_length + len(self.lines) * self.width

    @property
    def places(self) -> IntArray:
        """For each target, rows by rows, its place in the table [N]."""
        return np.concatenate([row.places for row in self.rows])

    @property
    def kept(self) -> KeptTokens | None:
        """The ids that could be sampled at each target."""
        return None if self.table.kept is None else self.table.kept.at(self.places)

    def predicting(self) -> IntArray:
        """For each target, rows by rows, the position of the token before it: flat in [families, shared_length] where
        it is in a shared prefix, else behind all of these in [lines, width]."""
        shared, width = self.shared_length, self.width
        behind = (len(self.families) - 1) * shared
        owners = np.repeat(np.arange(len(self.families) or 1), self.families or len(self.lines))
        found: list[IntArray] = []
        for number, line in enumerate(self.lines):
            for row, index in zip(line.rows, line.index, strict=True):
                before = index[row.targets - 1]
                found.append(before + np.where(before < shared, owners[number] * shared, behind + number * width))
        return np.concatenate(found)


# -- plan ------------------------------------------------------------------------------------------------------------

TRAINED = "trained"
"""A column that is 1 for each token that counts in a loss. Without it those with a weight do, and without both all."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicted time of a micro-batch, in units of one token's time without attention.

        rows     B W (1 + pair W / 2) + launch                    B rows of width W, causal attention
        shared   G C (1 + pair C / 2) + launch                    G prefixes of C tokens
                 + B W (1 + pair (C + W)) + B C copy + launch     B rows of W tokens after them, dense mask
        joined   L W (1 + pair W) + launch                        L lines of W tokens, dense mask

    Forward and backward scale alike, so only ratios matter.
    """

    pair: float = 1e-3
    """Attention of one token to one other."""
    copy: float = 0.02
    """Copying one prefix token's keys and values to one row."""
    launch: float = 50.0
    """Fixed time of a pass, whatever its size: its kernels, and adding the gradient of every weight."""

    def passes(self, count: int, width: int, joined: bool = False) -> float:
        return count * width * (1 + self.pair * width * (1.0 if joined else 0.5)) + self.launch

    def shared(self, families: int, shared_length: int, count: int, width: int) -> float:
        branches = count * width * (1 + self.pair * (shared_length + width))
        return self.passes(families, shared_length) + branches + count * shared_length * self.copy + self.launch

    def price(self, batch: MicroBatch) -> float:
        if batch.shared_length:
            return self.shared(len(batch.families), batch.shared_length, len(batch.lines), batch.width)
        return self.passes(len(batch.lines), batch.width, batch.joined)


CPU_COST = CostModel()


@dataclass(frozen=True, slots=True)
class Choice:
    """How the rows of a tree are computed."""

    lines: Sequence[Line] = ()
    family: MicroBatch | None = None
    """Rows with a common prefix."""

    def price(self, cost: CostModel) -> float:
        """In passes of its own: one for plain lines, and one for joined ones."""
        total = sum(cost.passes(1, line.length, line.joined) - cost.launch for line in self.lines)
        total += cost.launch * len({line.joined for line in self.lines})
        return total if self.family is None else total + cost.price(self.family)


def plan(
    batch: TokenTable | Sequence[TrainingSample],
    *,
    token_budget: int,
    cost: CostModel = CPU_COST,
    sharing: Sharing = "auto",
    join: bool = True,
) -> list[MicroBatch]:
    """Divide a batch into micro-batches of at most `token_budget` computed tokens; a longer single row goes alone.

    "auto" takes the cheapest by `cost` of four plans: nothing shared; everything joined; for each tree what is cheapest
    alone, and what is cheapest once several trees share a launch. A call is trained if one of its tokens is, as
    `TRAINED` says: all of its tokens are then targets. Without `join` no rows are joined, for models that take no mask.
    Raises PolicyError for a trained token without a prompt.
    """
    table = batch if isinstance(batch, TokenTable) else token_table(batch)
    packer = _Packer(table, token_budget, cost)
    counts = table.columns.get(TRAINED, table.columns.get("weights", np.ones(len(table.call)))) != 0
    trained = frozenset(np.unique(table.call[counts]).tolist())
    trees = [_Paths(table, number, trained, by_call=sharing == "rows") for number in table.part]
    if sharing in ("rows", "merged"):
        return packer.pack([Choice(tree.lines) for tree in trees])
    options: list[list[Choice]] = []
    for tree in trees:
        whole, families = Choice(tree.lines), tree.families()
        joined = [Choice(join_rows(tree.rows, token_budget))] if join else []
        if sharing == "auto":
            options.append([whole, *joined, *families])
        else:  # A tree whose rows share nothing needs no mask.
            options.append([*joined, *families] if families else [whole])

    def cheapest(alone: CostModel) -> list[MicroBatch]:
        return packer.pack([min(each, key=lambda choice: choice.price(alone)) for each in options])

    if sharing == "shared":
        return cheapest(cost)
    plans = [packer.pack([each[way] for each in options]) for way in range(1 + join)]
    plans += [cheapest(cost), cheapest(replace(cost, launch=0.0))]
    return min(plans, key=lambda batches: sum(map(cost.price, batches)))


class _Paths:
    """The rows of one tree."""

    def __init__(self, table: TokenTable, number: int, trained: Collection[int], by_call: bool) -> None:
        """`trained`: the calls of the table that are."""
        self._table, self._tree = table, table.samples[number].tree
        self._places = table.places[number]
        calls: dict[int, list[int]] = {}
        for index, place in self._places.items():
            if (call := int(table.calls[place])) in trained and self._tree.nodes[index].token_ids:
                calls.setdefault(call, []).append(index)
        self.paths = [(self._tree.path(nodes[-1]), set(nodes)) for nodes in calls.values()]
        """Each with the nodes of the calls that are its own to train."""
        if not by_call:  # Those to the deepest nodes; a call belongs to the first one through its last node.
            inner = {index for path, _ in self.paths for index in path[:-1]}
            free = {path[-1]: owned for path, owned in self.paths}
            self.paths = [
                (path, {node for index in path for node in free.pop(index, ())})
                for path, _ in self.paths
                if path[-1] not in inner
            ]
        self.rows = [self._row(path, owned) for path, owned in self.paths]
        self.lines = [Line().add(row, 0) for row in self.rows]

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
                places.append(self._table.starts[self._places[index]] + offsets)
        joined = np.concatenate(targets)
        if joined[0] == 0:
            raise PolicyError(f"the first token of call {self._tree.nodes[path[0]].call} has no prompt before it")
        return Row(tuple(tokens[: joined[-1] + 1]), joined, np.concatenate(places))

    def families(self) -> list[Choice]:
        """A prefix shared, at the deepest node common to them, for each set of at least two rows that a node has below
        it."""
        through: dict[tuple[int, int], list[int]] = {}
        """For each node, and the number of tokens from the root to its end, the rows through it."""
        for i, (path, _) in enumerate(self.paths):
            depth = 0
            for index in path:
                depth += len(self._tree.nodes[index].token_ids)
                through.setdefault((index, depth), []).append(i)
        lengths: dict[tuple[int, ...], int] = {}
        for (_, depth), members in through.items():
            if len(members) > 1 and depth > 1:
                key = tuple(members)
                lengths[key] = max(lengths.get(key, 0), depth - 1)
        choices: list[Choice] = []
        for members, length in lengths.items():
            inside = tuple(self.lines[i] for i in members)
            outside = [line for i, line in enumerate(self.lines) if i not in members]
            choices.append(Choice(outside, MicroBatch(inside, self._table, length, (len(inside),))))
        return choices


@dataclass(frozen=True, slots=True)
class _Packer:
    """Puts lines of one table into micro-batches."""

    table: TokenTable
    token_budget: int
    cost: CostModel

    def pack(self, choices: Sequence[Choice]) -> list[MicroBatch]:
        families: list[MicroBatch] = []
        lines: list[Line] = []
        for choice in choices:
            parts, whole = self._divide(choice.family) if choice.family else ([], [])
            families += parts
            lines += [*choice.lines, *whole]
        batches = [*self._by_length(line for line in lines if line.joined)]
        batches += self._by_length(line for line in lines if not line.joined)
        return [*self._pack_families(families), *(MicroBatch(tuple(each), self.table) for each in batches)]

    def _by_length(self, lines: Iterable[Line]) -> list[list[Line]]:
        """Lines by length, a new batch where the budget ends or padding has cost as much as another pass would."""
        batches: list[list[Line]] = []
        wasted = 0
        for line in sorted(lines, key=lambda line: line.length, reverse=True):
            width = batches[-1][0].length if batches else 0
            wasted += width - line.length
            if not batches or (len(batches[-1]) + 1) * width > self.token_budget or wasted > self.cost.launch:
                batches.append([])
                wasted = 0
            batches[-1].append(line)
        return batches

    def _divide(self, family: MicroBatch) -> tuple[list[MicroBatch], list[Line]]:
        """Families within the budget, each of which computes the prefix; lines that fit none have no prefix."""
        if family.shared_length + 2 * family.width > self.token_budget:
            return [], list(family.lines)
        size = (self.token_budget - family.shared_length) // family.width
        lines = sorted(family.lines, key=lambda line: line.length, reverse=True)
        parts = [tuple(lines[i : i + size]) for i in range(0, len(lines), size)]
        families = [replace(family, lines=part, families=(len(part),)) for part in parts if len(part) > 1]
        return families, [part[0] for part in parts if len(part) == 1]

    def _pack_families(self, families: list[MicroBatch]) -> list[MicroBatch]:
        """Join families while one pass over both is cheaper than two, at the length of the shortest prefix."""
        batches: list[MicroBatch] = []
        for family in sorted(families, key=lambda each: (each.shared_length, each.width), reverse=True):
            if batches:
                last = batches[-1]
                both = replace(family, lines=last.lines + family.lines, families=last.families + family.families)
                cheaper = self.cost.price(both) <= self.cost.price(last) + self.cost.price(family)
                if both.tokens <= self.token_budget and cheaper:
                    batches[-1] = both
                    continue
            batches.append(family)
        return batches
