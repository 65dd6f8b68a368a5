"""Makes a tiny model that can hand over, as a start for training `handoffs.py` on a laptop.

    python examples/frameworks/teams/handoffs_start.py --agent "ENV/bin/python examples/frameworks/teams/handoffs.py" \
        --output model

The team runs twice and its model calls are recorded, answered by a script: once all hand over, once the writer keeps
the text to itself. With other topics in place of the recorded one these calls become demonstrations for a new model.
Its researcher and editor do their work; its writer hands over in some of the runs only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.algorithms.recorded.sessions import read_sessions
from agentlightning.attempt_variables import attempt_environment, telemetry_opt_outs
from agentlightning.gateway.app import Gateway
from agentlightning.models.tiny import make_tiny
from agentlightning.server.app import Server
from agentlightning.testing import ScriptedEngine

TOPIC = "qqqq"
"""The topic of the recorded runs, which occurs nowhere else in a prompt."""
CLEAN, KEEPS = 0.7, 0.75
"""In the first share of the demonstrations all hand over; of the others, the writer keeps the text in a share."""
STEPS, BATCH = 150, 24
TOPICS_FILE = Path(__file__).with_name("topics.jsonl")
TOPICS = [json.loads(line)["topic"].removeprefix("Tell me about ")[:-1] for line in TOPICS_FILE.open()]

Record = dict[str, Any]


def script(keeps: bool) -> Callable[[list[dict[str, Any]]], str]:
    """What the three say, as text of the model."""

    def answer(messages: list[dict[str, Any]]) -> str:
        system = " ".join(each["content"] for each in messages if each["role"] == "system")
        if "You are the editor" in system:
            return "Edited: a text."
        if "You are the writer" in system:
            return "A text." + ("" if keeps else call("transfer_to_editor"))
        return "A fact." + call("transfer_to_writer")

    return answer


def call(tool: str) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': tool, 'arguments': {}})}\n</tool_call>"


async def record(command: list[str], keeps: bool) -> list[Record]:
    """The calls of one run, as conversations with their answers."""
    store, engine = agl.InMemoryLightningStore(), ScriptedEngine(script(keeps), context_length=100_000)
    gateway = Gateway(store, {"policy": engine}, secret="start", default_model="policy", accept_any_model=True)
    async with Server(store, gateway, secret="start") as server:
        task = {"topic": f"Tell me about {TOPIC}."}
        started = await store.start_rollout(task)
        ids = started.rollout_id, started.attempt.attempt_id
        variables = {**telemetry_opt_outs(os.environ), **attempt_environment(server.url, "start", *ids)}
        await run(command, json.dumps(task), variables)
        await store.update_attempt(*ids, status="succeeded")
    sessions = await read_sessions(store)
    sessions.check()
    (session,) = sessions.usable
    await store.close()
    return [
        {"messages": [*each.messages, {**(each.answer or {}), "name": "policy"}], "tools": list(each.tools)}
        for each in session.calls
    ]


async def run(command: list[str], given: str, variables: dict[str, str]) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **variables}, stdin=pipe, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate(given.encode())
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}:\n{(out + err).decode()[-2000:]}")


def demonstrations(handed: list[Record], kept: list[Record], count: int, seed: int) -> list[Record]:
    """The recorded calls with other topics, in the order of their runs."""
    rng, texts, found = random.Random(seed), [json.dumps(handed), json.dumps(kept)], list[Record]()
    while len(found) < count:
        text = texts[len(found) >= CLEAN * count and rng.random() < KEEPS]
        found += json.loads(text.replace(TOPIC, rng.choice(TOPICS)))
    return found[:count]


def learn(handed: list[Record], kept: list[Record], output: Path, *, steps: int = STEPS, seed: int = 0) -> Path:
    """A new model that imitates the recorded runs with other topics."""
    records = demonstrations(handed, kept, steps * BATCH, seed)
    longest = max(len(json.dumps(each)) for each in (*handed, *kept))
    model = make_tiny(output / "new", records, seed=seed, context_length=max(1024, longest))
    optimizer: Any = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
    settings: Any = {"steps": steps, "batch_size": BATCH, "shuffle": False, "optimizer": optimizer, "seed": seed}
    agl.SFTAlgorithm(model, records, output=output / "model", target_agent="policy", **settings).train()
    return output / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a tiny model that can hand over.")
    parser.add_argument("--agent", required=True, help="the command line of the team")
    parser.add_argument("--output", required=True, type=Path, help="the directory for the model")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    handed, kept = (asyncio.run(record(shlex.split(given.agent), keeps)) for keeps in (False, True))
    print(learn(handed, kept, given.output, seed=given.seed))


if __name__ == "__main__":
    main()
