"""KV cache of the active rows, in slots that a transformers model reads and writes in place.

One tensor for each shape of head ("pool"), [layers x {key, value}, slots, heads, capacity, dim]. A row's tokens start
at position 0 of its slot, so rows of different lengths need no padding. Before each forward pass the scheduler opens a
`StepWindow`: which slots take part, where each row's new tokens go, and how many positions are read. The model then
calls `update` of the layers below, through transformers' own `Cache`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import proxy

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from agentlightning.errors import PolicyError
from agentlightning.models.checkpoint import cache_argument
from agentlightning.util.common_prefix import common_prefix_length

BLOCK = 64
"""Capacity grows in blocks of this many tokens."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes of the keys and values that a model's layers store for each token."""

    locations: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """For each layer: (pool, index) of its keys, and of its values."""
    pools: tuple[tuple[int, int, int], ...]
    """For each pool: number of keys and values, heads, dim."""
    dtype: torch.dtype
    windows: Mapping[str, int | None]
    """For each kind of layer, FULL or SLIDING: size of its sliding window in tokens; None: full attention."""

    @property
    def has_sliding_window(self) -> bool:
        return any(self.windows.values())

    @property
    def bytes_per_token(self) -> int:
        return sum(count * heads * dim for count, heads, dim in self.pools) * self.dtype.itemsize


def probe_layout(model: PreTrainedModel) -> Layout:
    """Find the layout from the configuration and a forward pass over one token. Raises PolicyError for a model whose
    state is more than keys and values."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    kinds, details = cast(tuple[list[str], list[dict[str, Any]]], get_layer_types_and_kwargs(config))
    if unsupported := sorted(set(kinds) - {FULL, SLIDING}):
        raise PolicyError(
            f"{type(model).__name__} has layers of kind {', '.join(unsupported)}; the local policy samples from models "
            f"whose layers are {FULL} or {SLIDING}; use another model, or serve this one with vLLM"
        )
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        one = torch.ones(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=one, attention_mask=one, use_cache=True, **{cache_argument(model): cache})
    counts: dict[tuple[int, int], int] = {}
    """Of each shape, in the order of the pools."""

    def locate(states: Tensor) -> tuple[int, int]:
        shape = (states.shape[1], states.shape[3])
        counts[shape] = counts.get(shape, 0) + 1
        return list(counts).index(shape), counts[shape] - 1

    layers = cast(list[Any], cache.layers)
    if any(layer.keys is None for layer in layers):
        raise PolicyError(
            f"{type(model).__name__} does not fill the cache of keys and values that it is given, so the local policy"
            " cannot sample from it; use another model, or serve this one with vLLM"
        )
    return Layout(
        locations=tuple((locate(layer.keys), locate(layer.values)) for layer in layers),
        pools=tuple((count, *shape) for shape, count in counts.items()),
        dtype=model.dtype,
        windows={kind: detail.get("sliding_window") for kind, detail in zip(kinds, details, strict=True)},
    )


@dataclass(frozen=True, slots=True)
class StepWindow:
    """What one forward pass reads and writes. N rows, Q new tokens each."""

    slots: slice
    """The rows' slots."""
    span: int
    """Positions 0..span-1 are read."""
    width: int
    """Q."""
    fresh: bool
    """The slots are empty: the new tokens attend only to one another."""
    targets: tuple[Tensor, ...]
    """For each pool: flat indices over [slots, heads, capacity] for the new tokens. Empty if fresh."""
    past: int = 0
    """Cached tokens of a row that is computed alone, which the model asks for. 0: mask and positions are given."""


