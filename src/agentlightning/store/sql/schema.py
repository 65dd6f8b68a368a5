"""The tables of a store: the only place that names their columns in order. Everything else reads them by name.

Rows refer to one another by an integer `key`, which is also the order of creation; callers see only text ids. JSON is
stored as text. Also here: the version of the schema, and how an older database is brought up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, ClassVar, Final, Protocol, get_args, get_type_hints

from msgspec import Struct, field

from agentlightning.errors import StoreVersionError

SCHEMA_VERSION: Final = 1
_SINCE: Final = "2.0.0"
"""Beside the version in the table `about`, as development versions of 2.0 counted schemas of their own."""
FIND_VERSION: Final = "SELECT value FROM about WHERE name = 'schema_version'"
"""What a transaction begins with (`check_version`), unless nobody else has written."""
MAX_PACK: Final = 128
"""Spans in one pack at most."""
UNPLACED: Final = 256
"""Packs that begin at or before this sequence number have no rows in `span_places`: there are few for each attempt."""
IS_WAITING: Final = "status IN ('queuing', 'requeuing')"
IS_OPEN: Final = "status IN ('preparing', 'running')"
OPEN: Final = frozenset({"preparing", "running"})
"""The status of attempts, and of their rollouts, that have not ended."""

# -- rows that change ------------------------------------------------------------------------------------------------

# A class of columns has one field for each column, in order; the row below it adds what a transaction knows beside.


class RolloutColumns(Struct, eq=False):
    key: int
    rollout_id: str
    input: str
    mode: str | None
    resources_id: str | None
    status: str
    start_time: float
    end_time: float | None
    config: str | None
    metadata: str
    attempt_count: int
    queue: str
    priority: int


class RolloutRow(RolloutColumns, eq=False, kw_only=True):
    """A rollout with all of its attempts."""

    table: ClassVar[str] = "rollouts"
    stored: bool = True
    attempts: dict[str, AttemptRow] = field(default_factory=dict[str, "AttemptRow"])
    """By id, the latest one last."""
    counted: str | None = None
    """The status it is counted under in the table of counters; None before it is written."""

    @property
    def latest(self) -> AttemptRow | None:
        return next(reversed(self.attempts.values())) if self.attempts else None


class AttemptColumns(Struct, eq=False):
    key: int
    rollout_key: int
    sequence_id: int
    attempt_id: str
    status: str
    start_time: float
    end_time: float | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: str = "{}"
    superseded: int = 0
    last_span: int = 0
    """The highest sequence number assigned."""
    spans: int = 0
    bytes: int = 0
    """Of its packs and prompts."""
    timeout_at: float | None = None
    """Its deadline, on the steady clock."""
    silence: float | None = None
    """How long it may send no heartbeat."""
    silent_at: float | None = None
    """The deadline that follows from it."""
    claims: int = 1
    """How often its claim was answered: more than once if it was repeated."""


class AttemptRow(AttemptColumns, eq=False, kw_only=True):
    """One attempt of a rollout."""

    table: ClassVar[str] = "attempts"
    stored: bool = True
    rollout: RolloutRow


class WorkerColumns(Struct, eq=False):
    worker_id: str
    last_heartbeat_time: float | None = None
    stats: str = "{}"
    lease_seconds: float | None = None
    lost_at: float | None = None
    """When its lease expires, on the steady clock."""
    lost: int = 0
    last_error: str | None = None


class WorkerRow(WorkerColumns, eq=False, kw_only=True):
    """A worker."""

    table: ClassVar[str] = "workers"
    stored: bool = True


Row = RolloutRow | AttemptRow | WorkerRow
ROLLOUT: Final = RolloutColumns.__struct_fields__
ATTEMPT: Final = AttemptColumns.__struct_fields__
WORKER: Final = WorkerColumns.__struct_fields__
rollout_columns: Final = attrgetter(*ROLLOUT)
attempt_columns: Final = attrgetter(*ATTEMPT)
worker_columns: Final = attrgetter(*WORKER)
PACK: Final = ("key", "attempt_key", "first_sequence", "count", "superseded", "ids", "body")
"""`count` spans, MAX_PACK at most, whose sequence numbers are consecutive and begin with `first_sequence`."""
RESOURCES: Final = ("resources_id", "version", "create_time", "body", "update_time")


def select(alias: str, columns: tuple[str, ...]) -> str:
    """The columns of a table for a SELECT."""
    return ", ".join([f"{alias}.{name}" for name in columns])


# -- tables ------------------------------------------------------------------------------------------------------------


def types_of(kind: type[Struct]) -> dict[str, tuple[type, ...]]:
    """The Python types of each column; several if it may be NULL."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}


