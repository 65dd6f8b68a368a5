"""Makes the archives in `fixtures/`: a run and a database as an earlier version leaves them.

Run it with the interpreter of a checkout of that version, never of the present one; it uses nothing of the present
package. The archives in git were made by commit 5267b49 (2.0.0.dev0, November 2026):

    git worktree add ../before 5267b49 && make -C ../before .venv/.installed
    ../before/.venv/bin/python tests/compat/make_fixtures.py tests/compat/fixtures

The rows of their databases were then copied into tables of schema 1, the first one: that commit was before it.

Each archive holds a folder, and beside the data `expected.json`: what that version itself reads from it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

import agentlightning as agl

AGL = str(Path(sys.executable).parent / "agl")
COMMIT = "5267b49"
TOKEN = "token-of-the-fixtures"
HOME = "/before"
"""Stands for the folder of a run wherever its files name it."""


def module(name: str) -> Any:
    """A module of the package where that version has it, which is not where it is now."""
    return importlib.import_module(f"{agl.__name__}.{name}")


make_tiny = module("policy.tiny").make_tiny


def as_json(value: Any) -> Any:
    """A value of the package as JSON holds it."""
    return orjson.loads(orjson.dumps(value, default=lambda model: model.model_dump(mode="json")))


def write_expected(folder: Path, record: Any) -> None:
    made_by = {"commit": COMMIT, "version": "2.0.0.dev0"}
    (folder / "expected.json").write_bytes(orjson.dumps({"made_by": made_by, **record}, option=orjson.OPT_INDENT_2))


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`agl serve` on the store of a folder, and its URL."""
    command = [AGL, "serve", "--port", "0", "--json", "--store", str(folder / "store.db"), "--token", TOKEN, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(60)


def post(url: str, body: str, **headers: str) -> tuple[int, Any]:
    head = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}", **headers}
    request = urllib.request.Request(url, body.encode(), head)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.status, json.loads(response.read())


# -- a run -------------------------------------------------------------------------------------------------------------

AGENT = """
from openai import OpenAI

CLIENT = OpenAI()


def say(word: str) -> str:
    asked = [{"role": "user", "content": f"say {word}"}]
    answer = CLIENT.chat.completions.create(model="policy", messages=asked, max_tokens=6)
    return answer.choices[0].message.content or ""
"""
REWARD = """
def letters(task, output):
    return sum(character.isalpha() for character in output) / max(1, len(output))
"""
WORDS = ("red", "green", "blue", "white", "black", "pink", "grey", "brown", "gold", "teal")
RUN = (
    *("--agent", "agent.py:say", "--reward", "reward.py:letters", "--data", "tasks.jsonl", "--model", "model"),
    *("--run", "run", "--json", "warm_start.dataset=demonstrations.jsonl", "warm_start.steps=2"),
    *("algorithm.steps=3", "algorithm.tasks_per_step=4", "algorithm.group_size=4", "algorithm.optimizer.lr=1e-3"),
    *("evaluation.every=2", "run.keep_checkpoints=1", "runner.concurrency=16"),
)


