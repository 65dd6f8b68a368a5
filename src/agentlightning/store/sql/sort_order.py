"""The order of lists: by which fields each can be sorted, and sorting and cutting what is in memory."""

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
"""The fields by which each kind of list can be sorted."""
_NATURAL: Final = {"attempts": "sequence_id", "spans": "sequence_id"}
"""The field that stands for the order a list has anyway."""


@dataclass(frozen=True, slots=True)
class Order:
    """How a list is sorted."""

    field: str | None = None
    """None: the order that lists of its kind have anyway."""
    descending: bool = False

    @classmethod
    def of(cls, kind: str, sort_by: str | None, sort_order: SortOrder, after: str | None = None) -> Self:
        """Raises ConfigError for a field that is not there, and for a place (`after`) in an order of another kind."""
        if sort_by is not None and sort_by not in SORTABLE[kind]:
            raise ConfigError(f"sort_by={sort_by!r} is no field that {kind} are sorted by: {', '.join(SORTABLE[kind])}")
        if sort_order not in ("asc", "desc"):
            raise ConfigError(f"sort_order={sort_order!r} is neither asc nor desc")
        field = None if sort_by == _NATURAL.get(kind) else sort_by
        descending = sort_order == "desc"
        if after is not None and (field is not None or (descending and kind != "rollouts")):
            raise ConfigError(f"after={after!r} goes with the order of creation; page through others by offset")
        return cls(field, descending)

    @property
    def natural(self) -> bool:
        """It is the order that the list has anyway."""
        return self.field is None and not self.descending

    def arrange(self, items: Sequence[Item]) -> list[Item]:
        """The items in this order; a missing value comes before all others, equal ones stay as they stand. Descending,
        all of it turned round."""
        stood = list(items[::-1]) if self.descending else list(items)
        if self.field is None:
            return stood
        field = attrgetter(self.field)

        def key(item: Item) -> tuple[bool, Any]:
            value = field(item)
            return (value is not None, value)

        return sorted(stood, key=key, reverse=self.descending)

    def page(self, items: Sequence[Item], limit: int, offset: int) -> list[Item]:
        """One page of the items in this order; limit -1: all of them."""
        arranged = self.arrange(items)
        return arranged[offset:] if limit < 0 else arranged[offset : offset + limit]


NATURAL: Final = Order()
"""The order that a list has anyway."""


def check_logic(filter_logic: FilterLogic) -> bool:
    """Whether one filter is enough. Raises ConfigError for what is no logic."""
    if filter_logic not in ("and", "or"):
        raise ConfigError(f"filter_logic={filter_logic!r} is neither and nor or")
    return filter_logic == "or"
