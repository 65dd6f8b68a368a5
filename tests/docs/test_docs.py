"""Every code block of the documentation runs, in order, as a reader would run it."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, get_args
from unittest import mock

import pytest
from tests.docs.test_links import generated

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("plugins/*/README.md")} - generated().keys()),
]
"""Those written by hand; of the generated ones, tests/test_public_face.py runs the examples."""
FENCE = re.compile(r"^```(\w*)(?: file=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN_ONLY = {"", "text", "toml", "py", "pycon"}
"""Blocks that are no program: drawings, commands that the tests of the README run, signatures, and examples of
docstrings, which tests/test_public_face.py runs."""


class Block(NamedTuple):
    language: str
    file: str | None
    body: str


def blocks(page: Path) -> list[Block]:
    return [Block(language, file or None, body) for language, file, body in FENCE.findall(page.read_text())]


LONG = {
    "get-started/first-training",
    "get-started/the-run",
    "guides/evaluation",
    "guides/offline",
    "guides/operations/dashboard",
    "guides/operations/gateway",
    "guides/operations/serving",
    "guides/prompts",
    "guides/your-own-agent",
    "reference/rest",
    "reference/store",
}
"""Pages whose blocks take seconds: with the slow tests, which CI runs for the docs."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def as_parameter(page: Path) -> object:
    marks = [pytest.mark.slow, pytest.mark.timeout(900)] if name_of(page) in LONG else []
    return pytest.param(page, id=name_of(page), marks=marks)


def test_every_long_page_exists():
    assert not LONG - {name_of(page) for page in PAGES}


PORT = re.compile(r"(?<=--port |\.0\.0\.1:)47\d\d\b")
"""Of the servers that a page starts."""


def at_free_ports(page: Path) -> list[Block]:
    """The blocks of a page with ports that nobody uses, so that two runs on one machine do not meet."""
    text = "".join(block.body for block in blocks(page))
    with ExitStack() as stack:
        taken = {port: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for port in PORT.findall(text)}
        free = {port: str(each.getsockname()[1]) for port, each in taken.items()}
    return [block._replace(body=PORT.sub(lambda found: free[found[0]], block.body)) for block in blocks(page)]


CONTINUES = {"get-started/the-run": [ROOT / "docs" / "get-started" / "first-training.md"]}
"""Pages that go on with the files and the run of another one."""
SMALLER = {
    "--model smollm2-135m": "--model tiny",
    "algorithm.steps=16": "algorithm.steps=1",
    "algorithm.steps=20": "algorithm.steps=2",
}
"""What a page trains in minutes a test tries in seconds, with a model that needs no download."""


def run(block: Block, namespace: dict) -> None:
    if block.file:
        Path(block.file).write_text(block.body)
    elif block.language == "python":
        exec(compile(block.body, "<documentation>", "exec"), namespace)
    elif block.language == "console":
        for line in block.body.splitlines():
            if line.startswith("$ "):
                command = line[2:].replace("agl ", f"{Path(sys.executable).parent / 'agl'} ", 1)
                for words, fewer in SMALLER.items():
                    command = command.replace(words, fewer)
                subprocess.run(command, shell=True, check=True, timeout=500)
    else:
        assert block.language in SHOWN_ONLY, f"a block of language {block.language!r} is run by nobody"


@pytest.mark.parametrize("page", [as_parameter(page) for page in PAGES])
def test_every_code_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict = {"__name__": "__documentation__"}
    with mock.patch.dict(os.environ):  # those that a page sets end with it
        for each in (*CONTINUES.get(name_of(page), ()), page):
            for block in at_free_ports(each):
                run(block, namespace)


def test_every_setting_is_explained():
    """`agl train --print-config` prints the explanation of each setting; none may be empty."""
    from pydantic import BaseModel

    from agentlightning.config import TrainConfig
    from agentlightning.util.settings import field_texts

    def walk(model: type[BaseModel], path: str) -> None:
        for name, field in model.model_fields.items():
            assert field_texts(model).get(name), f"{path}{name} has no docstring"
            for part in (field.annotation, *get_args(field.annotation)):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    walk(part, f"{path}{name}.")

    walk(TrainConfig, "")
