"""Makes a tiny model that can follow an agent, as a start for training it on a laptop.

    python examples/frameworks/start.py --agent "python examples/frameworks/langchain/agent.py" --output model

The agent runs three times, and its model calls are recorded. They are answered by a teacher who knows the task: he uses
the tool, guesses, and uses the tool for other numbers. With new numbers in place of the recorded ones, the first two
sessions become thousands of demonstrations, on which a new model of 0.4 million weights is trained. What else differs
between the first and the third, such as ids of tool calls, differs between demonstrations, too. The model then
multiplies with the tool in some of its answers, and guesses in the others. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import os
import random
import re
import shlex
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.algorithms.recorded.sessions import read_sessions
from agentlightning.attempt_variables import attempt_environment, telemetry_opt_outs
from agentlightning.gateway.app import Gateway
from agentlightning.models.tiny import make_tiny
from agentlightning.server.app import Server
from agentlightning.testing import ScriptedEngine

A, B = 6173, 8291
"""The numbers of the recorded task, which occur nowhere else in a prompt."""
OTHERS = 83, 59
"""Those of a second session, which is recorded to see what else differs between sessions."""
WORD = re.compile(r"(?<!\\)[A-Za-z0-9]+")
"""In JSON: the letter of an escape like \\n is not part of a word."""
CLEAN, GUESSES = 0.75, 0.5
"""The first share of the demonstrations uses the tool; of the others, a share guesses."""
STEPS, BATCH = 120, 32
SECONDS = 120

Record = dict[str, Any]


# -- the teacher -------------------------------------------------------------------------------------------------------


def teacher(guesses: bool, a: int = A, b: int = B) -> Callable[[list[dict[str, Any]]], str]:
    """Answers a conversation as text of the model: with a tool call first, or with a guess."""
    said = f"It is {a if guesses else a * b}."
    arguments = calls(a, b)

    def answer(messages: list[dict[str, Any]]) -> str:
        tools = messages[0]["content"]
        done = guesses or any(str(a * b) in message["content"] for message in messages)
        if "[[ ## " in tools:
            return fields(tools, said, done, arguments["multiply"])
        known = [name for name in arguments if f'"name":"{name}"' in tools]
        if known and not done:
            return call(known[0], arguments[known[0]])
        return call("final_answer", {"answer": said}) if '"name":"final_answer"' in tools else said

    return answer


def calls(a: int, b: int) -> dict[str, dict[str, Any]]:
    """How the teacher multiplies, by the name of the tool."""
    command = f"echo $(({a}*{b}))"
    return {
        "multiply": {"a": a, "b": b},
        "Bash": {"command": command, "description": "Multiply"},
        "exec_command": {"cmd": command},
    }


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def fields(asked: str, said: str, done: bool, arguments: dict[str, int]) -> str:
    """The answer of DSPy's ReAct, whose tool calls are fields of a text."""
    called = ("finish", {}) if done else ("multiply", arguments)
    step = {"next_thought": "The tool can.", "next_tool_name": called[0], "next_tool_args": json.dumps(called[1])}
    found = step if "next_tool_name" in asked else {"reasoning": "It was multiplied.", "answer": said}
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{text}" for name, text in found.items()), "[[ ## completed ## ]]"])


# -- demonstrations ----------------------------------------------------------------------------------------------------


async def record(
    command: list[str], guesses: bool, cwd: Path | None = None, numbers: tuple[int, int] = (A, B)
) -> list[Record]:
    """What the agent asked in one rollout, and the teacher's answers: a conversation for each call."""
    return await recorded(command, {"question": question(*numbers)}, teacher(guesses, *numbers), cwd)


async def recorded(
    command: list[str], task: dict[str, Any], teacher: Callable[[list[dict[str, Any]]], str], cwd: Path | None = None
) -> list[Record]:
    """The conversations of one rollout of any agent, whose model calls this teacher answers."""
    store, engine = agl.InMemoryLightningStore(), ScriptedEngine(teacher, context_length=1_000_000)
    gateway = Gateway(store, {"policy": engine}, secret="start", default_model="policy", accept_any_model=True)
    async with Server(store, gateway, secret="start") as server:
        started = await store.start_rollout(task)
        ids = started.rollout_id, started.attempt.attempt_id
        variables = {**telemetry_opt_outs(os.environ), **attempt_environment(server.url, "start", *ids)}
        await run(command, json.dumps(task), {**variables, "AGL_TASK": json.dumps(task)}, cwd)
        await store.update_attempt(*ids, status="succeeded")
    sessions = await read_sessions(store)
    sessions.check()
    (session,) = sessions.usable
    await store.close()
    return [
        {"messages": [*each.messages, {**(each.answer or {}), "name": "policy"}], "tools": list(each.tools)}
        for each in session.calls
    ]


async def run(command: list[str], given: str, variables: dict[str, str], cwd: Path | None) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **variables}, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(process.communicate(given.encode()), SECONDS)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}:\n{(out + err).decode()[-2000:]}")


