"""A store in a SQLite file, or in memory."""

from agentlightning.store.sql.sqlite.database import SqliteDatabase

__all__ = ["SqliteDatabase"]
