"""Keys and values of every row being computed, in slots that a transformers model writes and reads in place.

One tensor for each shape of head ("pool"), [layers x {key, value}, slots, heads, capacity, dim]: a row's tokens lie
from position 0 of its slot, whatever the other rows do, so rows of different lengths need no padding. Before each
forward the scheduler opens a `Window`: which slots take part, where each row's new tokens go, and how far to look.
The model then calls `update` of the layers below, through transformers' own `Cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, get_layer_types_and_kwargs

from agentlightning.engine.local.prefix_cache import Segment
from agentlightning.errors import PolicyError

BLOCK = 64
"""Capacity grows in blocks of so many tokens."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model's layers keep for each token."""

    places: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """For each layer: (pool, index) of its keys, and of its values."""
    pools: tuple[tuple[int, int, int], ...]
    """For each pool: how many keys and values it holds, heads, dim."""
    dtype: torch.dtype
    windows: tuple[int | None, ...]
    """For each layer: how many tokens back it looks; None: all."""
    kinds: tuple[str, ...]
    """For each layer: FULL or SLIDING."""

    @property
    def slides(self) -> bool:
        """Whether some layer does not look at all tokens."""
        return any(window is not None for window in self.windows)

    @property
    def bytes_per_token(self) -> int:
        return sum(count * heads * dim for count, heads, dim in self.pools) * self.dtype.itemsize


def read_layout(model: PreTrainedModel) -> Layout:
    """Learn the layout from the configuration and one forward of one token. Raises PolicyError for a model whose
    state is more than keys and values."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    kinds, details = cast(tuple[list[str], list[dict[str, Any]]], get_layer_types_and_kwargs(config))
    if other := sorted(set(kinds) - {FULL, SLIDING}):
        raise PolicyError(
            f"{type(model).__name__} has layers of kind {', '.join(other)}; the local policy samples from models whose "
            f"layers are {FULL} or {SLIDING}; use another model, or serve this one with vLLM"
        )
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        one = torch.ones(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=one, attention_mask=one, past_key_values=cache, use_cache=True)
    counts: dict[tuple[int, int], int] = {}
    names: list[tuple[int, int]] = []
    places: list[tuple[tuple[int, int], tuple[int, int]]] = []

    def place(states: Tensor) -> tuple[int, int]:
        shape = (states.shape[1], states.shape[3])
        if shape not in counts:
            names.append(shape)
            counts[shape] = 0
        counts[shape] += 1
        return names.index(shape), counts[shape] - 1

    for layer in cast(list[CacheLayerMixin], cache.layers):
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        places.append((place(keys), place(values)))
    return Layout(
        places=tuple(places),
        pools=tuple((counts[shape], *shape) for shape in names),
        dtype=model.dtype,
        windows=tuple(detail.get("sliding_window") for detail in details),
        kinds=tuple(kinds),
    )


@dataclass(frozen=True, slots=True)
class Window:
    """What one forward reads and writes. N rows, Q new tokens each."""

    slots: slice
    """The rows' slots."""
    span: int
    """Positions 0..span-1 are read."""
    width: int
    """Q."""
    fresh: bool
    """Nothing lies in these slots yet: the new tokens need only look at one another."""
    targets: tuple[Tensor, ...]
    """For each pool: where the new tokens go, counted over [slots, heads, capacity]. Empty where fresh."""


@dataclass(slots=True)
class State:
    """The tensors, shared by the cache and its layers."""

    pools: list[Tensor] = field(default_factory=list[Tensor])
    window: Window | None = None


