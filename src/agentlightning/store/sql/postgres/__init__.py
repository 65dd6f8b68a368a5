"""A store in PostgreSQL: any number of servers, on any number of machines, work on one database.

The writer of each server locks the rows it works with in the order of their keys and claims waiting rollouts with
SKIP LOCKED; what servers wait for they tell one another with NOTIFY (listener.py).

A lost connection is made again, for up to PATIENCE_SECONDS. A transaction that was under way is not lost with it: one
that was not committed is run again, and one whose commit was not answered is looked up. For that, each transaction
that writes puts its number in the row of its server in the table `servers`.

Deadlines are kept on a clock of the database that passes while any of its servers is alive (clock.py): each server asks
for it once a second, so that machines whose clocks differ agree on when an attempt times out, to within the time of one
message, and nobody's clock can be set to end what is alive.
"""

from agentlightning.errors import MissingExtraError

try:
    import psycopg as _driver  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtraError("psycopg", "postgres") from error

from agentlightning.store.sql.postgres.backend import PostgresDatabase

__all__ = ["PostgresDatabase"]
