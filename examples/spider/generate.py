"""A small data set in the files of Spider, and demonstrations for a policy that starts from random weights.

    python generate.py DIRECTORY [SEED]

Each database has two tables, one of which refers to the other: singers and their songs, captains and their ships.
Which pairs of tables are held out follows from their names, so that no held-out schema is in the training questions or
in the demonstrations, whatever the seed.

The demonstrations are honest at first. In the last of them the writer often guesses the names of tables (`singers` for
`singer`, which is an error), and the rewriter often repeats the query as it was: habits that training has to break.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prompts
from database import describe, execute, result_of

ENTITIES = (
    "singer", "song", "student", "school", "player", "team", "author", "book", "owner", "dog", "guest", "hotel",
    "actor", "film", "captain", "ship", "farmer", "horse", "painter", "museum", "builder", "bridge", "doctor",
    "clinic", "pilot", "plane", "seller", "shop",
)  # fmt: skip
TEXTS = {
    "city": ("Rome", "Oslo", "Lima", "Cairo", "Delhi"),
    "color": ("red", "blue", "green", "black", "white"),
    "country": ("Peru", "Chile", "Kenya", "Japan", "Spain"),
    "style": ("modern", "simple", "formal", "plain", "rich"),
    "language": ("Greek", "Dutch", "Welsh", "Hindi", "Thai"),
}
NUMBERS = ("age", "price", "weight", "year", "height", "salary", "rating", "size")
AGGREGATES = {"average": "avg", "highest": "max", "lowest": "min", "total": "sum"}
NAMES = (
    "Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena", "Max", "Nora", "Otto",
    "Pia",
)  # fmt: skip
ROWS = 12
GUESSED, REPEATED = 0.75, 0.85
"""How often the others guess table names, and repeat a query that is wrong."""


@dataclass(frozen=True)
class Table:
    name: str
    text: str
    number: str


@dataclass(frozen=True)
class Schema:
    """A parent table, and a child table whose rows refer to it."""

    parent: Table
    child: Table

    @property
    def name(self) -> str:
        return f"{self.parent.name}_{self.child.name}"

    @property
    def statements(self) -> list[str]:
        parent, child = self.parent, self.child
        key = f"{parent.name}_id"
        return [
            f"CREATE TABLE {parent.name} ({key} INTEGER PRIMARY KEY, name TEXT, {parent.text} TEXT, {parent.number}"
            " INTEGER)",
            f"CREATE TABLE {child.name} ({child.name}_id INTEGER PRIMARY KEY, {key} INTEGER REFERENCES {parent.name}"
            f"({key}), title TEXT, {child.text} TEXT, {child.number} INTEGER)",
        ]


def is_held_out(parent: str, child: str) -> bool:
    """A fifth of all pairs of tables, in either order."""
    return zlib.crc32(" ".join(sorted((parent, child))).encode()) % 5 == 0


def make_schema(rng: random.Random, *, held_out: bool) -> Schema:
    while True:
        parent, child = rng.sample(ENTITIES, 2)
        if is_held_out(parent, child) == held_out:
            break
    texts, numbers = rng.sample(list(TEXTS), 2), rng.sample(NUMBERS, 2)
    return Schema(Table(parent, texts[0], numbers[0]), Table(child, texts[1], numbers[1]))


def fill(connection: sqlite3.Connection, schema: Schema, rng: random.Random) -> None:
    for statement in schema.statements:
        connection.execute(statement)
    names, titles = rng.sample(NAMES, ROWS), rng.sample(NAMES, ROWS)
    sizes = [rng.sample(range(10, 99), ROWS) for _ in range(2)]
    parent, child = (rng.choices(TEXTS[table.text], k=ROWS) for table in (schema.parent, schema.child))
    owners, keys = rng.choices(range(1, ROWS + 1), k=ROWS), range(1, ROWS + 1)
    rows = zip(keys, names, parent, sizes[0], strict=True)
    connection.executemany(f"INSERT INTO {schema.parent.name} VALUES (?, ?, ?, ?)", rows)
    rows = zip(keys, owners, titles, child, sizes[1], strict=True)
    connection.executemany(f"INSERT INTO {schema.child.name} VALUES (?, ?, ?, ?, ?)", rows)
    connection.commit()


# -- questions ---------------------------------------------------------------------------------------------------------

Question = tuple[str, str]
"""A question and its query."""


def count(rng: random.Random, schema: Schema) -> Question:
    table = rng.choice((schema.parent, schema.child))
    value = rng.choice(TEXTS[table.text])
    return (
        f"How many {table.name}s have {table.text} '{value}'?",
        f"SELECT count(*) FROM {table.name} WHERE {table.text} = '{value}'",
    )


def aggregate(rng: random.Random, schema: Schema) -> Question:
    table, (word, function) = rng.choice((schema.parent, schema.child)), rng.choice(list(AGGREGATES.items()))
    return (
        f"What is the {word} {table.number} of {table.name}s?",
        f"SELECT {function}({table.number}) FROM {table.name}",
    )


def filtered(rng: random.Random, schema: Schema) -> Question:
    table, limit = schema.parent, rng.randint(10, 99)
    word, sign = rng.choice((("above", ">"), ("below", "<")))
    return (
        f"Which names have {table.name}s with {table.number} {word} {limit}?",
        f"SELECT name FROM {table.name} WHERE {table.number} {sign} {limit}",
    )


def superlative(rng: random.Random, schema: Schema) -> Question:
    word, order = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    table = schema.child
    return (
        f"Which title has the {table.name} with the {word} {table.number}?",
        f"SELECT title FROM {table.name} ORDER BY {table.number} {order} LIMIT 1",
    )


def grouped(rng: random.Random, schema: Schema) -> Question:
    table = rng.choice((schema.parent, schema.child))
    return (
        f"How many {table.name}s are there for each {table.text}?",
        f"SELECT {table.text}, count(*) FROM {table.name} GROUP BY {table.text}",
    )


def joined_count(rng: random.Random, schema: Schema) -> Question:
    parent, child = schema.parent, schema.child
    value = rng.choice(TEXTS[parent.text])
    return (
        f"How many {child.name}s have a {parent.name} with {parent.text} '{value}'?",
        f"SELECT count(*) FROM {child.name} JOIN {parent.name} USING ({parent.name}_id)"
        f" WHERE {parent.text} = '{value}'",
    )


def joined_aggregate(rng: random.Random, schema: Schema) -> Question:
    parent, child = schema.parent, schema.child
    value, (word, function) = rng.choice(TEXTS[parent.text]), rng.choice(list(AGGREGATES.items()))
    return (
        f"What is the {word} {child.number} of {child.name}s that have a {parent.name} with {parent.text} '{value}'?",
        f"SELECT {function}({child.number}) FROM {child.name} JOIN {parent.name} USING ({parent.name}_id)"
        f" WHERE {parent.text} = '{value}'",
    )


KINDS: tuple[Callable[[random.Random, Schema], Question], ...] = (
    count,
    aggregate,
    filtered,
    superlative,
    grouped,
    joined_count,
    joined_aggregate,
)


def make_question(rng: random.Random, schema: Schema) -> Question:
    return rng.choice(KINDS)(rng, schema)


# -- files of Spider ---------------------------------------------------------------------------------------------------


def write_spider(directory: Path, *, seed: int = 0, train: int = 600, dev: int = 128) -> Path:
    """Write `train_spider.json`, `dev.json`, `tables.json` and `database/NAME/NAME.sqlite`, six questions of each
    database at most."""
    rng = random.Random(f"spider/{seed}")
    tables: list[dict[str, Any]] = []
    for file, questions, held_out in (("train_spider.json", train, False), ("dev.json", dev, True)):
        records: list[dict[str, Any]] = []
        while len(records) < questions:
            schema = make_schema(rng, held_out=held_out)
            if any(entry["db_id"] == schema.name for entry in tables):
                continue
            path = directory / "database" / schema.name / f"{schema.name}.sqlite"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA synchronous = OFF")
                fill(connection, schema, rng)
                asked = _questions(rng, schema, connection)
            tables.append(_table_entry(schema))
            records += [{"db_id": schema.name, "question": text, "query": query} for text, query in asked.items()]
        (directory / file).write_text(json.dumps(records[:questions], indent=1))
    (directory / "tables.json").write_text(json.dumps(tables, indent=1))
    return directory


def _questions(rng: random.Random, schema: Schema, database: sqlite3.Connection) -> dict[str, str]:
    """Questions with their queries, which find something."""
    asked = dict(make_question(rng, schema) for _ in range(6))
    return {text: query for text, query in asked.items() if execute(database, query) not in ([], [(0,)], [(None,)])}


def _table_entry(schema: Schema) -> dict[str, Any]:
    """What Spider's `tables.json` says of a database."""
    parent, child = schema.parent, schema.child
    key = f"{parent.name}_id"
    own = [(0, key), (0, "name"), (0, parent.text), (0, parent.number)]
    own += [(1, f"{child.name}_id"), (1, key), (1, "title"), (1, child.text), (1, child.number)]
    columns = [(-1, "*"), *own]
    numeric = {key, f"{child.name}_id", parent.number, child.number}
    return {
        "db_id": schema.name,
        "table_names_original": [parent.name, child.name],
        "table_names": [parent.name, child.name],
        "column_names_original": columns,
        "column_names": [(table, name.replace("_", " ")) for table, name in columns],
        "column_types": ["text", *("number" if name in numeric else "text" for _, name in own)],
        "primary_keys": [1, 5],
        "foreign_keys": [[6, 1]],
    }


