"""A server of the Tinker API over the tiny model, in the event loop of the test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="pip install ./plugins/tinker")

from tests.support.models import tiny_checkpoint

from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig, TinkerConfig
from agentlightning.server.app import Server
from agentlightning.store.sql.store import SqlStore
from agentlightning_tinker.policy import TinkerPolicy
from agentlightning_tinker.server.host import AdapterHost
from agentlightning_tinker.server.routes import tinker_routes

TOKEN = "secret"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def serving(model: Path, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Server]]:
    @asynccontextmanager
    async def serve(port: int = 0) -> AsyncGenerator[Server]:
        host = AdapterHost.open(LocalPolicyConfig(model=model, name="tiny", device="cpu"))
        store = SqlStore(":memory:")
        async with (
            tinker_routes([host], tmp_path / "saved", TOKEN) as pages,
            Server(store, secret="s", pages=pages, port=port, grace_seconds=1) as server,
        ):
            yield server
        await store.close()

    return serve


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """The package leaves connections to the garbage collector, which warns of each."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", f"tml-{TOKEN}")


def policy_settings(model: Path, **changes: Any) -> LocalPolicyConfig:
    given = {"lora": Lora(r=4), "seed": 3, "device": "cpu", "optimizer": OptimizerConfig(lr=1e-2), **changes}
    return LocalPolicyConfig.model_validate({"model": model, **given})


async def open_remote(model: Path, server: Server, **changes: Any) -> TinkerPolicy:
    settings = TinkerConfig(url=server.url, base_model="tiny", unreachable_seconds=2)
    return await TinkerPolicy.open(policy_settings(model, **changes), settings)
