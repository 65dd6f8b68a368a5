"""The options that several verbs have, and what they name: runs, stores, models, routes, durations, sizes."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from typer import Argument, Option

from agentlightning.errors import AgentLightningError, ConfigError, ServerError, StoreAuthError, StoreError
from agentlightning.rollouts import RolloutMode, RolloutStatus
from agentlightning.store.base import DEFAULT_STORE, STORE_VARIABLE, LightningStore, store_url
from agentlightning.store.types import Retention
from agentlightning.util.settings import load_settings

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig
    from agentlightning.engine.base import Engine
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.store.sql.store import SqlStore


Agent = Annotated[str | None, Option(help="module:name, path/file.py:name, or a command line in any language.")]
Reward = Annotated[
    str | None, Option(help="module:name or path/file.py:name of (task, output) -> number, or reasoning_gym.")
]
MODEL_HELP = "A directory, a .gguf file, a short name such as smollm2-135m, a hub name, or `tiny`."
Model = Annotated[str | None, Option(help=MODEL_HELP)]


@dataclass(frozen=True)
class Subject:
    """What is trained or measured."""

    agent: Agent = None
    reward: Reward = None
    data: str | None = None
    """Tasks: a JSONL, JSON, CSV or Parquet file, or an environment."""
    env: str | None = None
    """KIND:NAME: an environment with its tasks, agent and reward."""
    model: Model = None


Run = Annotated[Path | None, Argument(metavar="RUN", help="The directory of a run (default: the newest below runs).")]
GivenStore = Annotated[str | None, Option("--store", help="The store of the run, where it was given one.")]
NewRun = Annotated[Path | None, Option("--run", help="The directory of the new run (default: runs/<time>).")]
RewardWeights = Annotated[
    str | None,
    Option(help="Weights of the named dimensions of a reward: '{\"correctness\": 1.0}' (default: those of the run)."),
]
Token = Annotated[str | None, Option(envvar="AGL_TOKEN", help="The access token of the server.")]
LogFormat = Annotated[Literal["text", "json"], Option(help="Format of the log on stderr.")]


@dataclass(frozen=True)
class Serving:
    """The store that a server of this process writes to, and the models that it has."""

    store: str | None = None
    """A SQLite file, or postgresql://... (default: $AGL_STORE, else .agentlightning/store.db)"""
    token: str | None = Option(None, envvar="AGL_TOKEN")
    """The access token of the server."""
    models: list[str] | None = Option(None, "--model")
    """[NAME=]MODEL (a directory, .gguf file, short or hub name, or tiny); repeatable."""
    routes: Path | None = None
    """A TOML or JSON file that maps calls to models and providers, and sets budgets."""

    @cached_property
    def routing(self) -> GatewayConfig:
        """The configuration in the file of `--routes`."""
        from agentlightning.gateway.config import GatewayConfig

        return load_settings(GatewayConfig, toml=self.routes)

    def open_store(self) -> SqlStore:
        """Open the database. Raises ConfigError if that fails."""
        from agentlightning.store.sql.store import SqlStore

        try:
            return SqlStore(self.store)
        except StoreError as error:
            raise ConfigError(str(error)) from error

    def beside_store(self, suffix: str) -> Path:
        """The path of the database with a suffix; that of the default database if the store is not a file."""
        path = store_file(self.store) or Path(DEFAULT_STORE).absolute()
        return path.with_name(path.name + suffix)

    async def open_engines(self, routing: GatewayConfig, stack: AsyncExitStack) -> dict[str, Engine]:
        """Open the models of `--model [NAME=]MODEL`, named after their directory or file by default, and those that the
        configuration names. `tiny` is a new model with random weights. The stack closes them."""
        if not (self.models or routing.models):
            return {}
        from agentlightning.policy.open import directory_of, open_models

        named: dict[str, Any] = {}
        for model in self.models or ():
            name, equals, path = model.partition("=")
            if not equals:
                name, path = Path(model).name.removesuffix(".gguf"), model
            named[name] = await directory_of(path, stack)
        return await open_models(named | routing.models, stack)


@dataclass(frozen=True)
class AnyStore:
    """A store that exists, here or on a server."""

    store: str | None = Option(None, "--store", "--server")
    """A SQLite file, postgresql://... or the URL of a server (default: $AGL_STORE, else .agentlightning/store.db)"""
    token: Token = None

    @cached_property
    def place(self) -> str | None:
        """The store that is named."""
        return self.store

    def open(self, create: bool = False) -> AbstractAsyncContextManager[LightningStore]:
        return open_named(self.place, self.token, create)


