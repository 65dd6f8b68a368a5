"""Tasks: loading them from lists, JSONL, JSON, CSV, Parquet and Hugging Face `datasets`; splits and sampling.

A task is one input of an agent: any JSON value. Tasks are converted to plain JSON data when loaded, so that they are
the same before and after they have passed through the store. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast, runtime_checkable

import orjson

from agentlightning.errors import ConfigError, DatasetError, MissingExtraError
from agentlightning.util.json_values import Json, dumps, loads
from agentlightning.util.plugins import Registry, calls_of, plugin_names

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SAVED_DATASET = "datasets:"
"""Prefix of paths to directories written by `datasets.Dataset.save_to_disk`."""
INTEGRATIONS: Final = "agentlightning.integrations"


class DatasetKind:
    """A kind of dataset: the address `KIND:NAME?size=500&seed=1` is that many tasks of it. One of your own is named as
    `module:Class?size=500`, or by the name that a distribution announces.

    >>> from agentlightning.task import DatasetKind
    >>> class Sums(DatasetKind):
    ...     def load(self, address):
    ...         return [{"question": f"{n} + {n}", "answer": 2 * n} for n in range(address.size)]
    """

    agent: str | None = None
    """The agent of these tasks, as `module:name`, where none is given."""
    reward: str | None = None
    """Their reward function likewise."""

    def load(self, address: Any) -> Iterable[Any]:
        """The tasks; `address` has `name`, `size`, `seed`, `part` and `options`."""
        raise NotImplementedError(f"{type(self).__name__} defines no `load`")


class Environment(DatasetKind):
    """An environment of a package that is an extra.

    module: its module in `agentlightning.integrations`, with `load(address)` and `play`, an agent. scores: whether that
    has a reward function `score`; the agent of any other gives the rewards itself.
    """

    def __init__(self, module: str, scores: bool = False) -> None:
        self._module = f"{INTEGRATIONS}.{module}"
        self.agent, self.reward = f"{self._module}:play", f"{self._module}:score" if scores else None

    def load(self, address: Any) -> Iterable[Any]:
        return import_module(self._module).load(address)


DATASETS = Registry(
    "datasets",
    "kind of dataset",
    DatasetKind,
    {
        "reasoning_gym": Environment("reasoning_gym", scores=True),
        "textarena": Environment("text_gym"),
        "verifiers": Environment("verifiers"),
    },
)
"""By the kind in the address."""
_OWN_KIND: Final = re.compile(r"([\w.]+|[^?]+\.py):[A-Z]\w*(?=[:?]|$)")


def dataset_kind(address: str) -> tuple[str, DatasetKind] | None:
    """The kind of an address, and its name there; None for what is no address. Raises ConfigError for a class that
    cannot be used."""
    own = _OWN_KIND.match(address)
    name = own[0] if own else address.partition(":")[0]
    if not own and name not in DATASETS and (":" not in address or name not in plugin_names(DATASETS.kind)):
        return None
    found = DATASETS.find(name)
    return name, found() if isinstance(found, type) else found


SHOWN = 60
"""Maximum length of an invalid line in an error message."""
SHOWN_ROWS = 8
"""Rows named in a message."""
BOM = b"\xef\xbb\xbf"


@runtime_checkable
class Dataset(Protocol[T_co]):
    """Tasks by index: a list, a `torch.utils.data.Dataset`, a Hugging Face dataset ...

    >>> tasks: agl.Dataset = [{"question": "6 x 7", "answer": 42}]
    >>> tasks[0]["answer"]
    42
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


# -- loading ---------------------------------------------------------------------------------------------------------


def load_dataset(spec: str | Path | Sequence[Any] | Dataset[Any]) -> list[Any]:
    """Load tasks from a list, any object with a length and indexed items, or a file, as plain JSON data.

    Items may be pydantic models and dataclasses. The suffix determines the format of a file: `.jsonl` (one JSON value
    per line, empty lines are skipped), `.json` (an array), `.csv` (a header, then one task per row; values are text),
    `.parquet` (one task per row). A directory, or `datasets:PATH`, is a dataset saved by Hugging Face `datasets`; of
    several splits, `train` is taken. In rows of Parquet and `datasets`, a null within a value is left out: columns give
    one to each row that lacks a field of another. `KIND:NAME?size=500&seed=1` with a kind of DATASETS is
    that many tasks of an environment, `module:Class?size=500` of a kind of your own. Raises DatasetError with the file
    and line of the problem, or if there are no tasks.
    """
    if isinstance(spec, str | Path):
        tasks, where = _load_path(str(spec)), str(spec)
    else:
        where = f"the given {type(spec).__name__}"
        tasks = _plain(_items(spec), where)
    if not tasks:
        raise DatasetError(f"{where} has no tasks; at least one is needed")
    return tasks


