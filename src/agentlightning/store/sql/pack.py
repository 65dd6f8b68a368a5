"""Binary codec of packs: spans of one attempt that are stored together as one value.

`pack` encodes spans in the thread of the caller, `unpack` decodes them. A pack leaves out what the store decides: the
ids of the attempt, the sequence numbers, whether the attempt was superseded; and the tokens of long prompts, which the
store keeps apart (prompts.py). Nothing here reads or writes a database.

A body without tokens is JSON, one list for each span:

    [name, start, end, trace_id, parent_id, status_code, status_message, attributes, events, resource, tokens]

where None is written `false` (so that a `null` can only come from an attribute), a list may end after `attributes`,
`resource` is `true` if it equals that of the span before, and `tokens` is a list of counts: [1 if the prompt is kept
apart, prompt ids, response ids, log-probabilities], -1 for an absent attribute. A body with tokens begins with a zero
byte and the length of the JSON; then follow the JSON, and the numbers of all spans in order: int32 and float32, little
endian.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import repeat
from struct import Struct as Layout
from typing import Any, Final, cast

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
from agentlightning.store import validation
from agentlightning.util.json_values import dumps, loads
from agentlightning.util.random_ids import random_bytes

_header: Final = Layout("<xI")
ABSENT: Final = -1
"""The count of an absent token attribute."""
LONG_PROMPT: Final = 256
"""Bytes from which a prompt is kept apart from its span."""
_TOKENS: Final = frozenset(TOKEN_ATTRIBUTES)
_SHORT: Final = 8
"""The length of a row that ends after `attributes`."""
_AT_ONCE: Final = 65536
"""Token ids that are packed at once: meanwhile no other thread runs."""


class SpanPack(Struct, frozen=True, gc=False):
    """Encoded spans of one attempt."""

    span_ids: tuple[str, ...]
    """One for each span; generated where the caller gave none."""
    ids: bytes
    """`span_ids` as `join_ids` encodes them."""
    sequence_ids: tuple[int, ...]
    """As the caller gave them; 0: the store assigns the next one."""
    body: bytes
    """The encoded spans, which `unpack` decodes."""
    prompts: tuple[tuple[int, bytes], ...]
    """(index of the span, tokens of its prompt), for those that are kept apart."""
    named: bool
    """The caller chose the id of at least one span."""

    @property
    def count(self) -> int:
        return len(self.span_ids)


# -- spans to bytes --------------------------------------------------------------------------------------------------


def pack(spans: Sequence[Span]) -> SpanPack:
    """Encode the spans of one attempt, in order. Raises ConfigError, which names the value, for what could not be read
    back as it is: no JSON, NaN or infinity, text that is not Unicode, a NUL in an id or a name, a negative
    sequence_id."""
    rows: list[tuple[Any, ...]] = []
    span_ids: list[str] = []
    sequence_ids: list[int] = []
    numbers: list[bytes] = []
    prompts: list[tuple[int, bytes]] = []
    before: dict[str, Any] | None = None
    for span in spans:
        fields = astuple(span)
        _, _, name, start, end, sequence_id, trace_id, span_id, parent, code, message, attributes, events, resource = (
            fields
        )
        text = f"{name}{trace_id}{span_id}{parent or ''}"
        usual = text.isascii() and "\0" not in text and len(text) <= validation.MAX_TEXT
        if not usual or tuple(map(type, fields[2:12])) not in _EXPECTED or not 0 <= sequence_id <= MAX_SEQUENCE_ID:
            _check_fields(span)
        span_ids.append(span_id)
        sequence_ids.append(sequence_id)
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
        if events or resource or not _TOKENS.isdisjoint(attributes):
            row = _long_row(row, span, before, numbers, prompts, len(rows))
        before = resource
        rows.append(row)
    named = any(span_ids)
    if named:
        names = tuple([span_id or new_span_id() for span_id in span_ids])
        ids = join_ids(names)
    else:
        ids = b"\0" + random_bytes(8 * len(span_ids))
        names = split_ids(ids)
    body = _dump(rows, spans)
    if any(numbers) or prompts:
        body = b"".join([_header.pack(len(body)), body, *numbers])
    return SpanPack(names, ids, tuple(sequence_ids), body, tuple(prompts), named)


def _long_row(
    row: tuple[Any, ...],
    span: Span,
    previous: dict[str, Any] | None,
    numbers: list[bytes],
    prompts: list[tuple[int, bytes]],
    index: int,
) -> tuple[Any, ...]:
    """The row of a span that has events, a resource or tokens."""
    attributes, counts = span.attributes, None
    if not _TOKENS.isdisjoint(attributes):
        attributes = attributes.copy()
        counts = _take_tokens(attributes, numbers, prompts, index)
    events = [(event.name, event.timestamp, event.attributes) for event in span.events]
    resource = bool(span.resource) and (span.resource == previous or span.resource)
    return (*row[:-1], attributes, events, resource, counts or False)


def _take_tokens(
    attributes: dict[str, Any], numbers: list[bytes], prompts: list[tuple[int, bytes]], index: int
) -> tuple[int, int, int, int]:
    """Move the token attributes to `numbers` and `prompts`; returns their counts. An attribute that is no list of
    numbers in range stays."""
    prompt = pack_ids(attributes.get(PROMPT_TOKEN_IDS))
    apart = prompt is not None and len(prompt) >= LONG_PROMPT
    if apart and prompt is not None:
        prompts.append((index, prompt))
    response = pack_ids(attributes.get(RESPONSE_TOKEN_IDS))
    logprobs = pack_logprobs(LOGPROBS, attributes.get(LOGPROBS))
    return (
        int(apart),
        _take(attributes, PROMPT_TOKEN_IDS, prompt, [] if apart else numbers),
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
            _refuse_values(span)
        raise ConfigError(f"these spans cannot be stored as JSON: {error}") from error
    if json.rfind(b"null") >= 0:  # in half the time of `in`
        for span in spans:
            if validation.find_not_finite(span) is not None:
                _refuse_values(span)
    return json


def select(whole: SpanPack, indexes: Iterable[int]) -> SpanPack:
    """The pack with only the spans at `indexes`, for when the others are stored already."""
    prompts = dict(whole.prompts)
    spans = unpack(whole.body, "", "", whole.span_ids, whole.sequence_ids, prompt=prompts.__getitem__)
    return pack([spans[index] for index in indexes])


# -- bytes to spans --------------------------------------------------------------------------------------------------

PromptOf = Callable[[int], bytes]
"""The tokens of the prompt of the span at an index of a pack. Raises LookupError if they are missing."""


def _no_prompt(index: int) -> bytes:
    raise KeyError(index)


def unpack(
    body: bytes,
    rollout_id: str,
    attempt_id: str,
    span_ids: Sequence[str],
    sequence_ids: Sequence[int],
    superseded: bool = False,
    *,
    prompt: PromptOf = _no_prompt,
    tokens: bool = True,
) -> list[Span]:
    """Decode the spans of a pack. Without `tokens`, only their numbers are decoded. Raises ValueError if a prompt is
    missing."""
    json, data = body, b""
    if not body.startswith(b"["):
        end = _header.size + _header.unpack_from(body)[0]
        json, data = body[_header.size : end], body[end:]
    rows = loads(json)
    if not len(rows) == len(span_ids) == len(sequence_ids):
        raise ValueError(f"a pack of {len(rows)} spans has {len(span_ids)} ids and {len(sequence_ids)} numbers")
    if not rows:
        return []
    # Column by column, which takes half the time; `zip` ends with the shortest row.
    names, starts, ends, traces, parents, codes, messages, attributes, *_ = zip(*rows, strict=False)
    events: list[tuple[SpanEvent, ...]] = [()] * len(rows)
    resources: list[dict[str, Any]] = [{} for _ in rows]
    read = BytesIO(data).read
    for index, row in enumerate(rows):
        if len(row) > _SHORT:
            events[index] = tuple([SpanEvent(*event) for event in row[8]])
            resources[index] = resources[index - 1].copy() if row[9] is True else row[9] or {}
            if row[10] and not tokens:
                _count_tokens(attributes[index], row[10])
            elif row[10]:
                try:
                    apart = prompt(index) if row[10][0] else b""
                except LookupError:
                    what = f"tokens of span {span_ids[index]!r} are missing from the database"
                    raise ValueError(f"{what}: it was changed by another program") from None
                _read_tokens(attributes[index], row[10], read, apart)
    if superseded:
        for each in attributes:
            each[SUPERSEDED] = True
    owner, texts = (repeat(rollout_id), repeat(attempt_id)), (_with_none(parents), codes, _with_none(messages))
    columns = names, starts, _with_none(ends), sequence_ids, traces, span_ids, *texts, attributes, events, resources
    return list(map(Span, *owner, *columns))


def _with_none(values: Sequence[Any]) -> list[Any]:
    """Turn `false` back into None."""
    return [None if value is False else value for value in values]


def _read_tokens(attributes: dict[str, Any], counts: Sequence[int], read: Callable[[int], bytes], apart: bytes) -> None:
    """Add the token attributes of a span. read: the next bytes of the binary part. apart: the prompt, where it is kept
    apart."""
    is_apart, prompt, response, logprobs = counts
    ids = apart if is_apart else read(4 * max(prompt, 0))
    if prompt != ABSENT:
        attributes[PROMPT_TOKEN_IDS] = read_ids(ids)
    if response != ABSENT:
        attributes[RESPONSE_TOKEN_IDS] = read_ids(read(4 * response))
    if logprobs != ABSENT:
        attributes[LOGPROBS] = read_logprobs(read(4 * logprobs))


def _count_tokens(attributes: dict[str, Any], counts: Sequence[int]) -> None:
    """Add how many tokens a span has, where it has not recorded that itself."""
    for name, number in ((INPUT_TOKENS, counts[1]), (OUTPUT_TOKENS, counts[2])):
        if number != ABSENT:
            attributes.setdefault(name, number)


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


# -- numbers ---------------------------------------------------------------------------------------------------------


def pack_ids(value: Any) -> bytes | None:
    """Token ids in binary; None for what is no list of int32."""
    if not isinstance(value, list | tuple):
        return None
    ids = cast("Sequence[Any]", value)
    parts = [ids[start : start + _AT_ONCE] for start in range(0, len(ids), _AT_ONCE)]
    try:
        return b"".join([struct.pack(f"<{len(part)}i", *part) for part in parts])
    except struct.error:
        return None


def pack_logprobs(name: str, value: Any) -> bytes | None:
    """Log-probabilities in binary, rounded to float32; None for what is no list of numbers. Raises ConfigError, which
    names the index, if one is not finite."""
    if not isinstance(value, list | tuple):
        return None
    numbers = cast("Sequence[Any]", value)
    try:
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
        if math.isfinite(sum(numbers)):
            return packed
    except struct.error:
        return None
    except OverflowError:  # too large for float32, or for any float
        pass
    bad = next((index for index, number in enumerate(numbers) if not _fits(number)), None)
    if bad is None:  # only their sum is not finite
        return struct.pack(f"<{len(numbers)}f", *numbers)
    raise ConfigError(f"{name}[{bad}] is {numbers[bad]}; a log-probability is a finite number within float32")


def _fits(number: Any) -> bool:
    try:
        return math.isfinite(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return False


def read_ids(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def read_logprobs(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


# -- validation ------------------------------------------------------------------------------------------------------

# A quick test comes first; only a span that fails it is examined field by field.

MAX_SEQUENCE_ID: Final = 2**53
"""Larger integers are rounded by JSON parsers of other languages."""

_NONE: Final = type(None)
_EXPECTED: Final = frozenset(
    (str, start, end, int, str, str, parent, str, message, dict)
    for start in (float, int)
    for end in (float, int, _NONE)
    for parent in (str, _NONE)
    for message in (str, _NONE)
)
"""The types of the fields of a span from `name` to `attributes`."""


def _check_fields(span: Span) -> None:
    """Refuse fields of a wrong type, of which subclasses are accepted, and an id or a name that not every database can
    store."""
    of = f" of span {span.name!r}"
    for field in ("name", "span_id", "trace_id", "parent_id"):
        value = getattr(span, field)
        if value is not None or field != "parent_id":
            validation.check_text(value, field, of, sys.maxsize if field == "name" else validation.MAX_TEXT)
    for field, value in (("status_code", span.status_code), ("status_message", span.status_message or "")):
        if not isinstance(value, str):
            validation.check_text(value, field, of)
    for field, time in (("start_time", span.start_time), ("end_time", 0 if span.end_time is None else span.end_time)):
        if not isinstance(time, int | float) or isinstance(time, bool):
            raise ConfigError(f"{field}={time!r}{of} is not a number of seconds since 1970")
    if not isinstance(span.attributes, dict):
        raise ConfigError(f"attributes={span.attributes!r}{of} is not a dict")
    number = span.sequence_id
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_SEQUENCE_ID:
        raise ConfigError(f"sequence_id={span.sequence_id!r}{of}: use 0 for the next, or 1 to {MAX_SEQUENCE_ID}")


def _refuse_values(span: Span) -> None:
    """Refuse a value that JSON cannot hold."""
    of = f" of span {span.name!r}"
    for field in ("name", "start_time", "end_time", "status_code", "status_message", "events", "resource"):
        validation.to_json(getattr(span, field), field, of)
    for name, value in span.attributes.items():
        if not isinstance(name, str):
            raise ConfigError(f"{name!r}, the name of an attribute of span {span.name!r}, is not a string")
        validation.to_json(value, f"attributes[{name!r}]", of)
