"""What the JSON of each view holds, over two runs whose numbers are known."""

from __future__ import annotations

import asyncio
import re
import shutil
import statistics
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build
from agentlightning.config import TrainConfig
from agentlightning.credit import training_samples
from agentlightning.dashboard.data import rollouts as rollout_data
from agentlightning.dashboard.data import run_data
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.views import rollouts as rollouts_view
from agentlightning.store import LightningStore
from agentlightning.store.types import RolloutRecord
from agentlightning.task import task_key
from agentlightning.training.sources.collector import RolloutPlan, TrajectoryReader
from agentlightning.util.settings import dump_toml, load_settings

pytestmark = pytest.mark.integration


GRPO, RLOO = "calculator-grpo", "calculator-rloo"


async def get(client, path):
    response = await client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def rows_of(client, query):
    """All pages of a table."""
    rows, after = [], ""
    while True:
        page = await get(client, f"/runs/{GRPO}/rollouts?limit=100{query}{after}")
        rows += page["rows"]
        if page["next"] is None:
            return rows
        after = f"&after={page['next']}"


async def test_the_list_names_every_run_with_state_progress_and_reward_with_its_interval(client):
    runs = {run["name"]: run for run in (await get(client, "/runs"))["runs"]}
    assert set(runs) == {GRPO, RLOO}
    done, half = runs[GRPO], runs[RLOO]
    assert (done["state"], done["step"], done["steps"]) == ("finished", 24, 24)
    assert (half["state"], half["step"], half["steps"]) == ("unfinished", 14, 24)
    now, start = done["reward_now"], done["reward_start"]
    assert start["low"] < start["mean"] < start["high"] < now["low"] < now["mean"]
    assert done["held_out"]["greedy"]["gain"]["interval"][0] > 0
    lines = (await get(client, f"/runs/{GRPO}"))["curves"]["steps"]
    assert (len(lines), done["cost"]["dollars"]) == (24, None)
    assert done["cost"]["tokens"] > half["cost"]["tokens"] > 0
    assert (done["warnings"], half["warning_names"]) == (0, ["truncated_outputs"])
    assert (done["algorithm"], done["model"], done["agent"]) == ("lightning_rl", "tiny", "examples/calculator.py:solve")


async def test_the_settings_of_a_run_are_shown_without_secrets(writer, copied):
    path = copied / GRPO / "config.toml"
    provider = {"name": "known", "base_urls": ["http://127.0.0.1:1/v1"], "headers": {"authorization": "Bearer s3cret"}}
    settings = load_settings(TrainConfig, toml=path).model_dump() | {"gateway": {"providers": [provider]}}
    path.write_text(dump_toml(TrainConfig.model_validate(settings)))
    assert "s3cret" in path.read_text()
    shown = (await get(writer, f"/runs/{GRPO}"))["settings"]
    assert "http://127.0.0.1:1/v1" in shown["gateway.providers"]
    assert "s3cret" not in str(shown)


async def test_a_run_has_its_curves_band_settings_and_checkpoints(client, made_up):
    found = await get(client, f"/runs/{GRPO}")
    lines = [orjson.loads(line) for line in (made_up / GRPO / "metrics.jsonl").read_bytes().splitlines()]
    charts = {chart["name"]: chart for chart in found["curves"]["charts"]}
    assert charts["reward"]["series"][0]["values"] == [line["reward"] for line in lines]
    assert charts["reward"]["band"]["high"][3] == pytest.approx(lines[3]["reward"] + lines[3]["reward_std"])
    assert {"entropy", "kl", "gradient", "clip", "length", "staleness", "groups", "failures", "seconds"} <= set(charts)
    drawn = {each["metric"] for chart in charts.values() for each in chart["series"]}
    assert {each["metric"] for each in found["curves"]["others"]} | drawn >= set(lines[0]) - {"step", "reward_std"}
    assert found["settings"]["algorithm.credit"] == "group_relative"
    assert found["checkpoints"][0]["roles"] == ["current", "best"]


