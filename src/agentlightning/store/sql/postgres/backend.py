"""The PostgreSQL backend: prepares a database, connects to it and listens to other servers."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import psycopg

from agentlightning.errors import StoreError
from agentlightning.store.sql.migrations import migrate
from agentlightning.store.sql.postgres.connection import PostgresConnection, fetch_value
from agentlightning.store.sql.postgres.listener import PostgresListener
from agentlightning.store.sql.postgres.schema import PostgresSchema
from agentlightning.store.sql.postgres.server import PostgresServer
from agentlightning.store.sql.tables.backend import Wake

MIN_VERSION: Final = 130_000
"""PostgreSQL 13."""


class PostgresDatabase(PostgresServer):
    """See tables/backend.py for each method."""

    def prepare(self) -> None:
        try:
            with contextlib.closing(self.open()) as connection:
                self._check(connection)
                migrate(PostgresSchema(connection, self.name, self.schema))
        except self.errors as error:
            raise self.explain(error) from error

    def _check(self, connection: psycopg.Connection[Any]) -> None:
        if connection.info.server_version < MIN_VERSION:
            raise StoreError(f"{self.name} is PostgreSQL {connection.info.server_version // 10_000}; use 13 or newer")
        if fetch_value(connection, "SELECT pg_is_in_recovery()"):
            raise StoreError(f"{self.name} is a standby, which takes no writes; give the address of the primary")

    def connect(self, read_only: bool) -> PostgresConnection:
        try:
            return PostgresConnection(self, read_only)
        except self.errors as error:
            raise self.explain(error) from error

    def listen(self, wake: Wake) -> PostgresListener:
        try:
            return PostgresListener(self.open, self.channel, self.id, wake, self.closing)
        except self.errors as error:
            raise self.explain(error) from error
