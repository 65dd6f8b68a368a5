"""The bridge to verifiers: a process of its own, its protocol, its failures. Only the last test runs the real one."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from aiohttp import web
from tests.support.waiting import wait_until

from agentlightning import span as names
from agentlightning.config import TrainConfig
from agentlightning.errors import AgentError, ConfigError, DatasetError
from agentlightning.integrations import verifiers
from agentlightning.span import Span
from agentlightning.task import load_dataset
from agentlightning.tracing.scope import scope

FAKE = """#!{python}
import json, os, socket, subprocess, sys, threading, time
def answer(request):
    if request["method"] == "tasks":
        if request["env"]["name"] == "slow":
            open("begun", "w").close()
            time.sleep(2)
            open("loaded", "w").close()
        if request["env"]["name"] == "missing":
            return {{"error": "ModuleNotFoundError: no missing"}}
        options, total = request["env"]["options"], min(request["limit"], 30)
        return {{"result": [{{"index": i, "prompt": f"task {{i}} {{options}}"}} for i in range(total)]}}
    if request["index"] == 13:
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    if request["index"] == 14:
        subprocess.Popen(["sleep", "5"])
        time.sleep(0.3)
        os._exit(3)
    if request["index"] == 7:
        return {{"error": "ValueError: bad task"}}
    time.sleep(0.2 if request["index"] == 0 else 0)
    output = f"{{request['base_url']}} {{request['api_key']}} {{request['model']}} {{os.getpid()}}"
    return {{"result": {{"reward": request["index"] / 10, "rewards": {{"exact": 1.0}}, "output": output}}}}
def serve(connection):
    request = json.loads(connection.makefile().readline())
    if request.get("index") == 99:
        connection.recv(1)
        open("cancelled", "w").write("99")
    else:
        connection.sendall(json.dumps(answer(request)).encode())
        connection.close()
control = socket.socket(fileno=int(sys.argv[2]))
while received := socket.recv_fds(control, 1, 1)[1]:
    threading.Thread(target=serve, args=[socket.socket(fileno=received[0])]).start()
os._exit(0)
"""


@pytest.fixture
async def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A program in place of the Python that has verifiers."""
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(verifiers.PYTHON, raising=False)
    yield str(path)
    for worker in verifiers.Worker.running.values():
        worker.close()
    verifiers.Worker.running.clear()


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, spans: Any) -> None:
        self.spans += spans


async def play(task: Any, base_url: str = "http://gateway/rollout/1") -> tuple[Any, list[float]]:
    """The output, and the rewards that were recorded."""
    sink = Sink()
    with scope("ro-1", "at-1", sink):
        output = await verifiers.play(task, base_url, "key", "policy")
    return output, [span.attributes[names.SCORE_VALUE] for span in sink.spans if span.name == names.REWARD]


def wait_for_file(name: str) -> None:
    while not Path(name).exists():
        time.sleep(0.01)


def task_of(python: str, index: int) -> Any:
    env = {"name": "gsm8k", "harness": "null", "runtime": "subprocess", "options": {}}
    return {"prompt": "?", "verifiers": {"env": env, "index": index, "python": python}}


async def test_tasks_come_from_the_process_with_the_options_of_the_address(python: str) -> None:
    tasks = load_dataset(f"verifiers:gsm8k?size=3&python={python}&level=2&harness=bash")
    assert [task["prompt"] for task in tasks] == [f"task {index} {{'level': 2}}" for index in range(3)]
    source = tasks[0]["verifiers"]
    assert (source["env"]["harness"], source["env"]["runtime"], source["python"]) == ("bash", "subprocess", python)


async def test_the_parts_share_no_task(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verifiers.PYTHON, python)
    indices = {
        part: {task["verifiers"]["index"] for task in load_dataset(f"verifiers:gsm8k?part={part}")}
        for part in ("train", "held_out")
    }
    assert indices["train"] | indices["held_out"] == set(range(30))
    assert not indices["train"] & indices["held_out"]


async def test_a_rollout_calls_the_model_of_its_attempt_and_records_the_reward(python: str) -> None:
    output, rewards = await play(task_of(python, 5))
    assert output.startswith("http://gateway/rollout/1 key policy ")
    assert rewards == [0.5]


async def test_rollouts_share_one_process_and_run_at_the_same_time(python: str) -> None:
    outputs: list[str] = []

    async def one(index: int) -> None:
        output, rewards = await play(task_of(python, index), f"http://gateway/{index}")
        assert rewards == [index / 10]
        outputs.append(output)

    await asyncio.gather(*map(one, (0, 1, 2)))
    assert [output.split()[0] for output in outputs][-1] == "http://gateway/0", "the slow one ends last"
    assert len({output.split()[-1] for output in outputs}) == 1


