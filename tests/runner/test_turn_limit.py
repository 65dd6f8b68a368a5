"""An agent that fails because its rollout has had all its answers ends well; one that fails otherwise does not."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning.resources import LLM
from agentlightning.rollouts import RolloutConfig
from agentlightning.span import ERROR_TYPE, TURN_LIMIT_REACHED, Span, new_span_id

pytestmark = pytest.mark.integration


def fails_once_it_may(task: str) -> None:
    while not Path(task).exists():
        time.sleep(0.005)
    raise RuntimeError("no more answers")


def dies_once_it_may(task: str) -> None:
    while not Path(task).exists():
        time.sleep(0.005)
    os._exit(3)


COMMAND = ["sh", "-c", "read task; while ! [ -e {file} ]; do sleep 0.01; done; echo no more answers >&2; exit 3"]


@pytest.mark.parametrize(
    ("agent", "max_calls", "error", "status"),
    [
        (fails_once_it_may, 2, TURN_LIMIT_REACHED, "succeeded"),
        (fails_once_it_may, 2, "engine_error", "failed"),
        (fails_once_it_may, None, TURN_LIMIT_REACHED, "failed"),
        (dies_once_it_may, 2, TURN_LIMIT_REACHED, "succeeded"),
        ("command", 2, TURN_LIMIT_REACHED, "succeeded"),
    ],
)
async def test_the_end_of_an_agent_that_was_refused_a_call(
    agent: Any, max_calls: int | None, error: str, status: str, start: Any, store: Any, tmp_path: Path
) -> None:
    await store.add_resources({"llm": LLM(endpoint="http://x", model="m", max_calls=max_calls)})
    words = [word.replace("{file}", str(tmp_path / "go")) for word in COMMAND]
    await start(shlex.join(words) if agent == "command" else agent)
    queued = await store.enqueue_rollout(str(tmp_path / "go"), config=RolloutConfig(max_attempts=1))
    async with asyncio.timeout(30):
        while (attempt := await store.get_latest_attempt(queued.rollout_id)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    now, ids = time.time(), (queued.rollout_id, attempt.attempt_id)
    await store.add_span(Span(*ids, "chat m", now, now, span_id=new_span_id(), attributes={ERROR_TYPE: error}))
    (tmp_path / "go").touch()
    [ended] = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=30)
    metadata = (await store.get_latest_attempt(queued.rollout_id)).metadata
    assert ended.status == status
    assert metadata["error"]["message"], "why the agent ended is kept"
    assert metadata.get(TURN_LIMIT_REACHED, False) is (status == "succeeded")
