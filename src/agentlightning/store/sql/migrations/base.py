"""What a migration needs of a database, of either kind."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

Kind = Literal["sqlite", "postgresql"]


class Schema(Protocol):
    """The tables of one database, over a connection that nobody else uses."""

    name: str
    """How errors call the database."""
    elsewhere: str
    """What to give instead of one that cannot be used: "path" or "database"."""
    kind: Kind
    connection: Any
    """The driver's own."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """A transaction during which no other process changes the schema; undone where the block raises."""
        ...

    def version(self) -> int:
        """0 where there is no store yet."""
        ...

    def create(self) -> None:
        """Make the tables of SCHEMA_VERSION. Raises StoreError where there are tables of something else."""
        ...

    def execute(self, statement: str) -> Any:
        """One statement of the database's own SQL."""
        ...

    def remove_guard(self) -> None:
        """Let processes of every version write, this one too, until `install_guard`. Nothing where there is none."""
        ...

    def install_guard(self, version: int) -> None:
        """From now on, let only those processes write that know this version of the schema: an older one that has the
        database open is refused with its next write."""
        ...
