"""What the gateway costs a call, beside nginx, Agent Lightning 1.0's proxy and LiteLLM: `python benchmarks/gateway.py`.

All pass the same calls on to the same stub, which answers at once with 2 KB of chat completion and token ids
(arms/gateway_stub.py); the load is wrk, one connection for each call under way. Ours is `agl serve` on a durable file,
recording every exchange; 1.0 records in memory, LiteLLM and nginx do not record. The arms take turns; each runs in one
process. Needs wrk and nginx (Debian: apt-get install wrk nginx-light), and the peers of benchmarks/peers.sh.

Then a thousand streams at once through ours: errors, memory, and whether the tokens in the store are those that were
sent, a million of them.

    python benchmarks/gateway.py [--rounds 3] [--seconds 3] [--streams 1000] [--tokens 1000000] [--ours] [--check]
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
from dataclasses import dataclass, field
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

CONCURRENCIES = (1, 16, 64)
LITELLM = Path(os.environ.get("AGL_PEER_LITELLM") or HERE.parent / ".peers/litellm/bin/litellm")
BODY = {
    "model": "stub",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is six times seven, and why does everybody ask?"},
    ],
    "temperature": 1.0,
    "max_tokens": 64,
    "logprobs": True,
    "return_token_ids": True,
}
MODEL, PATH = "stub", "/v1/chat/completions"
NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream stub {{ server {stub}; keepalive 128; }}
  server {{ listen 127.0.0.1:{port} backlog=2048;
    location / {{ proxy_pass http://stub; proxy_http_version 1.1; proxy_set_header Connection ""; }} }}
}}
"""


@dataclass
class Arm:
    """Something that passes calls on."""

    name: str
    url: str
    pid: int
    runs: dict[int, list[dict[str, float]]] = field(default_factory=dict)

    def median(self, concurrency: int, value: str) -> float:
        return statistics.median(run[value] for run in self.runs[concurrency])


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
def ours(stub: str, folder: Path) -> Iterator[Arm]:
    routes = folder / "routes.toml"
    routes.write_text(
        f'[[providers]]\nname = "stub"\nbase_urls = ["{stub}/v1"]\ntoken_ids = true\nmax_concurrency = 4096\n'
        '[[routes]]\nmodel = "*"\nprovider = "stub"\n'
    )
    command = [sys.executable, "-m", "agentlightning.cli", "serve", "--port", "0", "--json"]
    command += ["--db", str(folder / "store.db"), "--routes", str(routes)]
    if not (HERE.parent / "src/agentlightning/cli/__main__.py").exists():
        command[1:3] = ["-c", "from agentlightning.cli import main; main()"]
    with running(command, said=True) as (process, line):
        server = json.loads(line)["url"]
        yield Arm("ours", server + attempt_of(server) + PATH, process.pid)


def attempt_of(server: str) -> str:
    """The path of a new attempt there."""

    async def start() -> str:
        client = LightningStoreClient(server)
        rollout = await client.start_rollout({"question": "6*7"})
        await client.close()
        return attempt_path(rollout.rollout_id, rollout.attempt.attempt_id)

    return asyncio.run(start())


@contextlib.contextmanager
def nginx(stub: str, folder: Path) -> Iterator[Arm]:
    port, configuration = free_port(), folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, stub=stub.removeprefix("http://"), port=port))
    with running(["nginx", "-c", str(configuration)]) as (process, _):
        url = f"http://127.0.0.1:{port}"
        until_up(url + "/health", process)
        yield Arm("nginx", url + PATH, process.pid)


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
        post(f"{url}/api/rollouts", [{"input": {"question": "6*7"}, "rollout_id": "r1"}])
        yield Arm("1.0", f"{url}/proxy/rollout/r1/attempt/0/mode/train/openai{PATH}", process.pid)


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
        yield Arm("LiteLLM", url + PATH, process.pid)


# -- the load ----------------------------------------------------------------------------------------------------------


