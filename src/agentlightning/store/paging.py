"""Reads long lists of a store in pages, so that a list of any length takes little memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

PAGE: Final = 2_000
"""Items of a list that are read at once at most."""
PAGE_BYTES: Final = 4 * 1024 * 1024


class PageSizer:
    """Chooses how many items to read at once: few at first, then about `target_bytes`, at most `max_items` items."""

    def __init__(self, target_bytes: int = PAGE_BYTES, max_items: int = PAGE, first: int = 8) -> None:
        self._target_bytes = target_bytes
        self._max_items = max_items
        self.items = min(first, self._max_items)

    def record(self, items: int, size: int) -> None:
        """Note that the last page of `items` items had `size` bytes."""
        fitting = self._target_bytes * items // max(size, 1)
        self.items = max(1, min(fitting, 4 * self.items, self._max_items))


async def read_pages(
    read: Callable[..., Awaitable[list[Any]]], arguments: Mapping[str, Any], cursor: str | None, sizer: PageSizer
) -> AsyncIterator[list[Any]]:
    """The pages of a list, at least one. `read` reads one page; `arguments` are those of the whole list; `cursor` is
    the field of an item that `after` takes, None if the list has no such argument."""
    page = dict(arguments)
    left: int = page["limit"]
    is_sorted = page.get("sort_by") is not None or page.get("sort_order") == "desc"
    while True:
        wanted = page["limit"] = sizer.items if left < 0 else min(sizer.items, left)
        items = await read(**page)
        yield items
        left -= len(items) if left > 0 else 0
        if len(items) < wanted or left == 0:
            return
        if cursor is None or is_sorted:  # only lists in the order of creation continue after an item
            page["offset"] += len(items)
        else:
            page |= {"offset": 0, "after": getattr(items[-1], cursor)}
