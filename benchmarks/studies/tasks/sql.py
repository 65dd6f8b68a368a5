"""Text to SQL by a writer, a checker and a rewriter, over generated SQLite databases; the reward is execution accuracy.

A question names an aggregate, a table, a color, a city and a period; the query has four slots:
`SELECT _ FROM cars WHERE _ = 'red' AND _ = 'rome' AND year _ 2008`. The writer fills one slot a call, then the query
runs. The checker sees the question, the slots and whether the query found anything, and says `ok` or names a slot,
which the rewriter fills again; there are at most two revisions. The reward is 1 if the last query gives the result of
the true one.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import zlib
from collections.abc import Mapping
from functools import cache
from typing import ClassVar

from tasks.base import Call, Environment, Episode, Split, Task

TABLES = ("cars", "homes")
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
COLORS, CITIES = ("red", "blue", "green"), ("rome", "oslo", "lima")
COLUMNS = ("color", "city")
PERIODS = {"recent": ">", "old": "<"}
SLOTS = ("aggregate", "first", "second", "sign")
OK = "ok"
ERROR, NOTHING, SOMETHING = "error", "nothing", "something"
REVISIONS = 2
ROWS = 60
RIGHT = 0.7
"""How often a starting policy fills a slot right."""
DATABASES = 64
"""Of each split."""


@cache
def database(seed: int) -> sqlite3.Connection:
    """Two tables of things with a color, a city, a price and a year."""
    rng = random.Random(f"sql/database/{seed}")
    connection = sqlite3.connect(":memory:")
    for table in TABLES:
        connection.execute(f"CREATE TABLE {table} (color TEXT, city TEXT, price INTEGER, year INTEGER)")
        rows = [
            (rng.choice(COLORS), rng.choice(CITIES), rng.randint(1, 999), rng.randint(1990, 2026)) for _ in range(ROWS)
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


def true_slots(question: str) -> dict[str, str]:
    aggregate, _, _, _, period = question.split()
    return dict(zip(SLOTS, (AGGREGATES[aggregate], *COLUMNS, PERIODS[period]), strict=True))


def wrong_slots(question: str) -> dict[str, str]:
    """What a starting policy takes for right: the opposite aggregate, the other column, the other period."""
    aggregate, _, _, _, period = question.split()
    other = next(each for each in PERIODS if each != period)
    filled = (AGGREGATES[CONFUSED[aggregate]], *reversed(COLUMNS), PERIODS[other])
    return dict(zip(SLOTS, filled, strict=True))


def query_of(question: str, slots: Mapping[str, str]) -> str:
    _, table, color, city, _ = question.split()
    aggregate, first, second, sign = (slots[each] for each in SLOTS)
    return f"SELECT {aggregate} FROM {table} WHERE {first} = '{color}' AND {second} = '{city}' AND year {sign} 2008"


def split_of(question: str) -> Split:
    """A fifth of all questions is held out."""
    return "held_out" if zlib.crc32(question.encode()) % 5 == 0 else "train"


class TextToSql(Environment):
    """Three agents, one policy."""

    name: ClassVar[str] = "sql"

    @property
    def words(self) -> tuple[str, ...]:
        roles = ("write", "check", "rewrite", *SLOTS, OK, ERROR, NOTHING, SOMETHING)
        return (
            *roles,
            *AGGREGATES,
            *TABLES,
            *COLORS,
            *CITIES,
            *PERIODS,
            *AGGREGATES.values(),
            *COLUMNS,
            *PERIODS.values(),
        )

    def tasks(self, split: Split, count: int, seed: int = 0) -> list[Task]:
        rng = random.Random(f"sql/{split}/{seed}")
        every = map(" ".join, itertools.product(AGGREGATES, TABLES, COLORS, CITIES, PERIODS))
        questions = [question for question in every if split_of(question) == split]
        found: list[Task] = []
        while len(found) < count:
            question = rng.choice(questions)
            number = 2 * rng.randrange(DATABASES) + (split == "held_out")
            true, wrong = true_slots(question), wrong_slots(question)
            others = [run_query(number, query_of(question, true | {slot: wrong[slot]})) for slot in SLOTS]
            if run_query(number, query_of(question, true)) not in (None, 0, *others):
                found.append({"question": question, "database": number})
        return found

    def episode(self, task: Task) -> Episode:
        question, number = task["question"], task["database"]
        slots: dict[str, str] = {}
        for slot in SLOTS:
            slots[slot] = yield _write(slot, question, slots)
        for _ in range(REVISIONS):
            verdict = yield _check(question, number, slots)
            if verdict not in SLOTS:
                break
            slots[verdict] = yield _rewrite(verdict, question, number, slots)
        truth = query_of(question, true_slots(question))
        return float(run_query(number, query_of(question, slots)) == run_query(number, truth))

    def best_answer(self, task: Task, call: Call) -> str:
        true = true_slots(task["question"])
        words = call.prompt.split()
        if call.agent != "checker":
            return true[words[1]]
        filled = dict(zip(SLOTS, words[6:], strict=False))
        return next((slot for slot in SLOTS if filled[slot] != true[slot]), OK)

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[Call, str]]:
        """Slots are filled right as often as `RIGHT` says, whatever the others hold. Half of the verdicts are
        `ok`, and the others name any slot, whatever the checker sees."""
        rng = random.Random(f"sql/demonstrations/{seed}")
        found: list[tuple[Call, str]] = []
        for task in self.tasks("train", min(count, 200), seed) * (count // min(count, 200) + 1):
            question, number = task["question"], task["database"]
            choices = (true_slots(question), wrong_slots(question))
            slots = {slot: rng.choice(choices)[slot] for slot in SLOTS}
            place = rng.randrange(len(SLOTS))
            slot, answer = SLOTS[place], choices[rng.random() >= RIGHT][SLOTS[place]]
            before = {each: slots[each] for each in SLOTS[:place]}
            found += rng.choices(
                [
                    (_write(slot, question, before), answer),
                    (_check(question, number, slots), OK if rng.random() < 0.5 else slot),
                    (_rewrite(slot, question, number, slots), answer),
                ],
                weights=(2, 1, 1),
            )
        return found[:count]


def _write(slot: str, question: str, slots: Mapping[str, str]) -> Call:
    return Call(" ".join(["write", slot, question, *slots.values()]), "writer")


def _check(question: str, number: int, slots: Mapping[str, str]) -> Call:
    return Call(f"check {_seen(question, number, slots)}", "checker")


def _rewrite(slot: str, question: str, number: int, slots: Mapping[str, str]) -> Call:
    return Call(f"rewrite {slot} {_seen(question, number, slots)}", "rewriter")


def _seen(question: str, number: int, slots: Mapping[str, str]) -> str:
    result = run_query(number, query_of(question, slots))
    outcome = ERROR if result == ERROR else NOTHING if result in (None, 0, NOTHING) else SOMETHING
    return " ".join([question, *(slots[each] for each in SLOTS), outcome])


agent = TextToSql()
