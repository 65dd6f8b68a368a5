"""The databases of Spider: what a model is told about one, what a query gives, and whether two results are the same."""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from pathlib import Path

Rows = list[tuple[object, ...]]
MOST_STEPS = 20_000_000
"""Instructions of SQLite's virtual machine after which a query is stopped: about a second."""
MOST_ROWS = 10_000
MOST_BYTES = 1_000_000
"""Of one value."""
MOST_CHARACTERS = 120
"""Of a result that a model is shown."""
MOST_ORDERS = 1000
"""Orders of columns that are tried."""
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
"""What a query may do."""


class QueryError(Exception):
    """The query cannot be run; the message is that of SQLite."""


def open_database(path: str | Path) -> sqlite3.Connection:
    """A connection that only reads. Raises FileNotFoundError with the name of the database."""
    path = Path(path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no database {path.stem!r}: {path} does not exist")
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    connection.text_factory = lambda text: text.decode(errors="replace")  # Some of Spider's texts are not UTF-8.
    return connection


def describe(database: sqlite3.Connection) -> str:
    """A line for each table with its columns, and one for each foreign key."""
    listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")
    tables = [name for (name,) in listed if not name.startswith("sqlite_")]
    columns = {each: database.execute(f"PRAGMA table_info({_quoted(each)})").fetchall() for each in tables}
    keys = {each: database.execute(f"PRAGMA foreign_key_list({_quoted(each)})").fetchall() for each in tables}
    lines = [f"{table}: {' '.join(_written(row[1]) for row in columns[table])}" for table in tables]
    return "\n".join(lines + [_foreign_key(table, row) for table in tables for row in keys[table]])


def _foreign_key(table: str, row: tuple[object, ...]) -> str:
    other, own, theirs = row[2:5]  # `theirs` is None where the primary key is meant.
    target = f"{other}.{theirs}" if theirs is not None and theirs != own else other
    return f"{table}.{own} -> {target}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _written(name: str) -> str:
    return name if name.isidentifier() else _quoted(name)


def execute(database: sqlite3.Connection, query: str) -> Rows:
    """The rows of a query. Raises QueryError for one that fails, does more than reading, takes too long or gives too
    much: it was written by a model."""
    left = iter(range(MOST_STEPS // 10_000))
    database.set_progress_handler(lambda: next(left, None) is None, 10_000)
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY)
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    try:
        rows = database.execute(query).fetchmany(MOST_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a NUL, an unpaired surrogate.
        raise QueryError("it takes too long" if str(error) == "interrupted" else str(error)) from error
    finally:
        database.set_authorizer(None)
        database.set_progress_handler(None, 0)
    if len(rows) > MOST_ROWS:
        raise QueryError(f"it gives more than {MOST_ROWS} rows")
    return rows


def result_of(database: sqlite3.Connection, query: str) -> str:
    """What a query gives, as a short text for a model."""
    try:
        rows = execute(database, query)
    except QueryError as error:
        return f"error: {error}"[:MOST_CHARACTERS]
    return str(rows)[:MOST_CHARACTERS] if rows else "no rows"


def same_result(left: Rows, right: Rows, *, ordered: bool) -> bool:
    """Whether two results hold the same rows, in the same order if `ordered`. The order of columns does not matter, as
    in the execution accuracy of Spider (Zhong et al. 2020, arXiv:2010.02840, section 3)."""
    if len(left) != len(right) or {*map(len, left)} != {*map(len, right)}:
        return False
    collect = list if ordered else Counter
    if collect(left) == collect(right):
        return True
    ours, theirs = ([Counter(column) for column in zip(*rows, strict=True)] for rows in (left, right))
    places = [[place for place, column in enumerate(ours) if column == wanted] for wanted in theirs]
    orders = (order for order in itertools.islice(itertools.product(*places), MOST_ORDERS))
    found = (order for order in orders if len(set(order)) == len(order))
    return any(collect([tuple(row[i] for i in order) for row in left]) == collect(right) for order in found)
