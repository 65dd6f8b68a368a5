"""`agl dashboard`: what it opens, that it only reads, and `agl serve --runs`."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx
import pytest
from tests.support.made_up_runs import write_runs

from agentlightning.server.app import listen
from agentlightning.store import LightningStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    asyncio.run(write_runs(root))
    return root


def opened(program) -> tuple[str, dict[str, str]]:
    """The address of its JSON, and the header with the token of its link."""
    said = program.line(60)
    url, _, token = said["link"].partition("#token=")
    assert url == said["url"]
    return f"{url}/api", {"authorization": f"Bearer {token}"}


def names(url: str, headers: dict[str, str]) -> list[str]:
    return [run["name"] for run in httpx.get(f"{url}/runs", headers=headers).raise_for_status().json()["runs"]]


def test_it_opens_one_run_or_several_and_shows_nothing_without_the_token_of_its_link(start, runs):
    one, several = (
        start("dashboard", "--port", "0", str(runs / "calculator-grpo"), "--json"),
        start("dashboard", "--port", "0", str(runs), "--json"),
    )
    url, headers = opened(one)
    assert names(url, headers) == ["calculator-grpo"]
    assert httpx.get(f"{url}/runs").status_code == 401
    body = {"rollout_ids": ["x"]}
    refused = httpx.post(f"{url}/runs/calculator-grpo/actions/cancel", json=body, headers=headers)
    assert "only reads" in refused.json()["error"]["message"]
    assert set(names(*opened(several))) == {"calculator-grpo", "calculator-rloo"}
    assert one.stop(signal.SIGINT) in (0, -signal.SIGINT, 130)


def test_it_opens_a_database(start, tmp_path):
    async def fill() -> None:
        store = LightningStore(tmp_path / "some.db")
        await store.enqueue_rollout({"question": "6 x 7"}, rollout_id="mine")
        await store.close()

    asyncio.run(fill())
    url, headers = opened(start("dashboard", "--port", "0", "some.db", "--json"))
    assert names(url, headers) == ["store"]
    rows = httpx.get(f"{url}/runs/store/rollouts", headers=headers).json()["rows"]
    assert [row["rollout_id"] for row in rows] == ["mine"]


def test_of_a_server_it_prints_the_link_of_its_own_dashboard(start, runs, invoke):
    arguments = ("serve", "--port", "0", "--store", "s.db", "--runs", str(runs), "--json")
    server = start(*arguments, AGL_TOKEN="theirs").line(60)
    done = invoke("dashboard", server["url"], "--token", "theirs", "--json")
    said = json.loads(done.stdout)
    assert said == {"url": f"{server['url']}/dashboard", "link": f"{server['url']}/dashboard#token=theirs"}
    own = {"authorization": "Bearer theirs"}
    assert {"calculator-grpo", "calculator-rloo"} < set(names(f"{said['url']}/api", own))
    wrong = invoke("dashboard", server["url"], "--token", "wrong")
    assert "does not accept this access token" in wrong.stderr
    assert "requires its access token" in invoke("dashboard", server["url"]).stderr


def test_status_reads_a_run_of_a_server_by_the_link_of_its_dashboard(start, runs, invoke):
    link = start("dashboard", "--port", "0", str(runs), "--json").line(60)["link"]
    found = json.loads(invoke("status", link, "--run", "calculator-rloo", "--json").stdout)
    local = json.loads(invoke("status", str(runs / "calculator-rloo"), "--json").stdout)
    for name in ("status", "step", "steps", "reward", "first_reward", "best_reward", "validation", "validated_at"):
        assert found[name] == local[name], name
    assert (found["start"], set(found["warnings"])) == (pytest.approx(local["start"]), set(local["warnings"]))
    assert [each["cause"] for each in found["failures"]] == ["ConnectionError"]
    shown = invoke("status", link, "--run", "calculator-rloo").stdout
    assert "calculator-rloo: unfinished, step 14 of 24" in shown
    assert "reward " in shown


def test_status_of_a_server_names_what_is_missing(start, runs, invoke):
    link = start("dashboard", "--port", "0", str(runs), "--json").line(60)["link"]
    wrong = invoke("status", link.partition("#")[0])
    assert wrong.exit_code == 1
    assert "requires its access token" in wrong.stderr
    unknown = invoke("status", link, "--run", "nope")
    assert "it has: " in unknown.stderr
    assert "calculator-grpo" in unknown.stderr
    gone = invoke("status", "http://127.0.0.1:9")
    assert "cannot be reached" in gone.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_recorded_runs_need_no_run_and_leave_nothing_behind(start, tmp_path, number):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = start("dashboard", "--port", "0", "--demo", "--json", TMPDIR=str(temporary))
    assert set(names(*opened(program))) == {"messages", "messages-rloo"}
    assert any(temporary.iterdir())
    assert program.stop(number) == 0
    assert not any(temporary.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"), [((), "'runs'"), (("nowhere",), "'nowhere'"), (("x", "--demo"), "--demo")]
)
def test_what_is_not_there_is_named_with_the_way_out(invoke, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = invoke("dashboard", "--port", "0", *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_a_port_that_is_taken_is_named_with_the_page_that_may_be_there_and_the_way_beside_it(invoke):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = invoke("dashboard", "--demo", "--port", str(port))
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert f"http://127.0.0.1:{port}/dashboard" in said
    assert "agl dashboard --port 0" in said
    assert "unpacking" not in said