@dataclass(frozen=True)
class StoreOfRun(AnyStore):
    """A store to read: that of a run, or another one."""

    run: Path | None = None
    """The directory of a run, whose store is read (default: the newest below runs, where there is no other store)."""

    @cached_property
    def place(self) -> str | None:
        """The store that is named, or that of a run; where nothing is named and there is no store of `agl run` either,
        that of the newest run. Raises ConfigError for a run together with another store, and for a run without one."""
        if self.run is None:
            named = self.store is not None or os.environ.get(STORE_VARIABLE)
            if named or Path(DEFAULT_STORE).exists() or not any(RUNS.glob("*/store.db")):
                return self.store
        elif self.store is not None:
            raise ConfigError("--run uses the store of that run; leave out --store")
        path = run_or_newest(self.run) / "store.db"
        if not path.exists():
            raise ConfigError(
                f"{path.parent} has no store.db: it is no run, or its rollouts are in the store that it was given"
            )
        return str(path)


@dataclass(frozen=True)
class Filter:
    """Which rollouts."""

    status: list[str] = Option([])
    """Only rollouts with this status; repeatable."""
    mode: list[str] = Option([])
    """Only rollouts with this mode; repeatable."""

    def query(self) -> dict[str, Any]:
        """For the queries of a store. Raises ConfigError for what is no status, or no mode."""
        for name, allowed in (("status", get_args(RolloutStatus)), ("mode", get_args(RolloutMode))):
            for value in vars(self)[name]:
                if value not in allowed:
                    raise ConfigError(f"--{name} {value!r} is not one of {', '.join(allowed)}")
        return {"status_in": self.status or None, "mode_in": self.mode or None}


# -- what options name ------------------------------------------------------------------------------------------------


RETRY_SECONDS = 3.0
"""How long calls are retried if no server answers; the user can repeat the command."""
TIMEOUT = 20.0
"""How long an answer of a server is waited for, in seconds."""
SERVERS = ("http://", "https://")
DATABASES = ("postgresql:", "postgres:", "postgresql+")
RUNS = Path("runs")
CONFIG_FILE = Path("agl.toml")
"""The settings of the current directory, where none are given."""


def own_config() -> Path | None:
    """The settings file of the current directory, which is said in a line; None where there is none."""
    if not CONFIG_FILE.is_file():
        return None
    typer.echo(f"settings: {CONFIG_FILE}", err=True)
    return CONFIG_FILE


def run_or_newest(run: Path | None, otherwise: str = "give the directory of a run") -> Path:
    """The run that is named, else the one below `runs` that wrote last, which is said in a line. Raises ConfigError
    where there is none."""
    if run is not None:
        return run
    states = sorted(RUNS.glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    if not states:
        raise ConfigError(f"there is no run below {RUNS}; {otherwise}")
    typer.echo(f"run: {states[-1].parent}, the newest", err=True)
    return states[-1].parent


def overrides(named: Mapping[str, object], settings: Sequence[str]) -> list[str]:
    """Settings as `key=value`: those that options are `named` for, where they are given, and then the others."""
    return [*(f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None), *settings]


def database_name(db: str | None) -> str:
    """What `--store` names, or what is opened without it; to be shown."""
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1@", str(store_url(db)))  # without the password


def store_file(store: str | None) -> Path | None:
    """The file of a store; None for one in memory, in a database or on a server."""
    from agentlightning.store.sql.sqlite import locate

    place = str(store_url(store))
    return None if place.startswith(SERVERS + DATABASES) else locate(place)


@asynccontextmanager
async def open_named(
    store: str | None, token: str | None = None, create: bool = False
) -> AsyncGenerator[LightningStore]:
    """Open a database, which must exist unless `create`, or the store of a server."""
    place, path = str(store_url(store)), store_file(store)
    if place.startswith(SERVERS):
        from agentlightning.store.http.client import LightningStoreClient

        opened = LightningStoreClient(place, token, patience=RETRY_SECONDS)
    else:
        if path is None and not place.startswith(DATABASES):
            raise ConfigError("an in-memory store ends with its process; give --store PATH or URL")
        if path is not None and not (create or path.exists()):
            raise ConfigError(f"there is no store at {path}; give --store PATH or URL")
        opened = LightningStore(place)
    try:
        yield opened
    finally:
        await opened.close()


def weights_of(text: str | None, of: TrainConfig | str | Path | None) -> dict[str, float] | None:
    """The weights of the dimensions of a reward: those of the option, else those of the settings, or of the run whose
    directory or store is named. None: there are none. Raises ConfigError for a text that is no table of numbers."""
    from agentlightning.algorithms.base import make_algorithm
    from agentlightning.algorithms.lightning_rl import LightningRLConfig
    from agentlightning.training.persistence.run_dir import settings_of_run

    if text is not None:
        return load_settings(LightningRLConfig, overrides=[f"reward_weights={text}"]).reward_weights
    if isinstance(of, str | Path):
        path = Path(of)
        directory = path.parent if path.is_file() else path
        of = settings_of_run(directory) if (directory / "config.toml").exists() else None
    found = of and make_algorithm(of.algorithm).reward_weights
    return dict(found) if found else None


async def get_json(server: str, path: str, token: str | None) -> dict[str, Any]:
    """What a server answers. Raises ServerError or StoreAuthError."""
    import httpx

    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT, headers=headers) as client:
            response = await client.get(server + path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"the server {server} cannot be reached: {error or type(error).__name__}") from error
    if response.status_code == 401:
        problem = "does not accept this access token" if token else "requires its access token"
        raise StoreAuthError(f"the server {server} {problem}; set AGL_TOKEN, or give --token")
    try:
        return response.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError) as error:
        raise ServerError(f"{server}{path} cannot be read: {error}") from error


