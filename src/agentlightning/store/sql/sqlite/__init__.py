"""A store in a SQLite file, or in memory."""

from agentlightning.store.sql.sqlite.backend import SqliteDatabase

__all__ = ["SqliteDatabase"]