def load(url: str, concurrency: int, seconds: float, folder: Path) -> dict[str, float]:
    """Calls a second and latencies in ms, as wrk saw them."""
    script = folder / "post.lua"
    headers = 'wrk.headers["Content-Type"] = "application/json"\n'
    report = (
        "done = function(summary, latency) local e = summary.errors\n"
        'io.write(string.format("DONE %d %d %d %d %d\\n", summary.requests, summary.duration, latency:percentile(50),'
        " latency:percentile(99), e.connect + e.read + e.write + e.status + e.timeout)) end\n"
    )
    script.write_text(f'wrk.method = "POST"\n{headers}wrk.body = [=[{json.dumps(BODY)}]=]\n{report}')
    command = [
        "wrk",
        "-t1",
        f"-c{concurrency}",
        f"-d{max(1, round(seconds))}s",
        "--timeout",
        "30s",
        "-s",
        str(script),
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"DONE (\d+) (\d+) (\d+) (\d+) (\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"wrk failed on {url}: {done.stdout} {done.stderr}")
    requests, micros, p50, p99, errors = map(int, found.groups())
    return {"rate": requests / micros * 1e6, "p50": p50 / 1e3, "p99": p99 / 1e3, "errors": errors, "calls": requests}


def direct(stub: str, options: argparse.Namespace, folder: Path) -> Arm:
    arm = Arm("the stub itself", stub + PATH, 0)
    for concurrency in CONCURRENCIES:
        arm.runs[concurrency] = [load(arm.url, concurrency, options.seconds, folder)]
    return arm


def take_turns(arms: list[Arm], options: argparse.Namespace, folder: Path) -> None:
    for arm in arms:
        load(arm.url, 16, min(1.0, options.seconds), folder)  # warm
    for _ in range(options.rounds):
        for concurrency in CONCURRENCIES:
            for arm in arms:
                arm.runs.setdefault(concurrency, []).append(load(arm.url, concurrency, options.seconds, folder))


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
    asked = {name: value for name, value in BODY.items() if name not in ("logprobs", "return_token_ids")}
    body = json.dumps(asked | {"stream": True}, separators=(",", ":")).encode()
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
        with ours(stub, folder) as arm:
            process, most = psutil.Process(arm.pid), 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, process.memory_info().rss)
                    await asyncio.sleep(0.1)

            async def run() -> list[int | BaseException]:
                watching = asyncio.create_task(watch())
                try:
                    return await stream_many(arm.url, options.streams)
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
    (rollout,) = await store.query_rollouts()
    for span in await store.query_spans(rollout.rollout_id):
        drawn = list(span.attributes[names.RESPONSE_TOKEN_IDS])
        seen += len(drawn)
        same += sum(one == other for one, other in zip(drawn, expected, strict=False))
    await store.close()
    return same, seen


# -- the whole ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stub_of(sizes: list[str]) -> Iterator[str]:
    with running([sys.executable, str(HERE / "arms/gateway_stub.py"), *sizes], said=True) as (_, line):
        yield line.split()[0]


def available(options: argparse.Namespace) -> list[Any]:
    """Who takes part; who does not is named."""
    arms: list[Any] = [ours]
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
            for start in available(options):
                own = folder / start.__name__
                own.mkdir()
                try:
                    arms.append(stack.enter_context(start(stub, own)))
                except RuntimeError as error:
                    print(f"{start.__name__} is left out: {error}", file=sys.stderr)
            take_turns(arms, options, folder)
            alone = direct(stub, options, folder)
        spans = asyncio.run(count_spans(folder / "ours/store.db"))
    answered = sum(run["calls"] for runs in arms[0].runs.values() for run in runs)
    return [alone, *arms], {"calls_answered": answered, "spans_kept": spans}


async def count_spans(database: Path) -> int:
    store = SqlStore(database)
    statistics = await store.statistics()
    await store.close()
    return next(value for name, value in statistics.items() if "span" in name)


def limits(arms: list[Arm], kept: dict[str, float], streams: dict[str, float]) -> list[tuple[str, float, str, bool]]:
    """(what, the figure, its limit, whether it is met)."""
    by_name = {arm.name: arm for arm in arms}
    mine, alone = by_name["ours"], by_name["the stub itself"]
    found: list[tuple[str, float, str, bool]] = []
    for peer, times in (("1.0", 10), ("LiteLLM", 25), ("nginx", 0.2)):
        for concurrency in CONCURRENCIES if peer in by_name else ():
            ratio = mine.median(concurrency, "rate") / by_name[peer].median(concurrency, "rate")
            found.append((f"ours / {peer} at {concurrency}", ratio, f"at least {times}", ratio >= times))
    added = mine.median(1, "p50") - alone.median(1, "p50")
    found.append(("added p50 at 1, ms", added, "under 0.5", added < 0.5))
    p99 = mine.median(16, "p99")
    found.append(("p99 at 16, ms", p99, "under 30", p99 < 30))
    errors = sum(run["errors"] for runs in mine.runs.values() for run in runs)
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
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=1000, help="at once; 0 leaves them out")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of all streams together")
    parser.add_argument("--directory", type=Path, default=None, help="where the database files go")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        print("wrk is not there, and it is the load: apt-get install wrk", file=sys.stderr)
        return 2
    arms, kept = measure_calls(options)
    streams = measure_streams(options) if options.streams else {}
    found = limits(arms, kept, streams)
    if options.json:
        measured = {arm.name: {str(each): arm.runs[each] for each in CONCURRENCIES} for arm in arms}
        print(json.dumps({"title": "gateway", "measured": measured, "kept": kept, "streams": streams, "limits": found}))
    else:
        show(arms, kept, streams, found)
    return int(options.check and not all(met for *_, met in found))


def show(arms: list[Arm], kept: dict[str, float], streams: dict[str, float], found: list[Any]) -> None:
    print(
        "calls a second, median of the rounds (p50 / p99 in ms), at concurrency " + ", ".join(map(str, CONCURRENCIES))
    )
    for arm in arms:
        cells = (
            f"{arm.median(each, 'rate'):9,.0f} ({arm.median(each, 'p50'):.2f} / {arm.median(each, 'p99'):.1f})"
            for each in CONCURRENCIES
        )
        print(f"  {arm.name:16}" + "".join(f"{cell:30}" for cell in cells))
    print("  " + ", ".join(f"{name} {value:,.0f}" for name, value in (kept | streams).items()))
    for text, value, limit, met in found:
        print(f"  {'MET   ' if met else 'MISSED'}  {text}: {value:,.3g}, {limit}")


if __name__ == "__main__":
    sys.exit(main())
