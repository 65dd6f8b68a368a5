"""Tasks and where they come from: lists, JSONL, JSON, Parquet, Hugging Face `datasets`; splits and sampling.

A task is one input of an agent: any JSON value. What this module hands out is plain JSON data already, the same that an
agent gets after its task has been through the store. It never downloads anything.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import orjson

from agentlightning.errors import ConfigError, DatasetError, MissingExtraError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SAVED_DATASET = "datasets:"
"""Before a path: it is a directory written by `datasets.Dataset.save_to_disk`."""
SHOWN = 60
"""Characters of an offending line that an error shows."""
BOM = b"\xef\xbb\xbf"


@runtime_checkable
class Dataset(Protocol[T_co]):
    """Tasks by number: a list, a `torch.utils.data.Dataset`, a Hugging Face dataset ...

    >>> tasks: agl.Dataset = [{"question": "6 x 7", "answer": 42}]
    >>> tasks[0]["answer"]
    42
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


# -- loading ---------------------------------------------------------------------------------------------------------


def load_dataset(spec: str | Path | Sequence[Any] | Dataset[Any]) -> list[Any]:
    """The tasks of a list, of anything with a length and numbered items, or of a file, as plain JSON data.

    Files are known by their ending: `.jsonl` (one JSON value a line, empty lines are skipped), `.json` (an array),
    `.parquet` (one task a row). A directory, or `datasets:PATH`, is a dataset saved by Hugging Face `datasets`.
    Raises DatasetError, which names the file and the line, and where there is no task at all.
    """
    if isinstance(spec, str | Path):
        tasks, where = _load_path(str(spec)), str(spec)
    else:
        where = f"the {type(spec).__name__} given"
        tasks = _plain(_items(spec), where)
    if not tasks:
        raise DatasetError(f"{where} holds no task; give at least one")
    return tasks


def _load_path(spec: str) -> list[Any]:
    path = Path(spec.removeprefix(SAVED_DATASET))
    if not path.exists():
        raise DatasetError(f"there is no dataset {str(path)!r}; give the path of a file that exists")
    if spec.startswith(SAVED_DATASET) or path.is_dir():
        return _plain(_saved_dataset(path), str(path))
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DatasetError(
            f"{path}: tasks are read from {', '.join(READERS)} files, not from {path.suffix or 'this'!r}"
        )
    return reader(path)


def _items(spec: Sequence[Any] | Dataset[Any]) -> Iterable[Any]:
    if isinstance(spec, dict):
        raise DatasetError("a dict is one task; put it into a list")
    if type(spec).__module__.partition(".")[0] == "pandas":
        raise DatasetError('a DataFrame holds columns, not tasks; pass frame.to_dict("records")')
    if isinstance(spec, Iterable):
        return cast(Iterable[Any], spec)
    if isinstance(spec, Dataset):
        return (spec[index] for index in range(len(spec)))
    raise DatasetError(f"{type(spec).__name__} is no dataset; give a list, a path, or something with len() and [index]")


def _plain(tasks: Iterable[Any], where: str) -> list[Any]:
    """Tasks as JSON carries them: dates become text, tuples lists. Refuses what JSON cannot hold, by its number."""
    plain: list[Any] = []
    for number, task in enumerate(tasks, 1):
        try:
            plain.append(orjson.loads(orjson.dumps(task, option=orjson.OPT_SERIALIZE_NUMPY)))
        except TypeError as error:
            raise DatasetError(
                f"{where}, task {number} cannot be written as JSON: {error}; use plain values"
            ) from error
    return plain


def _jsonl(path: Path) -> list[Any]:
    tasks: list[Any] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content = (line.removeprefix(BOM) if number == 1 else line).strip()
            if content:
                tasks.append(_json_value(content, f"{path}, line {number}", "each line holds one JSON value"))
    return tasks