async def test_the_doctors_warnings_are_placed_on_steps(client):
    warnings = {each["name"]: each for each in (await get(client, f"/runs/{RLOO}"))["warnings"]}
    assert warnings, "most calls of this run are cut off"
    first = min(each["since"] for each in warnings.values())
    assert [each["name"] for each in (await get(client, f"/runs/{RLOO}/steps/{first}"))["warnings"]]


async def test_validation_has_an_interval_over_its_tasks(client):
    modes = (await get(client, f"/runs/{GRPO}/tasks"))["modes"]
    assert [each["step"] for each in modes["greedy"]] == [6, 12, 18, 24]
    assert all(each["low"] < each["mean"] <= each["high"] and each["tasks"] == 8 for each in modes["greedy"])


@pytest.mark.parametrize("chosen", ["held_out", "validation"])
async def test_each_task_is_followed_through_its_measurements_and_the_last_compared_with_the_first(
    client, chosen, monkeypatch
):
    monkeypatch.setattr("agentlightning.dashboard.views.rollout.SECONDS", 30.0)  # on a busy machine, too
    found = await get(client, f"/runs/{GRPO}/tasks?set={chosen}&mode=greedy")
    labels = [each["label"] for each in found["measurements"]]
    assert labels == (["before", "after"] if chosen == "held_out" else ["6", "12", "18", "24"])
    changes = [each["change"] for each in found["tasks"] if each["change"] is not None]
    result = found["result"]
    assert len(found["tasks"]) == found["all_tasks"] == len(changes) + result["left_out"]
    assert (sum(change > 0 for change in changes), result["tasks"]) == (result["better"], len(changes))
    assert sum(change < 0 for change in changes) == result["worse"]
    assert statistics.fmean(changes) == pytest.approx(result["gain"])
    assert [abs(change) for change in changes] == sorted(map(abs, changes), reverse=True)
    if chosen == "held_out":
        gain = (await get(client, f"/runs/{GRPO}"))["held_out"]["greedy"]["gain"]
        assert result["gain"] == pytest.approx(gain["gain"])
    for task in found["tasks"]:
        for cell in task["cells"]:
            row = (await get(client, f"/runs/{GRPO}/rollouts/{cell['rollouts'][0]}"))["summary"]
            assert (row["task_key"], row["reward_number"]) == (task["task_key"], cell["mean"])


async def test_held_out_tasks_are_followed_through_stages_and_without_reading_validations(copied, client_of):
    path = copied / GRPO / "state.json"
    state = orjson.loads(path.read_bytes())
    stage = {"first_step": 0, "rollouts": 0, "learns_weights": True, "settings": ""}
    state["stages"] = [{"name": name, **stage} for name in ("apo", "lightning_rl")]
    path.write_bytes(orjson.dumps(state))
    run_id = state["run_id"]
    data = Catalog(roots=[copied])
    store = (await data.run(GRPO)).store
    for before, name in (("before-greedy", "stage-00-greedy"), ("after-000024-greedy", "before-greedy-changed1")):
        rollouts = await store.query_rollouts(rollout_id_contains=f"{run_id}-{before}-")
        records = await store.read_records([each.rollout_id for each in rollouts])
        await store.add_records([renamed(each, before, name) for each in records])
    asked, query = [], store.query_rollouts
    store.query_rollouts = lambda **given: asked.append(given) or query(**given)
    async with client_of(data) as client:
        found = await get(client, f"/runs/{GRPO}/tasks?set=held_out&mode=greedy")
    means = {each["label"]: each["reward"]["mean"] for each in found["measurements"]}
    assert list(means) == ["before", "after stage 1", "after"]
    assert means["before"] == means["after stage 1"] < means["after"]
    assert {each["reward"]["tasks"] for each in found["measurements"]} == {24}
    assert len(asked) == 3
    assert not any("validation" in each["rollout_id_contains"] for each in asked)
    await data.close()


