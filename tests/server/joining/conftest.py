from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from tests.support.model_server import ScriptedModelServer

from .runs import Hub


@pytest.fixture
def hub(tmp_path: Path) -> Generator[Hub]:
    running = Hub(tmp_path)
    yield running
    running.end()


@pytest.fixture
async def model_server() -> AsyncGenerator[ScriptedModelServer]:
    async with ScriptedModelServer(context_length=512) as server:
        yield server
