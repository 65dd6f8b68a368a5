"""The order of lists: the fields that each kind can be sorted by, and sorting and paging in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Self, TypeVar

from agentlightning.errors import ConfigError
from agentlightning.store.types import FilterLogic, SortOrder

Item = TypeVar("Item")

SORTABLE: Final[dict[str, tuple[str, ...]]] = {
    "rollouts": ("rollout_id", "start_time", "end_time", "status", "mode", "resources_id", "queue", "priority"),
    "attempts": (
        "sequence_id",
        "attempt_id",
        "start_time",
        "end_time",
        "status",
        "worker_id",
        "last_heartbeat_time",
    ),
    "spans": (
        "sequence_id",
        "start_time",
        "end_time",
        "name",
        "span_id",
        "trace_id",
        "parent_id",
        "attempt_id",
        "status_code",
    ),
    "resources": ("resources_id", "version", "create_time", "update_time"),
    "workers": (
        "worker_id",
        "status",
        "last_heartbeat_time",
        "current_rollout_id",
        "current_attempt_id",
        "open_attempts",
    ),
}
"""By kind of list: the fields it can be sorted by."""
_NATURAL: Final = {"attempts": "sequence_id", "spans": "sequence_id"}
"""By kind of list: the field that it is sorted by without `sort_by`."""


@dataclass(frozen=True, slots=True)
class Order:
    """How a list is sorted."""

    field: str | None = None
    """None: the natural order of its kind."""
    descending: bool = False

    @classmethod
    def of(cls, kind: str, sort_by: str | None, sort_order: SortOrder, after: str | None = None) -> Self:
        """Raises ConfigError for an unknown field, and for `after` with an order that has no such cursor."""
        if sort_by is not None and sort_by not in SORTABLE[kind]:
            raise ConfigError(f"sort_by={sort_by!r} cannot sort {kind}; use one of: {', '.join(SORTABLE[kind])}")
        if sort_order not in ("asc", "desc"):
            raise ConfigError(f"sort_order={sort_order!r} is neither asc nor desc")
        field = None if sort_by == _NATURAL.get(kind) else sort_by
        descending = sort_order == "desc"
        if after is not None and (field is not None or (descending and kind != "rollouts")):
            raise ConfigError(f"after={after!r} requires the order of creation; page through other orders by offset")
        return cls(field, descending)

    @property
    def natural(self) -> bool:
        """Whether it is the natural order."""
        return self.field is None and not self.descending

    def sort(self, items: Sequence[Item]) -> list[Item]:
        """Sort the items: None first, stable among equal values; descending reverses all of it."""
        ordered = list(items[::-1]) if self.descending else list(items)
        if self.field is None:
            return ordered
        field = attrgetter(self.field)

        def key(item: Item) -> tuple[bool, Any]:
            value = field(item)
            return (value is not None, value)

        return sorted(ordered, key=key, reverse=self.descending)

    def page(self, items: Sequence[Item], limit: int, offset: int) -> list[Item]:
        """One page of the sorted items; limit -1: all of them."""
        ordered = self.sort(items)
        return ordered[offset:] if limit < 0 else ordered[offset : offset + limit]


NATURAL: Final = Order()
"""Without `sort_by`."""


def check_logic(filter_logic: FilterLogic) -> bool:
    """Whether one filter is enough. Raises ConfigError for an unknown logic."""
    if filter_logic not in ("and", "or"):
        raise ConfigError(f"filter_logic={filter_logic!r} is neither and nor or")
    return filter_logic == "or"
