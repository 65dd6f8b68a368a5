"""Opens what the options of a verb name: the store, models, and the table of routes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from agentlightning.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from agentlightning.engine.base import Engine
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.store.sql.store import SqlStore

POSTGRES: Final = ("postgresql:", "postgres:", "postgresql+")
RUNS: Final = Path("runs")
CONFIG_FILE: Final = Path("agl.toml")
"""The settings of the current directory, where none are given."""


def own_config() -> Path | None:
    """The settings file of the current directory, which is said in a line; None where there is none."""
    if not CONFIG_FILE.is_file():
        return None
    typer.echo(f"settings: {CONFIG_FILE}", err=True)
    return CONFIG_FILE


def is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


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


def named_store(store: str | None, server: str | None) -> str | None:
    """The store that `--store` or `--server` names."""
    if store is not None and server is not None:
        raise ConfigError("--store opens a database, and --server uses that of a server; give only one of them")
    return server if store is None else store


def store_to_read(run: Path | None, store: str | None, server: str | None = None) -> str | None:
    """The store that is named, or that of a run; where nothing is named and there is no store of `agl run` either, that
    of the newest run. Raises ConfigError for a run together with another store, and for a run without one."""
    from agentlightning.store.base import DEFAULT_STORE, STORE_VARIABLE

    place = named_store(store, server)
    if run is None:
        named = place is not None or os.environ.get(STORE_VARIABLE)
        if named or Path(DEFAULT_STORE).exists() or not any(RUNS.glob("*/store.db")):
            return place
    elif place is not None:
        raise ConfigError("--run uses the store of that run; leave out --store and --server")
    path = run_or_newest(run) / "store.db"
    if not path.exists():
        raise ConfigError(
            f"{path.parent} has no store.db: it is no run, or its rollouts are in the store that it was given"
        )
    return str(path)


def overrides(named: Mapping[str, object], settings: Sequence[str] | None) -> list[str]:
    """Settings as `key=value`: those that options are `named` for, where they are given, and then the others."""
    return [*(f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None), *(settings or [])]


def database_name(db: str | None) -> str:
    """What `--store` names, or what is opened without it; to be shown."""
    from agentlightning.store.base import store_url

    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1@", str(store_url(db)))  # without the password


def open_store(db: str | None) -> SqlStore:
    """Open the database of `--store`. Raises ConfigError if that fails."""
    from agentlightning.store.sql.store import SqlStore

    try:
        return SqlStore(db)
    except StoreError as error:
        raise ConfigError(str(error)) from error


def weights_of(text: str | None, place: str | Path | None) -> dict[str, float] | None:
    """The weights of the dimensions of a reward: those of the option, else those of the run whose directory or store is
    `place`, or of the settings file that it is. None: there are none. Raises ConfigError for a text that is no table of
    numbers."""
    from agentlightning.algorithms.base import make_algorithm
    from agentlightning.algorithms.lightning_rl import LightningRLConfig
    from agentlightning.config import TrainConfig
    from agentlightning.training.persistence.run_changes import settings_of_run
    from agentlightning.util.settings import load_settings

    if text is not None:
        return load_settings(LightningRLConfig, overrides=[f"reward_weights={text}"]).reward_weights
    directory = Path("") if place is None or "://" in str(place) else Path(place)
    directory = directory.parent if directory.is_file() else directory
    if place == CONFIG_FILE:
        known = load_settings(TrainConfig, toml=CONFIG_FILE)
    elif place is not None and (directory / "config.toml").exists():
        known = settings_of_run(directory)
    else:
        return None
    found = make_algorithm(known.algorithm).reward_weights
    return None if found is None else dict(found)


def file_beside_store(db: str | None, suffix: str) -> Path:
    """The path of the database with a suffix; that of the default database if the store is not a file."""
    from agentlightning.store.base import DEFAULT_STORE, store_url
    from agentlightning.store.sql.sqlite import locate

    name = str(store_url(db))
    path = locate(DEFAULT_STORE) if name.startswith(POSTGRES) else locate(name) or locate(DEFAULT_STORE)
    assert path is not None
    return path.with_name(path.name + suffix)


def read_routing(path: Path | None) -> GatewayConfig:
    """The configuration in the file of `--routes`."""
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.util.settings import load_settings

    return load_settings(GatewayConfig, toml=path)


async def open_engines(models: Iterable[str], routing: GatewayConfig, stack: AsyncExitStack) -> dict[str, Engine]:
    """Open the models of `--model [NAME=]MODEL`, named after their directory or file by default, and those that the
    routes file names. `tiny` is a new model with random weights. The stack closes them."""
    engines: dict[str, Engine] = {}
    for model in models:
        from agentlightning.policy.open import directory_of, open_frozen

        name, equals, path = model.partition("=")
        if not equals:
            name, path = Path(model).name.removesuffix(".gguf"), model
        policy = await open_frozen(name, await directory_of(path, stack))
        stack.push_async_callback(policy.close)
        engines[policy.model] = policy
    if not routing.models:
        return engines
    from agentlightning.policy.open import open_models

    return engines | await open_models(routing.models, stack)


async def has_model(server: str, token: str | None) -> bool:
    """Whether the server has a model, or routes to one."""
    import httpx

    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(timeout=10) as client:
        try:
            response = await client.get(f"{server}/v1/models", headers=headers)
            models = response.json()
            return response.status_code == 200 and bool(models.get("data") or models.get("patterns"))
        except (httpx.HTTPError, ValueError, AttributeError):
            return False
