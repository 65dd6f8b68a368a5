"""A store in PostgreSQL: any number of servers, on any number of machines, work on one database.

The writer of each server locks the rows it works with in the order of their keys and claims waiting rollouts with
SKIP LOCKED; what servers wait for they tell one another with NOTIFY (listener.py).

A lost connection is made again, for up to PATIENCE_SECONDS. A transaction that was under way is not lost with it: one
that was not committed is run again, and one whose commit was not answered is looked up. For that, each transaction
that writes puts its number in the row of its server in the table `servers`.

Deadlines are kept on the database's clock, measured once when a store is opened: machines whose clocks differ agree on
when an attempt times out, to within the time of one message. A server opened after the database's own clock was set
sees the deadlines of the others move by as much.
"""

from agentlightning.errors import MissingExtraError

try:
    import psycopg as _driver  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtraError("psycopg", "postgres") from error

from agentlightning.store.sql.postgres.database import PostgresDatabase

__all__ = ["PostgresDatabase"]