def renamed(record, old, new):
    """The same rollout under another name."""

    def moved(each, **names):
        return replace(each, rollout_id=each.rollout_id.replace(old, new), **names)

    return RolloutRecord(
        moved(record.rollout),
        tuple(moved(each, attempt_id=f"{new}-{each.attempt_id}") for each in record.attempts),
        tuple(moved(each, attempt_id=f"{new}-{each.attempt_id}") for each in record.spans),
    )


async def test_a_step_leads_to_its_groups_the_largest_spread_first(client):
    step = await get(client, f"/runs/{GRPO}/steps/9")
    spreads = [group["spread"] for group in step["groups"]]
    assert spreads == sorted(spreads, reverse=True)
    assert len(spreads) == 4
    rewards = [reward for group in step["groups"] for reward in group["rewards"] if reward is not None]
    assert statistics.fmean(rewards) == pytest.approx(step["metrics"]["reward"])
    assert step["versions"] == [8]


async def test_pages_of_rollouts_together_hold_each_of_them_once(client):
    first = await get(client, f"/runs/{GRPO}/rollouts?limit=100")
    rows = await rows_of(client, "")
    assert first["total"] == len(rows) == len({row["rollout_id"] for row in rows})


@pytest.mark.parametrize(
    ("query", "holds"),
    [
        ("&state=failed", lambda row: row["status"] == "failed"),
        ("&mode=val", lambda row: row["mode"] == "val"),
        ("&reward_min=0.5&reward_max=1", lambda row: row["reward"] == 1.0),
        ("&reward=missing", lambda row: row["reward"] is None),
        ("&task=CHLOE", lambda row: "Chloe" in row["task"]),
        ("&failure=connection", lambda row: row["failure_kind"] == "ConnectionError"),
        ("&tools=failed", lambda row: row["tool_errors"] > 0),
        ("&agent=solve", lambda row: row["agents"] == ["solver"]),
        ("&version=3", lambda row: 3 in row["versions"]),
        ("&id=train-000005", lambda row: "train-000005" in row["rollout_id"]),
        ("&step=5", lambda row: "train-000005" in row["rollout_id"]),
        ("&group=r00000001-train-000005-0002", lambda row: row["group"] == "r00000001-train-000005-0002"),
    ],
)
async def test_a_filter_shows_all_that_match_and_no_others(client, query, holds):
    everything, found = await rows_of(client, ""), await rows_of(client, query)
    expected = {row["rollout_id"] for row in everything if holds(row)}
    assert expected
    assert {row["rollout_id"] for row in found} == expected


async def test_a_step_is_sorted_by_what_spans_hold_and_the_whole_store_by_its_own_fields(client):
    page = await get(client, f"/runs/{GRPO}/rollouts?step=9&sort=reward_number&order=asc")
    rewards = [row["reward"] for row in page["rows"]]
    known = [reward for reward in rewards if reward is not None]
    assert known == sorted(known)
    times = [row["start_time"] for row in await rows_of(client, "&sort=created&order=asc")]
    assert times == sorted(times)
    refused = await client.get(f"/runs/{GRPO}/rollouts?sort=reward_number")
    assert refused.status_code == 400
    assert "one step= or group=" in refused.json()["error"]["message"]
    refused = await client.get(f"/runs/{GRPO}/rollouts?sort=created,status")
    assert "sort='created,status' is none of" in refused.json()["error"]["message"]
    assert "reward_number" in page["sorts"]
    whole = await get(client, f"/runs/{GRPO}/rollouts?limit=1")
    assert whole["sorts"] == ["created", "status", "rollout_id"]
    for sort in whole["sorts"][1:]:
        values = [row[sort] for row in await rows_of(client, f"&sort={sort}&order=asc")]
        assert values == sorted(values)