_STANDARD: Final = {int: "BIGINT", str: "TEXT", float: "DOUBLE PRECISION"}
SQL_TYPES: Final = {
    table: {name: _STANDARD[types[0]] for name, types in types_of(kind).items()}
    for table, kind in (("rollouts", RolloutColumns), ("attempts", AttemptColumns))
}
"""By table: the type of each column in standard SQL."""


def _columns(kind: type[Struct], unique: str) -> str:
    names = {int: "{int}", str: "{text}", float: "{float}"}
    parts = [
        "key {key}" if name == "key" else f"{name} {names[types[0]]}{' NOT NULL' if len(types) == 1 else ''}"
        for name, types in types_of(kind).items()
    ]
    return ", ".join([*parts, f"UNIQUE ({unique})"])


TABLES: Final[Mapping[str, str]] = {
    "about": "name {text} PRIMARY KEY, value {text} NOT NULL",
    "rollouts": _columns(RolloutColumns, "rollout_id"),
    "attempts": _columns(AttemptColumns, "attempt_id"),
    "workers": "key {key}, " + _columns(WorkerColumns, "worker_id"),
    "span_packs": "key {key}, attempt_key {int} NOT NULL, first_sequence {int} NOT NULL, count {int} NOT NULL, "
    "superseded {int} NOT NULL, ids {blob} NOT NULL, body {blob} NOT NULL",
    # Which pack has a span, so that a long list continues after it at once.
    "span_places": "attempt_key {int} NOT NULL, span_id {text} NOT NULL, pack_key {int} NOT NULL, "
    "PRIMARY KEY (attempt_key, span_id)",
    # Long prompts: the first `keep` bytes of the prompt `base`, then `ids`; `root` is the first prompt of that chain.
    "prompts": "place {int} PRIMARY KEY, attempt_key {int} NOT NULL, root {int} NOT NULL, base {int}, "
    "keep {int} NOT NULL, ids {blob} NOT NULL",
    "resources": "key {key}, resources_id {text} NOT NULL UNIQUE, version {int} NOT NULL UNIQUE, "
    "create_time {float} NOT NULL, body {text} NOT NULL, update_time {float}",
    "queues": "key {key}, name {text} NOT NULL UNIQUE, max_open {int}",
    # `name` is a status of the rollouts of `queue`, or something counted in total; `shard` is the server that counts.
    "counts": "shard {text} NOT NULL, name {text} NOT NULL, queue {text} NOT NULL, number {int} NOT NULL, "
    "PRIMARY KEY (shard, name, queue)",
    # Calls with an idempotency key: a digest of their arguments, and their result (NULL if it was too large to store).
    "answered_calls": "key {text} PRIMARY KEY, digest {blob} NOT NULL, answered_at {float} NOT NULL, answer {blob}",
    # When a server was last alive: the steady time (see clock.py), and the reading of the clock that passes with it.
    "clocks": "name {text} PRIMARY KEY, reading {float} NOT NULL, steady {float} NOT NULL",
}
CLUSTERED: Final = frozenset({"span_places", "counts"})
"""Tables that SQLite keeps in the order of their primary key."""
INDEXES: Final = (
    f"INDEX rollouts_waiting ON rollouts (queue, priority DESC, key) WHERE {IS_WAITING}",
    f"INDEX rollouts_open ON rollouts (queue) WHERE {IS_OPEN}",
    "INDEX rollouts_finished ON rollouts (end_time, status) WHERE end_time IS NOT NULL",
    "UNIQUE INDEX attempts_of_rollout ON attempts (rollout_key, sequence_id)",
    "INDEX attempts_timeout ON attempts (timeout_at) WHERE timeout_at IS NOT NULL",
    "INDEX attempts_silent ON attempts (silent_at) WHERE silent_at IS NOT NULL",
    f"INDEX attempts_of_worker ON attempts (worker_id) WHERE {IS_OPEN}",
    "INDEX span_packs_of_attempt ON span_packs (attempt_key, first_sequence)",
    "INDEX prompts_of_attempt ON prompts (attempt_key, root, place)",
    "INDEX workers_lease ON workers (lost_at) WHERE lost_at IS NOT NULL",
    "INDEX answered_calls_in_order ON answered_calls (answered_at)",
)


