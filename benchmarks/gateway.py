"""What the gateway costs a call, beside nginx, Agent Lightning 1.0's proxy and LiteLLM: `python benchmarks/gateway.py`.

All pass the same calls on to the same stub (arms/gateway_stub.py), from agents as they are (arms/gateway_load.py): 16
to 800 live attempts, each of which thinks for 0.3 s between answers of 1 to 3 s; the same with prompts of 2 to 60 KB
and answers of 300 tokens, whole or streamed; for comparison, loops that call without a pause; and, ours alone, rollouts
of three calls that are started and ended over HTTP. Ours is `agl serve` on a durable file, recording every exchange;
1.0 records in memory, LiteLLM and nginx do not record. The arms take turns. What counts is the CPU time of a call,
children included: it depends least on what else the machine does. Needs, for the peers, nginx (Debian: apt-get install
nginx-light) and benchmarks/peers.sh.

Then a thousand streams at once through ours: errors, memory, and whether the tokens in the store are those that were
sent, a million of them.

    python benchmarks/gateway.py [--rounds 3] [--seconds 10] [--streams 1000] [--tokens 1000000] [--ours] [--check]
        [--beside CHECKOUT]     another checkout of this project takes turns, too
        [--workers N]           and so does `agl serve --workers N`, whose attempts are spread over N processes

Calls a second say little of several workers where these have to share the cores with the load and the stub, so the
table has the cores of each as well. What counts is N times the CPU time of a call of one process, by that of N: how
many times as much N processes carry, given a core each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness import HERE, PYTHONS

from agentlightning import LightningStoreClient
from agentlightning import span as names
from agentlightning.attempt_address import attempt_path
from agentlightning.store.sql.store import SqlStore

sys.path.insert(0, str(HERE / "arms"))
from line import free_port

LOADS: tuple[tuple[str | None, int], ...] = (
    *(("agent", count) for count in (16, 64, 200)),
    *(("reader", count) for count in (16, 64, 200, 800)),
    *(("stream", count) for count in (64, 256)),
    *((None, count) for count in (1, 16, 64)),
    ("rollouts", 16),
)
"""(user of the calls, connections). None calls without a pause, all with one attempt; "stream" is a reader."""
USER_OPTIONS = {"agent": ["--user", "agent"], "reader": ["--user", "reader"], None: []}
USER_OPTIONS |= {"stream": ["--user", "reader", "--stream"], "rollouts": ["--rollouts"]}
ATTEMPTS = 800
LITELLM = Path(os.environ.get("AGL_PEER_LITELLM") or HERE.parent / ".peers/litellm/bin/litellm")
MANY = "ours, N workers"
MODEL, PATH = "stub", "/v1/chat/completions"
NGINX = """
daemon off; worker_processes 1; worker_rlimit_nofile 8192; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 100000000; client_body_buffer_size 1m; proxy_buffers 64 16k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream stub {{ server {stub}; keepalive 1024; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port} backlog=2048;
    location / {{ proxy_pass http://stub; proxy_http_version 1.1; proxy_set_header Connection ""; }} }}
}}
"""


@dataclass
class Arm:
    """Something that passes calls on."""

    name: str
    urls: list[str]
    pid: int
    """The parent, of several processes."""
    without: tuple[str, ...] = ("rollouts",)
    """Users that it does not serve."""
    runs: dict[tuple[str | None, int], list[dict[str, float]]] = field(default_factory=dict)

    def median(self, load: tuple[str | None, int], value: str) -> float:
        return statistics.median(run[value] for run in self.runs[load])

    def cpu_seconds(self) -> float:
        """Of the process and its children, those that have ended included."""
        own = psutil.Process(self.pid)
        return sum(sum(each.cpu_times()[:4]) for each in (own, *own.children(recursive=True)))


# -- the arms ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(command: list[str], said: bool = False, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and its first line where it says one; ended by closing its input and telling it to."""
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe if said else nowhere, stderr=nowhere, text=True, **options
    )
    try:
        yield process, process.stdout.readline() if process.stdout else ""
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def until_up(url: str, process: subprocess.Popen[str], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url} did not come up")


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


@contextlib.contextmanager
def ours(
    stub: str, folder: Path, source: Path = HERE.parent, name: str = "ours", more: tuple[str, ...] = ()
) -> Iterator[Arm]:
    routes = folder / "routes.toml"
    routes.write_text(
        f'[[providers]]\nname = "stub"\nbase_urls = ["{stub}/v1"]\ntoken_ids = true\nmax_concurrency = 4096\n'
        '[[routes]]\nmodel = "*"\nprovider = "stub"\n'
    )
    command = [sys.executable, "-c", "from agentlightning.cli import main; main()", "serve", "--port", "0", "--json"]
    command += ["--store", str(folder / "store.db"), "--routes", str(routes), *more]
    environment = os.environ | {"PYTHONPATH": str(source / "src")}
    with running(command, said=True, env=environment) as (process, line):
        server = json.loads(line)["url"]
        yield Arm(name, [f"{server}{path}{PATH}" for path in asyncio.run(new_attempts(server))], process.pid, ())


