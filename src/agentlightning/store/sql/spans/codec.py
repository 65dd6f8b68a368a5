"""Binary codec of packs: spans of one attempt that are stored together as one value.

`pack` encodes spans in the thread of the caller, `unpack` decodes them. A pack leaves out what the store decides or
shares: the ids of the attempt, the sequence numbers, whether the attempt was superseded, and the blocks of long prompts
(token_blocks.py). Nothing here reads or writes a database.

A body without tokens is JSON, one list for each span:

    [name, start, end, trace_id, parent_id, status_code, status_message, attributes, events, resource, tokens]

where None is written `false` (so that a `null` can only come from an attribute), a list may end after `attributes`,
`resource` is `true` if it equals that of the span before, and `tokens` is a list of counts: [1 if the prompt begins
with a chain of blocks, prompt ids outside of it, response ids, log-probabilities], -1 for an absent attribute. A body
with tokens begins with a zero byte, the number of chains and the length of the JSON; then follow the digest of each
chain's last block, the JSON, and the numbers of all spans in order.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import repeat
from struct import Struct as Layout
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import astuple

from agentlightning.errors import ConfigError
from agentlightning.span import (
    INPUT_TOKENS,
    LOGPROBS,
    OUTPUT_TOKENS,
    PROMPT_TOKEN_IDS,
    RESPONSE_TOKEN_IDS,
    SUPERSEDED,
    TOKEN_ATTRIBUTES,
    Span,
    SpanEvent,
    new_span_id,
)
from agentlightning.store.sql.spans import token_blocks
from agentlightning.store.sql.spans.token_blocks import TokenBlock, TokenChain
from agentlightning.store.sql.spans.validate import (
    check_fields,
    check_sequence_ids,
    check_text,
    has_expected_types,
    refuse_not_finite,
    refuse_not_json,
)
from agentlightning.util.json_values import dumps, loads
from agentlightning.util.random_ids import random_bytes

_header = Layout("<xII")
ABSENT: Final = -1
"""The count of an absent token attribute."""
_has_null = re.compile(b"null").search  # a third faster than `in` on JSON text
_TOKENS: Final = frozenset(TOKEN_ATTRIBUTES)
_FEW: Final = 2
_SHORT: Final = {8}
"""The length of a row that ends after `attributes`."""


class SpanPack(Struct, frozen=True, gc=False):
    """Encoded spans of one attempt."""

    span_ids: tuple[str, ...]
    """One for each span; generated where the caller gave none."""
    ids: bytes
    """`span_ids` as `join_ids` encodes them."""
    sequence_ids: tuple[int, ...]
    """As the caller gave them; 0: the store assigns the next one."""
    json: bytes
    numbers: bytes = b""
    chains: tuple[TokenChain, ...] = ()
    """One for each prompt of at least one block, in the order of the spans."""

    @property
    def count(self) -> int:
        return len(self.span_ids)

    @property
    def body(self) -> bytes:
        """The encoded spans, which `unpack` decodes."""
        if not self.chains and not self.numbers and self.json.startswith(b"["):
            return self.json
        heads = b"".join([chain.head for chain in self.chains])
        return _header.pack(len(self.chains), len(self.json)) + heads + self.json + self.numbers

    @property
    def heads(self) -> set[bytes]:
        """The digests of the chains that `body` refers to, which protect their blocks from deletion."""
        return {chain.head for chain in self.chains}

    def blocks(self, known: Container[bytes] = ()) -> list[TokenBlock]:
        """The blocks that `body` refers to, parents first; see `token_blocks.blocks_of` for `known`."""
        return token_blocks.blocks_of(self.chains, known) if self.chains else []


# -- spans to bytes --------------------------------------------------------------------------------------------------


def pack(spans: Sequence[Span]) -> SpanPack:
    """Encode the spans of one attempt, in order. Raises ConfigError, which names the value, for what could not be read
    back as it is: no JSON, NaN or infinity, text that is not Unicode, a NUL in an id or a name, a negative
    sequence_id."""
    rows: list[tuple[Any, ...]] = []
    requested_ids: list[str] = []
    sequence_ids: list[int] = []
    texts: list[str] = []
    numbers: list[bytes] = []
    chains: list[TokenChain] = []
    before: dict[str, Any] | None = None
    for span in spans:
        fields = astuple(span)
        _, _, name, start, end, sequence_id, trace_id, span_id, parent, code, message, attributes, events, resource = (
            fields
        )
        requested_ids.append(span_id)
        sequence_ids.append(sequence_id)
        texts += (name, trace_id, parent or "")
        row = (
            name,
            start,
            False if end is None else end,
            trace_id,
            False if parent is None else parent,
            code,
            False if message is None else message,
            attributes,
        )
        if not has_expected_types(row):
            check_fields(span)
        if events or resource or not _TOKENS.isdisjoint(attributes):
            row = _long_row(row, span, before, numbers, chains)
        before = resource
        rows.append(row)
    generated = b"" if any(requested_ids) else b"\0" + random_bytes(8 * len(requested_ids))
    span_ids = split_ids(generated) if generated else tuple([span_id or new_span_id() for span_id in requested_ids])
    check_text(spans, span_ids, texts)
    check_sequence_ids(spans, sequence_ids)
    ids = generated or join_ids(span_ids)
    return SpanPack(span_ids, ids, tuple(sequence_ids), _dump(rows, spans), b"".join(numbers), tuple(chains))


def _long_row(
    row: tuple[Any, ...],
    span: Span,
    previous: dict[str, Any] | None,
    numbers: list[bytes],
    chains: list[TokenChain],
) -> tuple[Any, ...]:
    """The row of a span that has events, a resource or tokens."""
    attributes, counts = span.attributes, None
    if not _TOKENS.isdisjoint(attributes):
        attributes = attributes.copy()
        counts = _take_tokens(attributes, numbers, chains)
    events = [(event.name, event.timestamp, event.attributes) for event in span.events]
    resource = bool(span.resource) and (span.resource == previous or span.resource)
    return (*row[:-1], attributes, events, resource, counts or False)


def _take_tokens(
    attributes: dict[str, Any], numbers: list[bytes], chains: list[TokenChain]
) -> tuple[int, int, int, int]:
    """Move the token attributes to `numbers` and `chains`; returns their counts. An attribute that is no list of
    numbers in range stays."""
    chained, prompt_count = 0, ABSENT
    prompt = token_blocks.pack_ids(attributes.get(PROMPT_TOKEN_IDS))
    if prompt is not None:
        chain, rest = token_blocks.split(prompt)
        if chain is not None:
            chains.append(chain)
            chained = 1
        prompt_count = _take(attributes, PROMPT_TOKEN_IDS, rest, numbers)
    response = token_blocks.pack_ids(attributes.get(RESPONSE_TOKEN_IDS))
    logprobs = token_blocks.pack_logprobs(LOGPROBS, attributes.get(LOGPROBS))
    return (
        chained,
        prompt_count,
        _take(attributes, RESPONSE_TOKEN_IDS, response, numbers),
        _take(attributes, LOGPROBS, logprobs, numbers),
    )


def _take(attributes: dict[str, Any], name: str, data: bytes | None, numbers: list[bytes]) -> int:
    if data is None:
        return ABSENT
    del attributes[name]
    numbers.append(data)
    return len(data) // 4


def _dump(rows: list[tuple[Any, ...]], spans: Sequence[Span]) -> bytes:
    try:
        json = dumps(rows)
    except TypeError as error:
        for span in spans:
            refuse_not_json(span)
        raise ConfigError(f"these spans cannot be stored as JSON: {error}") from error
    if _has_null(json):
        for span in spans:
            refuse_not_finite(span)
    return json


def select(whole: SpanPack, indexes: Iterable[int]) -> SpanPack:
    """The pack with only the spans at `indexes`, for when the others are stored already."""
    spans = unpack(
        whole.body,
        rollout_id="",
        attempt_id="",
        span_ids=whole.span_ids,
        sequence_ids=whole.sequence_ids,
        chains={chain.head: chain.ids for chain in whole.chains},
    )
    return pack([spans[index] for index in indexes])


# -- bytes to spans --------------------------------------------------------------------------------------------------


def heads_of(body: bytes) -> list[bytes]:
    """The digests of the chains that a body refers to, in the order of its spans, without decoding the rest."""
    if body.startswith(b"["):
        return []
    count, _ = _header.unpack_from(body)
    start, size = _header.size, token_blocks.DIGEST
    if count * size > len(body):
        raise ValueError(f"{count} chains of tokens in {len(body)} bytes")
    return [body[start + index * size : start + (index + 1) * size] for index in range(count)]


def unpack(
    body: bytes,
    *,
    rollout_id: str,
    attempt_id: str,
    span_ids: Sequence[str],
    sequence_ids: Sequence[int],
    superseded: bool = False,
    chains: Mapping[bytes, bytes] | None = None,
    tokens: bool = True,
) -> list[Span]:
    """Decode the spans of a pack. `chains` has the tokens of each of `heads_of(body)`, as `token_blocks.join_blocks`
    returns them; ValueError if one is missing. Without `tokens`, only their numbers are decoded, for which chains are
    needed where a call has not recorded its usage."""
    json, numbers = _open(body, {} if chains is None else chains)
    rows = loads(json)
    ids = rollout_id, attempt_id
    if len(rows) > _FEW and set(map(len, rows)) == _SHORT:
        return _read_short(rows, ids, span_ids, sequence_ids, superseded)
    spans: list[Span] = []
    resource: dict[str, Any] = {}
    for row, span_id, sequence_id in zip(rows, span_ids, sequence_ids, strict=True):
        name, start, end, trace_id, parent, code, message, attributes = row[:8]
        end, parent, message = _with_none((end, parent, message))
        events: tuple[SpanEvent, ...] = ()
        resource_of: dict[str, Any] = {}
        if len(row) > 8:
            events = tuple([SpanEvent(*event) for event in row[8]])
            resource_of = resource.copy() if row[9] is True else row[9] or {}
            if row[10]:
                (numbers.read if tokens else numbers.count)(attributes, row[10], span_id)
        resource = resource_of
        if superseded:
            attributes[SUPERSEDED] = True
        many = start, end, sequence_id, trace_id, span_id, parent, code, message, attributes, events, resource_of
        spans.append(Span(*ids, name, *many))
    return spans


def _read_short(
    rows: list[Any], ids: tuple[str, str], span_ids: Sequence[str], sequence_ids: Sequence[int], superseded: bool
) -> list[Span]:
    """Decode spans without events, resources and tokens column by column, in half the time."""
    if not len(rows) == len(span_ids) == len(sequence_ids):
        raise ValueError(f"a pack of {len(rows)} spans has {len(span_ids)} ids and {len(sequence_ids)} numbers")
    names, starts, ends, traces, parents, codes, messages, attributes = zip(*rows, strict=True)
    if superseded:
        for each in attributes:
            each[SUPERSEDED] = True
    owner = map(repeat, ids)
    rest = codes, _with_none(messages), attributes
    return list(
        map(Span, *owner, names, starts, _with_none(ends), sequence_ids, traces, span_ids, _with_none(parents), *rest)
    )


def _with_none(values: Sequence[Any]) -> list[Any]:
    """Turn `false` back into None."""
    return [None if value is False else value for value in values]


def _open(body: bytes, chains: Mapping[bytes, bytes]) -> tuple[bytes, _Numbers]:
    if body.startswith(b"["):
        return body, _Numbers(b"", (), chains)
    heads = heads_of(body)
    start = _header.size + token_blocks.DIGEST * len(heads)
    end = start + _header.unpack_from(body)[1]
    return body[start:end], _Numbers(body[end:], heads, chains)


class _Numbers:
    """The binary part of a body, decoded span by span."""

    __slots__ = ("_chains", "_data", "_heads", "_start")

    def __init__(self, data: bytes, heads: Sequence[bytes], chains: Mapping[bytes, bytes]) -> None:
        self._data = data
        self._heads = iter(heads)
        self._chains = chains
        self._start = 0

    def read(self, attributes: dict[str, Any], counts: Sequence[int], span_id: str) -> None:
        """Add the token attributes of the next span."""
        chained, prompt, response, logprobs = counts
        if prompt != ABSENT:
            ids = self._next(prompt)
            if chained:
                ids = self._chain(span_id) + ids
            attributes[PROMPT_TOKEN_IDS] = token_blocks.read_ids(ids)
        if response != ABSENT:
            attributes[RESPONSE_TOKEN_IDS] = token_blocks.read_ids(self._next(response))
        if logprobs != ABSENT:
            attributes[LOGPROBS] = token_blocks.read_logprobs(self._next(logprobs))

    def count(self, attributes: dict[str, Any], counts: Sequence[int], span_id: str) -> None:
        """Add the numbers of prompt and response tokens of the next span, where it has not recorded them itself."""
        chained, prompt, response, logprobs = counts
        if prompt != ABSENT:
            self._next(prompt)
            head = next(self._heads) if chained else None
            if INPUT_TOKENS not in attributes:
                before = 0 if head is None else self._tokens_of(head, span_id)
                attributes[INPUT_TOKENS] = before + prompt
        if response != ABSENT:
            self._next(response)
            attributes.setdefault(OUTPUT_TOKENS, response)
        if logprobs != ABSENT:
            self._next(logprobs)

    def _tokens_of(self, head: bytes, span_id: str) -> int:
        try:
            return len(self._chains[head]) // 4
        except KeyError:
            raise token_blocks.missing_tokens(span_id) from None

    def _next(self, count: int) -> bytes:
        start, self._start = self._start, self._start + 4 * count
        return self._data[start : self._start]

    def _chain(self, span_id: str) -> bytes:
        try:
            return self._chains[next(self._heads)]
        except KeyError:
            raise token_blocks.missing_tokens(span_id) from None


# -- ids -------------------------------------------------------------------------------------------------------------


def join_ids(span_ids: Sequence[str]) -> bytes:
    """Encode ids: 8 bytes each if all of them are 16 hexadecimal digits, as those of OpenTelemetry, else JSON."""
    joined = "".join(span_ids)
    if set(map(len, span_ids)) == {16}:
        try:
            packed = bytes.fromhex(joined)
        except ValueError:
            packed = b""
        if packed.hex() == joined:
            return b"\0" + packed
    return dumps(span_ids)


def split_ids(data: bytes) -> tuple[str, ...]:
    """Decode what `join_ids` encoded."""
    if data.startswith(b"["):
        return tuple(loads(data))
    digits = data[1:].hex()
    return tuple([digits[start : start + 16] for start in range(0, len(digits), 16)])