def _load_path(spec: str) -> list[Any]:
    if not Path(spec).exists() and (found := dataset_kind(spec)) is not None:
        return _load_kind(spec, *found)
    path = Path(spec.removeprefix(SAVED_DATASET))
    if not path.exists():
        raise DatasetError(f"dataset not found: {str(path)!r}; pass the path of an existing file")
    if spec.startswith(SAVED_DATASET) or path.is_dir():
        return _plain(_rows(_saved_dataset(path), str(path)), str(path))
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DatasetError(
            f"{path}: tasks are read from {', '.join(READERS)} files, not from {path.suffix or 'this'!r}"
        )
    return reader(path)


def _load_kind(address: str, name: str, kind: DatasetKind) -> list[Any]:
    """The tasks of an address. What reads addresses is found by name, because it builds on this module."""
    rest = address[len(name) :].removeprefix(":")
    alias = name.rpartition(":")[2]
    text = f"{alias}:{alias if rest.startswith('?') or not rest else ''}{rest}"
    parsed = import_module(f"{INTEGRATIONS}.base").Address.parse(text)
    with calls_of(type(kind), "kind of dataset"):
        return _plain(kind.load(parsed), address)


def _items(spec: Sequence[Any] | Dataset[Any]) -> Iterable[Any]:
    package = type(spec).__module__.partition(".")[0]
    if package == "datasets":
        return _rows(spec, f"the given {type(spec).__name__}")
    if isinstance(spec, dict):
        raise DatasetError("a dict is one task; put it into a list")
    if package == "pandas":
        raise DatasetError('a DataFrame holds columns, not tasks; pass frame.to_dict("records")')
    if isinstance(spec, Iterable):
        return cast(Iterable[Any], spec)
    if isinstance(spec, Dataset):
        return (spec[index] for index in range(len(spec)))
    raise DatasetError(
        f"{type(spec).__name__} is not a dataset; pass a list, a path, or an object with len() and [index]"
    )


def _plain(tasks: Iterable[Any], where: str) -> list[Any]:
    """Convert tasks to JSON values: dates become text, tuples lists. Raises DatasetError with the task's number."""
    plain: list[Any] = []
    for number, task in enumerate(tasks, 1):
        try:
            plain.append(loads(dumps(task, _fields, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS)))
        except TypeError as error:
            raise DatasetError(
                f"{where}, task {number} cannot be written as JSON: {error}; use plain values"
            ) from error
    return plain


def _fields(value: Any) -> Any:
    """The fields of a pydantic model or a dataclass."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


def _rows(dataset: Any, where: str) -> list[Any]:
    """The rows of a Hugging Face dataset, or of a table, without the nulls that its columns gave them."""
    if isinstance(dataset, dict):
        splits = cast(Json, dataset)
        several, names = len(splits) > 1, ", ".join(splits)
        if several and "train" not in splits:
            raise DatasetError(f"{where} holds several splits ({names}); name one, as in {where}/{next(iter(splits))}")
        if several:
            logger.warning("%s holds the splits %s; train is taken", where, names)
        dataset = splits["train"] if several else next(iter(splits.values()), [])
    left_out: list[str] = []
    rows = [{name: _without_nulls(value, left_out) for name, value in row.items()} for row in dataset]
    if left_out:
        names = ", ".join(sorted(set(left_out))[:SHOWN_ROWS])
        logger.warning("%s: %d nulls within its values are left out (%s)", where, len(left_out), names)
    return rows


def _without_nulls(value: Any, left_out: list[str]) -> Any:
    if isinstance(value, dict):
        items = cast(Json, value).items()
        left_out += [name for name, each in items if each is None]
        return {name: _without_nulls(each, left_out) for name, each in items if each is not None}
    return [_without_nulls(each, left_out) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def _csv(path: Path) -> list[Any]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            rows = [(reader.line_num, row) for row in reader]
        except (csv.Error, UnicodeDecodeError) as error:
            raise DatasetError(f"{path}, line {reader.line_num + 1} is not CSV in UTF-8: {error}") from error
    if len(names := reader.fieldnames or ()) == 1 and (found := re.search(r"[;\t]", names[0])):
        raise DatasetError(f"{path} has the one column {names[0]!r}: separate columns with commas, not {found[0]!r}")
    for line, row in rows:
        if None in row or None in row.values():
            raise DatasetError(f"{path}, line {line} has another number of values than the header; quote commas")
    return [row for _, row in rows]


def _jsonl(path: Path) -> list[Any]:
    return [value for _, value in json_lines(path)]


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Where each line of a JSONL file is, and its value; empty lines are skipped. Raises DatasetError as
    `load_dataset` does."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where, content = f"{path}, line {number}", (line.removeprefix(BOM) if number == 1 else line).strip()
            if content:
                yield where, _json_value(content, where, "each line is one JSON value")


def _json_array(path: Path) -> list[Any]:
    content = path.read_bytes().removeprefix(BOM).strip()
    if not content:
        return []
    value = _json_value(content, str(path), "for one JSON value per line, use the suffix .jsonl")
    if not isinstance(value, list):
        raise DatasetError(f"{path} holds a JSON {type(value).__name__}, not an array of tasks; put it in [ ]")
    return cast(list[Any], value)


def _json_value(content: bytes, where: str, remedy: str) -> Any:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        shown = content[max(0, error.start - 20) : error.start + 20]
        raise DatasetError(
            f"{where} is not UTF-8: byte {content[error.start]:#04x} in {shown!r}; save it as UTF-8"
        ) from error
    try:
        return loads(text)
    except orjson.JSONDecodeError as error:
        shown = text if len(text) <= SHOWN else text[:SHOWN] + "..."
        raise DatasetError(f"{where} is not JSON ({error.msg}, column {error.colno}): {shown!r}; {remedy}") from error


def _parquet(path: Path) -> list[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError("pyarrow", "parquet") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path} is not a Parquet file: {error}") from error
    return _plain(_rows(rows, str(path)), str(path))


def _saved_dataset(path: Path) -> Iterable[Any]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError("datasets", "datasets") from error
    try:
        found: Any = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is a directory, but not one written by datasets' save_to_disk") from error
    return found


READERS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json_array, ".csv": _csv, ".parquet": _parquet}


# -- identity, splits, sampling --------------------------------------------------------------------------------------


def task_key(task: Any) -> str:
    """Digest of a task's content (32 hexadecimal digits), independent of the order of keys."""
    return hashlib.sha256(dumps(task, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)).hexdigest()[:32]


