"""A prompt search through `agl train`, and what the other verbs do with its run: its money, its prompts, its data."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.prompt_worlds import START, PromptWorld, PromptWorldServer, grade, report_tasks

import agentlightning as agl
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.runs import cost_of, show_search, summary

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("prompt runs")]

AGENT = (
    f"""
import json, os, re, urllib.request

{inspect.getsource(grade)}
"""
    + """
def reward(output):
    return grade(output)

def agent(task, resources):
    body = {"model": "follower", "messages": [{"role": "user", "content": resources["prompt"].format(**task)}]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""
)
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from agentlightning.cli.main import build; build()()"


def agl_program(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line where torch is not installed."""
    given = {**os.environ, "OPENAI_API_KEY": "none", **environment}
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def server() -> Any:
    with PromptWorldServer(PromptWorld(0)) as running:
        yield running


@pytest.fixture(scope="module")
def run(server: PromptWorldServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prompts")
    (place / "task_agent.py").write_text(AGENT)
    for name, tasks in (("train", report_tasks(30)), ("val", report_tasks(8, 500)), ("test", report_tasks(6, 900))):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (place / "run.toml").write_text(
        f"""
        agent = "task_agent.py:agent"
        reward = "task_agent.py:reward"
        [prompts]
        prompt = {json.dumps(START)}
        [data]
        train = "train.jsonl"
        validation = "val.jsonl"
        held_out = "test.jsonl"
        [[gateway.providers]]
        name = "world"
        base_urls = ["{server.url}"]
        api_key = "none"
        price = {{ input = 1000.0, output = 2000.0 }}
        [[gateway.routes]]
        provider = "world"
        [algorithm]
        type = "apo"
        critic = {{ model = "critic", base_url = "{server.url}" }}
        editor = {{ model = "editor", base_url = "{server.url}" }}
        budget = {{ calls = 300, money = 2.0 }}
        """
    )
    done = agl_program(place, "train", "--config", "run.toml", "--run", "run")
    assert done.returncode == 0, done.stderr
    (place / "printed.txt").write_text(done.stdout + done.stderr)
    return place / "run"


def test_the_budget_counts_the_dollars_of_the_agents_calls(run: Path) -> None:
    """The critic and the editor have no price here."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((run / "report.json").read_text())
    assert any("its budget of 2 in money is spent" in text for text in report["warnings"])
    assert 2.0 <= lines[-1]["apo_money"] == report["cost"]["search_money"] < 3.0
    assert lines[-1]["apo_evaluations"] < 300


async def test_no_token_and_no_dollar_is_counted_twice(run: Path) -> None:
    """The dashboard and the report: what critic and editor cost is not in the store, the rest is."""
    cost = json.loads((run / "report.json").read_text())["cost"]
    store = agl.LightningStore(run / "store.db")
    found = await store.query_rollouts()
    spans = [span for each in found for span in await store.query_spans(each.rollout_id)]
    await store.close()
    dollars = sum(span.attributes.get("agentlightning.cost", 0.0) for span in spans)
    assert cost["search_money"] + cost["provider_dollars"] == pytest.approx(dollars)
    shown = cost_of(RunFiles(run))
    assert (shown["dollars"], shown["tokens"]) == (
        pytest.approx(dollars),
        cost["search_tokens"] + cost["provider_tokens"],
    )


async def test_the_list_names_no_model_for_a_run_that_trains_none(run: Path) -> None:
    (listed,) = Catalog(roots=[run]).sources().values()
    assert listed is not None
    assert summary(listed)["model"] is None


async def test_held_out_rollouts_have_the_mode_test(run: Path) -> None:
    store = agl.LightningStore(run / "store.db")
    found = await store.query_rollouts()
    await store.close()
    modes = {(each.mode, "-trial-" in each.rollout_id) for each in found}
    assert modes == {("train", True), ("test", False)}


def test_train_ends_with_what_has_changed_in_the_prompt_line_by_line(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    printed = (run.parent / "printed.txt").read_text()
    assert report["prompt_diff"] in printed
    assert "/1000" not in printed
    assert " left" not in printed.partition("\ntraining")[2].partition("measuring the trained policy")[0]


def test_status_shows_the_prompt_and_what_has_changed_in_it(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    record = json.loads(agl_program(run.parent, "status", "run", "--json").stdout)
    assert record["prompts"] == report["prompts"] != {"prompt": START}
    assert record["prompt_diff"] == report["prompt_diff"]
    assert "\n+- " in report["prompt_diff"], "several lines"
    assert report["prompt_diff"] in agl_program(run.parent, "status", "run").stdout


def test_eval_measures_the_prompt_of_the_run_without_torch(run: Path, server: PromptWorldServer) -> None:
    report = json.loads((run / "report.json").read_text())
    done = agl_program(run.parent, "eval", "--run", "run", "--json", OPENAI_BASE_URL=server.url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reward"] > report["held_out"]["sampled"]["before"]


def test_eval_measures_another_prompt_in_place_of_that_of_the_run(run: Path, server: PromptWorldServer) -> None:
    before = json.loads((run / "report.json").read_text())["held_out"]["sampled"]["before"]
    other = f"prompts.prompt={START}"
    done = agl_program(run.parent, "eval", "--run", "run", "--json", other, OPENAI_BASE_URL=server.url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reward"] == pytest.approx(before, abs=0.2)


def test_the_page_names_no_model_of_a_run_that_trains_none(run: Path) -> None:
    assert summary(RunFiles(run))["model"] is None


async def test_the_page_shows_every_candidate_that_was_tried_what_it_changed_and_what_came_of_it(run: Path) -> None:
    data = Catalog(roots=[run])
    found = (await show_search(await data.run("run"), Query()))["candidates"]
    await data.close()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((run / "report.json").read_text())
    assert found[0]["texts"] == {"prompt": START}
    tried = sum(each[split]["tasks"] for each in found for split in ("train", "validation") if each[split])
    assert tried == lines[-1]["apo_evaluations"]
    assert [each["texts"] for each in found if each["result"]] == [report["prompts"]]
    assert [each["number"] for each in found if each["parent"] is None] == [0]
    for each in found[1:]:
        (change,) = each["changed"]
        before = [line["text"] for line in change["lines"] if line["kind"] != "added"]
        after = [line["text"] for line in change["lines"] if line["kind"] != "removed"]
        assert "\n".join(before) == found[each["parent"]]["texts"]["prompt"]
        assert "\n".join(after) == each["texts"]["prompt"]
    led, number = [], next(each["number"] for each in found if each["result"])
    while number is not None:
        led.append(number)
        number = found[number]["parent"]
    assert sorted(led) == [each["number"] for each in found if each["led"]]
    assert len(led) > 2


def test_export_gives_the_rollouts_of_the_search_and_says_where_the_prompts_are(run: Path) -> None:
    done = agl_program(run.parent, "export", "run", "--to", "openai-jsonl", "--json")
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    rows = [json.loads(line) for line in (run.parent / path).read_text().splitlines()]
    tasks = {json.loads(line)["task"] for line in (run.parent / "train.jsonl").read_text().splitlines()}
    assert rows
    assert all(any(task in row["messages"][0]["content"] for task in tasks) for row in rows)
    assert "\nrecords: " in agl_program(run.parent, "export", "run", "--to", "openai-jsonl").stdout
    weights = agl_program(run.parent, "export", "run", "--to", "hf")
    assert (weights.returncode, "holds no weights" in weights.stderr) == (2, True)
