"""A gateway, and agents that run in environments of their own and know nothing but their environment variables."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.frameworks.service import ENVIRONMENTS, Service, serving

from agentlightning.gateway.config import GatewayConfig

Start = Callable[[Any], Any]


@pytest.fixture
def programs() -> Callable[[str], Path]:
    """programs(name) is the folder of an environment's programs; without it the test is skipped."""

    def find(name: str) -> Path:
        home = ENVIRONMENTS / name
        folder = home / ("node_modules/.bin" if name == "commands" else "bin")
        if not (home / ".installed").exists() or not folder.exists():
            pytest.skip(f"{home} is not there; run: tests/frameworks/setup.sh {name}")
        return folder

    return find


@pytest.fixture
async def serve() -> AsyncIterator[Start]:
    """serve(script) starts a gateway whose engine, of any name, follows the script, and one attempt. `config` says
    what goes elsewhere."""
    async with contextlib.AsyncExitStack() as exits:

        async def start(script: Any, config: GatewayConfig | None = None) -> Service:
            return await exits.enter_async_context(serving(script, config))

        yield start
