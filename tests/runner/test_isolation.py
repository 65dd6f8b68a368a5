"""What an agent cannot do: see the server's token or a hidden field, speak for others, leave processes behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.waiting import until

from agentlightning.runner.hosts.host_pool import trim
from agentlightning.span import MESSAGE_BODY

pytestmark = pytest.mark.integration

CODE = """
import os, pickle, socket, stat, struct
import agentlightning as agl
from agentlightning.runner.hosts.messages import Spans
from agentlightning.span import Span
from agentlightning.tracing.scope import current_scope

NAMES = ("AGL_TOKEN", "LITELLM_LOCAL_MODEL_COST_MAP", "CREWAI_DISABLE_TELEMETRY")

def look(task, rollout):
    return repr([dict(task), rollout.input, *map(os.environ.get, NAMES)])

def judge(task, output):
    agl.emit_message(output)
    return float(task["answer"])

class Bomb:
    def __reduce__(self):
        return (open, (os.environ["TRAP"], "w"))

def attack(task):
    if task != "attack":
        return 1.0
    body = pickle.dumps(Bomb())
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.write(int(name), struct.pack("!Q", len(body)) + body)
        except OSError:
            pass
    import time
    time.sleep(60)

def forge(task):
    sink = current_scope().sink
    span = Span(task["rollout_id"], task["attempt_id"], "forged", 1.0, 2.0, attributes={"agentlightning.cost": -1e6})
    sink.host.send(Spans(sink.job.attempt_id, (span,)))
    return 1.0
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "isolated.py"
    path.write_text(CODE)
    return path


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def said(store: Any, rollout: Any) -> str:
    return "".join(str(span.attributes.get(MESSAGE_BODY, "")) for span in await store.query_spans(rollout.rollout_id))


@pytest.mark.parametrize("kind", ["python", "command"])
async def test_an_agent_sees_neither_the_token_nor_hidden_fields_and_is_kept_from_telemetry(
    kind: str, start: Any, roll: Any, rewards_of: Any, store: Any, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_TOKEN", "the-token")
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "of its user")
    monkeypatch.delenv("LITELLM_LOCAL_MODEL_COST_MAP", raising=False)
    agent = [sys.executable, "-c", "import os, sys; print(os.environ, sys.stdin.read())"]
    await start(f"{code}:look" if kind == "python" else agent, reward=f"{code}:judge", hide=["answer"])
    [ended] = await roll({"question": "1 + 1?", "answer": 424242})
    seen = await said(store, ended)
    assert await rewards_of(ended) == [424242.0]
    assert "1 + 1?" in seen
    assert "of its user" in seen
    assert "'True'" in seen
    assert "424242" not in seen
    assert "the-token" not in seen


@pytest.mark.skipif(sys.platform != "linux", reason="the agent finds its sockets in /proc")
async def test_what_an_agent_sends_to_the_runner_is_never_unpickled(
    start: Any, roll: Any, attempt_of: Any, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "sprung"
    monkeypatch.setenv("TRAP", str(trap))
    await start(f"{code}:attack", concurrency=1)
    [attacked] = await roll("attack")
    assert not trap.exists()
    assert attacked.status == "failed"
    assert "not a valid message" in (await attempt_of(attacked)).metadata["error"]["message"]
    [after] = await roll("work")
    assert after.status == "succeeded"


async def test_what_an_agent_sends_is_its_own_attempts_whatever_it_says(
    start: Any, roll: Any, store: Any, code: Path
) -> None:
    other = await store.start_rollout("somebody else's")
    await start(f"{code}:forge")
    [ended] = await roll({"rollout_id": other.rollout_id, "attempt_id": other.attempt.attempt_id})
    assert [span.name for span in await store.query_spans(other.rollout_id)] == []
    [forged] = await store.query_spans(ended.rollout_id, name="forged")
    assert "agentlightning.cost" not in forged.attributes


async def test_a_host_that_is_killed_leaves_no_command_running(
    start: Any, roll: Any, attempt_of: Any, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    # It has read its task once it is guarded.
    await start(
        ["sh", "-c", f"read -r _; sleep 1000 & echo $$ $! $PPID > {pids}.tmp; mv {pids}.tmp {pids}; wait"],
        concurrency=1,
    )
    rolling = asyncio.create_task(roll({}))
    await until(pids.exists)
    shell, child, host = map(int, pids.read_text().split())
    assert psutil.pid_exists(shell)
    assert psutil.pid_exists(child)
    os.kill(host, signal.SIGKILL)
    [ended] = await rolling
    assert ended.status == "failed"
    assert "SIGKILL" in (await attempt_of(ended)).metadata["error"]["message"]
    await until(lambda: is_gone(shell) and is_gone(child))


def test_a_log_keeps_its_end_and_goes_on(tmp_path: Path) -> None:
    log, previous = tmp_path / "agent.log", tmp_path / "agent.log.1"
    trim(log, 100)  # nothing has been printed yet
    with open(log, "ab", buffering=0) as agent:
        agent.write(b"a" * 100)
        trim(log, 100)
        assert (log.stat().st_size, previous.exists()) == (100, False)
        agent.write(b"b" * 90)
        trim(log, 100)
        assert (log.stat().st_size, previous.read_bytes()) == (0, b"a" * 10 + b"b" * 90)
        agent.write(b"more")
    assert log.read_bytes() == b"more"


async def test_a_runners_log_is_bounded(start: Any, roll: Any, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_bytes(b"of an earlier run" * 2_000_000)
    code = tmp_path / "loud.py"
    code.write_text("def agent(task):\n    print('hello ' * 1000)\n    return 1.0\n")
    await start(f"{code}:agent", log=log)
    await roll({})
    await until(lambda: log.stat().st_size <= 16 * 1024 * 1024)
