"""Version 3 to 4: idempotency keys, the steady clock, how often a claim was answered, when resources were replaced.

Also counts everything anew, as a process of version 2 that went on writing did not update the counters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from agentlightning.store.sql.migrations.base import Schema
from agentlightning.store.sql.migrations.v3 import COUNT

_TABLES: Final[Mapping[str, Sequence[str]]] = {
    "sqlite": (
        """
        CREATE TABLE answered_calls (
            key TEXT NOT NULL,
            digest BLOB NOT NULL,
            answered_at FLOAT NOT NULL,
            answer BLOB,
            PRIMARY KEY (key)
        )
        """,
        """
        CREATE TABLE clocks (
            name TEXT NOT NULL,
            reading FLOAT NOT NULL,
            steady FLOAT NOT NULL,
            PRIMARY KEY (name)
        )
        """,
        "ALTER TABLE resources ADD COLUMN update_time FLOAT",
        "ALTER TABLE attempts ADD COLUMN claims INTEGER DEFAULT '1' NOT NULL",
    ),
    "postgresql": (
        """
        CREATE TABLE answered_calls (
            key TEXT COLLATE "C" NOT NULL,
            digest BYTEA NOT NULL,
            answered_at DOUBLE PRECISION NOT NULL,
            answer BYTEA,
            PRIMARY KEY (key)
        )
        """,
        """
        CREATE TABLE clocks (
            name TEXT COLLATE "C" NOT NULL,
            reading DOUBLE PRECISION NOT NULL,
            steady DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (name)
        )
        """,
        "ALTER TABLE resources ADD COLUMN update_time DOUBLE PRECISION",
        "ALTER TABLE attempts ADD COLUMN claims BIGINT DEFAULT '1' NOT NULL",
    ),
}
_INDEXES: Final = (
    "CREATE INDEX answered_calls_in_order ON answered_calls (answered_at)",
    # The first databases of version 2 were made without these.
    "CREATE INDEX IF NOT EXISTS token_blocks_of_parent ON token_blocks (parent)",
    "CREATE INDEX IF NOT EXISTS pack_blocks_of_digest ON pack_blocks (digest)",
)
_LOCK: Final = "LOCK TABLE rollouts, attempts, counts IN SHARE ROW EXCLUSIVE MODE"


def migrate(schema: Schema) -> None:
    if schema.kind == "postgresql":
        schema.execute(_LOCK)
    for statement in (*_TABLES[schema.kind], *_INDEXES, "DELETE FROM counts", *COUNT):
        schema.execute(statement)
