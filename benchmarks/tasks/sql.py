"""Text to SQL by a writer, a checker and a rewriter, over generated SQLite databases; the reward is execution accuracy.

The writer turns a question into a query, which runs. The checker sees the question, the query and what it gave, and
says `ok` or `redo`; after `redo` the rewriter writes another query. There are at most four revisions. The reward is 1
if the last query gives the result of the true one.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import zlib
from functools import cache
from typing import ClassVar

from tasks.base import Call, Environment, Episode, Split, Task

TABLES = ("cars", "boats", "homes")
AGGREGATES = {
    "number": "count(*)",
    "highest-price": "max(price)",
    "lowest-price": "min(price)",
    "latest-year": "max(year)",
    "earliest-year": "min(year)",
}
CONFUSED = {
    "number": "highest-price",
    "highest-price": "lowest-price",
    "lowest-price": "highest-price",
    "latest-year": "earliest-year",
    "earliest-year": "latest-year",
}
"""What a starting policy takes each for."""
VALUES = {"red": "color", "blue": "color", "green": "color", "rome": "city", "oslo": "city", "lima": "city"}
COLUMNS = ("color", "city")
OK, REDO = "ok", "redo"
ERROR, NOTHING, SOMETHING = "error", "nothing", "something"
REVISIONS = 4
QUERY_WORDS = 9
"""Of the longest query, its end included."""
ROWS = 14
DATABASES = 64
"""Of each split."""


@cache
def database(seed: int) -> sqlite3.Connection:
    """Three tables of things with a color, a city, a price and a year."""
    rng = random.Random(f"sql/database/{seed}")
    connection = sqlite3.connect(":memory:")
    values = {column: [value for value, own in VALUES.items() if own == column] for column in COLUMNS}
    for table in TABLES:
        connection.execute(f"CREATE TABLE {table} (color TEXT, city TEXT, price INTEGER, year INTEGER)")
        rows = [
            (rng.choice(values["color"]), rng.choice(values["city"]), rng.randint(1, 99), rng.randint(1990, 2026))
            for _ in range(ROWS)
        ]
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", rows)
    connection.execute("PRAGMA query_only = ON")
    return connection


def run_query(seed: int, query: str) -> int | str | None:
    """The value a query gives; `error` if it cannot run."""
    try:
        rows = database(seed).execute(query).fetchmany(2)
    except (sqlite3.Error, sqlite3.Warning):
        return ERROR
    return rows[0][0] if len(rows) == 1 and len(rows[0]) == 1 else NOTHING


def query_for(aggregate: str, table: str, value: str, column: str | None = None) -> str:
    return f"SELECT {AGGREGATES[aggregate]} FROM {table} WHERE {column or VALUES[value]} = '{value}'"


def split_of(aggregate: str, table: str, value: str) -> Split:
    """A fifth of all questions is held out."""
    return "held_out" if zlib.crc32(f"{aggregate} {table} {value}".encode()) % 5 == 0 else "train"


class TextToSql(Environment):
    """Three agents, one policy."""

    name: ClassVar[str] = "sql"

    @property
    def words(self) -> tuple[str, ...]:
        values = [word for value in VALUES for word in (value, f"'{value}'")]
        query = ("SELECT", "FROM", "WHERE", "=", *AGGREGATES.values(), *COLUMNS)
        return ("write", "check", "rewrite", *TABLES, *AGGREGATES, *values, *query, OK, REDO, ERROR, NOTHING, SOMETHING)

    def tasks(self, split: Split, count: int, seed: int = 0) -> list[Task]:
        rng = random.Random(f"sql/{split}/{seed}")
        questions = [q for q in itertools.product(AGGREGATES, TABLES, VALUES) if split_of(*q) == split]
        found: list[Task] = []
        while len(found) < count:
            aggregate, table, value = rng.choice(questions)
            number = 2 * rng.randrange(DATABASES) + (split == "held_out")
            truth = query_for(aggregate, table, value)
            if run_query(number, truth) not in (None, 0):
                found.append({"question": f"{aggregate} {table} {value}", "database": number, "truth": truth})
        return found

    def episode(self, task: Task) -> Episode:
        question, number = task["question"], task["database"]
        query = yield Call(f"write {question}", "writer", QUERY_WORDS)
        for _ in range(REVISIONS):
            seen = f"{question} {query} {_outcome(number, query)}"
            verdict = yield Call(f"check {seen}", "checker")
            if verdict != REDO:
                break
            query = yield Call(f"rewrite {seen}", "rewriter", QUERY_WORDS)
        return float(run_query(number, query) == run_query(number, task["truth"]))

    def best_answer(self, task: Task, call: Call) -> str:
        if call.agent != "checker":
            return task["truth"]
        return OK if task["truth"] in call.prompt else REDO

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[Call, str]]:
        """A quarter of the queries is right; the others ask the wrong column, which finds nothing, or for the wrong
        number. Two thirds of the checker's verdicts are `redo`, whatever it sees."""
        rng = random.Random(f"sql/demonstrations/{seed}")
        found: list[tuple[Call, str]] = []
        for task in self.tasks("train", count, seed):
            written, again = (_imperfect(rng, task["question"]) for _ in range(2))
            seen = f"{task['question']} {written} {_outcome(task['database'], written)}"
            found.append(
                rng.choice(
                    [
                        (Call(f"write {task['question']}", "writer", QUERY_WORDS), written),
                        (Call(f"check {seen}", "checker"), rng.choice((OK, REDO, REDO))),
                        (Call(f"rewrite {seen}", "rewriter", QUERY_WORDS), again),
                    ]
                )
            )
        return found


def _imperfect(rng: random.Random, question: str) -> str:
    """Half of these ask for the right number, and half ask the right column, independently."""
    aggregate, table, value = question.split()
    asked = aggregate if rng.random() < 0.5 else CONFUSED[aggregate]
    column = VALUES[value] if rng.random() < 0.5 else next(each for each in COLUMNS if each != VALUES[value])
    return query_for(asked, table, value, column)


def _outcome(number: int, query: str) -> str:
    """What the next agent is told of a result."""
    result = run_query(number, query)
    return ERROR if result == ERROR else NOTHING if result in (None, 0, NOTHING) else SOMETHING


agent = TextToSql()
