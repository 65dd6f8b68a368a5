"""The server's side of the dashboard: the token, the page's headers, actions, the export."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import orjson
import pytest
from tests.support.models import tiny_checkpoint

import agentlightning
from agentlightning.dashboard.app import VIEWS, dashboard_routes, export
from agentlightning.dashboard.data import run_data
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.errors import StoreClosedError
from agentlightning.server.app import Server
from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.store.export.jsonl import read_items

STATIC = Path(agentlightning.__file__).parent / "dashboard" / "static"
GRPO, RLOO = "calculator-grpo", "calculator-rloo"


def some_path(view: str) -> str:
    return re.sub(r"\{\w+\}", "x", view)


@pytest.mark.parametrize("view", VIEWS)
async def test_without_the_token_no_view_shows_anything(client, view):
    for headers in ({"authorization": ""}, {"authorization": "Bearer wrong"}):
        response = await client.get(some_path(view), headers=headers)
        assert response.status_code == 401
        assert set(response.json()) == {"error", "detail"}


async def test_without_the_token_nothing_can_be_changed_or_exported(client):
    for path in (f"/runs/{GRPO}/actions/cancel", f"/runs/{GRPO}/export", "/anything"):
        response = await client.post(path, json={"rollout_ids": ["x"]}, headers={"authorization": "Bearer wrong"})
        assert response.status_code == 401


async def test_the_page_runs_scripts_of_its_own_server_alone(client):
    for path in ("", "/runs/x/rollouts/y", "/static/app.js", "/static/vendor/preact.js"):
        response = await client.get(f"http://127.0.0.1/dashboard{path}")
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_from_elsewhere():
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page)
    own = [path for path in STATIC.rglob("*.js") if path.parent.name != "vendor"]
    for path in [*own, STATIC / "index.html", *STATIC.rglob("*.css")]:
        assert "://" not in path.read_text(), path
    for path in own:
        assert not re.search(r"innerHTML|dangerouslySetInnerHTML|eval\(|new Function|document\.write", path.read_text())


def test_the_page_is_small_and_its_libraries_are_named_with_version_and_licence():
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < 400_000
    named = (STATIC / "vendor" / "README.md").read_text()
    for path in (STATIC / "vendor").iterdir():
        assert path.name == "README.md" or path.name in named, path.name


async def test_static_files_outside_the_page_are_not_served(client):
    for name in ("../app.py", "..%2fapp.py", "views/../../app.py", "nothing.js"):
        response = await client.get(f"http://127.0.0.1/dashboard/static/{name}")
        assert response.status_code == 404 or b"<!doctype html>" in response.content, name


async def test_a_read_only_dashboard_changes_nothing(client):
    response = await client.post(f"/runs/{GRPO}/actions/cancel", json={"rollout_ids": ["x"]})
    assert response.status_code == 400
    assert "only reads" in response.json()["error"]["message"]


async def act(writer, action, rollout_id, **more):
    response = await writer.post(f"/runs/{GRPO}/actions/{action}", json={"rollout_ids": [rollout_id], **more})
    assert response.status_code == 200, response.text
    return response.json()["results"][rollout_id]


async def row(writer, query):
    return (await writer.get(f"/runs/{GRPO}/rollouts?limit=1&{query}")).json()["rows"][0]


async def test_rollouts_are_cancelled_requeued_and_retried(writer):
    waiting = (await row(writer, "state=queuing"))["rollout_id"]
    assert (await act(writer, "cancel", waiting))["status"] == "cancelled"
    assert (await act(writer, "requeue", waiting))["status"] == "requeuing"
    done = (await row(writer, "state=succeeded"))["rollout_id"]
    refused = await act(writer, "requeue", done)
    assert not refused["done"]
    assert "succeeded" in refused["error"]
    again = await act(writer, "retry", done)
    new = (await writer.get(f"/runs/{GRPO}/rollouts/{again['rollout_id']}")).json()
    assert new["rollout"]["status"] == "queuing"
    assert done in new["rollout"]["metadata"]
    assert (await writer.get(f"/runs/{GRPO}/rollouts/{done}")).json()["rollout"]["status"] == "succeeded"


async def test_an_annotation_is_a_span_that_rewards_and_filters_use(writer):
    chosen = (await row(writer, "state=succeeded&reward_max=0.2"))["rollout_id"]
    assert (await act(writer, "annotate", chosen, score=0.75, label="looks right"))["done"]
    found = (await writer.get(f"/runs/{GRPO}/rollouts?label=looks%20right")).json()["rows"]
    assert [(each["rollout_id"], each["labels"]) for each in found] == [(chosen, ["looks right"])]
    spans = (await writer.get(f"/runs/{GRPO}/rollouts/{chosen}")).json()["spans"]
    assert spans[-1]["attributes"]["agentlightning.feedback.source"] == "dashboard"
    assert found[0]["reward"] == 0.75


async def test_a_request_of_another_content_type_changes_nothing(writer):
    """A form of another site can be sent without being asked first; JSON cannot."""
    body = orjson.dumps({"rollout_ids": ["x"]})
    response = await writer.post(f"/runs/{GRPO}/actions/cancel", content=body, headers={"content-type": "text/plain"})
    assert response.status_code == 415


@pytest.mark.parametrize("body", [{}, {"rollout_ids": []}, {"rollout_ids": "x"}, {"rollout_ids": [1]}, []])
async def test_a_request_that_names_no_rollouts_is_refused(writer, body):
    assert (await writer.post(f"/runs/{GRPO}/actions/cancel", json=body)).status_code == 400


async def test_a_selection_is_exported_as_a_store_imports_it(client, tmp_path):
    rows = (await client.get(f"/runs/{GRPO}/rollouts?limit=3&mode=train&state=succeeded")).json()["rows"]
    ids = [each["rollout_id"] for each in rows]
    response = await client.post(f"/runs/{GRPO}/export", json={"rollout_ids": ids})
    (tmp_path / "selection.jsonl").write_bytes(response.content)
    items = [item for item, _ in read_items(tmp_path / "selection.jsonl")]
    assert [item.rollout.rollout_id for item in items] == ids
    assert all(item.spans for item in items)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "command"), [("sft", ["sft", "--data"]), ("dpo", ["dpo", "--data"])])
async def test_what_the_filters_show_is_exported_as_a_dataset_that_trains(client, tmp_path, form, command):
    filters = {"mode": "train", "step": "9"}
    rows = (await client.get(f"/runs/{GRPO}/rollouts?mode=train&step=9&limit=500")).json()["rows"]
    response = await client.post(f"/runs/{GRPO}/export", json={"form": form, "filters": filters})
    assert response.status_code == 200, response.text
    lines = response.content.splitlines()
    assert int(response.headers["x-agl-records"]) == len(lines) > 0
    failed = sum(row["status"] != "succeeded" for row in rows)
    assert orjson.loads(response.headers["x-agl-skipped"]).get("that did not succeed", 0) == failed
    (tmp_path / f"{form}.jsonl").write_bytes(response.content)
    amount = "epochs=1" if form == "sft" else "steps=1"
    model = tiny_checkpoint(tmp_path / "model", context_length=2048)
    arguments = [*command, f"{form}.jsonl", "--model", str(model), "--run", "run", "--json", amount]
    agl = str(Path(sys.executable).parent / "agl")
    done = await asyncio.to_thread(subprocess.run, [agl, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["steps"] > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"form": "csv", "rollout_ids": ["x"]}, "none of: rollouts, sft, dpo"),
        ({"form": "sft", "filters": []}, "filters is no object"),
        ({"form": "sft", "filters": {"state": "done"}}, "state='done' is none of"),
        ({"form": "sft", "filters": {"state": "failed"}}, "that did not succeed"),
    ],
)
async def test_an_export_that_cannot_be_says_why(client, body, said):
    response = await client.post(f"/runs/{GRPO}/export", json=body)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


async def test_the_dashboard_is_served_beside_store_and_gateway_on_one_port(made_up):
    store = LightningStore(":memory:")
    data = Catalog(store, roots=[made_up], writable=True)
    async with Server(store, secret="s", token="t", pages=dashboard_routes(data, "t")) as server:
        headers = {"authorization": "Bearer t"}
        remote = LightningStoreClient(server.url, token="t")
        await remote.enqueue_rollout({"question": "6 x 7"}, rollout_id="mine")
        await remote.close()
        async with httpx.AsyncClient(base_url=server.url, headers=headers) as client:
            assert (await client.get("/dashboard")).text.startswith("<!doctype html>")
            rows = (await client.get("/dashboard/api/runs/store/rollouts")).json()["rows"]
            assert [each["rollout_id"] for each in rows] == ["mine"]
            assert (await client.get("/dashboard/api/runs/store/weights")).status_code == 404
            elsewhere = await client.get("/dashboard/api/runs", headers={"origin": "https://evil.example"})
            assert elsewhere.status_code == 403
    await data.close()
    await store.close()


async def test_a_store_stays_open_while_a_request_reads_it_and_is_closed_when_others_are_opened(
    copied, client_of, monkeypatch
):
    monkeypatch.setattr(run_data, "MOST_OPEN", 1)
    data = Catalog(roots=[copied])
    shutil.copytree(copied / GRPO, copied / "third")
    names = [GRPO, RLOO, "third"]
    async with client_of(data) as client:
        paths = [f"/runs/{name}/{view}" for name in names * 3 for view in ("rollouts?limit=500", "server", "failures")]
        answers = await asyncio.gather(*map(client.get, paths))
        assert [each.status_code for each in answers] == [200] * len(paths), [each.text[:200] for each in answers]
        first = await data.run(GRPO)
        for name in [*names[1:], *names[1:]]:
            await client.get(f"/runs/{name}/server")
        with pytest.raises(StoreClosedError):
            await first.store.count_rollouts()
        assert (await client.get(f"/runs/{GRPO}/rollouts")).status_code == 200
    await data.close()


async def test_an_export_of_any_length_reads_its_store_to_the_end(copied, client_of, monkeypatch):
    monkeypatch.setattr(run_data, "MOST_OPEN", 0)
    data = Catalog(roots=[copied])
    run = await data.run(GRPO)
    with run.reading():
        lines, counts = await export(run, {"filters": {}})
    parts = [await anext(lines), await anext(lines)]
    await data.run(RLOO)
    parts += [each async for each in lines]
    assert len(b"".join(parts).splitlines()) == int(counts["x-agl-records"]) + 2
    await data.close()