async def test_a_whole_id_is_found_without_a_search(client, monkeypatch):
    row = (await rows_of(client, "&state=failed"))[-1]
    monkeypatch.setattr("agentlightning.dashboard.views.rollouts._scan", None)
    found = await get(client, f"/runs/{GRPO}/rollouts?id={row['rollout_id']}")
    assert (found["rows"], found["next"], found["scanned"]) == ([row], None, 1)
    assert (await get(client, f"/runs/{GRPO}/rollouts?state=queuing&id={row['rollout_id']}"))["rows"] == []


async def test_in_a_large_store_only_what_the_store_keeps_the_number_of_is_counted(client, monkeypatch):
    small = await get(client, f"/runs/{GRPO}/rollouts?mode=val&limit=1")
    assert small["total"] > 0
    monkeypatch.setattr("agentlightning.dashboard.views.rollouts.MOST_COUNTED", 10)
    assert (await get(client, f"/runs/{GRPO}/rollouts?mode=val&limit=1"))["total"] is None
    assert (await get(client, f"/runs/{GRPO}/rollouts?state=failed&limit=1"))["total"] > 0


async def test_a_filter_over_many_rollouts_stops_and_says_where_to_go_on(client, monkeypatch):
    monkeypatch.setattr("agentlightning.dashboard.views.rollouts.MOST_SCANNED", 200)
    page = await get(client, f"/runs/{GRPO}/rollouts?task=nobody&limit=10")
    assert (page["rows"], page["scanned"]) == ([], 200)
    assert page["next"] is not None
    assert await rows_of(client, "&task=nobody") == []


async def worst_with_a_tool_error(client):
    groups = (await get(client, f"/runs/{GRPO}/steps/9"))["groups"]
    return next(group for group in groups if group["tool_errors"])


async def test_a_group_shows_the_best_beside_the_worst_and_where_they_part(client):
    group = await worst_with_a_tool_error(client)
    found = await get(client, f"/runs/{GRPO}/rollouts/{group['worst']}/group")
    rewards = [row["reward"] for row in found["rollouts"]]
    assert rewards == sorted(rewards, reverse=True)
    left, right = found["streams"]
    at = found["difference"]
    mine, theirs = left[at["call"]]["tokens"]["ids"], right[at["call"]]["tokens"]["ids"]
    assert mine[: at["token"]] == theirs[: at["token"]]
    assert mine[at["token"]] != theirs[at["token"]]
    chosen = found["rollouts"][1]["rollout_id"]
    other = await get(client, f"/runs/{GRPO}/rollouts/{group['worst']}/group?left={chosen}")
    assert (other["left"], other["right"]) == (chosen, found["right"])


async def test_the_turn_that_called_a_tool_has_its_error(client):
    rows = await rows_of(client, "&tools=failed&mode=train")
    found = await get(client, f"/runs/{GRPO}/rollouts/{rows[0]['rollout_id']}/tokens")
    results = found["stream"][0]["tool_results"]
    assert results[0]["failed"]
    assert "invalid syntax" in results[0]["text"]


async def test_token_advantages_are_those_of_the_steps_own_rule_over_its_own_rollouts(client, made_up):
    group = await worst_with_a_tool_error(client)
    found = await get(client, f"/runs/{GRPO}/rollouts/{group['worst']}/tokens")
    assert (found["step"], found["credit"]["rule"], found["credit"]["notes"]) == (9, "group_relative", [])
    store = LightningStore(made_up / GRPO / "store.db")
    rollouts = await store.query_rollouts(rollout_id_contains="train-000009", status_in=["succeeded"])
    plans = [RolloutPlan(each.rollout_id, None, each.metadata["group"]) for each in rollouts]
    trajectories, _ = await TrajectoryReader(store).read(plans)
    await store.close()
    by_group = {}
    for each in trajectories:
        by_group.setdefault(each.group, []).append(each)
    samples, _ = training_samples(list(by_group.values()), "group_relative")
    for call in found["stream"]:
        parts = [
            (sample.advantages[i].tolist(), sample.weights[i].tolist())
            for sample in samples
            for i, node in enumerate(sample.tree.nodes)
            if (node.rollout_id, node.call) == (group["worst"], call["span_id"])
        ]
        assert call["tokens"]["advantages"] == [number for own, _ in parts for number in own]
        assert call["tokens"]["weights"] == [number for _, own in parts for number in own]
        assert len(call["tokens"]["texts"]) == len(call["tokens"]["logprobs"]) == call["sampled_tokens"]


