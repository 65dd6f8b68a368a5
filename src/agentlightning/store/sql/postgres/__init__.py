"""The PostgreSQL backend: any number of servers, on any number of machines, share one database.

The writer of each server locks the rows it works with in the order of their keys, and claims waiting rollouts with
SKIP LOCKED. Servers notify one another of what they wait for with NOTIFY (server.py).

A lost connection is reopened, for up to RECONNECT_SECONDS. The running transaction is not lost with it: if it was not
committed, it runs again, and if the answer to its commit was lost, its outcome is looked up. For that, each transaction
that writes stores its number in the row of its server in the table `servers`.

Deadlines are kept on a clock of the database that passes while any of its servers is alive (see store/clock.py). Each
server synchronises with it once a second, so that machines whose clocks differ agree on when an attempt times out, to
within the duration of one message, and setting the clock of a machine ends nothing that is alive.
"""

from agentlightning.errors import MissingExtraError

try:
    import psycopg as _driver  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtraError("psycopg", "postgres") from error

from agentlightning.store.sql.postgres.connection import PostgresDatabase

__all__ = ["PostgresDatabase"]