class SlotLayer(CacheLayerMixin):
    """One layer's view of the slots."""

    def __init__(self, state: State, places: tuple[tuple[int, int], tuple[int, int]]) -> None:
        super().__init__()
        self._state = state
        self._places = places
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slots are made before the forward."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [N, heads, Q, dim]; returns all there are, [N, heads, span, dim]."""
        keys, values = self._places
        return self._put(keys, key_states), self._put(values, value_states)

    def _put(self, place: tuple[int, int], states: Tensor) -> Tensor:
        window = self._state.window
        assert window is not None
        pool, index = place
        data = self._state.pools[pool][index]
        if window.fresh:
            data[window.slots, :, : window.width] = states
            return states
        flat = data.view(-1, data.shape[-1])
        flat.index_copy_(0, window.targets[pool], states.reshape(-1, data.shape[-1]))
        return data[window.slots, :, : window.span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: asked only where a forward is fresh; otherwise mask and positions are given."""
        return 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """The slots. `limit_bytes` bounds them, but never below one row."""

    def __init__(self, layout: Layout, device: torch.device, *, max_slots: int, limit_bytes: int) -> None:
        self._state = State()
        super().__init__(layers=[SlotLayer(self._state, places) for places in layout.places])
        self.layout = layout
        self.device = device
        self.max_slots = max_slots
        self.limit_bytes = limit_bytes
        self.slots = 0
        self.capacity = 0

    # -- room ------------------------------------------------------------------------------------------------------

    def fits(self, slots: int, length: int) -> bool:
        """Whether there may be `slots` rows of up to `length` tokens. One row always may."""
        return slots <= self.max_slots and (slots == 1 or self._affords(slots, length))

    def reserve(self, slots: int, length: int, used: int, ahead: int = 0) -> None:
        """Make room for `slots` rows of up to `length` tokens, and of up to `ahead` more where the limit allows it;
        the first `used` slots keep what they hold."""
        if slots <= self.slots and length <= self.capacity:
            return
        capacity = in_blocks(length)
        for more in (in_blocks(length + ahead), self.capacity):
            if more > capacity and self._affords(slots, more):
                capacity = more
        ample = max(self.slots, min(self.max_slots, 1 << (slots - 1).bit_length()))
        if self._affords(ample, capacity):
            slots = ample
        old, keep = self._state.pools, min(capacity, self.capacity)
        # Zeros, not whatever memory holds: masked positions still take part as 0 x value, and 0 x NaN is NaN.
        self._state.pools = [
            torch.zeros(count, slots, heads, capacity, dim, dtype=self.layout.dtype, device=self.device)
            for count, heads, dim in self.layout.pools
        ]
        for source, target in zip(old, self._state.pools, strict=False):
            target[:, :used, :, :keep] = source[:, :used, :, :keep]
        self.slots, self.capacity = slots, capacity

    def release(self) -> None:
        """Give the memory back."""
        self._state.pools = []
        self._state.window = None
        self.slots = self.capacity = 0

    def _affords(self, slots: int, length: int) -> bool:
        return slots * in_blocks(length) * self.layout.bytes_per_token <= self.limit_bytes

    # -- one forward -----------------------------------------------------------------------------------------------

    def open(self, start: int, pasts: Sequence[int], width: int) -> None:
        """The next forward computes `width` tokens for each row in slots `start`.., after `pasts` known ones."""
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
        self._state.window = Window(slice(start, stop), max(pasts) + width, width, fresh, targets)

    def _range(self, stop: int) -> Tensor:
        return torch.arange(stop, device=self.device)

    def masks(self, positions_NQ: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive attention masks [N, 1, Q, span] for the open window: one, or one for each kind of layer."""
        assert self._state.window is not None
        back_T = self._range(self._state.window.span)
        seen_NQT = back_T <= positions_NQ.unsqueeze(-1)
        made: dict[str, Tensor] = {}
        for kind, window in dict(zip(self.layout.kinds, self.layout.windows, strict=True)).items():
            near = seen_NQT if window is None else seen_NQT & (back_T > positions_NQ.unsqueeze(-1) - window)
            mask = torch.zeros(near.shape, dtype=self.layout.dtype, device=self.device)
            made[kind] = mask.masked_fill_(~near, float("-inf")).unsqueeze(1)
        return made if len(made) > 1 else next(iter(made.values()))

    # -- rows ------------------------------------------------------------------------------------------------------

    def read(self, slot: int, start: int, stop: int) -> Segment:
        """A copy of one row's keys and values at positions start..stop-1."""
        return [pool[:, slot, :, start:stop].clone() for pool in self._state.pools]

    def gather(self, slots: Sequence[int], length: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Copies of the first `length` keys and values [slots, heads, length, dim] of some rows, for each layer."""
        index = torch.tensor(slots, device=self.device)
        pools = [pool[:, :, :, :length].index_select(1, index) for pool in self._state.pools]
        return tuple((pools[a][i], pools[b][j]) for (a, i), (b, j) in self.layout.places)

    def write(self, slot: int, start: int, segment: Segment, count: int) -> None:
        """Put the first `count` tokens of `segment` at position `start` of a row."""
        for pool, part in zip(self._state.pools, segment, strict=True):
            pool[:, slot, :, start : start + count] = part[:, :, :count]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for pool in self._state.pools:
            pool[:, target, :, :length] = pool[:, source, :, :length]


def vocabulary(model: PreTrainedModel) -> int:
    """How many token ids the model knows."""
    return cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings


def in_blocks(length: int) -> int:
    """`length` rounded up to whole blocks."""
    return -(-length // BLOCK) * BLOCK