def ddl(types: Mapping[str, str], clustered: str = "") -> list[str]:
    """The statements that create the tables, with the names of the types in one database."""
    tables = [
        f"CREATE TABLE {name} ({columns.format_map(types)}){clustered * (name in CLUSTERED)}"
        for name, columns in TABLES.items()
    ]
    return tables + [f"CREATE {index}" for index in INDEXES]


# -- migrations --------------------------------------------------------------------------------------------------------


class Schema(Protocol):
    """The schema of one database, over a connection that nobody else uses."""

    name: str
    """The name of the database in errors."""

    def exclusive(self) -> AbstractContextManager[Any]:
        """A transaction during which no other process changes the schema, and none that uses an existing one is in a
        transaction; rolled back if the block raises."""
        ...

    def create(self) -> None:
        """Create the tables of SCHEMA_VERSION. Raises StoreError if the database has other tables."""
        ...

    def has(self, table: str) -> bool: ...

    def execute(self, statement: str, /) -> Any:
        """Execute one statement in the SQL of this database."""
        ...


Step = Callable[[Schema], None]

STEPS: Final[Mapping[int, Step]] = {}
"""By version: the step from the version before. It has the SQL of its version, and never imports the tables above."""


def _version(schema: Schema) -> str | None:
    """What the table `about` says: None for an empty database, "" for one of a development version."""
    about = dict(schema.execute("SELECT name, value FROM about").fetchall()) if schema.has("about") else {}
    if not about:
        return None
    return about.get("schema_version", "") if about.get("since") == _SINCE else ""


def migrate(schema: Schema, latest: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS) -> None:
    """Bring a database to version `latest` in one transaction. Raises StoreVersionError for one of another version, and
    StoreError for no store: this code could lose what is in it."""
    if _version(schema) == str(latest):
        return
    with schema.exclusive():
        found = _version(schema)  # another process may have migrated it meanwhile
        if found == str(latest):
            return
        if found is None:
            schema.create()
        else:
            numbers = range(int(found) + 1, latest + 1) if found.isdecimal() else ()
            if not numbers or not set(numbers) <= steps.keys():
                raise _refusal(schema.name, found or "of a development one", latest)
            for number in numbers:
                steps[number](schema)
        schema.execute("DELETE FROM about")
        schema.execute(f"INSERT INTO about (name, value) VALUES ('schema_version', '{latest}'), ('since', '{_SINCE}')")


def check_version(name: str, found: str) -> None:
    """Called with the answer to FIND_VERSION when a transaction has begun. Raises StoreVersionError where a process of
    a later version has migrated the database since it was opened."""
    if found != str(SCHEMA_VERSION):
        raise _refusal(name, found, SCHEMA_VERSION)


def _refusal(name: str, found: str, own: int) -> StoreVersionError:
    return StoreVersionError(
        f"{name} was written by another version of agentlightning (its schema is {found}, this one has {own}); use "
        "that version, or export it with that version (agl store export FILE.jsonl) and import the file into a new "
        "store with this one (agl store import FILE.jsonl)"
    )
