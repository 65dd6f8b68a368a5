"""What this process has recorded and not yet written: opening a store writes it first, so that it is found there."""

from __future__ import annotations

from collections.abc import Callable

_writers: list[Callable[[], object]] = []


def register(write: Callable[[], object]) -> None:
    """Call `write` before a store is opened."""
    _writers.append(write)


def write_pending() -> None:
    """Write what is waiting, as far as that is possible in a few seconds."""
    for write in _writers:
        write()
