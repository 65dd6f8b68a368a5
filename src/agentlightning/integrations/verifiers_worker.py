"""Runs the tasks of a `verifiers` taskset for another process. Started with the Python that has verifiers installed.

It imports nothing of this package. Requests and replies are JSON objects, one a line, on stdin and stdout:

    {"id": 1, "method": "tasks", "env": {...}, "limit": 100, "seed": 0}
        -> {"id": 1, "result": [{"index": 0, "prompt": "..."}, ...]}
    {"id": 2, "method": "rollout", "env": {...}, "index": 0, "base_url": "...", "api_key": "...", "model": "..."}
        -> {"id": 2, "result": {"reward": 1.0, "rewards": {"name": 1.0}, "output": "..."}}
    {"id": 2, "method": "cancel"}

`env`: name, harness, runtime, options. An error is {"id": 2, "error": "..."}. It exits at the end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

sys.path[0] = os.getcwd()  # not the folder of this file, whose modules have the names of packages


class Environments:
    """The environments in use, by configuration, and their tasks by index."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._opened: dict[str, Any] = {}
        self._serving: set[str] = set()
        self._tasks: dict[tuple[str, int], Any] = {}
        self._lock = asyncio.Lock()

    def open(self, env: dict[str, Any]) -> Any:
        from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
            env_config_type,
            load_environment,
            resolve_env_config,
        )

        key = json.dumps(env, sort_keys=True)
        if key not in self._opened:
            config: dict[str, Any] = {"taskset": {"id": env["name"], **env["options"]}}
            if "agent" in env_config_type(env["name"]).model_fields:
                harness = None if env["harness"] == "default" else {"id": env["harness"]}
                config["agent"] = {"harness": harness, "runtime": {"type": env["runtime"]}}
            self._opened[key] = load_environment(resolve_env_config(config))
        return self._opened[key]

    async def serve(self, env: dict[str, Any]) -> Any:
        """The environment, ready to run episodes."""
        key = json.dumps(env, sort_keys=True)
        async with self._lock:
            opened = self.open(env)
            if key not in self._serving:
                await self._stack.enter_async_context(opened.serving())
                self._serving.add(key)
        return opened

    def task(self, env: dict[str, Any], index: int) -> Any:
        key = json.dumps(env, sort_keys=True), index
        if key not in self._tasks:
            found = list(self.open(env).taskset.include(idx=[f"{index}:{index + 1}"]))
            if not found:
                raise IndexError(f"the taskset {env['name']!r} has no task {index}")
            self._tasks[key] = found[0]
        return self._tasks[key]


async def answer(environments: Environments, request: dict[str, Any]) -> Any:
    if request["method"] == "tasks":
        taskset = environments.open(request["env"]).taskset
        view = taskset.shuffle(request["seed"]) if request["seed"] and taskset.bounded else taskset
        tasks = list(view.take(request["limit"]))
        return [{"index": task.data.idx, "prompt": getattr(task.data, "prompt_text", None)} for task in tasks]
    return await rollout(environments, request)


async def rollout(environments: Environments, request: dict[str, Any]) -> dict[str, Any]:
    from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]

    variable = f"AGL_VERIFIERS_KEY_{request['id']}"
    os.environ[variable] = request["api_key"]
    try:
        env = await environments.serve(request["env"])
        client = EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        context = ModelContext(model=request["model"], client=client)
        episode = await env.run_episode(environments.task(request["env"], request["index"]), context)
    finally:
        del os.environ[variable]
    failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        raise RuntimeError("; ".join(str(failure)[:1000] for failure in failures) or "the episode ran no agent")
    traces = episode.traces
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "rewards": {name: each.score for name, each in traces[0].rewards.items() if each is not None},
        "output": traces[-1].last_reply,
    }


async def main(replies: int) -> None:
    running: dict[int, asyncio.Task[None]] = {}

    async def handle(environments: Environments, request: dict[str, Any]) -> None:
        try:
            reply = {"id": request["id"], "result": await answer(environments, request)}
        except Exception as error:  # noqa: BLE001  the other process raises it
            reply = {"id": request["id"], "error": f"{type(error).__name__}: {error}"}
        finally:
            running.pop(request["id"], None)
        data = memoryview(json.dumps(reply, default=str).encode() + b"\n")
        while data:
            data = data[os.write(replies, data) :]

    async with AsyncExitStack() as stack:
        environments = Environments(stack)
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            if request["method"] == "cancel":
                if request["id"] in running:
                    running[request["id"]].cancel()
            else:
                running[request["id"]] = asyncio.create_task(handle(environments, request))
        if all_running := [task for task in running.values() if not task.done()]:
            await asyncio.wait(all_running, timeout=None if sys.argv[1:] == ["finish"] else 0)


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no reply
    asyncio.run(main(out))
