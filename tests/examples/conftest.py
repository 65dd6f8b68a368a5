"""Examples as their users have them: a folder of modules, some of which need the packages of an agent framework."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning import span as names
from agentlightning.tracing.scope import current_agent, scope

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """module_of(example, name) is a module in the folder of an example; examples have modules of the same name."""
    folders: list[Path] = []

    def load(example: str, name: str) -> ModuleType:
        folder = ROOT / "examples" / example
        folders.append(folder)
        for other in {path.stem for path in folder.glob("*.py")} & sys.modules.keys():
            if not _is_in(sys.modules[other], [folder]):  # of another example, or of a test that has loaded an agent
                monkeypatch.delitem(sys.modules, other)
        monkeypatch.syspath_prepend(str(folder))
        return importlib.import_module(name)

    yield load
    for name, module in list(sys.modules.items()):
        if _is_in(module, folders):
            del sys.modules[name]


def _is_in(module: ModuleType, folders: Sequence[Path]) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent in folders


@pytest.fixture
def python_of() -> Callable[[str, str], Path]:
    """python_of(example, modules) is an interpreter that has them: that of `setup.sh`, or this one; else skips."""

    def find(example: str, modules: str) -> Path:
        made = ROOT / ".peers" / "examples" / example / "bin" / "python"
        for python in (made, Path(sys.executable)):
            if (
                python.exists()
                and not subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode
            ):
                return python
        pytest.skip(f"{modules} are not installed; run: tests/examples/setup.sh {example}")

    return find


@dataclass
class Played:
    """A game in which a script takes the place of the model."""

    spans: list[agl.Span] = field(default_factory=list[agl.Span])
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(agent, what it was asked), in order."""

    def put(self, spans: Sequence[agl.Span]) -> None:
        self.spans += spans

    @property
    def reward(self) -> Any:
        return agl.find_final_reward(self.spans)

    @property
    def rewards(self) -> dict[str, float]:
        """By agent."""
        own = [span.attributes for span in self.spans if names.REWARD_AGENT in span.attributes]
        return {str(each[names.REWARD_AGENT]): float(each[names.SCORE_VALUE]) for each in own}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[Played]]:
    """await played(agent, task, answer): a call of `agent.play`. `answer`: (agent, question) -> text, or a list."""

    async def play(agent: ModuleType, task: Any, answer: Callable[[str, str], str] | list[str]) -> Played:
        found = Played()

        def reply(request: httpx.Request) -> httpx.Response:
            asked = current_agent() or "", json.loads(request.content)["messages"][-1]["content"]
            found.asked.append(asked)
            text = answer[len(found.asked) - 1] if isinstance(answer, list) else answer(*asked)
            return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})

        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            monkeypatch.setattr(agent, "http_client", lambda: client)
            with scope("ro-1", "at-1", found):
                await agent.play(task, agl.LLM(endpoint="http://model/v1", model="policy"))
        return found

    return play