async def new_attempts(server: str) -> list[str]:
    """The paths of new attempts there."""
    client = LightningStoreClient(server)
    started = [await client.start_rollout({"question": "6*7"}) for _ in range(ATTEMPTS)]
    await client.close()
    return [attempt_path(each.rollout_id, each.attempt.attempt_id) for each in started]


@contextlib.contextmanager
def nginx(stub: str, folder: Path) -> Iterator[Arm]:
    port, configuration = free_port(), folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, stub=stub.removeprefix("http://"), port=port))
    with running(["nginx", "-c", str(configuration)]) as (process, _):
        url = f"http://127.0.0.1:{port}"
        until_up(url + "/health", process)
        yield Arm("nginx", [url + PATH] * ATTEMPTS, process.pid)


@contextlib.contextmanager
def agl1(stub: str, folder: Path) -> Iterator[Arm]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(PYTHONS["agl1"]), "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}"]
    command += [f"default_proxy.model_name={MODEL}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with running(command, cwd=folder, env=environment) as (process, _):
        until_up(f"{url}/healthz", process)
        post(f"{url}/api/models", [{"model": MODEL, "endpoint": f"{stub}/v1"}])
        post(f"{url}/api/rollouts", [{"input": {"question": "6*7"}, "rollout_id": f"r{n}"} for n in range(ATTEMPTS)])
        urls = [f"{url}/proxy/rollout/r{number}/attempt/0/mode/train/openai{PATH}" for number in range(ATTEMPTS)]
        yield Arm("1.0", urls, process.pid, ("stream", "rollouts"))


@contextlib.contextmanager
def litellm(stub: str, folder: Path) -> Iterator[Arm]:
    port, configuration = free_port(), folder / "litellm.yaml"
    configuration.write_text(
        f"model_list:\n  - model_name: {MODEL}\n    litellm_params:\n      model: openai/{MODEL}\n"
        f"      api_base: {stub}/v1\n      api_key: none\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    command = [str(LITELLM), "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port)]
    with running(command, cwd=folder, env=environment) as (process, _):
        url = f"http://127.0.0.1:{port}"
        until_up(f"{url}/health/liveliness", process)
        yield Arm("LiteLLM", [url + PATH] * ATTEMPTS, process.pid)


# -- the load ----------------------------------------------------------------------------------------------------------


