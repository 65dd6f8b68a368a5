"""Numbered migrations: one runner for SQLite and PostgreSQL.

A new database is created from tables/schema.py. An older one runs every step above its version, in one transaction; a
step contains the SQL of its version and never imports the schema, which goes on changing. A database of any other
version is refused, as this code could lose what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from agentlightning.errors import StoreError
from agentlightning.store.sql.tables.schema import SCHEMA_VERSION


class Schema(Protocol):
    """The schema of one database, over a connection that nobody else uses."""

    name: str
    """The name of the database in errors."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """A transaction during which no other process changes the schema; rolled back if the block raises."""
        ...

    def create(self) -> None:
        """Create the tables of SCHEMA_VERSION. Raises StoreError if the database has other tables."""
        ...

    def about(self) -> dict[str, str]:
        """The table `about`; nothing for an empty database."""
        ...

    def execute(self, statement: str) -> Any:
        """Execute one statement in the SQL of this database."""
        ...


Step = Callable[[Schema], None]

STEPS: Final[Mapping[int, Step]] = {}
"""By version: the step from the version before."""
_SINCE: Final = "2.0"
"""Beside the version in the table `about`, as development versions of 2.0 counted schemas of their own."""


def _version(about: Mapping[str, str]) -> str:
    return about.get("schema_version", "") if about.get("since") == _SINCE else ""


def migrate(schema: Schema, latest: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS) -> None:
    """Migrate a database to version `latest`. Raises StoreError for one of another version, or no store."""
    if _version(schema.about()) == str(latest):
        return
    with schema.exclusive():
        about = schema.about()  # another process may have migrated it meanwhile
        if _version(about) == str(latest):
            return
        if not about:
            schema.create()
        else:
            for step in _steps(schema.name, _version(about), latest, steps):
                step(schema)
        schema.execute("DELETE FROM about")
        schema.execute(f"INSERT INTO about (name, value) VALUES ('schema_version', '{latest}'), ('since', '{_SINCE}')")


def _steps(name: str, found: str, latest: int, steps: Mapping[int, Step]) -> list[Step]:
    numbers = range(int(found) + 1, latest + 1) if found.isdecimal() else ()
    if not numbers or not set(numbers) <= steps.keys():
        raise StoreError(
            f"{name} was written by another version of agentlightning (its schema is "
            f"{found or 'of a development one'}, this one has {latest}); export it with that version (agl store "
            "export FILE.jsonl) and import the file into a new store with this one (agl store import FILE.jsonl)"
        )
    return [steps[number] for number in numbers]
