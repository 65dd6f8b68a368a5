"""INSERT and UPDATE statements of many rows, written by hand: SQLAlchemy has no fast way for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from agentlightning.store.sql.tables.backend import Insert, Row, Update

CHUNK_SIZES: Final = (64, 32, 16, 8)
"""Rows in one statement; the rest goes into one more. Few sizes, so that few statements are compiled."""

Values = Callable[[Insert | Update, int], str]
"""The VALUES of a statement for so many rows, in the dialect's form of parameters."""


def chunks(rows: Sequence[Row]) -> Sequence[Sequence[Row]]:
    """The rows in chunks of CHUNK_SIZES, and one smaller chunk."""
    if len(rows) < CHUNK_SIZES[-1]:
        return [rows] if rows else []
    found: list[Sequence[Row]] = []
    start = 0
    while start < len(rows):
        left = len(rows) - start
        size = next((size for size in CHUNK_SIZES if size <= left), left)
        found.append(rows[start : start + size])
        start += size
    return found


def insert_sql(insert: Insert, rows: int, values: Values) -> str:
    table = quoted(insert.table.name)
    sql = f"INSERT INTO {table} ({', '.join(map(quoted, insert.columns))}) VALUES {values(insert, rows)}"
    if not insert.unique:
        return sql
    sql += f" ON CONFLICT ({', '.join(map(quoted, insert.unique))}) DO "
    changes = [f"{quoted(name)} = excluded.{quoted(name)}" for name in insert.replace]
    changes += [f"{quoted(name)} = {table}.{quoted(name)} + excluded.{quoted(name)}" for name in insert.add]
    return sql + (f"UPDATE SET {', '.join(changes)}" if changes else "NOTHING")


def update_sql(update: Update, rows: int, values: Values) -> str:
    table, names = quoted(update.table.name), [quoted(name) for name in update.columns]
    changes = ", ".join(f"{name} = new.{name}" for name in names[1:])
    return (
        f"WITH new ({', '.join(names)}) AS (VALUES {values(update, rows)}) "
        f"UPDATE {table} SET {changes} FROM new WHERE {table}.{names[0]} = new.{names[0]}"
    )


def quoted(name: str) -> str:
    return f'"{name}"'
