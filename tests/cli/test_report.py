"""`agl report`: the text and the page of a run."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from pathlib import Path

import orjson
import pytest
from tests.support.made_up_runs import write_runs

from agentlightning.training.persistence.run_dir import RunDir

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    asyncio.run(write_runs(root))
    return root


def test_the_text_says_what_changed_with_its_interval(invoke, runs):
    done = invoke("report", str(runs / "calculator-grpo"), "--examples", "1")
    assert done.exit_code == 0, done.output
    gain = orjson.loads((runs / "calculator-grpo" / "report.json").read_bytes())["held_out"]["greedy"]
    assert f"| greedy | {gain['before']:.3f} | {gain['after']:.3f} | {gain['gain']:+.3f} |" in done.output


def test_the_page_has_the_curves_and_no_script_and_needs_nothing_else(invoke, runs, tmp_path):
    page = tmp_path / "report.html"
    done = invoke("report", str(runs / "calculator-grpo"), "--html", "--out", str(page))
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.count("<figure>") >= 12
    lines = (runs / "calculator-grpo" / "metrics.jsonl").read_bytes().splitlines()
    first = re.search(r'<polyline points="([^"]+)"', text)
    assert first is not None
    assert len(first[1].split()) == len(lines)
    assert not re.search(r"[}>]svg{", text.replace("figure>svg{", "")), "browsers give a drawing within other sizes"
    assert "<script" not in text
    assert not re.search(r"(src|href)=", text)
    assert "<b>&amp; sells</b>" not in text, "the text of a task is no HTML"
    assert "&lt;b&gt;" in text


def test_a_run_that_is_not_finished_has_a_page_and_no_text(invoke, runs):
    path = runs / "calculator-rloo"
    assert "is not finished" in invoke("report", str(path)).output
    done = invoke("report", str(path), "--html")
    assert done.exit_code == 0, done.output
    text = (path / "report.html").read_text()
    assert "The run is not finished" in text
    assert "<b>truncated outputs</b>, since step" in text


def test_a_run_in_progress_is_not_to_be_resumed(invoke, runs):
    path = runs / "calculator-rloo"
    with closing(RunDir.open(path)):
        for command in ("report", "export"):
            assert "the run is in progress; wait for its end" in " ".join(invoke(command, str(path)).output.split())
    assert f"agl train --resume {path}" in " ".join(invoke("report", str(path)).output.split())


def test_a_file_that_cannot_be_written_is_named(invoke, runs, tmp_path):
    done = invoke("report", str(runs / "calculator-grpo"), "--out", str(tmp_path / "nowhere" / "report.md"))
    assert done.exit_code == 2
    assert "nowhere/report.md cannot be written" in done.output


def test_a_directory_without_a_run_is_named(invoke, tmp_path):
    done = invoke("report", str(tmp_path), "--html")
    assert done.exit_code == 2
    assert "holds no run" in done.output
