"""Numbered migrations: one runner for SQLite and PostgreSQL.

A new database is created from tables/schema.py. An older one runs every step above its version, in one transaction. A
step contains the SQL of its version and never imports the schema, which goes on changing: the outcome of a step never
changes. A database that a newer release wrote is refused, as older code could lose what that added. A process that has
a database open while a newer one migrates it is refused when it writes next, as it would not maintain what is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from agentlightning.errors import StoreError
from agentlightning.store.sql.migrations import v2, v3, v4
from agentlightning.store.sql.migrations.base import Schema
from agentlightning.store.sql.tables.schema import SCHEMA_VERSION

__all__ = ["STEPS", "Schema", "Step", "migrate"]

Step = Callable[[Schema], None]

STEPS: Final[Mapping[int, Step]] = {2: v2.migrate, 3: v3.migrate, 4: v4.migrate}
"""By version: the step from the version before. PostgreSQL was added with version 2."""


def migrate(schema: Schema, latest: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS) -> None:
    """Migrate a database to version `latest`. Raises StoreError for one that is newer, or not a store."""
    if schema.version() == latest:
        return
    with schema.exclusive():
        version = schema.version()  # another process may have migrated it meanwhile
        if version == latest:
            return
        if version > latest:
            raise StoreError(
                f"{schema.name} was written by a newer version of agentlightning (its schema is {version}, this one "
                f"knows {latest}); run: pip install --upgrade agentlightning, or give another {schema.elsewhere}"
            )
        if version == 0:
            schema.create()
        else:
            schema.remove_guard()
            for number in range(version + 1, latest + 1):
                steps[number](schema)
        schema.install_guard(latest)
        schema.execute("DELETE FROM about WHERE name = 'schema_version'")
        schema.execute(f"INSERT INTO about (name, value) VALUES ('schema_version', '{latest}')")
