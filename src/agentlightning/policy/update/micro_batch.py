"""What one forward and backward pass computes: rows of tokens, those trained among them, and what a loss needs of each.

`packing` decides which rows there are, `forward` computes them. Nothing here needs torch.

Shapes: S sampled tokens of all samples of a batch, N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentlightning.trajectory import Node, TokenTree, TrainingSample

FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int64]

NOT_SAMPLED = -1


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """For each of some tokens the ids that alone could be sampled in its place, ragged."""

    sizes: IntArray
    """The number of ids of each token; 0: every token of the vocabulary."""
    ids: IntArray
    """Those of all tokens, one behind the other."""

    def at(self, places: IntArray) -> KeptTokens:
        """Those of the tokens at `places`."""
        sizes = self.sizes[places]
        begins = (np.cumsum(self.sizes) - self.sizes)[places]
        index = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
        return KeptTokens(sizes, self.ids[index])


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The sampled tokens of a batch, sample by sample and node by node, as flat arrays [S]."""

    columns: Mapping[str, FloatArray]
    """The columns that all samples have, and `sampled_logprobs`."""
    temperatures: FloatArray
    call: IntArray
    """The call of each token, numbered within the batch."""
    rollout: IntArray
    """The rollout of each token, numbered likewise."""
    starts: tuple[IntArray, ...]
    """For each sample, where the tokens of each node begin; `NOT_SAMPLED` for prompts."""
    calls: tuple[IntArray, ...]
    """For each sample, the call of each node; `NOT_SAMPLED` for prompts."""
    kept: KeptTokens | None = None
    """None: every token could be sampled everywhere."""


def token_table(samples: Sequence[TrainingSample]) -> TokenTable:
    """The sampled tokens of `samples`, numbered."""
    shared = set.intersection(*(set(sample.columns) for sample in samples)) if samples else set[str]()
    nodes: list[tuple[TrainingSample, int, Node]] = []
    starts, calls, call, count, position = list[IntArray](), list[IntArray](), list[int](), 0, 0
    for sample in samples:
        tree = sample.tree
        begins, numbers = (np.full(len(tree.nodes), NOT_SAMPLED, np.int64) for _ in range(2))
        for index, node in enumerate(tree.nodes):
            if not node.sampled:
                continue
            continues = _continues(tree, index)
            begins[index], numbers[index] = position, numbers[node.parent] if continues else count
            position, count = position + len(node.token_ids), count + (not continues)
            nodes.append((sample, index, node))
            call.append(int(numbers[index]))
        starts.append(begins)
        calls.append(numbers)
    lengths = [len(node.token_ids) for _, _, node in nodes]
    columns = {name: _join([sample.columns[name][i] for sample, i, _ in nodes]) for name in shared}
    columns["sampled_logprobs"] = _join([np.array(node.logprobs, np.float32) for _, _, node in nodes])
    rollouts: dict[tuple[int, object], int] = {}
    rollout = [
        rollouts.setdefault((id(sample), node.rollout_id or number), len(rollouts))
        for (sample, _, node), number in zip(nodes, call, strict=True)
    ]
    return TokenTable(
        columns=columns,
        temperatures=np.repeat(np.array([node.temperature for _, _, node in nodes], np.float32), lengths),
        call=np.repeat(np.array(call, np.int64), lengths),
        rollout=np.repeat(np.array(rollout, np.int64), lengths),
        starts=tuple(starts),
        calls=tuple(calls),
        kept=_kept_tokens([node for _, _, node in nodes]),
    )