class KVCacheLayer(CacheLayerMixin):
    """One layer's view of the slots."""

    def __init__(self, cache: KVCache, locations: tuple[tuple[int, int], tuple[int, int]]) -> None:
        super().__init__()
        self._cache: KVCache = proxy(cache)  # Whose memory is freed with the last reference to it.
        self._locations = locations
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the slots are allocated before the forward pass."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [N, heads, Q, dim]; returns all of the rows', [N, heads, span, dim]."""
        keys, values = self._locations
        return self._store(keys, key_states), self._store(values, value_states)

    def _store(self, location: tuple[int, int], states: Tensor) -> Tensor:
        window = self._cache.window
        assert window is not None
        pool, index = location
        data = self._cache.pools[pool][index]
        if window.fresh:
            data[window.slots, :, : window.width] = states
            return states
        flat = data.view(-1, data.shape[-1])
        flat.index_copy_(0, window.targets[pool], states.reshape(-1, data.shape[-1]))
        rows = data[window.slots, :, : window.span]
        return nn.functional.pad(rows, (0, 0, 0, self._cache.padding)) if self._cache.padding else rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self._cache.window is None else self._cache.window.past

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):
    """The slots. `limit_bytes` bounds their memory, but one row always fits."""

    def __init__(self, layout: Layout, device: torch.device, *, max_slots: int, limit_bytes: int) -> None:
        super().__init__(layers=[KVCacheLayer(self, locations) for locations in layout.locations])
        self.pools: list[Tensor] = []
        self.window: StepWindow | None = None
        self.padding = 0
        """Positions of zeros that are read after the span, as if a longer row were in the batch."""
        self.layout = layout
        self.device = device
        self.max_slots = max_slots
        self.limit_bytes = limit_bytes
        self.slots = 0
        self.capacity = 0

    # -- memory --------------------------------------------------------------------------------------------------------

    def fits(self, slots: int, length: int) -> bool:
        """Whether `slots` rows of up to `length` tokens fit. One row always does."""
        return slots <= self.max_slots and (slots == 1 or self._within_limit(slots, length))

    def reserve(self, slots: int, length: int, used: int, ahead: int = 0) -> None:
        """Allocate `slots` rows of up to `length` tokens, and up to `ahead` more if the limit allows it. The first
        `used` slots keep their content."""
        if slots <= self.slots and length <= self.capacity:
            return
        capacity = round_to_block(length)
        for more in (round_to_block(length + ahead), self.capacity):
            if more > capacity and self._within_limit(slots, more):
                capacity = more
        with_spare = max(self.slots, min(self.max_slots, 1 << (slots - 1).bit_length()))
        if self._within_limit(with_spare, capacity):
            slots = with_spare
        old, keep = self.pools, min(capacity, self.capacity)
        # Zeros, not uninitialised memory: masked positions still contribute 0 x value, and 0 x NaN is NaN.
        self.pools = [
            torch.zeros(count, slots, heads, capacity, dim, dtype=self.layout.dtype, device=self.device)
            for count, heads, dim in self.layout.pools
        ]
        for source, target in zip(old, self.pools, strict=False):
            target[:, :used, :, :keep] = source[:, :used, :, :keep]
        self.slots, self.capacity = slots, capacity

    def release(self) -> None:
        """Free the memory."""
        self.pools = []
        self.window = None
        self.slots = self.capacity = 0

    def usage(self, slots: int, length: int) -> float:
        """The share of the limit that `slots` rows of up to `length` tokens need; at most 1."""
        return min(1.0, self._num_bytes(slots, length) / max(1, self.limit_bytes))

    def _within_limit(self, slots: int, length: int) -> bool:
        return self._num_bytes(slots, length) <= self.limit_bytes

    def _num_bytes(self, slots: int, length: int) -> int:
        return slots * round_to_block(length) * self.layout.bytes_per_token

    # -- one forward pass ----------------------------------------------------------------------------------------------

    @contextmanager
    def padded(self, positions: int) -> Generator[None]:
        """Within, as many positions more are read, all of them masked."""
        self.padding = positions
        try:
            yield
        finally:
            self.padding = 0

    def open_window(self, start: int, pasts: Sequence[int], width: int, *, alone: bool = False) -> None:
        """The next forward pass computes `width` tokens for each row in slots `start`.., after `pasts` cached ones.
        `alone`: the model makes the mask and the positions of the one row itself."""
        stop = start + len(pasts)
        fresh = not any(pasts)
        targets: tuple[Tensor, ...] = ()
        if not fresh:
            first = torch.tensor(pasts, device=self.device).view(-1, 1, 1)
            slot = torch.arange(start, stop, device=self.device).view(-1, 1, 1)
            offset = self._range(width)
            targets = tuple(
                ((slot * heads + self._range(heads).view(1, -1, 1)) * self.capacity + first + offset).view(-1)
                for _, heads, _ in self.layout.pools
            )
        past = pasts[0] if alone else 0
        self.window = StepWindow(slice(start, stop), max(pasts) + width, width, fresh, targets, past)

    def _range(self, stop: int) -> Tensor:
        return torch.arange(stop, device=self.device)

    def masks(self, positions_NQ: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive attention masks [N, 1, Q, span] for the open window: one, or one for each kind of layer."""
        assert self.window is not None
        keys_T = self._range(self.window.span + self.padding)
        causal_NQT = keys_T <= positions_NQ.unsqueeze(-1)
        masks: dict[str, Tensor] = {}
        for kind, window in self.layout.windows.items():
            visible = causal_NQT if window is None else causal_NQT & (keys_T > positions_NQ.unsqueeze(-1) - window)
            mask = torch.zeros(visible.shape, dtype=self.layout.dtype, device=self.device)
            masks[kind] = mask.masked_fill_(~visible, float("-inf")).unsqueeze(1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def read(self, slot: int, start: int, stop: int) -> Segment:
        """A copy of one row's keys and values at positions start..stop-1."""
        return [pool[:, slot, :, start:stop].clone() for pool in self.pools]

    def gather(self, slots: Sequence[int], length: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each layer, copies of the first `length` keys and values of some rows, [slots, heads, length, dim]."""
        index = torch.tensor(slots, device=self.device)
        pools = [pool[:, :, :, :length].index_select(1, index) for pool in self.pools]
        return tuple((pools[a][i], pools[b][j]) for (a, i), (b, j) in self.layout.locations)

    def write(self, slot: int, start: int, segment: Segment, count: int) -> None:
        """Put the first `count` tokens of `segment` at position `start` of a row."""
        for pool, part in zip(self.pools, segment, strict=True):
            pool[:, slot, :, start : start + count] = part[:, :, :count]

    def clear(self, slot: int) -> None:
        """Forget the keys and values of a row."""
        for pool in self.pools:
            pool[:, slot].zero_()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for pool in self.pools:
            pool[:, target, :, :length] = pool[:, source, :, :length]


def vocab_size(model: PreTrainedModel) -> int:
    """Number of token ids the model has."""
    return cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings


def round_to_block(length: int) -> int:
    """`length` rounded up to a multiple of BLOCK."""
    return -(-length // BLOCK) * BLOCK


# -- prefixes ----------------------------------------------------------------------------------------------------------

# Prefix cache: keys and values of token prefixes in a radix tree, bounded in bytes, evicting the least recently used.
#
# Each node holds a run of tokens with their keys and values; a run shared by several sequences is stored once. Entries
# belong to the weights that computed them: there is a tree for each adapter, and whoever changes weights calls `clear`.

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
