"""What the databases do with bare rows of 1.5 KB and nothing else: for orientation. See line.py for the protocol."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
from itertools import count, islice
from pathlib import Path

from line import ATTRIBUTES, SPAN_BYTES, serve

BODIES = [json.dumps(each).ljust(SPAN_BYTES, "x") for each in ATTRIBUTES]
TABLE = "CREATE TABLE raw_spans (key BIGINT PRIMARY KEY, attempt TEXT, span_id TEXT, body {type})"


def rows(numbers: count[int], batch: int) -> list[tuple[int, str, str, str]]:
    return [(n, f"at-{n // 8:024x}", f"{n:016x}", BODIES[n % len(BODIES)]) for n in islice(numbers, batch)]


def sqlite(seconds: float, batch: int = 100, directory: str | None = None) -> dict[str, float]:
    """Rows in transactions of `batch`, write-ahead log, full durability."""
    with tempfile.TemporaryDirectory(prefix="agl-bench-", dir=directory) as folder:
        database = sqlite3.connect(Path(folder) / "raw.db", isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(TABLE.format(type="TEXT").replace("BIGINT", "INTEGER"))
        numbers, done, started = count(), 0, time.perf_counter()
        while (spent := time.perf_counter() - started) < seconds:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT INTO raw_spans VALUES (?, ?, ?, ?)", rows(numbers, batch))
            database.execute("COMMIT")
            done += batch
        database.close()
    return {"rows_per_second": done / spent}


def postgres_copy(url: str, seconds: float, batch: int = 100) -> dict[str, float]:
    """The same by COPY into PostgreSQL."""
    import psycopg

    with psycopg.connect(url) as database:
        database.execute("DROP TABLE IF EXISTS raw_spans")
        database.execute(TABLE.format(type="TEXT"))
        database.commit()
        numbers, done, started = count(), 0, time.perf_counter()
        while (spent := time.perf_counter() - started) < seconds:
            with database.cursor() as cursor, cursor.copy("COPY raw_spans FROM STDIN") as copy:
                for row in rows(numbers, batch):
                    copy.write_row(row)
            database.commit()
            done += batch
        database.execute("DROP TABLE raw_spans")
    return {"rows_per_second": done / spent}


if __name__ == "__main__":
    serve([sqlite, postgres_copy])