async def test_each_trained_token_has_its_ratio_of_new_to_old_and_the_clip_range_of_the_loss(client, made_up):
    group = await worst_with_a_tool_error(client)
    found = await get(client, f"/runs/{GRPO}/rollouts/{group['worst']}/tokens")
    lines = [orjson.loads(each) for each in (made_up / GRPO / "ratios/step-000009.jsonl").read_bytes().splitlines()]
    recorded = {line["call"]: line["log_ratios"] for line in lines if line["rollout"] == group["worst"]}
    assert {call["span_id"]: call["tokens"]["log_ratios"] for call in found["stream"]} == recorded
    assert found["ratios"] == {"known": True, "note": "", "clip": [0.2, 0.28]}
    sides = await get(client, f"/runs/{GRPO}/rollouts/{group['worst']}/group")
    assert all(call["tokens"]["log_ratios"] for stream in sides["streams"] for call in stream)


async def test_each_sampled_token_has_the_likeliest_ones_at_its_place_where_they_are_recorded(client):
    group = await worst_with_a_tool_error(client)
    found = await get(client, f"/runs/{GRPO}/rollouts/{group['worst']}/tokens")
    for call in found["stream"]:
        tokens = call["tokens"]
        assert len(tokens["alternatives"]) == len(tokens["ids"])
        for row, token, logprob in zip(tokens["alternatives"], tokens["ids"], tokens["logprobs"], strict=True):
            values = [value for _, _, value in row]
            assert values == sorted(values, reverse=True)
            assert all(text for _, text, _ in row)
            own = [value for other, _, value in row if other == token]
            assert own == [pytest.approx(logprob, rel=1e-2)] if own else logprob <= values[-1] + 0.01


async def test_where_no_ratios_are_recorded_the_page_names_the_setting(client):
    row = (await rows_of(client, "&mode=test&state=succeeded"))[0]
    found = await get(client, f"/runs/{GRPO}/rollouts/{row['rollout_id']}/tokens")
    assert found["stream"][0]["tokens"]["log_ratios"] is None
    assert not found["ratios"]["known"]
    assert "run.token_ratios=true" in found["ratios"]["note"]


async def test_a_rollout_that_measures_has_no_advantages_and_says_why(client):
    row = (await rows_of(client, "&mode=test&state=succeeded"))[0]
    found = await get(client, f"/runs/{GRPO}/rollouts/{row['rollout_id']}/tokens")
    assert found["stream"][0]["tokens"]["advantages"] is None
    assert found["credit"]["notes"] == ["this rollout measures the policy: nothing is learned from it"]


async def test_prompt_tokens_are_shown_once(client):
    row = (await rows_of(client, "&tools=failed&mode=train"))[0]
    first, second = (await get(client, f"/runs/{GRPO}/rollouts/{row['rollout_id']}/tokens"))["stream"]
    assert second["known_tokens"] == first["prompt_tokens"] + first["sampled_tokens"]
    assert "".join(second["prompt"]["texts"]).startswith("<|tool|>error")


async def test_a_rollout_has_attempts_spans_and_its_conversation_without_repetition(client):
    row = (await rows_of(client, "&tools=failed&mode=train"))[0]
    found = await get(client, f"/runs/{GRPO}/rollouts/{row['rollout_id']}")
    assert [attempt["status"] for attempt in found["attempts"]] == ["succeeded"]
    assert [span["kind"] for span in found["spans"]] == ["model", "error", "model", "reward"]
    roles = [[message["role"] for message in call["messages"]] for call in found["stream"]]
    assert roles == [["system", "user"], ["tool"]]
    assert found["stream"][0]["answer"][0]["parts"][1]["kind"] == "tool_call"