async def test_a_rollout_that_fails_is_a_failed_attempt_without_a_reward(python: str) -> None:
    with pytest.raises(AgentError, match="verifiers: ValueError: bad task"):
        await play(task_of(python, 7))


async def test_a_process_that_dies_says_why_and_is_started_again(python: str) -> None:
    with pytest.raises(AgentError, match=r"ended \(3\):\nout of luck"):
        await play(task_of(python, 13))
    assert (await play(task_of(python, 5)))[1] == [0.5]


async def test_a_process_that_dies_stops_nothing_else(python: str) -> None:
    """Also where a program that it started still has its output open."""
    began, ticks = time.monotonic(), [time.monotonic()]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.01)
            ticks.append(time.monotonic())

    ticking = asyncio.create_task(tick())
    dead = await asyncio.gather(*(play(task_of(python, 14)) for _ in range(3)), return_exceptions=True)
    await asyncio.sleep(0.1)
    ticking.cancel()
    assert all("ended (3)" in str(each) for each in dead)
    longest = max(after - before for before, after in itertools.pairwise(ticks))
    assert longest < (time.monotonic() - began) / 3


async def test_more_rollouts_may_begin_than_a_process_that_starts_can_hold(python: str, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\nsleep 0.3\nexec {python} "$@"\n')
    slow.chmod(0o755)
    found = await asyncio.gather(*(play(task_of(str(slow), 5)) for _ in range(400)))
    assert [rewards for _, rewards in found] == [[0.5]] * 400


def test_an_interrupt_ends_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(FAKE.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    caller = threading.get_ident()

    def interrupt() -> None:
        wait_for_file("begun")
        signal.pthread_kill(caller, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        load_dataset(f"verifiers:slow?python={tmp_path}/python")
    assert not (tmp_path / "loaded").exists(), "it did not wait for its end"


async def test_a_cancelled_rollout_is_cancelled_in_the_process(python: str) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(play(task_of(python, 99)), 0.5)
    await asyncio.to_thread(wait_for_file, "cancelled")


async def test_without_a_python_the_error_says_how_to_make_one(python: str) -> None:
    for address in ("verifiers:gsm8k", "verifiers:gsm8k?python=/no/where"):
        with pytest.raises(ConfigError, match=r"pip install verifiers.*AGL_VERIFIERS_PYTHON"):
            load_dataset(address)


async def test_what_verifiers_cannot_load_is_an_error_with_its_reason(python: str) -> None:
    with pytest.raises(
        DatasetError, match=r"verifiers:missing cannot be loaded by .*: verifiers: ModuleNotFoundError: no missing"
    ):
        load_dataset(f"verifiers:missing?python={python}")
    with pytest.raises(DatasetError, match=r"cannot be loaded by /bin/false: .* has ended \(1\)"):
        load_dataset("verifiers:gsm8k?python=/bin/false")


def test_env_names_the_agent_and_no_reward() -> None:
    config = TrainConfig(env="verifiers:gsm8k")
    assert (config.agent, config.reward) == ("agentlightning.integrations.verifiers:play", None)


# -- the process, with as little of the package as it needs ------------------------------------------------------------

PACKAGE = {
    "verifiers/__init__.py": "",
    "verifiers/v1/__init__.py": "",
    "verifiers/v1/utils/__init__.py": "",
    "verifiers/v1/utils/loaders.py": """
        import asyncio, contextlib
        from types import SimpleNamespace as N

        class Taskset:
            bounded = True
            tasks = [N(data=N(idx=number, prompt_text=f"Say {number}.")) for number in range(9)]
            def take(self, limit):
                return self.tasks[:limit]
            def include(self, idx):
                begin, end = map(int, idx[0].split(":"))
                return self.tasks[begin:end]

        class Environment:
            taskset = Taskset()
            @contextlib.asynccontextmanager
            async def serving(self):
                try:
                    yield
                finally:
                    open("closed", "w").close()
            async def run_episode(self, task, context):
                if task.data.idx == 8:
                    try:
                        await asyncio.sleep(600)
                    finally:
                        open("cancelled", "w").close()
                if task.data.idx == 6:
                    await asyncio.sleep(0.3)
                print("no reply")
                trace = N(reward=task.data.idx / 10, rewards={}, errors=[], last_reply=context.model)
                return N(ok=task.data.idx != 7, errors=["bad task"], traces=[trace])

        def env_config_type(name):
            return N(model_fields={})
        def resolve_env_config(config):
            return config
        def load_environment(config):
            print("loading")
            return Environment()
    """,
    "verifiers/v1/clients.py": """
        from types import SimpleNamespace
        EvalClientConfig = ModelContext = SimpleNamespace
    """,
}


def install_package() -> None:
    for name, text in PACKAGE.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(textwrap.dedent(text))


async def test_the_process_runs_tasks_says_what_fails_and_cancels_what_nobody_waits_for(python: str) -> None:
    install_package()
    tasks = load_dataset(f"verifiers:numbers?size=9&python={sys.executable}")
    assert [task["prompt"] for task in tasks] == [f"Say {number}." for number in range(9)]
    assert await asyncio.gather(*map(play, tasks[:3])) == [("policy", [number / 10]) for number in range(3)]
    with pytest.raises(AgentError, match="verifiers: RuntimeError: bad task"):
        await play(tasks[7])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(play(tasks[8]), 0.5)
    await asyncio.to_thread(wait_for_file, "cancelled")


async def test_rollouts_wait_where_their_process_may_open_no_more_files(python: str, tmp_path: Path) -> None:
    install_package()
    few = tmp_path / "few"
    few.write_text(f'#!/bin/sh\nulimit -n 32\nexec {sys.executable} "$@"\n')
    few.chmod(0o755)
    tasks = load_dataset(f"verifiers:numbers?size=9&python={few}")
    await play(tasks[0])
    assert await asyncio.gather(*(play(tasks[6]) for _ in range(60))) == [("policy", [0.6])] * 60


KILLED = """
import asyncio, os, sys
from agentlightning.integrations.verifiers import Worker
worker = Worker.of(sys.executable)
env = {"name": "numbers", "harness": "null", "runtime": "subprocess", "options": {}}
where = {"base_url": "http://gateway", "api_key": "key", "model": "policy"}
asyncio.run(worker.request({"method": "rollout", "env": env, "index": 0, **where}))
os._exit(0)
"""


def test_nothing_is_left_of_a_host_that_ends_without_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hosts end that are killed, and the processes of their group by SIGTERM."""
    monkeypatch.chdir(tmp_path)
    install_package()
    host = Popen([sys.executable, "-c", KILLED], start_new_session=True)
    assert host.wait(30) == 0
    with suppress(ProcessLookupError):
        os.killpg(host.pid, signal.SIGTERM)
    wait_until(Path("closed").exists)


# -- the real package ------------------------------------------------------------------------------------------------

TASKSET = """
import verifiers.v1 as vf

__all__ = ["NumberTaskset"]

class NumberData(vf.TaskData):
    answer: str = ""

class NumberTask(vf.Task[NumberData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

class NumberConfig(vf.TasksetConfig):
    count: int = 5

class NumberTaskset(vf.Taskset[NumberTask, NumberConfig]):
    def load(self):
        for number in range(self.config.count):
            yield NumberTask(NumberData(prompt=f"Say {number}.", answer=str(number)), self.config.task)
"""


@pytest.fixture
async def model(request: Any) -> AsyncIterator[tuple[str, list[Any]]]:
    """A model that says 2, with streaming; its URL and the (path, key) of its calls."""
    calls: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        calls.append((request.path, request.headers["authorization"]))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        base = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        for delta, reason in (({"role": "assistant", "content": "It is 2"}, None), ({}, "stop")):
            chunk = {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        await response.write(
            f"data: {json.dumps({**base, 'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        )
        return response

    app = web.Application()
    app.router.add_post("/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", calls
    await runner.cleanup()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not os.environ.get("AGL_VERIFIERS_PYTHON"), reason="AGL_VERIFIERS_PYTHON names no Python")
async def test_a_real_taskset_is_loaded_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: tuple[str, list[Any]]
) -> None:
    (tmp_path / "agl_numbers.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    tasks = load_dataset("verifiers:agl_numbers?size=4&count=9")
    assert [task["prompt"] for task in tasks] == ["Say 0.", "Say 1.", "Say 2.", "Say 3."]
    url, calls = model
    results = await asyncio.gather(*(play(task, f"{url}/attempt-{i}/v1") for i, task in enumerate(tasks)))
    assert [rewards for _, rewards in results] == [[0.0], [0.0], [1.0], [0.0]]
    assert {output for output, _ in results} == {"It is 2"}
    assert set(calls) == {(f"/attempt-{i}/v1/chat/completions", "Bearer key") for i in range(4)}
    for worker in verifiers.Worker.running.values():
        worker.close()
    verifiers.Worker.running.clear()
