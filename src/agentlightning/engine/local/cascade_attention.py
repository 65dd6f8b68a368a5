"""Shared-prefix (cascade) attention for decoding on the CPU: the prefix of a group of rows is read from memory once.

Decoding one token for many rows is bound by reading keys and values. Where rows begin with the same tokens, a single
matrix product of all their queries with one copy of the prefix gives the same scores; the rest of each row is read as
usual, and one softmax spans both. Registered with transformers as an attention function, so the model is unchanged.

Shapes: N rows, G groups, S members of the largest group, H key heads, R queries of each, P tokens of the prefix, T of a
whole row, D dim.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "agentlightning_cascade"
BLOCK = 16
"""Prefixes are compared in whole blocks of this many tokens."""
CANDIDATES = 32
"""Number of prefix lengths to try."""
MIN_SAVED_BYTES = 1 << 20
"""Bytes per layer that sharing must save to be worth its extra operations."""
MIN_SAVED_SHARE = 0.25
"""Share of the bytes read that it must save."""
FEW_ROWS, LONG_ROWS = 8, 160
"""In bfloat16, SDPA is faster than two products and a softmax for up to so many rows, or rows of so many tokens."""
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that change the scores in ways not implemented here."""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Rows grouped by a common prefix."""

    length: int
    """P"""
    rows: tuple[tuple[int, ...], ...]
    hashes: tuple[bytes, ...]
    """Hash of each group's prefix."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The groups of a batch, with one copy of each prefix."""

    groups: PrefixGroups
    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values of each layer: [G, H, P, D]."""
    members: Tensor | None
    """Row index of each group member, [G x S], padded by repeating a row. None: the rows are already in this order."""
    positions: Tensor | None
    """Index of each row in `members`, [N]; None likewise."""


def hash_prefixes(tokens: Sequence[int], adapter: str | None = None) -> list[bytes]:
    """Hashes of the first block, of the first two, and so on. Another adapter has other keys and values for them."""
    digest = hashlib.blake2b((adapter or "").encode(), digest_size=16)
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest.update(array("q", tokens[start : start + BLOCK]).tobytes())
        hashes.append(digest.digest())
    return hashes


def find_groups(row_hashes: Sequence[Sequence[bytes]], lengths: Sequence[int], token_bytes: int) -> PrefixGroups | None:
    """The grouping that saves the most memory reads, or None if none is worth it.

    `row_hashes`: prefix hashes of each row; `lengths`: its tokens; `token_bytes`: bytes of a layer for each token."""
    count, max_blocks = len(row_hashes), min(map(len, row_hashes))
    best, blocks = 0, 0
    step = max(1, max_blocks // CANDIDATES)
    for candidate in range(max_blocks, 0, -step):
        sizes = Counter(row[candidate - 1] for row in row_hashes)
        saved = (count - len(sizes)) * candidate * BLOCK
        if saved > best and len(sizes) * max(sizes.values()) <= 2 * count:
            best, blocks = saved, candidate
    if best * token_bytes < MIN_SAVED_BYTES or best < MIN_SAVED_SHARE * sum(lengths):
        return None
    rows: dict[bytes, list[int]] = {}
    for index, row in enumerate(row_hashes):
        rows.setdefault(row[blocks - 1], []).append(index)
    return PrefixGroups(blocks * BLOCK, tuple(map(tuple, rows.values())), tuple(rows))


def index_rows(groups: PrefixGroups, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """`members` and `positions` of SharedPrefix."""
    size = max(map(len, groups.rows))
    members = [row for rows in groups.rows for row in (*rows, *rows[:1] * (size - len(rows)))]
    if members == list(range(len(members))):
        return None, None
    positions = [0] * sum(map(len, groups.rows))
    for group, rows in enumerate(groups.rows):
        for position, row in enumerate(rows):
            positions[row] = group * size + position
    return torch.tensor(members, device=device), torch.tensor(positions, device=device)


_current: ContextVar[SharedPrefix | None] = ContextVar("shared_prefix", default=None)


def supported(model: PreTrainedModel) -> bool:
    """Whether `model` runs where this was measured to pay off, with an attention function that it can replace."""
    config: Any = model.config.get_text_config(decoder=True)
    return model.device.type == "cpu" and config._attn_implementation == "sdpa"


@contextmanager
def use_cascade_attention(model: PreTrainedModel, shared: SharedPrefix | None) -> Generator[None]:
    """Within the context, a `supported` model computes attention with `attend`."""
    config: Any = model.config.get_text_config(decoder=True)
    token = _current.set(shared)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
        _current.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [N, H x R, 1, D], key and value [N, H, T, D], additive mask [N, 1, 1, T]; returns [N, 1, H x R, D].

    Any other call goes to SDPA, which is slower for single queries on the CPU."""
    if (
        query.shape[2] != 1
        or attention_mask is None
        or any(kwargs.get(name) is not None for name in UNSUPPORTED_ARGUMENTS)
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    count, heads, dim = query.shape[0], key.shape[1], query.shape[3]
    queries = (query * (dim**-0.5 if scaling is None else scaling)).reshape(count, heads, -1, dim)
    output = attend_rows(queries, key, value, attention_mask, getattr(module, "layer_idx", None))
    return output.reshape(count, 1, -1, value.shape[3]), None


def attend_rows(queries_NHRD: Tensor, key: Tensor, value: Tensor, mask: Tensor, layer: int | None) -> Tensor:
    """What `attend` computes, from scaled queries; returns [N, H, R, D]."""
    shared = _current.get()
    if shared is None or layer is None:
        if key.dtype == torch.bfloat16 and (len(key) <= FEW_ROWS or key.shape[2] >= LONG_ROWS):
            return functional.scaled_dot_product_attention(queries_NHRD, key, value, mask, scale=1.0)
        return _softmax(queries_NHRD @ key.transpose(2, 3) + mask, queries_NHRD.dtype) @ value
    prefix, (keys, values) = shared.groups.length, shared.layers[layer]
    head = _by_row(_by_group(queries_NHRD, shared) @ keys.transpose(2, 3), shared)
    tail = queries_NHRD @ key[:, :, prefix:].transpose(2, 3) + mask[..., prefix:]
    weights = _softmax(torch.cat([head, tail], dim=-1), queries_NHRD.dtype)
    output = _by_row(_by_group(weights[..., :prefix], shared) @ values, shared)
    return output + weights[..., prefix:] @ value[:, :, prefix:]


def _softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return scores.softmax(dim=-1, dtype=torch.float32).to(dtype)


def _by_group(x_NHRD: Tensor, shared: SharedPrefix) -> Tensor:
    """[N, H, R, D] to [G, H, S x R, D]."""
    groups = len(shared.groups.rows)
    _, heads, queries, dim = x_NHRD.shape
    grouped = x_NHRD if shared.members is None else x_NHRD.index_select(0, shared.members)
    return grouped.reshape(groups, -1, heads, queries, dim).transpose(1, 2).reshape(groups, heads, -1, dim)


def _by_row(x_GHSD: Tensor, shared: SharedPrefix) -> Tensor:
    """[G, H, S x R, D] to [N, H, R, D]."""
    groups, heads, _, dim = x_GHSD.shape
    size = max(map(len, shared.groups.rows))
    grouped = x_GHSD.view(groups, heads, size, -1, dim).transpose(1, 2).reshape(groups * size, heads, -1, dim)
    return grouped if shared.positions is None else grouped.index_select(0, shared.positions)


AttentionInterface.register(NAME, attend)
