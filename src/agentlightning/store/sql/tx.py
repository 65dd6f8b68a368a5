"""A transaction: the rows it has loaded, the changes it has not written yet, and the SQL to read and write the rest.

Commands (rollouts.py, spans.py, admin.py) are plain functions of a transaction. A row is loaded once in a
transaction, locked until its end, and changed with `set`; changes are written together, before the next query.
Commands check before they change anything: one that raises later has the committer roll the transaction back, and run
the other commands again.

SQL is written once: `?` stands for a parameter, `= ANY (?)` takes a list, `strpos(text, part)` finds a part of a text,
and FOR UPDATE locks rows on databases that several processes write to at once. Each backend translates that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Final, Protocol

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.store.clock import Clock
from agentlightning.store.sql import schema
from agentlightning.store.sql.schema import (
    ATTEMPT,
    ROLLOUT,
    WORKER,
    AttemptRow,
    RolloutRow,
    Row,
    WorkerRow,
    attempt_columns,
    rollout_columns,
    select,
    worker_columns,
)
from agentlightning.store.validation import NO_LIMIT

Wake = Callable[[bool, "Sequence[str] | None"], None]
"""(a rollout may be claimable, ids of rollouts that have finished; None: any may have)."""


# -- what a backend provides -------------------------------------------------------------------------------------------


class Connection(Protocol):
    """One connection, used by one thread at a time. It raises the driver's own errors. Methods with a body are what a
    database does whose write transactions are serialised."""

    position: str = "r.key"
    """The SQL of the place of a rollout in order of creation."""
    writer_id: str = ""
    """Whose counters it adds to: "" on a database with one writer, else a name of its own."""

    def begin(self, write: bool, durable: bool = True) -> None:
        """Begin a transaction. On SQLite, one that writes takes the only write lock. A commit that is not durable
        survives the end of the process, and not that of the machine."""
        ...

    def commit(self) -> None: ...

    def rollback(self) -> None:
        """Roll back the transaction, if there is one."""
        ...

    def close(self) -> None: ...

    def all(self, sql: str, *values: Any) -> list[Any]:
        """All rows, as tuples."""
        ...

    def run(self, sql: str, *values: Any) -> int:
        """The number of rows changed."""
        ...

    def write(self, statement: Statement, rows: Sequence[Sequence[Any]]) -> None:
        """Execute a statement for these rows of values, at the latest before the next query or the commit."""
        ...

    def lock(self, sql: str, *values: Any) -> None:
        """Lock the rows of a query until the transaction ends, at the latest before the next query, which sees what
        others have written to them."""

    def new_key(self, table: str, expected: int) -> int:
        """A value for the column `key` of a table, above those before it in this transaction, which writes. expected:
        how many it will need of this table, if they must be in the order of transactions; else 0."""
        ...

    def commit_in_order(self, table: str) -> None:
        """To be called before an insert for which the database assigns the keys: other transactions that insert into
        `table` wait until this one has ended, so that no row is visible before one with a lower key."""

    def check_files(self) -> None:
        """Raises StoreLostError if the files of the database are no longer those that were opened."""

    def last_position(self) -> int:
        """The last position of a rollout, at or before which no further one will appear: a page in order of creation
        must not go beyond it. Waits for no other server. Restarts the transaction, which must be read-only."""
        return NO_LIMIT

    def sync_clock(self, clock: Clock) -> None:
        """Record that a server is alive, and set `clock` to the steady time that all processes of the database share.
        Within a transaction that writes; on `shared` databases outside of any, as all servers write the same row."""
        ...

    def changed(self) -> bool:
        """Whether another connection has written since the last call; valid until the end of a transaction that writes
        and begins with it. On a `shared` database, nobody asks."""
        return True

    def fresh(self) -> bool:
        """Whether certainly no other connection has written since the last transaction of this one. Any thread may
        ask."""
        return False

    def notify(self, queued: bool, finished: Sequence[str]) -> None:
        """Notify the listeners of other processes with the commit: a rollout may be claimable, these rollouts have
        finished. Does nothing where other processes poll."""

    def size(self) -> int:
        """The size of the database in bytes."""
        ...

    def vacuum(self) -> None:
        """Return free space to the file system. Outside of a transaction."""
        ...


class Database(Protocol):
    """One database. Creating the object opens nothing."""

    name: str
    """Its name in errors, without any password."""
    shared: bool
    """Several processes write at once, each locking the rows it works with. Otherwise there is one write lock."""
    single: bool
    """One connection serves everything (a database in memory)."""
    next_waiting: str
    """See `rollouts.take`."""
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

    def close(self) -> None:
        """Nothing waits for a lost server any more, and nothing is called."""

    def listen(self, wake: Wake) -> None:
        """Call `wake` from another thread when other processes commit. Without that, `Connection.changed` is polled."""

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


@contextmanager
def explained(database: Database) -> Generator[None]:
    """Within it, errors of the driver become StoreErrors."""
    try:
        yield
    except database.errors as error:
        raise database.explain(error) from error


# -- SQL of rows -------------------------------------------------------------------------------------------------------


Statement = Callable[[int], str]
"""The SQL that writes so many rows at once, whose values follow one another."""
CHUNK_SIZES: Final = (64, 32, 16)
"""Rows that are written by one statement; the rest by one more. Few sizes, so that few statements are compiled."""
CHUNK_BYTES: Final = 8 << 20
"""Bytes in the rows of one statement, unless it writes one row: PostgreSQL closes the connection at 1 GB."""


def insert(table: str, columns: Sequence[str], otherwise: str = "") -> Statement:
    """otherwise: what happens in place of a conflict."""
    start, row = f"INSERT INTO {table} ({', '.join(columns)}) VALUES", f"({', '.join('?' * len(columns))})"

    @cache
    def statement(rows: int) -> str:
        return f"{start} {', '.join([row] * rows)} {otherwise}"

    return statement


_WITH_STATUS: Final = {
    "rollouts": ("end_time", "attempt_count"),
    "attempts": ("end_time", "silent_at", "timeout_at", "last_heartbeat_time", "spans", "bytes", "last_span"),
}
"""By table: the columns that are written whenever the status is, so that one statement writes most changes."""


@cache
def _change(table: str, *columns: str) -> tuple[Statement, Callable[[Any], tuple[Any, ...]]]:
    """How changes of these columns are written, and the values of a row for that."""
    names = tuple(sorted({*columns, *(_WITH_STATUS[table] if "status" in columns else ())}))
    return _update(table, names), attrgetter(*names, "key")


@cache
def _update(table: str, columns: tuple[str, ...]) -> Statement:
    """Of rows by their keys, which come last."""
    one = f"UPDATE {table} SET {', '.join([f'{name} = ?' for name in columns])} WHERE key = ?"
    types = schema.SQL_TYPES[table]
    first = ", ".join([f"CAST(? AS {types[name]})" for name in (*columns, "key")])
    row = f", ({', '.join('?' * (len(columns) + 1))})"
    start = f"WITH new ({', '.join(columns)}, key) AS (VALUES ({first})"
    end = f"UPDATE {table} SET {', '.join([f'{name} = new.{name}' for name in columns])} FROM new"

    @cache
    def statement(rows: int) -> str:
        return one if rows == 1 else f"{start}{row * (rows - 1)}) {end} WHERE {table}.key = new.key"

    return statement


def chunks(statement: Statement, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """The statements that write the rows, with the values of each."""
    start = 0
    while left := len(rows) - start:
        size = next((size for size in CHUNK_SIZES if size <= left), left)
        values = list(chain.from_iterable(rows[start : start + size]))
        sizes = [len(value) for value in values if type(value) is bytes] if bytes in map(type, rows[start]) else []
        if sum(sizes) > CHUNK_BYTES:
            size, values = 1, list(rows[start])
        yield statement(size), values
        start += size


_WRITE_WORKER: Final = insert(
    "workers",
    WORKER,
    f"ON CONFLICT (worker_id) DO UPDATE SET {', '.join([f'{name} = excluded.{name}' for name in WORKER[1:]])}",
)
_INSERTS: Final = {
    "rollouts": (insert("rollouts", ROLLOUT), rollout_columns),
    "attempts": (insert("attempts", ATTEMPT), attempt_columns),
    "workers": (_WRITE_WORKER, worker_columns),
}
"""By table: how rows are inserted, and their values."""
_NAME_QUEUE: Final = insert("queues", ("name",), "ON CONFLICT DO NOTHING")
_ADD_COUNT: Final = insert(
    "counts",
    ("shard", "name", "queue", "number"),
    "ON CONFLICT (shard, name, queue) DO UPDATE SET number = counts.number + excluded.number",
)

_LOAD: Final = (
    f"SELECT {select('r', ROLLOUT)}, {select('a', ATTEMPT)} FROM rollouts r "
    "LEFT JOIN attempts a ON a.rollout_key = r.key WHERE {} ORDER BY r.key, a.sequence_id"
)
_LOCK: Final = "SELECT key FROM rollouts WHERE rollout_id = ANY (?) ORDER BY key FOR UPDATE"
_LOAD_BY_ID: Final = _LOAD.format("r.rollout_id = ANY (?)")
LOAD_BY_KEY: Final = _LOAD.format("r.key = ANY (?)")
_LOAD_WORKERS: Final = (
    f"SELECT {select('w', WORKER)} FROM workers w WHERE w.worker_id = ANY (?) ORDER BY w.worker_id FOR UPDATE OF w"
)
OPEN_ATTEMPTS: Final = (
    "SELECT a.worker_id, r.rollout_id, a.attempt_id FROM attempts a JOIN rollouts r ON r.key = a.rollout_key "
    f"WHERE a.{schema.IS_OPEN} AND a.worker_id = ANY (?) AND a.superseded = 0 ORDER BY a.key"
)
"""Of workers: (worker_id, rollout_id, attempt_id), the newest last."""
OWNERS: Final = (
    "SELECT a.attempt_id, r.rollout_id FROM attempts a JOIN rollouts r ON r.key = a.rollout_key "
    "WHERE a.attempt_id = ANY (?)"
)

ATTEMPTS: Final = "attempts"
SPANS: Final = "spans"
"""What is counted beside rollouts."""


CACHE_BYTES: Final = 8 << 20
"""Of rows that stay in memory from one transaction to the next where no other process has written: estimated."""
ABSENT_BYTES: Final = 300
"""Of an id that is known to be absent."""


def _missing(names: Iterable[str], known: Container[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name not in known]


class Tx:
    """Used by the thread of the committer alone, for one transaction after the other."""

    def __init__(self, connection: Connection, clock: Clock, database: Database) -> None:
        self.connection, self.clock, self.database = connection, clock, database
        self.known_queues: set[str] = set()
        """Names that are in the database; none is ever removed."""
        self.known_resources: set[str] = set()
        self.changed = False
        """Something was changed since the committer last reset this, before a command."""
        self._memory = 0
        """Estimated bytes of the rows."""
        self.generation = 0
        """Another one where what is in memory of rollouts and queues was dropped."""
        self.begin()

    def begin(self, outdated: bool = True) -> None:
        """Start over within a transaction that has just begun. outdated: others may have written since the last one, so
        that the rows in memory are dropped."""
        self.wall, self.steady = self.clock.wall(), self.clock.steady()
        self.queued = False
        """A rollout may have become claimable."""
        self.finished: set[str] = set()
        """Ids of rollouts that have finished."""
        self.deleted: list[str] = []
        self.deadline: float | None = None
        """The earliest deadline that was set, on the steady clock."""
        self.new_rollouts = 0
        """How many keys of rollouts the batch will need."""
        if outdated or self._memory > CACHE_BYTES:
            self.generation += 1
            self._memory = 0
            self.waiting: list[RolloutRow] = []
            """Rollouts that became claimable, for who chooses among them."""
            self.rollouts: dict[str, RolloutRow | None] = {}
            self.owners: dict[str, str | None] = {}
            """The rollout id by attempt id."""
        self.workers: dict[str, WorkerRow] = {}
        self.open_attempts: dict[str, list[tuple[str, str]]] = {}
        """By worker: (rollout id, attempt id), the newest last, as of when they were loaded."""
        self._changed: dict[Row, dict[str, Any]] = {}
        """The columns of each row that were set. Only these are written, so that few indexes are touched."""
        self._inserts: defaultdict[Statement, list[tuple[Any, ...]]] = defaultdict(list)
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)

    def rolled_back(self) -> None:
        """Drop what is remembered from one transaction to the next."""
        self.known_queues.clear()
        self.known_resources.clear()
        self.begin()

    # -- commands ----------------------------------------------------------------------------------------------------

    def note_deadline(self, deadline: float) -> None:
        """Have the deadlines checked at this time, on the steady clock."""
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline

    def note_waiting(self, row: RolloutRow) -> None:
        """It can be claimed from now on."""
        self.queued = True
        self.waiting.append(row)

    # -- SQL ---------------------------------------------------------------------------------------------------------

    def all(self, sql: str, *values: Any) -> list[Any]:
        """Query what is in the database now, with all changes of this transaction."""
        self.flush()
        return self.connection.all(sql, *values)

    def run(self, sql: str, *values: Any) -> int:
        """Change rows that are not in memory; returns how many."""
        self.flush()
        self.changed = True
        return self.connection.run(sql, *values)

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, rollout_ids: Iterable[str]) -> None:
        if missing := _missing(rollout_ids, self.rollouts):
            self.rollouts.update(dict.fromkeys(missing))
            self._memory += ABSENT_BYTES * len(missing)
            self.connection.lock(_LOCK, missing)
            self.load_rows(_LOAD_BY_ID, missing)

    def load_rows(self, sql: str, *values: Any) -> list[RolloutRow]:
        """Rollouts with their attempts, by a statement such as LOAD_BY_KEY. Those in memory are as they are there."""
        found: list[RolloutRow] = []
        known, width = None, len(ROLLOUT)
        for columns in self.connection.all(sql, *values):
            if not found or found[-1].key != columns[0]:
                known = self.rollouts.get(columns[1])
                found.append(known or self._remember(RolloutRow(*columns[:width], counted=columns[5])))
            if known is None and columns[width] is not None:
                attempt = AttemptRow(*columns[width:], rollout=found[-1])
                found[-1].attempts[attempt.attempt_id] = attempt
        return found

    def _remember(self, row: RolloutRow) -> RolloutRow:
        self.rollouts[row.rollout_id] = row
        self._memory += 2_000 + len(row.input) + len(row.metadata)
        return row

    def load_workers(self, worker_ids: Iterable[str]) -> None:
        if missing := _missing(worker_ids, self.workers):
            self.workers.update({name: WorkerRow(name, stored=False) for name in missing})
            self.workers.update({columns[0]: WorkerRow(*columns) for columns in self.all(_LOAD_WORKERS, missing)})

    def load_open_attempts(self, worker_ids: Iterable[str]) -> None:
        if missing := _missing(worker_ids, self.open_attempts):
            self.open_attempts.update({name: [] for name in missing})
            for worker_id, rollout_id, attempt_id in self.all(OPEN_ATTEMPTS, missing):
                self.open_attempts[worker_id].append((rollout_id, attempt_id))

    def find_rollout(self, rollout_id: str) -> RolloutRow | None:
        self.load([rollout_id])
        return self.rollouts[rollout_id]

    def rollout(self, rollout_id: str) -> RolloutRow:
        row = self.find_rollout(rollout_id)
        if row is None:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")
        return row

    def attempt(self, rollout_id: str, attempt_id: str) -> AttemptRow:
        """An attempt; "latest" is the latest one."""
        rollout = self.rollouts.get(rollout_id) or self.rollout(rollout_id)
        row = rollout.latest if attempt_id == "latest" else rollout.attempts.get(attempt_id)
        if row is None:
            raise NotFoundError(f"rollout {rollout_id!r} has no attempt {attempt_id!r}")
        return row

    def load_owners(self, attempt_ids: Iterable[str]) -> None:
        """Find the rollouts of attempts."""
        if missing := _missing(attempt_ids, self.owners):
            self.owners.update(dict.fromkeys(missing))
            self._memory += ABSENT_BYTES * len(missing)
            self.owners.update(self.all(OWNERS, missing))

    def find_attempt(self, attempt_id: str) -> AttemptRow | None:
        """An attempt of any rollout."""
        self.load_owners([attempt_id])
        owner = self.owners[attempt_id]
        rollout = None if owner is None else self.find_rollout(owner)
        return None if rollout is None else rollout.attempts.get(attempt_id)

    def worker(self, worker_id: str) -> WorkerRow:
        """A worker; one that is unknown is new."""
        self.load_workers([worker_id])
        return self.workers[worker_id]

    def check_resources(self, resources_id: str | None) -> None:
        """Raises NotFoundError for resources that were never published. None stands for the latest."""
        if resources_id is None or resources_id in self.known_resources:
            return
        if not self.all("SELECT key FROM resources WHERE resources_id = ?", resources_id):
            raise NotFoundError(f"no resources {resources_id!r} in this store; publish them with add_resources")
        self.known_resources.add(resources_id)

    # -- changing ----------------------------------------------------------------------------------------------------

    def set(self, row: Row, **changes: Any) -> None:
        """Change columns of a row."""
        self.changed = True
        for name, value in changes.items():
            setattr(row, name, value)
        self._changed.setdefault(row, {}).update(changes)

    def add_rollout(self, row: RolloutRow) -> RolloutRow:
        """Add a row that is not stored; assigns its key."""
        row.key = self.connection.new_key("rollouts", max(1, self.new_rollouts))
        self._remember(row)
        self._changed[row] = {}
        self.changed = True
        return row

    def add_attempt(self, row: AttemptRow) -> AttemptRow:
        """Add a row that is not stored; assigns its keys."""
        row.key, row.rollout_key = self.connection.new_key("attempts", 0), row.rollout.key
        row.rollout.attempts[row.attempt_id] = row
        self.owners[row.attempt_id] = row.rollout.rollout_id
        self._changed[row] = {}
        self.changed = True
        return row

    def remove_attempt(self, row: AttemptRow) -> None:
        """Remove an attempt that no caller has seen."""
        self.run("DELETE FROM attempts WHERE key = ?", row.key)
        self.count(ATTEMPTS, -1)
        del row.rollout.attempts[row.attempt_id]
        self.owners.pop(row.attempt_id, None)

    def insert(self, statement: Statement, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows that are not kept in memory."""
        self.changed = True
        self._inserts[statement] += rows

    def name_queue(self, name: str) -> None:
        if name not in self.known_queues:
            self.known_queues.add(name)
            self.insert(_NAME_QUEUE, [(name,)])

    def count(self, name: str, number: int, queue: str = "") -> None:
        """Add to a counter."""
        self._counts[name, queue] += number

    # -- writing -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the changes, so that queries see them."""
        if self._changed:
            self._write_rows()
        if self._inserts:
            inserts, self._inserts = self._inserts, defaultdict(list)
            for statement, rows in inserts.items():
                self.connection.write(statement, sorted(rows))  # servers that name the same queues do so in one order

    def _write_rows(self) -> None:
        changed, self._changed = self._changed, {}
        groups: defaultdict[Statement, list[tuple[Any, ...]]] = defaultdict(list)
        new_worker = False
        for row, columns in changed.items():
            in_place = row.stored
            if isinstance(row, RolloutRow):
                self._count_status(row)
            elif isinstance(row, WorkerRow):
                new_worker |= not row.stored
                in_place = False
            elif not row.stored:
                self.count(ATTEMPTS, 1)
            statement, values_of = _change(row.table, *columns) if in_place else _INSERTS[row.table]
            groups[statement].append(values_of(row))
            row.stored = True
        if new_worker:
            self.connection.commit_in_order("workers")
        self.connection.write(_WRITE_WORKER, sorted(groups.pop(_WRITE_WORKER, ())))
        for statement, rows in groups.items():
            self.connection.write(statement, rows)

    def _count_status(self, row: RolloutRow) -> None:
        if row.counted != row.status:
            self.count(row.status, 1, row.queue)
            if row.counted is not None:
                self.count(row.counted, -1, row.queue)
            row.counted = row.status

    def finish(self) -> None:
        """Write what is left, with the counters last: other servers may wait for these."""
        self.flush()
        if self._counts:
            rows = [(self.connection.writer_id, *key, number) for key, number in sorted(self._counts.items()) if number]
            self._counts.clear()
            self.connection.write(_ADD_COUNT, rows)
