"""Opens what the options of a verb name: the store, models, and the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agentlightning.engine.base import Engine
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.store.sql.store import SqlStore

POSTGRES: Final = ("postgresql:", "postgres:", "postgresql+")


def database_name(db: str | None) -> str:
    """What `--db` names, or what is opened without it; to be shown."""
    from agentlightning.store.base import store_url

    return without_password(str(store_url(db)))


def open_store(db: str | None) -> SqlStore:
    """Open the database of `--db`. Raises ConfigError if that fails."""
    from agentlightning.errors import ConfigError, StoreError
    from agentlightning.store.sql.store import SqlStore

    try:
        return SqlStore(db)
    except StoreError as error:
        raise ConfigError(str(error)) from error


def weights_of(text: str | None, place: str | Path | None) -> dict[str, float] | None:
    """The weights of the dimensions of a reward: those of the option, else those of the run whose directory or store is
    `place`. None: there are none. Raises ConfigError for a text that is no table of numbers."""
    from agentlightning.algorithms import make_algorithm
    from agentlightning.algorithms.lightning_rl import LightningRLConfig
    from agentlightning.training.persistence.run_changes import settings_of_run
    from agentlightning.util.settings import load_settings

    if text is not None:
        return load_settings(LightningRLConfig, overrides=[f"reward_weights={text}"]).reward_weights
    directory = Path("") if place is None or "://" in str(place) else Path(place)
    directory = directory.parent if directory.is_file() else directory
    if place is None or not (directory / "config.toml").exists():
        return None
    found = make_algorithm(settings_of_run(directory).algorithm).reward_weights
    return None if found is None else dict(found)


def file_beside_store(db: str | None, suffix: str) -> Path:
    """The path of the database with a suffix; that of the default database if the store is not a file."""
    from agentlightning.store.base import DEFAULT_STORE, store_url
    from agentlightning.store.sql.sqlite import locate

    name = str(store_url(db))
    path = locate(DEFAULT_STORE) if name.startswith(POSTGRES) else locate(name) or locate(DEFAULT_STORE)
    assert path is not None
    return path.with_name(path.name + suffix)


def without_password(url: str) -> str:
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1@", url)


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
