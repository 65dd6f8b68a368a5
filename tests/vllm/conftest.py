"""A real vLLM on this machine's CPU, where there is one: see setup.sh."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentlightning.engine.servers.clients.vllm import VllmProcess
from agentlightning.transport import Transport

HERE = Path(__file__).parent
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of them needs a server, whose start takes half a minute and more."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def on_cpu() -> dict[str, str]:
    """The environment of a server on a machine that it shares."""
    return ON_CPU


@pytest.fixture(scope="session")
def vllm() -> str:
    """The program that starts vLLM."""
    folder = Path(os.environ.get("AGL_VLLM") or HERE.parent.parent / ".peers" / "vllm")
    program = folder / "bin" / "vllm"
    if not program.exists():
        pytest.skip(f"{program} does not exist; make it with tests/vllm/setup.sh, or set AGL_VLLM to where it is")
    return str(program)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small policies of one shape and one tokenizer, whose output layer is their input embedding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentlightning.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("models")
    first = make_tiny(folder / "first", ["What is 12 + 30?", "Tom has 3 apples and buys 4 more."], seed=1)
    model = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)  # Less alike than a fresh model's: an error then shows.
    model.save_pretrained(first)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std())
    model.save_pretrained(folder / "second")
    AutoTokenizer.from_pretrained(first).save_pretrained(folder / "second")
    return [first, folder / "second"]


@pytest.fixture(scope="session")
def server(vllm: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the first model, in float32, that also takes adapters. Tests change its weights."""
    with serving(vllm, models[0], tmp_path_factory.mktemp("vllm") / "vllm.log") as url:
        yield url


@pytest.fixture(scope="module")
def fresh_server(vllm: str, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same, of one module: with the weights of the first model, and before any structured output. vLLM constrains
    all answers with the back end that the first of them needed."""
    with serving(vllm, models[0], tmp_path_factory.mktemp("vllm") / "vllm.log") as url:
        yield url


@contextmanager
def serving(vllm: str, model: Path, log: Path) -> Generator[str]:
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    args = ("--enforce-eager", "--enable-lora", "--max-lora-rank", "16", *tools)

    async def start() -> VllmProcess:
        transport = Transport()
        try:
            process = VllmProcess(transport, model, "tiny", log, (vllm,), args, ON_CPU, "float32", 1024)
            await process.restart(None)
            return process
        finally:
            await transport.close()

    child = asyncio.run(start())
    try:
        yield child.url
    finally:
        asyncio.run(child.close())
