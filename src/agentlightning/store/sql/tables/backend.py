"""The interface of a database backend, which sqlite/ and postgres/ implement.

A `Database` locates, prepares and opens a database, and explains its errors; a `Connection` is used by one thread at a
time. Statements are written once in SQLAlchemy Core (statements.py) and compiled for each dialect on first use. They
run on the driver's own cursor, which costs a fraction of SQLAlchemy's connection, and a store does little else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from sqlalchemy import ClauseElement, Table
from sqlalchemy.engine import Dialect

from agentlightning.errors import StoreError
from agentlightning.store.clock import Clock

Row = Sequence[Any]


@dataclass(slots=True, eq=False)
class Compiled:
    """The SQL for one dialect, and the order of its parameters."""

    sql: str
    order: tuple[int, ...] | None
    """For each parameter of the SQL, the index of its value; None if the values are in order."""

    def arrange(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values if self.order is None else tuple([values[index] for index in self.order])


@dataclass(slots=True, eq=False)
class Statement:
    """A statement of SQLAlchemy Core that takes its parameters in the order of `names`. A list is passed to the driver
    in the form that `schema.in_list` expects in its dialect."""

    clause: ClauseElement
    names: tuple[str, ...] = ()
    _compiled: dict[str, Compiled] = field(default_factory=dict[str, Compiled])

    def compiled(self, dialect: Dialect) -> Compiled:
        """For a dialect with positional parameters."""
        found = self._compiled.get(dialect.name)
        if found is None:
            found = self._compiled[dialect.name] = self._compile(dialect)
        return found

    def _compile(self, dialect: Dialect) -> Compiled:
        compiled = self.clause.compile(dialect=dialect)
        order = tuple(getattr(compiled, "positiontup", None) or ())
        if set(order) != set(self.names):
            raise AssertionError(f"the parameters are {order}, not {self.names}: {compiled}")
        indexes = None if order == self.names else tuple(self.names.index(name) for name in order)
        return Compiled(str(compiled), indexes)


@dataclass(frozen=True, slots=True, eq=False)
class Insert:
    """An INSERT of many rows, each with the values of `columns`."""

    table: Table
    columns: tuple[str, ...]
    unique: tuple[str, ...] = ()
    """If a row with the same values in these columns exists, only its columns in `replace` and `add` change."""
    replace: tuple[str, ...] = ()
    """Columns that are set to the new value."""
    add: tuple[str, ...] = ()
    """Columns to which the new value is added."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """An UPDATE of many rows, each with the values of `columns`, the first of which is `key`."""

    table: Table
    columns: tuple[str, ...]


class Connection(Protocol):
    """One connection, used by one thread at a time. It raises the driver's own errors."""

    writer_id: str
    """Whose counters it adds to (session/counters.py): "" on a database with one writer, else a name of its own."""

    def begin(self, write: bool) -> None:
        """Begin a transaction. On SQLite, one that writes takes the only write lock."""
        ...

    def commit(self) -> None:
        """The transaction is durable when this returns."""
        ...

    def rollback(self) -> None:
        """Roll back the transaction, if there is one."""
        ...

    def close(self) -> None: ...

    def all(self, statement: Statement, *values: Any) -> list[Any]:
        """All rows, as tuples."""
        ...

    def run(self, statement: Statement, *values: Any) -> int:
        """The number of rows changed."""
        ...

    def insert(self, insert: Insert, rows: Sequence[Row]) -> int:
        """Insert in as few statements as the driver allows; returns the number of rows inserted or changed."""
        ...

    def update(self, update: Update, rows: Sequence[Row]) -> None:
        """Update in as few statements as the driver allows."""
        ...

    def keys(self, table: Table, count: int) -> Sequence[int]:
        """Reserve `count` values for the column `key` of a table, ascending, above those reserved before. Within a
        transaction that writes."""
        ...

    def commit_in_order(self, table: Table) -> None:
        """To be called before an insert for which the database assigns the keys: other transactions that insert into
        `table` wait until this one has ended, so that no row is visible before one with a lower key."""
        ...

    def check_files(self) -> None:
        """Raises StoreLostError if the files of the database are no longer those that were opened."""
        ...

    def last_position(self) -> int:
        """The last position of a rollout, at or before which no further one will appear: a page in order of creation
        must not go beyond it. Waits for no other server. Restarts the transaction, which must be read-only."""
        ...

    def lock(self, table: Table) -> None:
        """Lock a table against writes by others until the transaction ends."""
        ...

    def sync_clock(self, clock: Clock) -> None:
        """Record that a server is alive, and set `clock` to the steady time that all processes of the database share.
        Within a transaction that writes; on `shared` databases outside of any, as all servers write the same row."""
        ...

    def changed(self) -> bool:
        """Whether another connection has written since the last call. Always True where finding out would cost as much
        as reading again. On databases that are not `shared`, the answer is valid until the end of the transaction."""
        ...

    def notify(self, queued: bool, finished: Sequence[str]) -> None:
        """Notify the listeners of other processes with the commit: a rollout may be claimable, these rollouts have
        finished. To be called before `commit`. Does nothing where other processes poll."""
        ...

    def size(self) -> int:
        """The size of the database in bytes."""
        ...

    def vacuum(self) -> None:
        """Return free space to the file system. Outside of a transaction."""
        ...


Wake = Callable[[bool, Sequence[str] | None], None]
"""(a rollout may be claimable, ids of rollouts that have finished; None: any may have)."""


class Listener(Protocol):
    """Receives notifications of other processes in a thread of its own."""

    def close(self) -> None: ...


class Database(Protocol):
    """One database. Creating the object opens nothing."""

    name: str
    """Its name in errors, without any password."""
    dialect: Dialect
    shared: bool
    """Several processes write at once, each locking the rows it works with, so rows read in one transaction may be
    outdated in the next. Otherwise there is one write lock, and `Connection.changed` tells whether they are."""
    single: bool
    """One connection serves everything (a database in memory)."""
    errors: ClassVar[tuple[type[Exception], ...]]
    """The exceptions of the driver."""

    def prepare(self) -> None:
        """Check that it is a store, create the tables of a new one, migrate an older one. Raises StoreError."""
        ...

    def connect(self, read_only: bool) -> Connection:
        """Raises StoreError."""
        ...

    def begin_close(self) -> None:
        """The store is about to be closed: calls no longer wait long for a lost server."""
        ...

    def listen(self, wake: Wake) -> Listener | None:
        """Call `wake` from another thread when other processes commit. None: poll `Connection.changed` instead."""
        ...

    def explain(self, error: Exception) -> StoreError:
        """The StoreError to raise instead of an error of the driver."""
        ...

    def is_fatal(self, error: BaseException) -> bool:
        """Whether the whole transaction failed for a reason that no single command causes (disk full, connection
        lost), so that running its commands one by one would not help."""
        ...

    def may_retry(self, error: BaseException) -> bool:
        """Whether the same transaction may succeed when retried at once (a deadlock, a serialization failure)."""
        ...