def measure(arm: Arm, load: tuple[str | None, int], seconds: float, stub: Arm) -> dict[str, float]:
    """Calls, errors, latencies in ms, ms of CPU a call, and the cores that the arm, and load and stub, have used."""
    user, connections = load
    urls = arm.urls[:connections] if user else arm.urls[:1] * connections
    if user == "rollouts":
        urls = [re.match(r"http://[^/]+", arm.urls[0])[0]] * connections  # type: ignore[index]
    command = [sys.executable, str(HERE / "arms/gateway_load.py"), "--seconds", str(seconds)]
    command += [*urls, *USER_OPTIONS[user]]
    before, beside, began = arm.cpu_seconds(), stub.cpu_seconds() + cpu_of_ended_children(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the load failed on {arm.name}: {done.stderr}")
    figures = json.loads(done.stdout)
    used, wall = arm.cpu_seconds() - before, time.perf_counter() - began
    beside = stub.cpu_seconds() + cpu_of_ended_children() - beside
    return figures | {"cpu": 1e3 * used / figures["calls"], "cores": used / wall, "beside": beside / wall}


def cpu_of_ended_children() -> float:
    return sum(os.times()[2:4])


def take_turns(arms: list[Arm], options: argparse.Namespace) -> None:
    for arm in arms:
        measure(arm, (None, 16), min(1.0, options.seconds), arms[-1])  # warm
    for _ in range(options.rounds):
        for load in LOADS:
            for arm in arms:
                if load[0] not in arm.without:
                    arm.runs.setdefault(load, []).append(measure(arm, load, options.seconds, arms[-1]))


# -- streams -----------------------------------------------------------------------------------------------------------


async def stream_one(host: str, port: int, path: str, body: bytes, begun: asyncio.Barrier) -> int:
    """Bytes of one stream, read to its end. Raises where it is cut short."""
    await begun.wait()
    reader, writer = await asyncio.open_connection(host, port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status:
            raise RuntimeError(status.decode())
        data = await reader.readuntil(b"\r\n0\r\n\r\n")
        if b"[DONE]" not in data:
            raise RuntimeError("a stream ended before its end")
        return len(data)
    finally:
        writer.close()


async def stream_many(url: str, streams: int) -> list[int | BaseException]:
    host, port, path = re.fullmatch(r"http://([^:]+):(\d+)(/.*)", url).groups()  # type: ignore[union-attr]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Six times seven?"}], "stream": True}
    body = json.dumps(asked, separators=(",", ":")).encode()
    begun = asyncio.Barrier(streams)
    calls = (stream_one(host, int(port), path, body, begun) for _ in range(streams))
    return await asyncio.gather(*calls, return_exceptions=True)


def measure_streams(options: argparse.Namespace) -> dict[str, float]:
    """Many streams at once, and what the store says of them."""
    pieces = 50
    tokens = max(1, options.tokens // (options.streams * pieces))
    sizes = ["--tokens", str(tokens), "--pieces", str(pieces), "--pause", "0.1"]
    with tempfile.TemporaryDirectory(dir=options.directory) as name, stub_of(sizes) as stub:
        folder = Path(name)
        with ours(stub.urls[0], folder) as arm:
            process, most = psutil.Process(arm.pid), 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, process.memory_info().rss)
                    await asyncio.sleep(0.1)

            async def run() -> list[int | BaseException]:
                watching = asyncio.create_task(watch())
                try:
                    return await stream_many(arm.urls[0], options.streams)
                finally:
                    watching.cancel()

            started = time.perf_counter()
            ended = asyncio.run(run())
            seconds = time.perf_counter() - started
        same, seen = asyncio.run(compare_tokens(folder / "store.db", tokens, pieces))
    errors = [each for each in ended if isinstance(each, BaseException)]
    for error in errors[:3]:
        print(f"  a stream failed: {error!r}", file=sys.stderr)
    sent = tokens * pieces * options.streams
    return {
        **{"streams": options.streams, "errors": len(errors), "seconds": seconds, "mb": most / 1e6},
        **{"tokens_sent": sent, "tokens_recorded": seen, "tokens_equal": same},
    }


async def compare_tokens(database: Path, tokens: int, pieces: int) -> tuple[int, int]:
    """(tokens that are the ones sent, tokens recorded)."""
    expected = list(range(tokens * pieces))
    same = seen = 0
    store = SqlStore(database)
    rollouts = [rollout.rollout_id for rollout in await store.query_rollouts()]
    for span in [span for rollout_id in rollouts for span in await store.query_spans(rollout_id)]:
        drawn = list(span.attributes[names.RESPONSE_TOKEN_IDS])
        seen += len(drawn)
        same += sum(one == other for one, other in zip(drawn, expected, strict=False))
    await store.close()
    return same, seen


# -- the whole ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stub_of(sizes: list[str]) -> Iterator[Arm]:
    with running([sys.executable, str(HERE / "arms/gateway_stub.py"), *sizes], said=True) as (process, line):
        yield Arm("the stub itself", [line.split()[0]], process.pid)


def available(options: argparse.Namespace) -> list[Any]:
    """Who takes part; who does not is named."""
    arms: list[Any] = [ours]
    arms += [partial(ours, source=source, name=source.name) for source in options.beside]
    if options.workers > 1:
        arms.append(partial(ours, name=MANY, more=("--workers", str(options.workers))))
    for name, arm, there in (
        ("nginx", nginx, shutil.which("nginx") is not None),
        ("1.0", agl1, PYTHONS["agl1"].exists()),
        ("LiteLLM", litellm, LITELLM.exists()),
    ):
        if options.ours:
            continue
        if there:
            arms.append(arm)
        else:
            print(f"{name} is left out: it is not there; see the first lines of this program", file=sys.stderr)
    return arms


def measure_calls(options: argparse.Namespace) -> tuple[list[Arm], dict[str, float]]:
    with tempfile.TemporaryDirectory(dir=options.directory) as name, stub_of([]) as stub:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            arms: list[Arm] = []
            for number, start in enumerate(available(options)):
                own = folder / str(number)
                own.mkdir()
                try:
                    arms.append(stack.enter_context(start(stub.urls[0], own)))
                except RuntimeError as error:
                    print(f"an arm is left out: {error}", file=sys.stderr)
            arms.append(replace(stub, urls=[stub.urls[0] + PATH] * ATTEMPTS))
            take_turns(arms, options)
        spans = asyncio.run(count_spans(folder / "0/store.db"))
    calls = {"rollouts": 3}
    answered = sum(run["calls"] * calls.get(user or "", 1) for (user, _), runs in arms[0].runs.items() for run in runs)
    return arms, {"calls_answered": answered, "spans_kept": spans}


async def count_spans(database: Path) -> int:
    store = SqlStore(database)
    statistics = await store.statistics()
    await store.close()
    return next(value for name, value in statistics.items() if "span" in name)


def limits(
    arms: list[Arm], kept: dict[str, float], streams: dict[str, float], workers: int
) -> list[tuple[str, float, str, bool]]:
    """(what, the figure, its limit, whether it is met)."""
    by_name = {arm.name: arm for arm in arms}
    mine, alone = by_name["ours"], by_name["the stub itself"]
    found: list[tuple[str, float, str, bool]] = []
    for peer, times in (("1.0", 0.5), ("LiteLLM", 0.2)):
        for load in by_name[peer].runs if peer in by_name else ():
            ratio = mine.median(load, "cpu") / by_name[peer].median(load, "cpu")
            found.append((f"CPU of ours / {peer}, {named(load)}", ratio, f"at most {times}", ratio <= times))
    for load in alone.runs:
        added = mine.median(load, "p50") - alone.median(load, "p50")
        if load[0] is not None:
            found.append((f"added p50, ms, {named(load)}", added, "under 10", added < 10))
    for load, most in ((("reader", 64), 2.6), (("stream", 64), 6.0), (("rollouts", 16), 2.0)):
        cpu = mine.median(load, "cpu")
        found.append((f"ms of CPU, {named(load)}", cpu, f"at most {most}", cpu <= most))
    for load in (("reader", 800), ("stream", 256)):
        added = mine.median(load, "p99") - alone.median(load, "p99")
        found.append((f"added p99, ms, {named(load)}", added, "at most 50", added <= 50))
    for load in LOADS if MANY in by_name else ():
        times = workers * mine.median(load, "cpu") / by_name[MANY].median(load, "cpu")
        text = f"{workers} workers carry times as much as one, {named(load)}"
        found.append((text, times, "at least 0.8 a worker", times >= 0.8 * workers))
    errors = sum(run["errors"] for arm in (mine, by_name.get(MANY, mine)) for runs in arm.runs.values() for run in runs)
    found.append(("calls that failed", errors, "none", errors == 0))
    lost = max(0.0, kept["calls_answered"] - kept["spans_kept"])
    found.append(("calls answered and not in the store", lost, "none", lost == 0))
    if streams:
        found.append((f"{streams['streams']:g} streams, errors", streams["errors"], "none", streams["errors"] == 0))
        found.append(("memory at its most, MB", streams["mb"], "under 500", streams["mb"] < 500))
        wrong = streams["tokens_sent"] - streams["tokens_equal"]
        found.append((f"of {streams['tokens_sent']:,} tokens sent, recorded otherwise", wrong, "none", wrong == 0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often the arms take turns")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=1000, help="at once; 0 leaves them out")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of all streams together")
    parser.add_argument("--directory", type=Path, default=None, help="where the database files go")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    parser.add_argument("--beside", type=Path, default=[], action="append", help="another checkout of this project")
    parser.add_argument("--workers", type=int, default=1, help="processes of another server that takes turns")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arms, kept = measure_calls(options)
    streams = measure_streams(options) if options.streams else {}
    found = limits(arms, kept, streams, options.workers)
    if options.json:
        measured = {arm.name: {named(each): runs for each, runs in arm.runs.items()} for arm in arms}
        print(json.dumps({"title": "gateway", "measured": measured, "kept": kept, "streams": streams, "limits": found}))
    else:
        show(arms, kept, streams, found)
    return int(options.check and not all(met for *_, met in found))


def named(load: tuple[str | None, int]) -> str:
    user, connections = load
    kinds = {"agent": "live attempts", "reader": "live attempts with long prompts", None: "at once in a loop"}
    kinds |= {"stream": "live attempts with long prompts, streamed", "rollouts": "workers, rollouts of three calls"}
    return f"{connections} {kinds[user]}"


def show(arms: list[Arm], kept: dict[str, float], streams: dict[str, float], found: list[Any]) -> None:
    for load in LOADS:
        columns = "ms of CPU a call, calls a second (p50 / p99 in ms), cores of it + of load and stub"
        print(f"{named(load)}: {columns}, medians of the rounds")
        for arm in (arm for arm in arms if load in arm.runs):
            names = ("cpu", "rate", "p50", "p99", "cores", "beside")
            cpu, rate, p50, p99, cores, beside = (arm.median(load, value) for value in names)
            print(f"  {arm.name:16}{cpu:8.3f} {rate:9,.0f} ({p50:.2f} / {p99:.1f}) {cores:5.2f} + {beside:.2f}")
    print("  " + ", ".join(f"{name} {value:,.0f}" for name, value in (kept | streams).items()))
    for text, value, limit, met in found:
        print(f"  {'MET   ' if met else 'MISSED'}  {text}: {value:,.3g}, {limit}")


if __name__ == "__main__":
    sys.exit(main())