async def test_one_task_is_followed_across_versions_of_the_weights(client):
    group = (await get(client, f"/runs/{GRPO}/steps/3"))["groups"][0]
    key = (await get(client, f"/runs/{GRPO}/rollouts/{group['first']}"))["summary"]["task_key"]
    found = await get(client, f"/runs/{GRPO}/tasks/{key}")
    versions = [each["version"] for each in found["versions"]]
    assert versions == [2, 8, 14, 20]
    assert all(each["reward"]["low"] <= each["reward"]["mean"] <= each["reward"]["high"] for each in found["versions"])
    assert found["complete"]


async def test_a_prompt_that_changed_is_shown_as_a_difference(client):
    versions = (await get(client, f"/runs/{GRPO}/resources"))["versions"]
    newest = versions[0]["changed"][0]
    kinds = [(line["kind"], line["text"]) for line in newest["lines"]]
    assert ("removed", "Reply with a number.") in kinds
    assert ("added", "Reply ### ANSWER: number ###") in kinds


async def test_weights_say_what_they_learned_from(client):
    records = (await get(client, f"/runs/{GRPO}/weights"))["records"]
    assert [each["step"] for each in records] == list(range(24, 0, -1))
    assert records[0]["rollouts"] == (await get(client, f"/runs/{GRPO}/steps/24"))["learned"]
    assert records[0]["parent"] == 23


async def test_runs_are_compared_by_settings_and_by_the_tasks_both_have_measured(writer, copied):
    found = await get(writer, f"/compare?runs={GRPO},{RLOO}")
    settings = {each["setting"]: each["values"] for each in found["settings"]}
    assert settings["algorithm.credit"] == {GRPO: "group_relative", RLOO: "leave_one_out"}
    assert "algorithm.steps" not in settings
    assert "no held-out tasks in common" in found["tasks"][0]["error"]
    state = orjson.loads((copied / RLOO / "state.json").read_bytes())
    mine = orjson.loads((copied / GRPO / "state.json").read_bytes())["evaluations"]["after-greedy"]
    state["evaluations"]["after-greedy"] = [0.0, *mine[1:]]
    (copied / RLOO / "state.json").write_bytes(orjson.dumps(state))
    compared = (await get(writer, f"/compare?runs={GRPO},{RLOO}"))["tasks"][0]["modes"]["greedy"]
    assert [(each["first"], each["second"]) for each in compared["lost"]] == [(1.0, 0.0)]
    assert (compared["won"], compared["result"]["worse"], compared["result"]["better"]) == ([], 1, 0)
    low, high = compared["result"]["interval"]
    assert low < compared["result"]["gain"] < 0 < high


async def test_runs_that_differ_in_the_seed_alone_are_one_line_with_the_figures_of_agl_compare(
    tmp_path, made_up, client_of
):
    """Two seeds of one configuration, beside a run of another."""
    for number, name in enumerate((GRPO, "again", RLOO)):
        run = Path(shutil.copytree(made_up / (GRPO if name == "again" else name), tmp_path / name))
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(re.sub(r"^seed = \d+$", f"seed = {number}", config, flags=re.MULTILINE))
        lines = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
        moved = [{**line, "reward": line["reward"] + 0.1 * number} for line in lines]
        (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in moved))
    report = orjson.loads((tmp_path / "again/report.json").read_bytes())
    report["held_out"]["greedy"]["after"] -= 0.125
    (tmp_path / "again/report.json").write_bytes(orjson.dumps(report))
    data = Catalog(roots=[tmp_path])
    async with client_of(data) as client:
        (joined,) = (await get(client, "/runs"))["joined"]
        found = await get(client, f"/compare?runs={GRPO},again,{RLOO}")
        reward = next(each for each in found["curves"] if each["metric"] == "reward")["series"]
        first = (await get(client, f"/runs/{GRPO}"))["curves"]["charts"][0]["series"][0]["values"]
    await data.close()
    assert (found["groups"], found["ungrouped"]) == ([[GRPO, "again"], [RLOO]], "")
    runs = [str(tmp_path / name) for name in (GRPO, "again")]
    said = orjson.loads(CliRunner().invoke(build(), ["compare", *runs, "--json"]).stdout)["configurations"]
    assert [found["configurations"][0][name] for name in ("after", "gain")] == [said[0]["after"], said[0]["gain"]]
    assert said[0]["after"]["greedy"]["interval"]
    assert (set(joined["runs"]), joined["gain"]) == ({GRPO, "again"}, said[0]["gain"])
    assert reward[0]["values"] == pytest.approx([value + 0.05 for value in first])
    widths = [high - low for low, high in zip(reward[0]["low"], reward[0]["high"], strict=True)]
    # 12.706 * sqrt(0.005 / 2) to both sides, Student's quantile for one degree of freedom
    assert widths == pytest.approx([2 * 0.6353] * 24, abs=1e-3)
    assert set(reward[1]["low"]) == {None}, "one run has no interval over seeds"