async def has_model(server: str, token: str | None) -> bool:
    """Whether the server has a model, or routes to one."""
    with suppress(AgentLightningError, AttributeError):
        models = await get_json(server, "/v1/models", token)
        return bool(models.get("data") or models.get("patterns"))
    return False


# -- durations and sizes ----------------------------------------------------------------------------------------------


_QUANTITY = re.compile(r"\s*(\d{1,18}(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)
SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
BYTES = {"": 1, "b": 1} | {f"{k}{i}b": base**n for k, n in POWERS.items() for i, base in (("", 1000), ("i", 1024))}


def read_duration(text: str) -> float:
    """The seconds in `90s`, `15m`, `12h`, `30d` or `2w`. Raises ConfigError for other text."""
    return _read_quantity(text, SECONDS, "a duration such as 90s, 15m, 12h, 30d or 2w")


def read_size(text: str) -> int:
    """The bytes in `500MB` (powers of 1000), `512MiB` (powers of 1024) or a plain number. Raises ConfigError for other
    text."""
    return round(_read_quantity(text, BYTES, "a size such as 500MB, 10GB or 512MiB"))


def _read_quantity(text: str, units: Mapping[str, float], what: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = match and units.get(match[2].lower())
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not {what}")
    if (value := float(match[1]) * factor) >= 2**63:
        raise ConfigError(f"{text!r} is too large for {what}")
    return value


def retention_from(max_age_seconds: float | None, keep: int | None, max_size: str | None) -> Retention | None:
    """The retention policy for an age, a number of rollouts and a size; None where nothing is limited. Raises
    ConfigError for text that is no size."""
    if max_age_seconds is None and keep is None and max_size is None:
        return None
    return Retention(max_age_seconds, keep, None if max_size is None else read_size(max_size))


# -- the access token -------------------------------------------------------------------------------------------------
#
# Hides the access token of a program from the agents that it runs, which run as the same user.
#
# Every process of a user can read the environment (`/proc/PID/environ`) and the memory of the others. Called by `agl
# runner` and `agl run` once they have read the token.


TOKEN_VARIABLE = "AGL_TOKEN"
_PR_SET_DUMPABLE = 4
_ENV_START, _ENV_END = 49, 50
"""Indexes, from 0, of the fields of `/proc/PID/stat` with the bounds of the initial environment."""


def hide_token() -> None:
    """Remove the token from the environment, also where the kernel shows it, and make the memory of this process
    unreadable to other processes of the same user."""
    token = os.environ.pop(TOKEN_VARIABLE, None)
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if token:
        _erase(f"{TOKEN_VARIABLE}={token}")


def _erase(entry: str) -> None:
    """Overwrite an entry of the initial environment."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ENV_START - 2]), int(fields[_ENV_END - 2])
    except (OSError, ValueError, IndexError):
        return
    if not start < end:  # a kernel that hides addresses
        return
    whole, text = ctypes.string_at(start, end - start), os.fsencode(entry) + b"\0"
    at = 0 if whole.startswith(text) else whole.find(b"\0" + text) + 1
    if whole[at:].startswith(text):
        ctypes.memset(start + at, 0, len(text))
