"""The interface that migrations use, implemented by sqlite/schema.py and postgres/schema.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

Kind = Literal["sqlite", "postgresql"]


class Schema(Protocol):
    """The schema of one database, over a connection that nobody else uses."""

    name: str
    """The name of the database in errors."""
    elsewhere: str
    """What errors advise to change: "path" or "database"."""
    kind: Kind
    connection: Any
    """The driver's own."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """A transaction during which no other process changes the schema; rolled back if the block raises."""
        ...

    def version(self) -> int:
        """0 for an empty database."""
        ...

    def create(self) -> None:
        """Create the tables of SCHEMA_VERSION. Raises StoreError if the database has other tables."""
        ...

    def execute(self, statement: str) -> Any:
        """Execute one statement in the SQL of this database."""
        ...

    def remove_guard(self) -> None:
        """Let processes of every version write, until `install_guard`."""
        ...

    def install_guard(self, version: int) -> None:
        """From now on, only let processes write that know this version of the schema: an older one that has the
        database open is refused when it writes next."""
        ...