async def test_runs_that_cannot_be_joined_by_seed_stand_alone_and_the_page_says_why(copied, client_of):
    shutil.copytree(copied / GRPO, copied / "again")
    data = Catalog(roots=[copied])
    async with client_of(data) as client:
        found = await get(client, f"/compare?runs={GRPO},again")
        assert (await get(client, "/runs"))["joined"] == []
    await data.close()
    assert found["groups"] == [[GRPO], ["again"]]
    assert "one configuration with one seed" in found["ungrouped"]


async def test_what_happens_now_has_workers_and_queues(client):
    live = await get(client, f"/runs/{GRPO}/server")
    assert {each["worker_id"] for each in live["workers"]} >= {"worker-0", "worker-1", "worker-2"}
    queues = {each["name"]: each for each in live["queues"]}
    assert (queues["train"]["waiting"], queues["train"]["limit"]) == (2, 24)
    assert live["statistics"]["rollouts.queuing"] == 2
    times = [call["end_time"] for call in live["calls"]]
    assert times == sorted(times, reverse=True)
    newest = next(row for row in await rows_of(client, "") if row["calls"])
    assert live["calls"][0]["rollout_id"] == newest["rollout_id"]
    assert (live["calls"][0]["agent"], live["calls"][0]["version"]) == ("solver", 24)
    assert live["calls"][0]["answer"].startswith("### ANSWER")


async def test_failures_are_counted_by_cause(client, monkeypatch):
    failed = await rows_of(client, "&state=failed")
    found = await get(client, f"/runs/{GRPO}/failures")
    assert {each["cause"]: each["count"] for each in found["causes"]} == Counter(row["failure_kind"] for row in failed)
    assert (found["read"], found["all"]) == (len(failed), True)
    first = found["causes"][0]
    assert first["newest"] == failed[0]["rollout_id"]
    assert first["message"] == failed[0]["failure"]
    assert len(await rows_of(client, f"&state=failed&failure={first['cause']}")) == first["count"]
    monkeypatch.setattr("agentlightning.dashboard.views.rollouts.MOST_FAILED", 3)
    found = await get(client, f"/runs/{GRPO}/failures")
    assert (found["read"], found["all"]) == (3, False)


async def test_unknown_names_are_404_with_a_message(client):
    run = f"/runs/{GRPO}"
    for path in ("/runs/nope", f"{run}/rollouts/nope", f"{run}/steps/99", "/nope", f"{run}/tasks/no"):
        response = await client.get(path)
        assert response.status_code == 404, path
        assert response.json()["error"]["message"]


