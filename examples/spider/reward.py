"""Execution accuracy: 1.0 for a query whose result is that of the true query, else 0.0."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from database import QueryError, execute, open_database, same_result


def score(task: dict[str, Any], output: str) -> float:
    """The reward of the agent's query. An error of the true query is an error of the data, and raised."""
    with closing(open_database(task["database"])) as database:
        wanted = execute(database, task["query"])
        try:
            found = execute(database, output)
        except QueryError:
            return 0.0
    return float(same_result(found, wanted, ordered="order by" in task["query"].lower()))