def make_run(folder: Path) -> None:
    """A finished run of three steps with a warm start, which more steps may be added to."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"word": word}) + "\n" for word in WORDS))
    talks = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w}] for w in WORDS]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    size = {"hidden_size": 16, "layers": 1, "heads": 2, "vocabulary": 300, "context_length": 128}
    make_tiny(folder / "model", [{"messages": talk} for talk in talks], **size)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "sk-none"}
    done = subprocess.run(
        [AGL, "train", *RUN], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    for name in ("model", "demonstrations.jsonl"):  # a run keeps the policy it began with
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "run" / "curve.png").unlink()
    for path in folder.rglob("*"):  # whose text names the folder
        if path.suffix in (".toml", ".json", ".jsonl"):
            path.write_bytes(path.read_bytes().replace(str(folder).encode(), HOME.encode()))
    write_expected(folder, {"report": json.loads(json.dumps(report).replace(str(folder), HOME))})


# -- a database --------------------------------------------------------------------------------------------------------


def span(claimed: agl.AttemptedRollout, name: str, number: int, **fields: Any) -> agl.Span:
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    given = {"start_time": 100.0 + number, "end_time": 101.0 + number, "span_id": f"{name[:6]:x<12}{number:04x}"}
    return agl.Span(**ids, name=name, **(given | fields))


def spans_of(claimed: agl.AttemptedRollout, seed: int) -> list[agl.Span]:
    """Calls of a conversation whose prompts grow, rewards, and what else an agent leaves."""
    prompt, spans = [(seed * 7 + place) % 5000 for place in range(1500)], []
    for turn in range(3):
        answer = [(seed + turn * 31 + place) % 5000 for place in range(20)]
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "policy",
            "gen_ai.response.model": "policy",
            "gen_ai.response.id": f"chatcmpl-{seed}-{turn}",
            "gen_ai.input.messages": '[{"role":"user","parts":[{"type":"text","content":"6 × 7?"}]}]',
            "agentlightning.prompt_token_ids": prompt,
            "agentlightning.response_token_ids": answer,
            "agentlightning.logprobs": [-0.25 * (place % 8) for place in range(20)],
            "agentlightning.policy_version": seed + 1,
        }
        if turn:
            attributes["agentlightning.continues"] = spans[-1].span_id
        trace = {"trace_id": f"{seed:032x}", "status_code": "OK", "resource": {"service.name": "agent"}}
        spans.append(span(claimed, "chat policy", seed * 100 + turn, attributes=attributes, **trace))
        prompt = [*prompt, *answer, 7, 8, 9]
    event = agl.SpanEvent("cache miss", timestamp=100.5, attributes={"key": "tea", "tries": 2})
    spans.append(span(claimed, "search", seed * 100, events=(event,), parent_id=spans[0].span_id))
    named = {"right": 1.0, "short": 0.5}
    for number, attributes in enumerate(
        ({"gen_ai.evaluation.score.value": seed / 4}, {"agentlightning.reward.values": named})
    ):
        spans.append(span(claimed, "gen_ai.evaluation.result", seed * 100 + number, attributes=attributes))
    return spans


async def fill(store: agl.LightningStore) -> None:
    """Rollouts and attempts in every state, workers, queues and resources."""
    prompt = agl.PromptTemplate(template="Say {word}.")
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="policy", policy_version=1)
    await store.add_resources({"llm": llm, "prompt": prompt}, "res-1")
    proxied = agl.ProxyLLM(endpoint="http://127.0.0.1:1", model="policy", sampling_parameters={"temperature": 1.0})
    await store.add_resources({"llm": proxied}, "res-2")
    await store.update_worker("w-1", {"cpu": 0.5})
    await store.update_worker("w-leased", {"gpus": [0, 1]}, lease_seconds=3600)
    await store.update_queue("limited", 2)
    await store.update_queue("paused", 0)
    retry = agl.RolloutConfig(timeout_seconds=3600, unresponsive_seconds=3600, max_attempts=3)

    async def start(name: str, worker_id: str = "w-1", **options: Any) -> agl.AttemptedRollout:
        return await store.start_rollout({"task": name}, rollout_id=f"ro-{name}", worker_id=worker_id, **options)

    async def end(claimed: agl.AttemptedRollout, status: Any, **options: Any) -> None:
        await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status=status, **options)

    await start("preparing", mode="train", config=retry)
    await start("leased", worker_id="w-leased", mode="train")
    running = await start("running", queue="limited", config=retry)
    await store.add_many_spans(spans_of(running, 1))
    succeeded = await start("succeeded", mode="val", resources_id="res-1", metadata={"source": "fixture", "n": 3})
    await store.add_many_spans(spans_of(succeeded, 2))
    await end(succeeded, "succeeded", metadata={"output": "42"})
    failed = await start("failed")
    await store.add_span(spans_of(failed, 3)[0])
    await end(failed, "failed", metadata={"error": {"type": "ValueError", "message": "no"}})
    await start("timeout", config=agl.RolloutConfig(timeout_seconds=0.05))
    await start("silent", config=agl.RolloutConfig(unresponsive_seconds=0.05))
    again = await start("requeuing", config=retry, mode="test")
    await end(again, "failed", metadata={"error": {"type": "OSError", "message": "again"}})
    await store.cancel_rollout((await start("cancelled")).rollout_id)
    first = await start("superseded")
    await store.add_span(spans_of(first, 4)[0])
    second = await store.start_attempt(first.rollout_id, "w-1")
    await store.add_many_spans([spans_of(first, 4)[1], spans_of(second, 5)[0]])
    await end(second, "succeeded")
    task = {"question": "6 × 7", "nested": [1, None, {"deep": True}]}
    await store.enqueue_rollout(task, rollout_id="ro-queued", mode="train", metadata={"n": 1})
    await store.enqueue_rollout("urgent", rollout_id="ro-urgent", mode="train", priority=5)
    await store.enqueue_rollout("private", rollout_id="ro-private", queue="_run-1")
    await store.enqueue_rollout("held back", rollout_id="ro-paused", queue="paused")
    timed = ["ro-timeout", "ro-silent"]
    assert len(await store.wait_for_rollouts(rollout_ids=timed, timeout=60)) == 2


async def read_database(path: Path) -> dict[str, Any]:
    store = agl.LightningStore(path)
    try:
        known = await store.query_rollouts()
        ids = [rollout.rollout_id for rollout in known]
        statistics = await store.statistics()
        return as_json(
            {
                "rollouts": known,
                "attempts": {each: await store.query_attempts(each) for each in ids},
                "spans": {each: await store.query_spans(each) for each in ids},
                "resources": await store.query_resources(),
                "workers": await store.query_workers(),
                "queues": await store.query_queues(),
                "statistics": {name: count for name, count in statistics.items() if name != "bytes"},
            }
        )
    finally:
        await store.close()


def make_database(folder: Path) -> None:
    store = agl.LightningStore(folder / "store.db")

    async def work() -> None:
        await fill(store)
        await store.close()

    asyncio.run(work())
    answered: list[dict[str, Any]] = []
    requeued = {"rollout_id": "ro-leased", "reason": "shutdown"}
    with serving(folder) as (_, url):
        for number, (path, body) in enumerate(
            (
                ("queues/rollouts/enqueue", {"rollouts": [{"input": "once"}, {"input": "and for all"}]}),
                ("rollouts", {"input": "started once"}),
                ("resources", {"prompt": {"resource_type": "prompt_template", "template": "{x}"}}),
                ("calls", {"calls": [{"method": "requeue_rollout", "arguments": requeued, "key": "key-of-call"}]}),
            )
        ):
            key, sent = f"key-{number}", json.dumps(body)
            status, answer = post(f"{url}/v1/agl/{path}", sent, **{"idempotency-key": key})
            answered.append({"path": path, "key": key, "sent": sent, "status": status, "answer": answer})
    write_expected(folder, asyncio.run(read_database(folder / "store.db")) | {"answered": answered})


# -- archives ----------------------------------------------------------------------------------------------------------


def pack(folder: Path, target: Path) -> None:
    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return None if info.name.endswith(("lock", ".spent", "__pycache__")) else info

    with tarfile.open(target, "w:xz", preset=9) as archive:
        for entry in sorted(folder.iterdir()):
            archive.add(entry, entry.name, filter=plain)


def main(arguments: Sequence[str]) -> None:
    target = Path(arguments[0] if arguments else Path(__file__).parent / "fixtures").resolve()
    target.mkdir(exist_ok=True)
    for name, make in (("run", make_run), ("database", make_database)):
        if len(arguments) < 2 or name in arguments[1:]:
            with tempfile.TemporaryDirectory() as directory:
                make(Path(directory))
                pack(Path(directory), target / f"{name}.tar.xz")


if __name__ == "__main__":
    main(sys.argv[1:])
