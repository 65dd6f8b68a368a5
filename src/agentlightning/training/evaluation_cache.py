"""Keeps the rollouts of evaluations in a directory, so that the same one is not run again, after a crash neither.

A rollout's id is a digest of the task, the number of its repetition, and what produces the reward: agent, reward
function, model, mode, and the runner's settings that agents see. Code is known by the file it is in and by what it
closes over; a change in a file that it imports is not seen. A failed rollout is run again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from agentlightning.errors import ConfigError
from agentlightning.rollouts import PRIVATE_QUEUE
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.util.file_lock import lock_file

DIGITS = 32


@dataclass(frozen=True, slots=True)
class EvaluationCache:
    """The part of a cache for one combination of agent, reward, model and settings."""

    store: LightningStoreBase
    settings: str
    """Digest of what produces rewards, beside the task."""

    @property
    def queue(self) -> str:
        """Only rollouts of these settings, so that no other agent runs what an interrupted evaluation left."""
        return f"{PRIVATE_QUEUE}eval-{self.settings}"

    @property
    def resources_id(self) -> str:
        return f"eval-{self.settings}"

    def rollout_ids(self, tasks: Sequence[Any], repeats: int) -> list[str]:
        """An id for each rollout, task by task. Tasks of equal content are further repetitions."""
        seen: Counter[str] = Counter()
        ids: list[str] = []
        for key in map(task_key, tasks):
            for _ in range(repeats):
                ids.append(f"eval-{_digest([self.settings, key, seen[key]])}")
                seen[key] += 1
        return ids

    async def begin(self) -> set[str]:
        """Cancel what an interrupted evaluation left waiting, to be queued again where it is asked for. Returns the
        ids of the rollouts that have succeeded already."""
        left = await self.store.query_rollouts(
            status_in=["queuing", "requeuing", "preparing", "running"], queue_in=[self.queue]
        )
        for rollout in left:
            await self.store.cancel_rollout(rollout.rollout_id)
        done = await self.store.query_rollouts(status_in=["succeeded"], queue_in=[self.queue])
        return {rollout.rollout_id for rollout in done}


def open_cache(
    directory: Path, stack: AsyncExitStack, agent: Any, reward: Any, model: str | Path | None, *settings: Any
) -> EvaluationCache:
    """Open the cache in a directory; `settings`: what else tells results apart, as JSON values. Raises ConfigError
    where another process uses it, or nothing can be written."""
    files = None if model is None else _files(Path(model))
    known = _digest([identity(agent), identity(reward), files, *settings])
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((directory / "lock").open("w"))
    except OSError as error:
        raise ConfigError(f"cache={str(directory)!r} cannot be written: {error}") from error
    if not lock_file(lock.fileno()):
        raise ConfigError(f"another evaluation uses cache={str(directory)!r}; wait for it, or use another directory")
    store = LightningStore(directory / "store.db")
    stack.push_async_callback(store.close)
    return EvaluationCache(store, known)


def identity(part: Any) -> Any:
    """What tells an agent or a reward function from another, as JSON. Raises ConfigError where that cannot be told."""
    return _named(part) if isinstance(part, str) else _described(part, frozenset())


def _named(spec: str) -> Any:
    """A name or a command, with the digests of the files in it."""
    module = spec.partition(":")[0]
    files = [Path(module), *map(Path, shlex.split(spec))]
    if module.isidentifier() or all(map(str.isidentifier, module.split("."))):
        try:
            found = find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is not None and found.origin is not None:
            files.append(Path(found.origin))
    return [spec, sorted({_file(path) for path in files if path.is_file()})]


def _described(value: Any, above: frozenset[int]) -> Any:
    """`above`: the objects that hold it."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, bytes | Path):
        return repr(value)
    if id(value) in above:
        return "again"
    above = above | {id(value)}
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = [value.__defaults__, value.__kwdefaults__]
        return [_source(value), _code(value.__code__), _described([cells, defaults], above)]
    if inspect.isclass(value) or inspect.isbuiltin(value):
        return _source(value)
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_described(each, above)) for each in cast("Iterable[Any]", value))
    if isinstance(value, Mapping):
        parts: Any = list(cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, list | tuple | Iterator):
        parts = list(cast("Iterable[Any]", value))
    else:
        try:
            parts = value.__reduce_ex__(2)  # its class and its state, as they are pickled
        except (TypeError, AttributeError) as error:
            raise ConfigError(
                f"the cache cannot tell this {type(value).__name__} from another; give the agent and the reward as"
                " module:name, or leave out cache"
            ) from error
    return [_described(each, above) for each in parts]


def _source(value: Any) -> Any:
    """The name of a function or a class, and the digest of its file where it has one."""
    name = [getattr(value, "__module__", None), value.__qualname__]
    try:
        return [*name, _file(Path(inspect.getfile(value)))]
    except (TypeError, OSError):
        return name


def _code(code: CodeType) -> Any:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names]


def _file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]


def _files(directory: Path) -> Any:
    """The names, sizes and times of a model's files: their content may be many gigabytes."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(directory)), path.stat()) for path in found]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]
