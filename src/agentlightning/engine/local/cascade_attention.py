"""Attention while drawing, on the CPU: what rows share is read from memory once for the group, not once for each.

Drawing one token for many rows is bound by reading keys and values. Where rows begin with the same tokens, one
matrix product of all their queries with one copy of the prefix gives the same scores; the rest of each row is read
as ever, and one softmax spans both. Plugged into transformers as an attention function, so the model stays as it is.

Shapes: N rows, G groups, S places for members in a group, H heads of keys, R queries of each, P tokens of the
prefix, T of a whole row, D dim.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "agentlightning_drawing"
BLOCK = 16
"""Prefixes are compared in whole blocks of so many tokens."""
CANDIDATES = 32
"""How many lengths of a common prefix are tried."""
WORTH_BYTES = 1 << 20
"""What sharing must save of each layer's reading to be worth its extra operations."""
WORTH_SHARE = 0.25
"""And what share of it."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that change the scores in ways not computed here."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows begin alike."""

    length: int
    """P"""
    rows: tuple[tuple[int, ...], ...]
    names: tuple[bytes, ...]
    """A fingerprint of each group's prefix."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The groups of a batch, with one copy of each prefix."""

    groups: Groups
    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values of each layer: [G, H, P, D]."""
    members: Tensor | None
    """The row at each place, [G x S]; a place that no row needs repeats one. None: the rows lie in that order."""
    places: Tensor | None
    """Each row's place, [N]. None: likewise."""


def fingerprints(tokens: Sequence[int]) -> list[bytes]:
    """A digest of the first block, of the first two, and so on."""
    digest = hashlib.blake2b(digest_size=16)
    found: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest.update(array("q", tokens[start : start + BLOCK]).tobytes())
        found.append(digest.digest())
    return found


def find_groups(prints: Sequence[Sequence[bytes]], lengths: Sequence[int], token_bytes: int) -> Groups | None:
    """The grouping that saves most reading, or None where none is worth it.

    `prints`: fingerprints of each row; `lengths`: its tokens; `token_bytes`: what a layer keeps for each token."""
    count, most = len(prints), min(map(len, prints))
    best, blocks = 0, 0
    step = max(1, most // CANDIDATES)
    for candidate in range(most, 0, -step):
        sizes = Counter(row[candidate - 1] for row in prints)
        saved = (count - len(sizes)) * candidate * BLOCK
        if saved > best and len(sizes) * max(sizes.values()) <= 2 * count:
            best, blocks = saved, candidate
    if best * token_bytes < WORTH_BYTES or best < WORTH_SHARE * sum(lengths):
        return None
    rows: dict[bytes, list[int]] = {}
    for index, row in enumerate(prints):
        rows.setdefault(row[blocks - 1], []).append(index)
    return Groups(blocks * BLOCK, tuple(map(tuple, rows.values())), tuple(rows))


def layout(groups: Groups, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """`members` and `places` of SharedPrefix."""
    size = max(map(len, groups.rows))
    members = [row for rows in groups.rows for row in (*rows, *rows[:1] * (size - len(rows)))]
    if members == list(range(len(members))):
        return None, None
    places = [0] * sum(map(len, groups.rows))
    for group, rows in enumerate(groups.rows):
        for place, row in enumerate(rows):
            places[row] = group * size + place
    return torch.tensor(members, device=device), torch.tensor(places, device=device)


_current: ContextVar[SharedPrefix | None] = ContextVar("shared_prefix", default=None)


def applies(model: PreTrainedModel) -> bool:
    """Whether `model` runs where this was measured to pay, and with an attention function this can stand in for."""
    config: Any = model.config.get_text_config(decoder=True)
    return model.device.type == "cpu" and config._attn_implementation == "sdpa"


@contextmanager
def attending(model: PreTrainedModel, shared: SharedPrefix | None) -> Generator[None]:
    """Within, `model`, to which this `applies`, draws tokens with `attend`."""
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

    Anything else goes to SDPA, which takes longer for single queries on the CPU."""
    if query.shape[2] != 1 or attention_mask is None or any(kwargs.get(name) is not None for name in UNSUPPORTED):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    count, heads, dim = query.shape[0], key.shape[1], query.shape[3]
    queries = (query * (dim**-0.5 if scaling is None else scaling)).reshape(count, heads, -1, dim)
    shared, layer = _current.get(), getattr(module, "layer_idx", None)
    if shared is None or layer is None:
        weights = _softmax(queries @ key.transpose(2, 3) + attention_mask, query.dtype)
        output = weights @ value
    else:
        output = _attend_shared(queries, key, value, attention_mask, shared, cast(int, layer))
    return output.reshape(count, 1, -1, value.shape[3]), None


def _attend_shared(
    queries_NHRD: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, shared: SharedPrefix, layer: int
) -> Tensor:
    prefix, (keys, values) = shared.groups.length, shared.layers[layer]
    head = _by_row(_by_group(queries_NHRD, shared) @ keys.transpose(2, 3), shared)
    tail = queries_NHRD @ key[:, :, prefix:].transpose(2, 3) + attention_mask[..., prefix:]
    weights = _softmax(torch.cat([head, tail], dim=-1), queries_NHRD.dtype)
    output = _by_row(_by_group(weights[..., :prefix], shared) @ values, shared)
    return output + weights[..., prefix:] @ value[:, :, prefix:]


def _softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    return scores.softmax(dim=-1, dtype=torch.float32).to(dtype)


def _by_group(x_NHRD: Tensor, shared: SharedPrefix) -> Tensor:
    """[N, H, R, D] to [G, H, S x R, D]."""
    groups = len(shared.groups.rows)
    _, heads, queries, dim = x_NHRD.shape
    placed = x_NHRD if shared.members is None else x_NHRD.index_select(0, shared.members)
    return placed.reshape(groups, -1, heads, queries, dim).transpose(1, 2).reshape(groups, heads, -1, dim)


def _by_row(x_GHSD: Tensor, shared: SharedPrefix) -> Tensor:
    """[G, H, S x R, D] to [N, H, R, D]."""
    groups, heads, _, dim = x_GHSD.shape
    size = max(map(len, shared.groups.rows))
    placed = x_GHSD.view(groups, heads, size, -1, dim).transpose(1, 2).reshape(groups * size, heads, -1, dim)
    return placed if shared.places is None else placed.index_select(0, shared.places)


AttentionInterface.register(NAME, attend)
