"""Promises about what an agent that is traced with OpenTelemetry finds in its environment."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from agentlightning.attempt_address import trace_id_of

pytestmark = pytest.mark.integration

PRINT = "import os; print(*(os.environ.get(name) for name in ('TRACEPARENT', 'OTEL_RESOURCE_ATTRIBUTES')))"


def say_what_is_set(task: Any) -> list[str]:
    return sorted(name for name in os.environ if name.startswith(("OTEL_EXPORTER", "OTEL_RES", "TRACEPARENT")))


async def test_a_program_belongs_to_the_trace_of_its_attempt(start: Any, roll: Any, attempt_of: Any) -> None:
    await start([sys.executable, "-c", PRINT])
    (rollout,) = await roll({"q": 1})
    attempt = await attempt_of(rollout)
    parent, resource = attempt.metadata["output"].split()
    assert parent.split("-")[1] == trace_id_of(attempt.attempt_id)
    assert f"agentlightning.attempt_id={attempt.attempt_id}" in resource


async def test_agents_that_share_a_process_are_not_told_which_attempt_their_sdk_is_of(
    start: Any, roll: Any, attempt_of: Any
) -> None:
    await start(say_what_is_set)
    (rollout,) = await roll({"q": 1})
    assert (await attempt_of(rollout)).metadata["output"] == ["TRACEPARENT"]
