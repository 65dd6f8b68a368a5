"""Base class of the values that exist in millions: spans, rollouts, attempts.

A `FrozenStruct` is immutable and compares by its fields. It is a msgspec struct, whose construction takes a twentieth
of the time of a frozen dataclass, but `dataclasses.fields`, `replace` and `asdict`, and libraries that use them, treat
it as a dataclass. It validates nothing. Subclasses set `gc=False`: they hold JSON, which has no cycles, and garbage
collection would take a tenth of the store's time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import NODEFAULT, Struct
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

StructType = TypeVar("StructType", bound="FrozenStruct")


class FrozenStruct(Struct, frozen=True):
    """Immutable struct. Decorate each subclass with `as_dataclass`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a field of this type in a pydantic model."""
        parameters: list[core_schema.ArgumentsParameter] = []
        for field in dataclasses.fields(cls):
            schema = handler.generate_schema(field.type)
            if field.default is not dataclasses.MISSING:
                schema = core_schema.with_default_schema(schema, default=field.default)
            elif field.default_factory is not dataclasses.MISSING:
                schema = core_schema.with_default_schema(schema, default_factory=field.default_factory)
            parameters.append(core_schema.arguments_parameter(field.name, schema, mode="keyword_only"))
        constructor = core_schema.call_schema(core_schema.arguments_schema(parameters), cls)
        return core_schema.union_schema(
            [core_schema.is_instance_schema(cls), constructor],
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
            ),
        )


def as_dataclass(struct: type[StructType]) -> type[StructType]:
    """Class decorator: add the fields that `dataclasses` looks for."""
    options = {"kw_only": False, "init": True, "repr": True, "hash": None, "compare": True, "metadata": None}
    struct.__dataclass_fields__ = fields = dict[str, dataclasses.Field[Any]]()
    for info in msgspec.structs.fields(struct):
        default = dataclasses.MISSING if info.default is NODEFAULT else info.default
        factory = dataclasses.MISSING if info.default_factory is NODEFAULT else info.default_factory
        fields[info.name] = field = dataclasses.Field(default, factory, **options)  # pyright: ignore
        field.name, field.type = info.name, info.type
        field._field_type = dataclasses._FIELD  # pyright: ignore
    return struct
