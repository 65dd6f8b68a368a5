"""Promises about what is emitted outside of any session."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store.types import RolloutRecord

pytestmark = pytest.mark.integration

Read = Callable[..., list[RolloutRecord]]


def ask(question: str, answer: str, reward: float) -> None:
    agl.emit_prompt(question, answer)
    agl.emit_reward(reward)


def test_what_a_process_emits_is_one_rollout_and_it_says_so_once(
    recorded: Read, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ask("a", "b", 0.0)
        with agl.operation("plan"):
            agl.emit_message("c")
        agl.emit_reward(1.0)
    (record,) = recorded()
    assert record.rollout.status == "succeeded"
    assert [span.name.rpartition(".")[2] for span in record.spans] == [
        "chat",
        "result",
        "message",
        "operation",
        "result",
    ]
    assert len({span.trace_id for span in record.spans}) == 1
    (said,) = caplog.records
    assert "one rollout" in said.message
    status = agl.recording_status()
    assert (status.sessions, status.sessions_implicit, status.problem) == (1, 1, "")


def test_it_ends_where_a_store_is_opened_and_another_one_begins_after(recorded: Read) -> None:
    ask("a", "b", 1.0)
    agl.emit_prompt("without an answer")
    store = agl.LightningStore()
    ask("c", "d", 1.0)
    assert len(store.get_successful_trajectories()) == 2, "reading ends the second"
    first, second = recorded()
    assert [span.name for span in first.spans] == ["chat", "gen_ai.evaluation.result", "agentlightning.prompt"]
    assert (first.rollout.status, second.rollout.status) == ("succeeded", "succeeded")
    assert agl.recording_status().prompts_unanswered == 1


def test_threads_and_tasks_that_run_at_once_do_not_mix_their_rewards(recorded: Read) -> None:
    both = threading.Barrier(2)

    def in_a_thread(name: str) -> None:
        agl.emit_prompt(name, name)
        both.wait()
        agl.emit_reward(float(ord(name)))

    async def in_a_task(name: str) -> None:
        agl.emit_prompt(name, name)
        await asyncio.sleep(0.01)
        agl.emit_reward(float(ord(name)))

    async def main() -> None:
        agl.emit_message("before")
        await asyncio.gather(*map(in_a_task, "abc"))

    threads = [threading.Thread(target=in_a_thread, args=name) for name in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(main())
    found = {}
    for record in recorded():
        rewards = [s.attributes["gen_ai.evaluation.score.value"] for s in record.spans if "evaluation" in s.name]
        found["".join(s.attributes["gen_ai.input.messages"] for s in record.spans if s.name == "chat")] = rewards
    assert sorted(map(tuple, found.values())) == [(), (97.0,), (98.0,), (99.0,), (120.0,), (121.0,)]


def test_a_session_within_is_a_rollout_of_its_own(recorded: Read) -> None:
    agl.emit_message("outside")
    with agl.track_session("mine"):
        ask("a", "b", 1.0)
    agl.emit_message("outside again")
    outside, mine = recorded()
    assert (outside.rollout.metadata["session"], mine.rollout.input) == ("implicit", "mine")
    assert (len(outside.spans), len(mine.spans)) == (2, 2)


def test_a_bare_thread_of_an_open_session_is_given_none(recorded: Read) -> None:
    with agl.track_session():
        thread = threading.Thread(target=agl.emit_reward, args=[1.0])
        thread.start()
        thread.join()
    (record,) = recorded()
    assert record.spans == (), "it may be of another attempt: a reward is not guessed"


def test_sampling_and_redaction_hold_for_it(recorded: Read) -> None:
    agl.configure_recording(redact=lambda attributes: dict.fromkeys(attributes, "x"))
    agl.emit_message("secret")
    (record,) = recorded()
    assert "secret" not in str(record.spans[0].attributes)
    agl.configure_recording(sampling_rate=0.0)
    agl.emit_message("sampled out")
    assert len(recorded()) == 1


SCRIPT = """
import agentlightning as agl, os
agl.emit_prompt("6 x 7?", "42")
if (child := os.fork()) == 0:
    agl.emit_prompt("in the child", "yes"); agl.emit_reward(0.0)
    agl.flush_recording()
    os._exit(0)
os.waitpid(child, 0)
agl.emit_reward(1.0)
"""


def test_the_end_of_a_process_ends_it_and_a_fork_has_its_own(recorded: Read, tmp_path: Path) -> None:
    environment: dict[str, Any] = {**os.environ, "AGL_STORE": ""}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60, cwd=tmp_path, env=environment)
    found = {str(s.attributes["gen_ai.input.messages"]): r for r in recorded() for s in r.spans if s.name == "chat"}
    assert [record.rollout.status for record in found.values()] == ["succeeded", "succeeded"]
    assert sorted(agl.find_final_reward(record.spans) for record in found.values()) == [0.0, 1.0]  # pyright: ignore
