"""Version 2 to 3: counters of rollouts, attempts and spans."""

from __future__ import annotations

from typing import Final

from agentlightning.store.sql.migrations.base import Schema

_SQLITE: Final = """
CREATE TABLE counts (
    shard TEXT NOT NULL,
    name TEXT NOT NULL,
    queue TEXT NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (shard, name, queue)
) WITHOUT ROWID
"""
_POSTGRES: Final = """
CREATE TABLE counts (
    shard TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    queue TEXT COLLATE "C" NOT NULL,
    number BIGINT NOT NULL,
    PRIMARY KEY (shard, name, queue)
) WITH (fillfactor = 50)
"""
_LOCK: Final = "LOCK TABLE rollouts, attempts IN SHARE ROW EXCLUSIVE MODE"
COUNT: Final = (
    "INSERT INTO counts SELECT '', status, queue, count(*) FROM rollouts GROUP BY status, queue",
    "INSERT INTO counts SELECT '', 'attempts', '', count(*) FROM attempts",
    "INSERT INTO counts SELECT '', 'spans', '', coalesce(sum(spans), 0) FROM attempts",
)


def migrate(schema: Schema) -> None:
    if schema.kind == "postgresql":
        schema.execute(_LOCK)
    schema.execute(_SQLITE if schema.kind == "sqlite" else _POSTGRES)
    for statement in COUNT:
        schema.execute(statement)
