"""Validation of spans. A quick test comes first; only a span that fails it is examined field by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.span import Span
from agentlightning.store.validation import find_not_finite
from agentlightning.util.json_values import dumps

MAX_SEQUENCE_ID: Final = 2**53
"""Larger integers are rounded by JSON parsers of other languages."""
MAX_ID_CHARACTERS: Final = 512

_EXPECTED: Final = frozenset(
    (str, start, end, str, parent, str, message, dict)
    for start in (float, int)
    for end in (float, int, bool)
    for parent in (str, bool)
    for message in (str, bool)
)
"""The types of the fields in a row of a pack, where None is False."""


def has_expected_types(row: tuple[Any, ...]) -> bool:
    """Whether the fields of a span have exactly the expected types; if not, `check_fields` decides."""
    return tuple(map(type, row)) in _EXPECTED


def check_fields(span: Span) -> None:
    """Refuse fields of a wrong type; subclasses are accepted."""
    texts: dict[str, Any] = {"name": span.name, "trace_id": span.trace_id, "status_code": span.status_code}
    texts |= {"parent_id": span.parent_id or "", "status_message": span.status_message or ""}
    for field, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{field}={value!r} of span {span.name!r} is not a string")
    for field, time in (("start_time", span.start_time), ("end_time", 0 if span.end_time is None else span.end_time)):
        if not isinstance(time, int | float) or isinstance(time, bool):
            raise ConfigError(f"{field}={time!r} of span {span.name!r} is not a number of seconds since 1970")
    if not isinstance(span.attributes, dict):
        raise ConfigError(f"attributes={span.attributes!r} of span {span.name!r} is not a dict")


def check_text(spans: Sequence[Span], span_ids: Sequence[str], others: Sequence[str]) -> None:
    """Refuse an id or a name that not every database can store. others: every name and other id of the spans."""
    parts = [*span_ids, *others]
    try:
        text = "".join(parts)
    except TypeError as error:
        bad = next(value for value in span_ids if not isinstance(value, str))
        raise ConfigError(f"span_id={bad!r} is not a string") from error
    if "\0" not in text and text.isascii() and max(map(len, parts), default=0) <= MAX_ID_CHARACTERS:
        return
    for span, span_id in zip(spans, span_ids, strict=True):
        ids = (("span_id", span_id), ("trace_id", span.trace_id), ("parent_id", span.parent_id or ""))
        for field, value in (*ids, ("name", span.name)):
            _check_one_text(field, value, span)
        for field, value in ids:
            if len(value) > MAX_ID_CHARACTERS:
                raise ConfigError(
                    f"{field} of span {span.name!r} has {len(value)} characters; the store takes {MAX_ID_CHARACTERS}"
                )


def _check_one_text(field: str, value: str, span: Span) -> None:
    if "\0" in value:
        raise ConfigError(f"{field}={value!r} of span {span.name!r} contains a NUL character; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{field}={value!r} of span {span.name!r} is not Unicode text: {error.reason}") from error


def check_sequence_ids(spans: Sequence[Span], sequence_ids: Sequence[int]) -> None:
    if set(map(type, sequence_ids)) <= {int} and (
        not sequence_ids or 0 <= min(sequence_ids) <= max(sequence_ids) <= MAX_SEQUENCE_ID
    ):
        return
    for span in spans:
        if not isinstance(span.sequence_id, int) or not 0 <= span.sequence_id <= MAX_SEQUENCE_ID:
            raise ConfigError(
                f"sequence_id={span.sequence_id!r} of span {span.name!r}: use 0 for the next, or 1 to {MAX_SEQUENCE_ID}"
            )


def _parts(span: Span) -> list[tuple[str, Any]]:
    """(name in an error, value) of everything in a span that a user chooses."""
    fields: tuple[str, ...] = ("name", "start_time", "end_time", "status_code", "status_message")
    parts = [(field, getattr(span, field)) for field in fields]
    parts += [(f"attributes[{name!r}]", value) for name, value in span.attributes.items()]
    parts += [(f"resource[{name!r}]", value) for name, value in span.resource.items()]
    for index, event in enumerate(span.events):
        parts += [(f"events[{index}].name", event.name), (f"events[{index}].timestamp", event.timestamp)]
        parts += [(f"events[{index}].attributes[{name!r}]", value) for name, value in event.attributes.items()]
    return parts


def refuse_not_json(span: Span) -> None:
    """Refuse a value that orjson does not encode."""
    containers = [span.attributes, span.resource, *(event.attributes for event in span.events)]
    for name in (name for container in containers for name in container):
        if not isinstance(name, str):
            raise ConfigError(f"{name!r}, the name of an attribute of span {span.name!r}, is not a string")
    for name, value in _parts(span):
        try:
            dumps(value)
        except TypeError as error:
            raise ConfigError(
                f"{name} of span {span.name!r} cannot be stored as JSON: {error}; "
                "use str, int, float, bool, None, list, dict"
            ) from error


def refuse_not_finite(span: Span) -> None:
    """Refuse NaN and infinity, which orjson writes as null."""
    events = [(event.timestamp, event.attributes) for event in span.events]
    if find_not_finite((span.start_time, span.end_time, span.attributes, span.resource, events)) is None:
        return
    for name, value in _parts(span):
        found = find_not_finite(value)
        if found is not None:
            raise ConfigError(
                f"{name}{found[0]} is {found[1]} in span {span.name!r}, which JSON cannot hold; "
                "leave it out or send it as text"
            )
