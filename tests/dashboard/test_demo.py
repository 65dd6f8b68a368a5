"""What `agl dashboard --demo` shows: two recorded runs whose pages agree with one another."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import pytest
from tests.dashboard.conftest import client_of

from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.serve import EXPORTS, RECORDED

pytestmark = pytest.mark.integration
RUN = "/runs/messages"


@pytest.fixture
async def client(recorded: Path) -> AsyncIterator[httpx.AsyncClient]:
    data = Catalog(roots=[recorded])
    async with client_of(data) as client:
        yield client
    await data.close()


async def get(client, path):
    response = await client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def rows_of(client, query):
    rows, after = [], ""
    while True:
        page = await get(client, f"{RUN}/rollouts?limit=500{query}{after}")
        rows += page["rows"]
        if page["next"] is None:
            return rows
        after = f"&after={page['next']}"


def test_it_is_small():
    assert RECORDED.stat().st_size < 300_000


async def test_both_runs_have_finished_and_the_longer_one_comes_first(client):
    runs = (await get(client, "/runs"))["runs"]
    assert [run["name"] for run in runs] == ["messages", "messages-rloo"]
    for run in runs:
        assert (run["state"], run["step"], run["model"]) == ("finished", run["steps"], "smollm2-135m")
        assert run["held_out"]["greedy"]["gain"]["interval"][0] > 0


async def test_the_result_is_that_of_the_rollouts_in_the_store(client):
    held_out = (await get(client, RUN))["held_out"]
    tasks = await get(client, f"{RUN}/tasks?set=held_out&mode=greedy")
    assert [each["label"] for each in tasks["measurements"]] == ["before", "after"]
    assert tasks["result"]["gain"] == pytest.approx(held_out["greedy"]["gain"]["gain"])
    for each in tasks["measurements"]:
        assert each["reward"]["mean"] == pytest.approx(held_out["greedy"][each["label"]]["mean"])


async def test_every_step_has_its_rollouts_with_the_reward_of_its_curve(client):
    found = await get(client, RUN)
    rewards = next(chart for chart in found["curves"]["charts"] if chart["name"] == "reward")["series"][0]["values"]
    version = 0
    for step, reward in zip(found["curves"]["steps"], rewards, strict=True):
        shown = await get(client, f"{RUN}/steps/{step}")
        assert shown["rollouts"] == shown["learned"]
        means = [statistics.fmean(group["rewards"]) for group in shown["groups"]]
        assert statistics.fmean(means) == pytest.approx(reward)
        assert shown["versions"] == [version]
        if any(len(set(group["rewards"])) > 1 for group in shown["groups"]):
            version += 1  # where all rewards of each group are equal, nothing is learned or published


async def test_times_are_those_of_a_run_that_has_just_ended(client, recorded):
    rows = await rows_of(client, "")
    began, ended = min(row["start_time"] for row in rows), max(row["end_time"] for row in rows)
    assert began < ended <= time.time()
    assert ended > (recorded / "messages" / "state.json").stat().st_mtime - 60
    published = {
        each["resources_id"]: each["create_time"] for each in (await get(client, f"{RUN}/resources"))["versions"]
    }
    assert len(set(published.values())) == len(published)
    for row in rows:
        assert published[row["resources_id"]] <= row["start_time"]
    weights = (await get(client, f"{RUN}/weights"))["records"]
    assert all(began < each["time"] <= ended for each in weights)


async def test_a_group_shows_its_tokens_with_advantages_ratios_and_alternatives(client):
    for step in (1, 9, 13):
        groups = (await get(client, f"{RUN}/steps/{step}"))["groups"]
        shown = await get(client, f"{RUN}/rollouts/{groups[0]['best']}/group")
        assert shown["has_texts"]
        assert shown["ratios"]["known"]
        assert not shown["credit"]["notes"]
        for call in (call for stream in shown["streams"] for call in stream):
            tokens = call["tokens"]
            assert not set(tokens["texts"]) & {f"<{each}>" for each in tokens["ids"]}
            assert bool(tokens["alternatives"] and all(tokens["alternatives"])) == (step == 9)
            assert len(tokens["log_ratios"]) == len(tokens["advantages"]) == len(tokens["ids"])


async def test_no_warning_is_said_twice(client):
    found = await get(client, RUN)
    assert found["warnings"]
    assert found["report"]["warnings"] == []
    first = found["warnings"][0]
    said = [each["what"] for each in (await get(client, f"{RUN}/steps/{first['since']}"))["warnings"]]
    assert said != [first["what"]], "a step says what was seen at it, the run what was seen last"


def test_the_transcripts_of_the_readme_are_of_this_run(recorded):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = re.findall(r"^(user|before|after): +(.+?)(?: +\(reward (.+)\))?$", readme, re.MULTILINE)
    assert len(shown) == 6
    said = set()
    for export in (recorded / "messages" / EXPORTS).glob("*.jsonl"):
        for rollout in map(orjson.loads, export.read_bytes().splitlines()):
            if found := re.search("-(before|after)-.*greedy", rollout.get("rollout_id", "")):
                output = " ".join(rollout["attempts"][0]["metadata"]["output"].split())
                reward = rollout["spans"][-1]["attributes"]["gen_ai.evaluation.score.value"]
                said.add((rollout["input"]["message"], found[1], output, f"{reward:.3f}"))
    for place in range(0, 6, 3):
        (_, message, _), *answers = shown[place : place + 3]
        assert {(message, when, " ".join(text.split()), reward) for when, text, reward in answers} <= said


async def test_they_can_be_compared_on_the_same_tasks(client):
    found = await get(client, "/compare?runs=messages,messages-rloo")
    assert {each["setting"] for each in found["settings"]} >= {"algorithm.credit", "algorithm.steps"}
    assert found["tasks"][0]["modes"]["greedy"]["tasks"] == 64
