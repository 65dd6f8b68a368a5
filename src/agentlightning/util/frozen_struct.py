"""The base of values that are made by the million: spans, rollouts, attempts.

A carrier is frozen and compares by its fields. It is a msgspec struct, which is made in a twentieth of the time of a
frozen dataclass, and still one of the dataclasses for `dataclasses.fields`, `replace` and `asdict`, and for libraries
that look for them. It checks nothing. Subclasses say `gc=False`: what they hold is JSON, which has no cycles, and the
garbage collector spent a tenth of a store's time on them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import NODEFAULT, Struct
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Kind = TypeVar("Kind", bound="Carrier")


class Carrier(Struct, frozen=True):
    """What its subclasses name are its fields, in the order of its arguments. Each is decorated with `carrier`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """As a field of a user's pydantic model."""
        parameters: list[core_schema.ArgumentsParameter] = []
        for field in dataclasses.fields(cls):
            kind = handler.generate_schema(field.type)
            if field.default is not dataclasses.MISSING:
                kind = core_schema.with_default_schema(kind, default=field.default)
            elif field.default_factory is not dataclasses.MISSING:
                kind = core_schema.with_default_schema(kind, default_factory=field.default_factory)
            parameters.append(core_schema.arguments_parameter(field.name, kind, mode="keyword_only"))
        made = core_schema.call_schema(core_schema.arguments_schema(parameters), cls)
        return core_schema.union_schema(
            [core_schema.is_instance_schema(cls), made],
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
            ),
        )


def carrier(kind: type[Kind]) -> type[Kind]:
    """Give a carrier the fields that `dataclasses` looks for."""
    known = {"kw_only": False, "init": True, "repr": True, "hash": None, "compare": True, "metadata": None}
    kind.__dataclass_fields__ = fields = dict[str, dataclasses.Field[Any]]()
    for info in msgspec.structs.fields(kind):
        default = dataclasses.MISSING if info.default is NODEFAULT else info.default
        factory = dataclasses.MISSING if info.default_factory is NODEFAULT else info.default_factory
        fields[info.name] = field = dataclasses.Field(default, factory, **known)  # pyright: ignore
        field.name, field.type = info.name, info.type
        field._field_type = dataclasses._FIELD  # pyright: ignore
    return kind
