"""Runs the tasks of a `verifiers` taskset for another process. Started with the Python that has verifiers installed.

It imports nothing of this package. It is given the number of a socket that connections are sent through; each is one
request, a line of JSON, and its reply, JSON up to the end. A request ends with its connection:

    {"method": "tasks", "env": {...}, "limit": 100, "seed": 0}
        -> {"result": [{"index": 0, "prompt": "..."}, ...]}
    {"method": "rollout", "env": {...}, "index": 0, "base_url": "...", "api_key": "...", "model": "..."}
        -> {"result": {"reward": 1.0, "rewards": {"name": 1.0}, "output": "..."}}

`env`: name, harness, runtime, options. An error is {"error": "..."}. It exits at the end of the socket, whose maker may
have been killed, and not by SIGTERM before: it ends what its environments run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import AsyncExitStack
from functools import cache
from select import POLLIN, poll
from signal import SIGTERM, signal
from socket import recv_fds, socket
from typing import Any
from uuid import uuid4

sys.path[0] = os.getcwd()  # not the folder of this file, whose modules have the names of packages


@cache
def environment(env: str) -> Any:
    """The environment of a request's `env`, as JSON."""
    from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config  # pyright: ignore[reportMissingImports]

    given = json.loads(env)
    config: dict[str, Any] = {"taskset": {"id": given["name"], **given["options"]}}
    if "agent" in env_config_type(given["name"]).model_fields:
        harness = None if given["harness"] == "default" else {"id": given["harness"]}
        config["agent"] = {"harness": harness, "runtime": {"type": given["runtime"]}}
    return load_environment(resolve_env_config(config))


@cache
def task_of(env: str, index: int) -> Any:
    found = list(environment(env).taskset.include(idx=[f"{index}:{index + 1}"]))
    if not found:
        raise IndexError(f"the taskset {json.loads(env)['name']!r} has no task {index}")
    return found[0]


stack, lock = AsyncExitStack(), asyncio.Lock()
serving: set[str] = set()
"""The environments in use, which are closed with the stack."""


async def serve(reader: StreamReader, writer: StreamWriter) -> None:
    """A connection."""
    work = asyncio.create_task(reply(json.loads(await reader.readline())))
    gone = asyncio.create_task(reader.read())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            writer.write(json.dumps(work.result(), default=str).encode())
            await writer.drain()
    finally:
        work.cancel()
        gone.cancel()
        writer.close()


async def reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = tasks if request["method"] == "tasks" else rollout
        return {"result": await answer(json.dumps(request["env"], sort_keys=True), request)}
    except Exception as error:  # noqa: BLE001  the other process raises it
        return {"error": f"{type(error).__name__}: {error}"}


async def rollout(env: str, request: dict[str, Any]) -> dict[str, Any]:
    from verifiers.v1.clients import EvalClientConfig, ModelContext  # pyright: ignore[reportMissingImports]

    async with lock:
        if env not in serving:
            await stack.enter_async_context(environment(env).serving())
            serving.add(env)
    variable = f"AGL_VERIFIERS_KEY_{uuid4().hex}"
    os.environ[variable] = request["api_key"]
    try:
        client = EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        context = ModelContext(model=request["model"], client=client)
        return result_of(await environment(env).run_episode(task_of(env, request["index"]), context))
    finally:
        del os.environ[variable]


async def tasks(env: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    taskset = environment(env).taskset
    view = taskset.shuffle(request["seed"]) if request["seed"] and taskset.bounded else taskset
    found = view.take(request["limit"])
    return [{"index": task.data.idx, "prompt": getattr(task.data, "prompt_text", None)} for task in found]


def result_of(episode: Any) -> dict[str, Any]:
    failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        raise RuntimeError("; ".join(str(failure)[:1000] for failure in failures) or "the episode ran no agent")
    traces = episode.traces
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "rewards": {name: each.score for name, each in traces[0].rewards.items() if each is not None},
        "output": traces[-1].last_reply,
    }


async def main() -> None:
    async with stack:
        control, connections = socket(fileno=int(sys.argv[1])), set[asyncio.Task[None]]()
        arrivals = poll()
        arrivals.register(control, POLLIN)
        while True:
            await asyncio.to_thread(arrivals.poll)
            try:
                os.close(os.dup(control.fileno()))
            except OSError:  # as many files are open as may be: a connection would be lost
                await asyncio.sleep(0.1)
                continue
            sent, received, *_ = recv_fds(control, 1, 1)
            if not sent:
                break
            for number in received:
                # A request is a line, whatever its length.
                connection = await asyncio.open_unix_connection(sock=socket(fileno=number), limit=1 << 30)
                connections.add(task := asyncio.create_task(serve(*connection)))
                task.add_done_callback(connections.discard)


if __name__ == "__main__":
    signal(SIGTERM, lambda _, __: None)
    asyncio.run(main())
