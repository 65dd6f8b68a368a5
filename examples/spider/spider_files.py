"""Reads the files of Spider: questions, and where their databases are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentlightning.errors import DatasetError

TRAIN, DEV = "train_spider.json", "dev.json"
KEYS = ("db_id", "question", "query")


def read_spider(directory: str | Path, file: str = TRAIN) -> list[dict[str, Any]]:
    """The tasks of one file: question, database (the path of its file) and query (the true one). Raises DatasetError
    for a file that is missing or is not one of Spider's, and names the databases that are missing."""
    directory = Path(directory).resolve()
    records = _read(directory / file)
    paths = {each["db_id"]: directory / "database" / each["db_id"] / f"{each['db_id']}.sqlite" for each in records}
    if missing := sorted(name for name, path in paths.items() if not path.is_file()):
        raise DatasetError(
            f"{directory / file} asks about {len(missing)} databases that are missing: {', '.join(missing[:5])}"
            f"{' ...' if len(missing) > 5 else ''}; {paths[missing[0]]} should be there"
        )
    return [
        {"question": each["question"], "database": str(paths[each["db_id"]]), "query": each["query"]}
        for each in records
    ]


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DatasetError(f"there is no {path}; give the folder of Spider that has {TRAIN} and {DEV}") from None
    except ValueError as error:
        raise DatasetError(f"{path} is not JSON: {error}") from error
    if not isinstance(records, list) or not records:
        raise DatasetError(f"{path} holds no list of questions")
    for number, record in enumerate(records):
        absent = [key for key in KEYS if not isinstance(record, dict) or not isinstance(record.get(key), str)]
        if absent:
            raise DatasetError(f"record {number} of {path} has no text {absent[0]!r}")
    return records