def split(tasks: Sequence[T], fractions: Sequence[float], seed: int = 0) -> list[list[T]]:
    """Split tasks into parts of about the given fractions, which sum to 1; each part keeps the order of the tasks.

    The split depends on a hash of seed and content: it is the same on any machine and for any order of the tasks, and
    tasks with equal content are always in the same part.
    """
    if any(fraction < 0 for fraction in fractions) or abs(sum(fractions) - 1) > 1e-6:
        raise ConfigError(f"fractions {list(fractions)} do not sum to 1; use fractions such as [0.7, 0.1, 0.2]")
    keys = [task_key(task) for task in tasks]
    counts, ends = Counter(keys), [round(len(keys) * share) for share in accumulate(fractions)]
    part_of: dict[str, int] = {}
    placed = 0
    for key in sorted(counts, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest()):
        part_of[key] = bisect_right(ends, placed)
        placed += counts[key]
    parts: list[list[T]] = [[] for _ in fractions]
    for key, task in zip(keys, tasks, strict=True):
        parts[part_of[key]].append(task)
    return parts


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows of two datasets that hold the same tasks."""

    first: str
    second: str
    rows: tuple[tuple[int, int], ...]
    """Row of the first and row of the second, counted from 1, for each task of the second that the first has."""

    def __str__(self) -> str:
        shown = ", ".join(f"{second} (= {first})" for first, second in self.rows[:SHOWN_ROWS])
        more = f" and {len(self.rows) - SHOWN_ROWS} more" if len(self.rows) > SHOWN_ROWS else ""
        return f"{len(self.rows)} {self.second} tasks are {self.first} tasks, too: rows {shown}{more}"


def overlaps(datasets: Mapping[str, Sequence[Any]]) -> list[Overlap]:
    """Which of the named datasets share tasks of equal content, two by two."""
    keys = {name: [task_key(task) for task in tasks] for name, tasks in datasets.items()}
    found: list[Overlap] = []
    for (first, ours), (second, theirs) in combinations(keys.items(), 2):
        rows = dict(zip(reversed(ours), range(len(ours), 0, -1), strict=True))
        shared = tuple((rows[key], row) for row, key in enumerate(theirs, 1) if key in rows)
        if shared:
            found.append(Overlap(first, second, shared))
    return found


def tasks_of_step(number: int, batch: int, step: int, seed: int = 0) -> list[int]:
    """The places of the tasks of a step, counted from 0, among `number` tasks: reshuffled every epoch, each task once
    per epoch. A batch may extend into the next epoch. A resumed run draws the same tasks."""
    places = [divmod(position, number) for position in range(step * batch, (step + 1) * batch)]
    return [_shuffled(number, f"{seed}:{epoch}")[index] for epoch, index in places]


@lru_cache(2)
def _shuffled(number: int, seed: str) -> list[int]:
    """Cached, since a million numbers take a second."""
    order = list(range(number))
    random.Random(seed).shuffle(order)
    return order