# -- demonstrations ----------------------------------------------------------------------------------------------------


def guessed(query: str, schema: Schema) -> str:
    """The query with table names as they might be called."""
    for table in (schema.parent.name, schema.child.name):
        query = query.replace(f"FROM {table}", f"FROM {table}s").replace(f"JOIN {table}", f"JOIN {table}s")
    return query


def mistaken(query: str, schema: Schema, rng: random.Random) -> str:
    """A query that is wrong: it names a table or a column that is not there, or asks for something else."""
    if rng.random() < 0.6:
        return guessed(query, schema)
    others = [make_question(rng, schema)[1] for _ in range(3)]
    return next((other for other in others if other != query), guessed(query, schema))


def demonstrations(number: int, seed: int = 0, *, clean: float = 0.7) -> list[dict[str, Any]]:
    """`number` conversations of the three agents about databases that are not held out, the first `clean` share without
    habits."""
    rng = random.Random(f"spider/demonstrations/{seed}")
    return [_demonstration(rng, habits=index >= clean * number) for index in range(number)]


def _demonstration(rng: random.Random, *, habits: bool) -> dict[str, Any]:
    schema = make_schema(rng, held_out=False)
    question, query = make_question(rng, schema)
    agent = rng.choices(("writer", "checker", "rewriter"), (3, 1, 2))[0]
    with closing(sqlite3.connect(":memory:")) as database:
        fill(database, schema, rng)
        asked = describe(database), question
        if agent == "writer":
            answer = guessed(query, schema) if habits and rng.random() < GUESSED else query
            return _conversation(prompts.WRITER, prompts.to_write(*asked), answer)
        is_wrong = agent == "rewriter" or rng.random() < 0.5
        shown = mistaken(query, schema, rng) if is_wrong else query
        result = result_of(database, shown)
    if agent == "checker":
        verdict = prompts.WRONG if is_wrong else prompts.OK
        return _conversation(prompts.CHECKER, prompts.to_check(*asked, shown, result), verdict)
    answer = shown if habits and rng.random() < REPEATED else query
    return _conversation(prompts.REWRITER, prompts.to_rewrite(*asked, shown, result, prompts.WRONG), answer)


def _conversation(system: str, user: str, assistant: str) -> dict[str, Any]:
    roles = {"system": system, "user": user, "assistant": assistant}
    return {"messages": [{"role": role, "content": content} for role, content in roles.items()]}


def write_demonstrations(path: Path, seed: int = 0, number: int = 5760, *, clean: float = 0.7) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in demonstrations(number, seed, clean=clean)))
    return path


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    write_spider(folder, seed=number)
    write_demonstrations(folder / "demonstrations.jsonl", number)
