"""Agents for tests of runners, each with one good or bad behaviour. Usable by name or as objects."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentlightning.resources import LLM, NamedResources, PromptTemplate
from agentlightning.rollouts import AttemptedRollout
from agentlightning.runner.agents.litagent import LitAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.tracing.emit import emit_message, emit_reward

# -- working --------------------------------------------------------------------------------------------------------


def reward_of_task(task: Mapping[str, Any]) -> float:
    """Returns the task's own `reward`."""
    return float(task["reward"])


async def reward_of_task_async(task: Mapping[str, Any]) -> float:
    await asyncio.sleep(0)
    return float(task["reward"])


def echo(task: Any) -> Any:
    """Returns the task as its output."""
    return task


def emits_rewards(task: Mapping[str, Any]) -> None:
    """Emits each of the task's `rewards`, and returns nothing."""
    for value in task["rewards"]:
        emit_message(f"about to emit {value}")
        emit_reward(value)


@rollout
async def decorated(task: Mapping[str, Any], rollout: AttemptedRollout) -> float:
    emit_message(rollout.attempt.attempt_id)
    return float(task["reward"])


@llm_rollout
def model_name(task: Any, llm: LLM) -> str:
    return f"{llm.model} at {llm.endpoint}"


@prompt_rollout
async def filled_prompt(task: Mapping[str, Any], prompt_template: PromptTemplate) -> str:
    return prompt_template.format(**task)


class Sync(LitAgent[dict[str, Any]]):
    """One method for every mode."""

    def rollout(self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout) -> float:
        return float(task["reward"])


class ByMode(LitAgent[dict[str, Any]]):
    """Its reward shows which method ran: 1.0 for training, 2.0 for validation."""

    async def training_rollout_async(
        self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout
    ) -> float:
        return 1.0

    def validation_rollout(self, task: dict[str, Any], resources: NamedResources, rollout: AttemptedRollout) -> float:
        return 2.0


class Posting:
    """An agent class that uses only environment variables: posts `SCORE` as its reward."""

    def __init__(self) -> None:
        self.events = os.environ["AGL_EVENT_URL"]

    async def run(self) -> None:
        event = {"event_type": "reward", "data": {"value": float(os.environ["SCORE"])}}
        await asyncio.to_thread(post, self.events, os.environ["AGL_KEY"], event)


def post(url: str, key: str, event: Mapping[str, Any]) -> None:
    """POST an event as JSON."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(event).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        response.read()


async def environment_everywhere(task: Mapping[str, Any]) -> dict[str, str]:
    """The attempt id as seen by threads, executors and subprocesses, after other attempts had time to interfere."""
    await asyncio.sleep(float(task.get("seconds", 0.02)))
    seen: dict[str, str] = {}
    thread = threading.Thread(target=lambda: seen.update(thread=os.environ["AGL_ATTEMPT_ID"]))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as executor:
        seen["executor"] = executor.submit(os.getenv, "AGL_ATTEMPT_ID").result() or ""
    seen["to_thread"] = await asyncio.to_thread(lambda: os.environ["AGL_ATTEMPT_ID"])
    script = "import os; print(os.environ['AGL_ATTEMPT_ID'], end='')"
    seen["subprocess"] = (
        await asyncio.to_thread(subprocess.check_output, [sys.executable, "-S", "-c", script])
    ).decode()
    seen["here"] = os.environ["AGL_ATTEMPT_ID"]
    return seen


# -- misbehaving -----------------------------------------------------------------------------------------------------


def raises(task: Any) -> None:
    emit_reward(1.0)
    raise ValueError(f"no idea what to do with {task!r}")


def dies(task: Any) -> None:
    """Exits its process as a crashing native library would."""
    os._exit(7)


def segfaults(task: Any) -> None:
    import ctypes

    ctypes.string_at(0)


def hangs(task: Mapping[str, Any]) -> float:
    """Hangs in its thread if the task has `hang`."""
    if task.get("hang"):
        time.sleep(3600)
    return 1.0


async def hangs_async(task: Mapping[str, Any]) -> float:
    """Hangs, but can be cancelled, if the task has `hang`."""
    if task.get("hang"):
        await asyncio.sleep(3600)
    return 1.0


async def ignores_cancellation(task: Mapping[str, Any]) -> float:
    """Hangs and cannot be cancelled, if the task has `hang`."""
    while task.get("hang"):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    return 1.0


async def blocks_the_loop(task: Mapping[str, Any]) -> float:
    """Blocks the event loop of its process if the task has `hang`."""
    if task.get("hang"):
        time.sleep(3600)  # noqa: ASYNC251  intentional
    return 1.0


def fails_first(task: Any, rollout: AttemptedRollout) -> float:
    """Fails in its first attempt, succeeds in its second."""
    if rollout.attempt.sequence_id == 1:
        raise ConnectionError("the first attempt never works")
    return 1.0


# -- rewards ---------------------------------------------------------------------------------------------------------


def exact(output: Any, answer: Any) -> float:
    """1.0 if the output equals the task's `answer`."""
    return float(str(output).strip() == str(answer))


async def dimensions(task: Any, output: Any, rollout: AttemptedRollout) -> dict[str, float]:
    return {"correctness": 1.0, "length": len(str(output)) / 10}
