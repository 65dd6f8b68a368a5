"""Evaluations on disk: one JSON object with the rewards of each task's rollouts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from agentlightning.errors import ConfigError
from agentlightning.util.json_values import dumps

VERSION = 1
Members: TypeAlias = dict[str, dict[str, tuple[int, ...]]]


class EvaluationRecord(BaseModel):
    """What a file holds."""

    model_config = ConfigDict(extra="forbid")

    agentlightning_evaluation: int
    """The version of the format."""
    rollouts: list[list[float | None]]
    seconds: float = 0.0
    reasons: dict[str, int] = {}
    failed_as: str | float = "lowest"
    tasks: tuple[str, ...] = ()
    members: Members = {}
    cached: int = 0
    bounds: tuple[float, float] | None = None


def write_record(path: Path, fields: Mapping[str, Any]) -> None:
    """Write an evaluation's fields, whole or not at all. Raises ConfigError where nothing can be written."""
    record = {"agentlightning_evaluation": VERSION, **fields}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_bytes(dumps(record) + b"\n")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"the evaluation cannot be written to {path}: {error}") from error


def read_record(path: Path) -> dict[str, Any]:
    """The fields of an evaluation in a file. Raises ConfigError where there is none."""
    try:
        record = EvaluationRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"no evaluation can be read from {path}: {error}; write one with --out or save()") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise ConfigError(
            f"{path} holds no evaluation ({where}: {first['msg']}); give a file of `agl eval --out` or Evaluation.save"
        ) from error
    if record.agentlightning_evaluation != VERSION:
        raise ConfigError(f"{path} has format {record.agentlightning_evaluation}; this version reads {VERSION}")
    fields = record.model_dump()
    del fields["agentlightning_evaluation"]
    return fields
