"""Agents of real frameworks are trained as they are, each in the environment of its framework.

What is not installed is skipped; `measuring.py` writes what such a run gains into docs/guides/frameworks.md.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.frameworks import measuring
from tests.frameworks.examples import ALL, BY_NAME, Example
from tests.frameworks.measuring import HEADINGS, rows, sharing_imports, starting_model, train, verify
from tests.frameworks.service import EXAMPLES, starting_models


def cells(line: str) -> dict[str, str]:
    return dict(zip(HEADINGS, (cell.strip() for cell in line.strip().strip("|").split("|")), strict=True))


def test_the_table_has_the_pinned_versions() -> None:
    titles = {example.title: example for example in ALL}
    table = rows()
    for title, line in table.items():
        assert cells(line)["version"] == titles[title].version(), f"measure it again: {titles[title].name}"


def test_the_table_says_what_had_to_be_changed() -> None:
    for example in ALL:
        if example.title in rows():
            assert cells(rows()[example.title])["changed in the agent"] == example.changed


def test_every_example_has_an_agent_and_a_page_that_trains_it() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name not in {"__pycache__", "teams"}}
    assert folders == {example.file.partition("/")[0] for example in ALL}
    for example in ALL:
        page = (EXAMPLES / example.file).with_name("README.md").read_text()
        assert "agl train --config examples/frameworks/train.toml" in page
        assert Path(example.file).name in page


def test_no_example_imports_agent_lightning() -> None:
    for example in ALL:
        assert "agentlightning" not in (EXAMPLES / example.file).read_text()


@pytest.mark.integration
def test_an_agent_whose_starting_model_is_kept_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start, ran = starting_models(), list[str]()

    async def record(command: list[str], guesses: bool, *more: Any) -> list[dict[str, Any]]:
        ran.append(command[-1])
        return [{"messages": [{"role": "user", "content": str(guesses)}], "tools": []}]

    def learn(used: Any, guessed: Any, output: Path, **more: Any) -> None:
        (output / "model").mkdir(parents=True)

    monkeypatch.setattr(start, "record", record)
    monkeypatch.setattr(start, "learn", learn)
    monkeypatch.setattr(measuring, "ENVIRONMENTS", tmp_path)
    example = BY_NAME["shell"]
    model = starting_model(example, tmp_path)
    assert len(ran) == 3
    assert starting_model(example, tmp_path) == model
    assert len(ran) == 3
    assert starting_model(replace(example, start_steps=1), tmp_path) != model
    assert len(ran) == 6
    shutil.rmtree(model)
    assert starting_model(example, tmp_path) == model
    assert len(ran) == 9


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("example", ALL, ids=lambda example: example.name)
def test_an_agent_is_trained_as_it_is(example: Example, tmp_path: Path) -> None:
    """All rollouts count, and update the weights; the starting model can follow the agent."""
    if missing := example.missing():
        pytest.skip(missing)
    with sharing_imports():
        report = train(example, starting_model(example, tmp_path), tmp_path)
    verify(example, report, tmp_path)