async def test_a_view_that_has_not_changed_is_not_sent_again(client):
    first = await client.get(f"/runs/{GRPO}")
    again = await client.get(f"/runs/{GRPO}", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_a_run_of_an_earlier_version_is_shown(tmp_path: Path, client_of):
    with tarfile.open(Path(__file__).parents[1] / "compat/fixtures/run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    data = Catalog(roots=[tmp_path / "run"])
    async with client_of(data) as client:
        assert (await get(client, "/runs/run"))["summary"]["state"] == "finished"
        row = (await get(client, "/runs/run/rollouts?step=2&limit=1"))["rows"][0]
        found = await get(client, f"/runs/run/rollouts/{row['rollout_id']}/tokens")
        assert any("no audit log" in note for note in found["credit"]["notes"])
        assert found["stream"][0]["tokens"]["advantages"]
    await data.close()


async def test_a_group_that_rollouts_name_in_their_metadata_alone_is_found(tmp_path: Path, client_of):
    store = LightningStore(tmp_path / "store.db")
    for number in range(6):
        await store.enqueue_rollout({"n": number}, rollout_id=f"mine-{number}", metadata={"group": f"g-{number % 2}"})
    data = Catalog(store)
    async with client_of(data) as client:
        rows = (await get(client, "/runs/store/rollouts?group=g-1"))["rows"]
        assert {row["rollout_id"] for row in rows} == {"mine-1", "mine-3", "mine-5"}
        assert (await get(client, "/runs/store/rollouts?group=g-7"))["rows"] == []
    await data.close()
    await store.close()


async def test_where_ids_do_not_tell_groups_no_store_is_read_whole(tmp_path: Path, client_of, monkeypatch):
    monkeypatch.setattr(run_data, "MOST_NEAR", 4)
    monkeypatch.setattr(rollouts_view, "PAGE_OF_TASK", 10)
    store = LightningStore(tmp_path / "store.db")
    for number in range(40):
        group = {"group": str(number // 2)}
        await store.enqueue_rollout({"n": number % 8}, rollout_id=f"mine-{number:03d}", metadata=group)
    read, query = list[int](), store.query_rollouts

    async def counted(**options):
        found = await query(**options)
        read.append(len(found))
        return found

    monkeypatch.setattr(store, "query_rollouts", counted)
    data = Catalog(store)
    async with client_of(data) as client:
        found = await get(client, "/runs/store/rollouts/mine-021/group")
        assert [row["rollout_id"] for row in found["rollouts"]] == ["mine-020", "mine-021"]
        found = await get(client, f"/runs/store/tasks/{task_key({'n': 3})}")
        assert (len(found["rollouts"]), found["scanned"], found["complete"]) == (5, 40, True)
    assert max(read) <= 10
    await data.close()
    await store.close()


async def test_the_members_of_a_group_are_found_however_many_rollouts_are_newer(tmp_path: Path, client_of, monkeypatch):
    monkeypatch.setattr(run_data, "MOST_NEAR", 6)
    store = LightningStore(tmp_path / "store.db")
    for number in range(40):
        group = {"group": f"g-{number // 4}"}
        await store.enqueue_rollout({"n": number}, rollout_id=f"mine-{number:03d}", metadata=group)
    data = Catalog(store)
    async with client_of(data) as client:
        for number in (0, 5, 19, 39):
            found = await get(client, f"/runs/store/rollouts/mine-{number:03d}/group")
            first = number // 4 * 4
            assert {row["rollout_id"] for row in found["rollouts"]} == {f"mine-{first + n:03d}" for n in range(4)}
    await data.close()
    await store.close()


async def test_summaries_that_are_forgotten_while_others_are_read_are_still_answered(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(rollout_data, "SUMMARIES", 1)
    store = LightningStore(tmp_path / "store.db")
    for name in "abc":
        await store.enqueue_rollout({"n": name}, rollout_id=name)
        await store.cancel_rollout(name)
    rollouts = await store.query_rollouts()
    summaries = rollout_data.Summaries(store)
    await summaries.of(rollouts[:1])
    both, _ = await asyncio.gather(summaries.of(rollouts[:2]), summaries.of(rollouts[2:]))
    assert [row.rollout_id for row in both] == ["a", "b"]
    await store.close()
