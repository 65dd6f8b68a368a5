"""What the store asks of a database: the interface that sqlite.py and postgres.py implement.

A `Database` knows how to find, check, open and explain one; a `Connection` is used by one thread at a time. Statements
are written once in SQLAlchemy Core (statements.py) and compiled for each dialect when first used: running compiled SQL
on the driver's own cursor costs a fraction of going through SQLAlchemy's connection, and a store does little else.
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
    """SQL for one dialect, and where each of its parameters comes from."""

    sql: str
    order: tuple[int, ...] | None
    """For each parameter of the SQL, its index among the values given; None where that is the order given."""

    def arrange(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return values if self.order is None else tuple([values[index] for index in self.order])


@dataclass(slots=True, eq=False)
class Statement:
    """A statement of SQLAlchemy Core whose parameters are given in the order of `names`.

    A list given for a parameter (of `schema.is_one_of`) goes to the driver in the way of its dialect.
    """

    clause: ClauseElement
    names: tuple[str, ...] = ()
    _compiled: dict[str, Compiled] = field(default_factory=dict[str, Compiled])

    def compiled(self, dialect: Dialect) -> Compiled:
        """Of a dialect whose parameters have positions (`?` or `%s`)."""
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
    """Many new rows of one table: each row holds the values of `columns`."""

    table: Table
    columns: tuple[str, ...]
    unique: tuple[str, ...] = ()
    """Where a row with the same values in these columns exists, it is left alone, except for `replace`."""
    replace: tuple[str, ...] = ()
    """The columns that such a row takes over from the new one."""
    add: tuple[str, ...] = ()
    """The columns in which such a row grows by the new one."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Many changed rows of one table: each row holds the values of `columns`, the first of which is `key`."""

    table: Table
    columns: tuple[str, ...]


class Connection(Protocol):
    """One connection, used by one thread at a time. It raises the driver's own errors."""

    writer_id: str
    """Where it counts (counts.py): "", or a name that no other connection which writes at the same time has."""

    def begin(self, write: bool) -> None:
        """Start a transaction. On SQLite, one that writes holds the only write lock from here on."""
        ...

    def commit(self) -> None:
        """What was written is durable when this returns."""
        ...

    def rollback(self) -> None:
        """Undo the transaction, if there is one."""
        ...

    def close(self) -> None: ...

    def all(self, statement: Statement, *values: Any) -> list[Any]:
        """Every row, as a tuple."""
        ...

    def run(self, statement: Statement, *values: Any) -> int:
        """The number of rows changed."""
        ...

    def insert(self, insert: Insert, rows: Sequence[Row]) -> int:
        """The number of rows that are new or replaced. As few statements as the driver allows."""
        ...

    def update(self, update: Update, rows: Sequence[Row]) -> None:
        """As few statements as the driver allows."""
        ...

    def keys(self, table: Table, count: int) -> Sequence[int]:
        """`count` fresh values for the column `key` of a table, ascending, above those given before. Within a
        transaction that writes."""
        ...

    def commit_in_order(self, table: Table) -> None:
        """Before rows of `table` that the database gives their keys: other transactions that do so wait until this one
        has ended, so that a row is never seen before one with a lower key."""
        ...

    def check_files(self) -> None:
        """Raises StoreLostError where the files of the database are no longer those that were opened."""
        ...

    def stable_key(self, table: Table) -> int:
        """The highest key of `table` below which no row can appear any more that is not there now, for tables whose
        rows have their keys from `keys`: what is read page by page in the order of keys must not go beyond. On a shared
        database this waits for transactions under way, and begins the transaction, which must be one that only reads,
        anew."""
        ...

    def lock(self, table: Table) -> None:
        """Nobody else writes to the table until the transaction ends."""
        ...

    def sync_clock(self, clock: Clock) -> None:
        """Say that a server is alive, and have `clock` show the steady time that all processes of the database agree
        on. Within a transaction that writes; outside of any on databases that are `shared`, since the row it writes is
        that of all servers."""
        ...

    def changed(self) -> bool:
        """Whether another connection than this has written since the last call. Always True where that cannot be
        known at less than the cost of reading again. Within a transaction, the answer holds until its end on
        databases that are not `shared`."""
        ...

    def notify(self, queued: bool, finished: Sequence[str]) -> None:
        """Tell the listeners of other processes, once the transaction is committed: a rollout may be waiting to be
        claimed; these rollouts have finished. Before `commit`. Nothing where they find out by themselves."""
        ...

    def size(self) -> int:
        """Bytes the database takes."""
        ...

    def vacuum(self) -> None:
        """Give free space back to the system. Outside of a transaction."""
        ...


Wake = Callable[[bool, Sequence[str] | None], None]
"""(a rollout may be waiting to be claimed, ids of rollouts that have finished; None: any may have)."""


class Listener(Protocol):
    """Hears what other processes committed, in a thread of its own."""

    def close(self) -> None: ...


class Database(Protocol):
    """One database, found by its URL. Making one opens nothing."""

    name: str
    """How errors call it, without any password."""
    dialect: Dialect
    shared: bool
    """Several processes write at once, each locking the rows it works with: nothing read in one transaction holds in
    the next. Otherwise there is one write lock, and `Connection.changed` tells whether what was read still holds."""
    single: bool
    """There is one connection for everything (a database in memory)."""
    errors: ClassVar[tuple[type[Exception], ...]]
    """What the driver raises."""

    def prepare(self) -> None:
        """Check that it is one of ours, make the tables where there are none, take an older one through the
        migrations. Raises StoreError with the way out."""
        ...

    def connect(self, read_only: bool) -> Connection:
        """Raises StoreError with the way out."""
        ...

    def listen(self, wake: Wake) -> Listener | None:
        """Call `wake` from another thread after others committed. None: look at `Connection.changed` from time to
        time instead."""
        ...

    def explain(self, error: Exception) -> StoreError:
        """The error to raise instead of one of the driver's."""
        ...

    def is_fatal(self, error: BaseException) -> bool:
        """The whole transaction failed, and trying its calls one by one would not help (disk full, connection lost);
        otherwise one value of one call may be to blame."""
        ...

    def may_retry(self, error: BaseException) -> bool:
        """The same transaction may succeed when tried again at once (a deadlock, a serialization failure)."""
        ...
