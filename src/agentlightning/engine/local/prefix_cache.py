"""Prefix cache: keys and values of token prefixes in a radix tree, bounded in bytes, evicting the least recently used.

Each node holds a run of tokens with their keys and values; a run shared by several sequences is stored once. Entries
belong to the weights that computed them: there is a tree for each adapter, and whoever changes weights calls `clear`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor

from agentlightning.util.common_prefix import common_prefix_length

Segment = list[Tensor]
"""Keys and values of a run of tokens: for each pool [layers x {key, value}, heads, tokens, dim]."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens that follows the run of its parent."""

    tokens: list[int]
    segment: Segment
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict["int", "Node"])
    """By their first token."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.segment)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a sequence."""

    length: int
    nodes: tuple[tuple[Node, int], ...]
    """Nodes from the root, each with the number of its tokens that match."""


class RadixPrefixCache:
    """At most `limit_bytes` of keys and values; 0 disables the cache."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._roots: dict[str | None, Node] = {}
        """By adapter; None: the model's own weights."""
        self._order: OrderedDict[Node, None] = OrderedDict()
        """Oldest first. A node is always newer than its children, so the oldest one is a leaf."""

    def __len__(self) -> int:
        return len(self._order)

    def match(self, tokens: list[int], adapter: str | None = None) -> Match:
        """The longest prefix of `tokens` that is cached for an adapter."""
        nodes: list[tuple[Node, int]] = []
        node, length = self._root(adapter), 0
        while length < len(tokens) and (child := node.children.get(tokens[length])) is not None:
            count = common_prefix_length(child.tokens, tokens, length)
            nodes.append((child, count))
            node, length = child, length + count
            if count < len(child.tokens):
                break
        self._touch(node)
        return Match(length, tuple(nodes))

    def insert(self, tokens: list[int], read: Callable[[int, int], Segment], adapter: str | None = None) -> None:
        """Cache `tokens` for an adapter. `read(start, stop)` copies keys and values; it is called only for those not
        cached yet."""
        if self.limit_bytes <= 0:
            return
        found = self.match(tokens, adapter)
        if found.length == len(tokens):
            return
        parent = self._root(adapter)
        if found.nodes:
            parent, count = found.nodes[-1]
            if count < len(parent.tokens):
                parent = self._split(parent, count)
        node = Node(tokens[found.length :], read(found.length, len(tokens)), parent)
        parent.children[node.tokens[0]] = node
        self._order[node] = None
        self.num_bytes += node.num_bytes
        self._touch(node)
        while self.num_bytes > self.limit_bytes and self._order:
            node, _ = self._order.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.tokens[0]]
            self.num_bytes -= node.num_bytes

    def clear(self, adapters: Collection[str | None] | None = None) -> None:
        """Drop what these adapters computed; None: everything."""
        for adapter in list(self._roots) if adapters is None else adapters:
            below = [self._roots.pop(adapter)] if adapter in self._roots else []
            while below:
                for node in below.pop().children.values():
                    below.append(node)
                    del self._order[node]
                    self.num_bytes -= node.num_bytes

    def _root(self, adapter: str | None) -> Node:
        return self._roots.setdefault(adapter, Node(tokens=[], segment=[], parent=None))

    def _split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` tokens; returns the upper part. Copies, so that each part frees its own memory."""
        assert node.parent is not None
        upper = Node(node.tokens[:count], [part[:, :, :count].clone() for part in node.segment], node.parent)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[count:]
        node.segment = [part[:, :, count:].clone() for part in node.segment]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self._order[upper] = None
        return upper

    def _touch(self, node: Node) -> None:
        """Make `node` and its ancestors the most recently used, the root-most last."""
        while node.parent is not None:
            self._order.move_to_end(node)
            node = node.parent
