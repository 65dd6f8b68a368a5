"""JSON of users: an integer of any size stays itself. orjson reads one beyond 64 bits as a float, and writes none."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeGuard

import msgspec
import orjson

Json: TypeAlias = dict[str, Any]
"""A JSON object."""

_decode: Final = msgspec.json.Decoder().decode


def loads(data: bytes | bytearray | memoryview | str) -> Any:
    """Raises orjson.JSONDecodeError."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return orjson.loads(data)


def is_table(value: object) -> TypeGuard[Json]:
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def recorded_objects(value: object) -> list[Json]:
    """The objects of a recorded list, JSON text (with the NaN and the lone surrogates that the standard library
    accepts) or a list; empty for anything else."""
    if isinstance(value, str | bytes):
        for read in (loads, json.loads):
            with suppress(ValueError):
                value = read(value)
                break
    return [each for each in value if is_table(each)] if is_list(value) else []


def dumps(value: Any, default: Callable[[Any], Any] | None = None, option: int | None = None) -> bytes:
    """Raises TypeError as orjson does."""
    try:
        return orjson.dumps(value, default, option)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise

    def written(part: Any) -> Any:
        return _map_large(part, lambda large: orjson.Fragment(str(large)))

    return orjson.dumps(written(value), default and (lambda part: written(default(part))), option)


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON, what JSON lacks as its `repr`."""
    if isinstance(value, str):
        return value
    return dumps(value, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


def _map_large(value: Any, write: Callable[[int], Any]) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**64:
        return write(value)
    if is_table(value):
        return {name: _map_large(each, write) for name, each in value.items()}
    return [_map_large(each, write) for each in value] if is_list(value) or isinstance(value, tuple) else value


# -- between processes -------------------------------------------------------------------------------------------------

_LARGE: Final = 1
"""MessagePack's code of such an integer, which has no form of its own there."""


def pack(message: Any, encoder: msgspec.msgpack.Encoder) -> bytes:
    """A message as MessagePack."""
    try:
        return encoder.encode(message)
    except OverflowError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=encoder.enc_hook)
        return encoder.encode(_map_large(plain, lambda large: msgspec.msgpack.Ext(_LARGE, str(large).encode())))


def unpack_large(code: int, data: memoryview) -> int:
    """msgspec's hook that reads what `pack` wrote."""
    if code != _LARGE:
        raise ValueError(f"code {code} is none of an integer")
    return int(bytes(data))