def _kept_tokens(nodes: Sequence[Node]) -> KeptTokens | None:
    if all(node.kept_sets is None for node in nodes):
        return None
    none = np.zeros(0, np.int64)
    sizes = [
        np.zeros(len(node.token_ids), np.int64) if node.kept_sets is None else node.kept_sets.size_array()
        for node in nodes
    ]
    ids = [none if node.kept_sets is None else node.kept_sets.id_array() for node in nodes]
    return KeptTokens(np.concatenate(sizes), np.concatenate(ids))


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


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Rows of one tree that are computed as one: their common tokens once, each seen by what is below it alone."""

    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    index: tuple[IntArray, ...]
    """For each row, where its tokens stand in the line."""
    begins: tuple[int, ...]
    """For each row, how many of its tokens stand there for an earlier row."""


def join_rows(rows: Iterable[Row], limit: int) -> list[Line]:
    """The rows in lines of at most `limit` tokens; a longer row has one for itself."""
    lines: list[list[tuple[Row, int]]] = []
    length, before = 0, ()
    for row in sorted(rows, key=lambda row: row.token_ids[:-1]):
        own = row.token_ids[:-1]
        common = next(
            (i for i, (a, b) in enumerate(zip(own, before, strict=False)) if a != b), min(len(own), len(before))
        )
        if not lines or length + len(own) - common > limit:
            lines.append([])
            length = common = 0
        lines[-1].append((row, common))
        length, before = length + len(own) - common, own
    return [_line(each) for each in lines]


def _line(rows: Sequence[tuple[Row, int]]) -> Line:
    token_ids: list[int] = []
    index: list[IntArray] = []
    for row, common in rows:
        own = np.arange(len(token_ids), len(token_ids) + row.length - common)
        index.append(np.concatenate([index[-1][:common], own]) if index else own)
        token_ids += row.token_ids[common:-1]
    return Line(tuple(row for row, _ in rows), tuple(token_ids), tuple(index), tuple(common for _, common in rows))


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows computed in one forward and backward pass. The targets of a call are all in it."""

    rows: tuple[Row, ...]
    table: TokenTable
    shared_length: int = 0
    """How many tokens of each row are computed once per family, in a pass before; 0: none."""
    families: tuple[int, ...] = ()
    """Where `shared_length` > 0: how many consecutive rows share each prefix."""
    lines: tuple[Line, ...] = ()
    """What the rows are joined to; empty: each is computed by itself."""

    @property
    def width(self) -> int:
        """Length of the padded rows, without the shared part, or lines."""
        lengths = [len(line.token_ids) for line in self.lines] or [row.length for row in self.rows]
        return max(lengths) - self.shared_length

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return len(self.families) * self.shared_length + len(self.lines or self.rows) * self.width

    @property
    def shared_prefixes(self) -> int:
        """How many prefixes of several rows are computed once."""
        return len(self.families) + sum(len(line.rows) > 1 for line in self.lines)

    @property
    def places(self) -> IntArray:
        """For each target, rows by rows, its place in the table [N]."""
        return np.concatenate([row.places for row in self.rows])

    @property
    def kept(self) -> KeptTokens | None:
        """The ids that could be sampled at each target."""
        return None if self.table.kept is None else self.table.kept.at(self.places)

    def predictions(self) -> Predictions:
        """The positions that predict the targets: one token before each, in the shared prefix or in its row."""
        shared, width, none = self.shared_length, self.width, np.empty(0, np.int64)
        if self.lines:
            found = [
                number * width + index[row.targets - 1]
                for number, line in enumerate(self.lines)
                for row, index in zip(line.rows, line.index, strict=True)
            ]
            inside = np.concatenate(found)
            return Predictions(none, inside, np.arange(len(inside)))
        owners = [family for family, count in enumerate(self.families) for _ in range(count)] or [0] * len(self.rows)
        counts = [len(row.targets) for row in self.rows]
        before = np.concatenate([row.targets for row in self.rows]) - 1
        early = before < shared
        prefix = np.repeat(np.array(owners, np.int64) * shared, counts) + before
        inside = np.repeat(np.arange(len(self.rows)) * width, counts) + before - shared
        order = np.empty(len(before), np.int64)
        split = int(early.sum())
        order[early], order[~early] = np.arange(split), np.arange(split, len(before))
        return Predictions(prefix[early], inside[~early], order)


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The positions among the computed tokens of a micro-batch that predict its targets."""

    prefix: IntArray
    """Flat positions in [families, shared_length]."""
    rows: IntArray
    """Flat positions in [rows or lines, width]."""
    order: IntArray
    """For each target, rows by rows, its place in `prefix` followed by `rows`."""