def _json_array(path: Path) -> list[Any]:
    content = path.read_bytes().removeprefix(BOM).strip()
    if not content:
        return []
    value = _json_value(content, str(path), "for one JSON value a line, end its name in .jsonl")
    if not isinstance(value, list):
        raise DatasetError(f"{path} holds a JSON {type(value).__name__}, not an array of tasks; put it in [ ]")
    return cast(list[Any], value)


def _json_value(content: bytes, where: str, way_out: str) -> Any:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        shown = content[max(0, error.start - 20) : error.start + 20]
        raise DatasetError(
            f"{where} is not UTF-8: byte {content[error.start]:#04x} in {shown!r}; save it as UTF-8"
        ) from error
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        shown = text if len(text) <= SHOWN else text[:SHOWN] + "..."
        raise DatasetError(f"{where} is not JSON ({error.msg}, column {error.colno}): {shown!r}; {way_out}") from error


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
    return _plain(rows, str(path))


def _saved_dataset(path: Path) -> Iterable[Any]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError("datasets", "datasets") from error
    try:
        found: Any = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is a directory, but not one written by datasets' save_to_disk") from error
    if isinstance(found, dict):
        names = ", ".join(map(str, found))
        raise DatasetError(f"{path} holds several splits ({names}); name one, as in {path / next(iter(found))}")
    return found


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json_array,
    ".parquet": _parquet,
}


# -- identity, splits, sampling --------------------------------------------------------------------------------------


def task_key(task: Any) -> str:
    """32 hexadecimal digits: the same for tasks of the same content, whatever the order of their keys."""
    canonical = orjson.dumps(task, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return hashlib.sha256(canonical).hexdigest()[:32]


def split(tasks: Sequence[T], fractions: Sequence[float], seed: int = 0) -> list[list[T]]:
    """The tasks in parts of about the given shares, which add up to 1; each keeps the order of the tasks.

    Chance is a hash of seed and content: the same tasks are split the same way on any machine and in any order of the
    file, and tasks of the same content always fall into the same part.
    """
    if any(fraction < 0 for fraction in fractions) or abs(sum(fractions) - 1) > 1e-6:
        raise ConfigError(f"fractions {list(fractions)} do not add up to 1; give shares such as [0.7, 0.1, 0.2]")
    keys = [task_key(task) for task in tasks]
    part_of = _assign(keys, fractions, seed)
    parts: list[list[T]] = [[] for _ in fractions]
    for key, task in zip(keys, tasks, strict=True):
        parts[part_of[key]].append(task)
    return parts


def _assign(keys: Sequence[str], fractions: Sequence[float], seed: int) -> dict[str, int]:
    ends = [round(len(keys) * share) for share in accumulate(fractions)]
    counts: dict[str, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    part_of: dict[str, int] = {}
    placed = 0
    for key in sorted(counts, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest()):
        part_of[key] = bisect_right(ends, placed)
        placed += counts[key]
    return part_of


class TaskSampler:
    """Draws the tasks of each step: shuffled anew in each epoch, every task once an epoch.

    What a step draws depends on (tasks, batch, seed, step) alone, so a resumed run draws what it would have drawn.
    """

    def __init__(self, tasks: Sequence[Any], batch: int, seed: int = 0) -> None:
        if not tasks:
            raise DatasetError("there is no task to draw from; give at least one")
        if batch < 1:
            raise ConfigError(f"batch={batch} draws nothing; use at least 1")
        self.tasks = tasks
        self.batch = batch
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def draw(self, step: int) -> list[Any]:
        """The tasks of a step, the first being step 0. A batch may reach into the next epoch."""
        if step < 0:
            raise ConfigError(f"step={step}: steps are counted from 0")
        return list(self._draw(step))

    def _draw(self, step: int) -> Iterator[Any]:
        for position in range(step * self.batch, (step + 1) * self.batch):
            epoch, index = divmod(position, len(self.tasks))
            yield self.tasks[self._shuffled(epoch)[index]]

    def _shuffled(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.tasks)))
            random.Random(f"{self.seed}:{epoch}").shuffle(self._order)
        return self._order