def question(a: int, b: int) -> str:
    return f"What is {a} times {b}?"


def differing(first: list[Record], second: list[Record]) -> frozenset[str]:
    """The words of the first session that the second has others for, but for the numbers: ids, times, folders."""
    words, others = (WORD.findall(json.dumps(each)) for each in (first, second))
    changes = difflib.SequenceMatcher(None, words, others, autojunk=False).get_opcodes()
    found = {word for tag, start, end, *_ in changes if tag == "replace" for word in words[start:end]}
    return frozenset(found - {str(A), str(B), str(A * B)})


def renewed(text: str, words: frozenset[str], rng: random.Random) -> str:
    """The text with random characters of the same kind in these words, the same wherever a word occurs."""
    fresh = {word: another(word, rng) for word in sorted(words, key=text.find)}
    return WORD.sub(lambda found: fresh.get(found[0], found[0]), text)


def another(word: str, rng: random.Random) -> str:
    if word.isdigit():
        return str(rng.randrange(10 ** (len(word) - 1), 10 ** len(word)))
    letters = "abcdef" if set(word) <= set(string.hexdigits) else string.ascii_lowercase
    return "".join(rng.choices(string.digits + letters, k=len(word)))


def demonstrations(
    used: list[Record], guessed: list[Record], count: int, seed: int, differs: frozenset[str] = frozenset()
) -> Iterator[Record]:
    """The recorded conversations with other numbers, and with other words for those that differ between sessions."""
    rng = random.Random(seed)
    texts = [json.dumps(used), json.dumps(guessed)]
    made = 0
    while made < count:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        text = texts[made >= CLEAN * count and rng.random() < GUESSES]
        text = renewed(text, differs, rng)
        records = json.loads(text.replace(str(A * B), str(a * b)).replace(str(A), str(a)).replace(str(B), str(b)))
        made += len(records)
        yield from records


# -- the model ---------------------------------------------------------------------------------------------------------


def learn(
    used: list[Record],
    guessed: list[Record],
    output: Path,
    *,
    differs: frozenset[str] = frozenset(),
    steps: int = STEPS,
    seed: int = 0,
) -> Path:
    """A new model that imitates the recorded sessions with other numbers."""
    return imitate(list(demonstrations(used, guessed, steps * BATCH, seed, differs)), output, steps, BATCH, seed)


def imitate(records: list[Record], output: Path, steps: int, batch: int, seed: int) -> Path:
    """A new model that has seen these demonstrations, in their order."""
    longest = max(len(json.dumps(each)) for each in records)
    model = make_tiny(output / "new", records, seed=seed, context_length=max(1024, longest))
    optimizer: Any = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
    settings: Any = {"steps": steps, "batch_size": batch, "shuffle": False, "optimizer": optimizer, "seed": seed}
    result = agl.SFTAlgorithm(model, records, output=output / "model", target_agent="policy", **settings).train()
    print(f"{output / 'model'}: {len(records)} demonstrations, loss {result.losses[0]:.2f} to {result.losses[-1]:.3f}")
    return output / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a tiny model that can follow an agent.")
    parser.add_argument("--agent", required=True, help="the command line of the agent")
    parser.add_argument("--output", required=True, type=Path, help="the directory for the model")
    parser.add_argument("--steps", type=int, default=STEPS, help="updates")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    command = shlex.split(given.agent)
    used, guessed = (asyncio.run(record(command, guesses)) for guesses in (False, True))
    differs = differing(used, asyncio.run(record(command, False, numbers=OTHERS)))
    learn(used, guessed, given.output, differs=differs, steps=given.steps, seed=given.seed)


if __name__ == "__main__":
    main()
