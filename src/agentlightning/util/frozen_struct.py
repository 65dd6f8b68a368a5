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
from pydantic import ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

StructType = TypeVar("StructType", bound="FrozenStruct")


class FrozenStruct(Struct, frozen=True):
    """Immutable struct. Decorate each subclass with `as_dataclass`."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a field of this type in a pydantic model: an instance, or a table of its fields."""
        fields: dict[str, Any] = {field.name: (field.type, field) for field in dataclasses.fields(cls)}
        model = create_model(cls.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        return core_schema.union_schema(
            [
                core_schema.is_instance_schema(cls),
                core_schema.no_info_after_validator_function(
                    lambda table: cls(**dict(table)), handler.generate_schema(model)
                ),
            ],
            serialization=core_schema.plain_serializer_function_ser_schema(msgspec.structs.asdict),
        )


def as_dataclass(struct: type[StructType]) -> type[StructType]:
    """Class decorator: add the fields that `dataclasses` looks for."""
    fields = [(info.name, info.type, _field(info)) for info in msgspec.structs.fields(struct)]
    made = dataclasses.make_dataclass(struct.__name__, fields, init=False, repr=False, eq=False, kw_only=True)
    struct.__dataclass_fields__ = made.__dataclass_fields__
    return struct


def _field(info: msgspec.structs.FieldInfo) -> Any:
    defaults = {"default": info.default, "default_factory": info.default_factory}
    return dataclasses.field(**{name: each for name, each in defaults.items() if each is not NODEFAULT})
