"""Model calls while a run trains: its gateway in the trainer's process, beside one in `agl serve` that it has joined.

    python benchmarks/studies/joined.py [--rounds 6] [--seconds 5] [--in-flight] [--hidden 256] [--check]

Both arms are real trainers that update one local model without a pause and give each version to a scripted model server
(arms/updating.py); the calls go through the gateway of one arm, which renders, samples, records and answers them. The
arms take turns, at rest and during updates, under two loads of wrk: 16 callers that never rest, and 64 agents that
think for a second on average after each answer. Calls of either arm wait while servers get new weights.

Printed are medians over the rounds, with the CPU time of the gateway's process for each call; and, for ratios of the
joined server to the trainer's process, the median of the ratios with its 95% bootstrap interval. Needs wrk (Debian:
apt-get install wrk).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from agentlightning import LightningStoreClient
from agentlightning.attempt_address import attempt_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import HERE

from gateway import running

TRAINER, HUB = "trainer's process", "joined server"
LOADS = {"16 callers": (16, 0), "64 agents": (64, 1000)}
"""Name -> connections, and mean milliseconds between an answer and the next call."""
STATES = ("at rest", "updating")
ATTEMPTS, ANSWER = 64, 16
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is six times seven, and why does everybody ask?"},
]
SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = [=[%s]=]
local paths, last = {%s}, 0
request = function() last = last %% #paths + 1 return wrk.format(nil, paths[last]) end
%s
done = function(summary, latency) local e = summary.errors
  io.write(string.format("DONE %%d %%d %%d %%d %%d\\n", summary.requests, summary.duration, latency:percentile(50),
    latency:percentile(99), e.connect + e.read + e.write + e.status + e.timeout)) end
"""
Run = dict[str, float]


class Arm:
    """A trainer, and where its calls go."""

    def __init__(self, name: str, trainer: subprocess.Popen[str], url: str, gateway: int) -> None:
        self.name, self._trainer, self.url = name, trainer, url
        self._gateway = psutil.Process(gateway)
        self.runs: dict[tuple[str, str], list[Run]] = {}
        """By load and state."""

    def ask(self, job: str) -> dict[str, Any]:
        assert self._trainer.stdin is not None
        assert self._trainer.stdout is not None
        print(json.dumps({"job": job}), file=self._trainer.stdin, flush=True)
        return json.loads(self._trainer.stdout.readline())

    def measure(self, load: str, state: str, seconds: int, folder: Path) -> Run:
        if state == "updating":
            self.ask("updates")
        before = sum(self._gateway.cpu_times()[:2])
        run = call(self.url, *LOADS[load], seconds, folder)
        cpu = (sum(self._gateway.cpu_times()[:2]) - before) / run["calls"] * 1e3
        found = self.ask("rest")
        return run | {"cpu": cpu, "updates": found["updates"], "held": found["held"]}


def call(url: str, callers: int, think: int, seconds: int, folder: Path) -> Run:
    """Calls a second, latencies in ms, and calls that failed. Each measurement has attempts of its own."""
    script = folder / "calls.lua"
    body = json.dumps({"model": "policy", "messages": MESSAGES, "max_tokens": ANSWER})
    paths = ", ".join(f'"{path}/v1/chat/completions"' for path in asyncio.run(attempts(url)))
    script.write_text(
        SCRIPT % (body, paths, f"delay = function() return math.random(0, {2 * think}) end" if think else "")
    )
    options = ["-t1", f"-c{callers}", f"-d{seconds}s", "--timeout", "60s", "-s", str(script)]
    done = subprocess.run(["wrk", *options, url], capture_output=True, text=True)
    found = re.search(r"DONE (\d+) (\d+) (\d+) (\d+) (\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"wrk failed on {url}: {done.stdout} {done.stderr}")
    requests, micros, p50, p99, errors = map(int, found.groups())
    return {"rate": requests / micros * 1e6, "p50": p50 / 1e3, "p99": p99 / 1e3, "calls": requests, "errors": errors}


async def attempts(url: str) -> list[str]:
    client = LightningStoreClient(url)
    started = [await client.start_rollout({"question": "6*7"}) for _ in range(ATTEMPTS)]
    await client.close()
    return [attempt_path(each.rollout_id, each.attempt.attempt_id) for each in started]


@contextlib.contextmanager
def arms(options: argparse.Namespace, folder: Path) -> Iterator[list[Arm]]:
    program = [sys.executable, "-W", "ignore", str(HERE / "arms/updating.py")]
    with contextlib.ExitStack() as stack:

        def start(command: list[str]) -> tuple[subprocess.Popen[str], str]:
            process, line = stack.enter_context(running(command, said=True))
            return process, json.loads(line)["url"]

        server, hub = start([*serve_command(), "--port", "0", "--json", "--db", str(folder / "hub.db")])
        made = []
        for name, joins in ((TRAINER, []), (HUB, ["--hub", hub])):
            own = folder / name.split()[0].strip("'s")
            own.mkdir()
            words = ["--folder", str(own), "--server", start(program)[1], *joins]
            words += ["--hidden", str(options.hidden), *(["--in-flight"] if options.in_flight else [])]
            trainer, url = start([*program, *words])
            made.append(Arm(name, trainer, url, server.pid if joins else trainer.pid))
        yield made


def serve_command() -> list[str]:
    return [sys.executable, "-c", "from agentlightning.cli import main; main()", "serve"]


def take_turns(made: Sequence[Arm], options: argparse.Namespace, folder: Path) -> None:
    for arm in made:
        call(arm.url, 16, 0, 1, folder)  # warm
    for number in range(options.rounds):
        for load in LOADS:
            for state in STATES:
                for arm in made if number % 2 else reversed(made):
                    run = arm.measure(load, state, options.seconds, folder)
                    arm.runs.setdefault((load, state), []).append(run)


def medians(runs: Sequence[Run], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def ratio(above: Sequence[Run], below: Sequence[Run], name: str) -> tuple[float, float, float]:
    """The median of the ratios of the rounds, and its 95% bootstrap interval."""
    ratios = [one[name] / other[name] for one, other in zip(above, below, strict=True)]
    draw = random.Random(0)
    drawn = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), drawn[50], drawn[1949]


def show(made: Sequence[Arm]) -> None:
    own, hub = made
    print(f"{'':46}{'calls/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}{'updates/s':>11}{'held':>7}")
    for key in own.runs:
        for arm in made:
            runs = arm.runs[key]
            took = sum(run["calls"] / run["rate"] for run in runs)
            updates, held = (sum(run[name] for run in runs) / took for name in ("updates", "held"))
            figures = [medians(runs, name) for name in ("rate", "p50", "p99", "cpu")]
            name = f"{key[0]}, {key[1]}, {arm.name}"
            print(
                f"{name:46}{figures[0]:9.0f}{figures[1]:9.1f}{figures[2]:9.1f}{figures[3]:9.2f}{updates:11.2f}{held:7.0%}"
            )
    print("\njoined server / trainer's process, median of the rounds (95% interval)")
    for key in own.runs:
        found = {name: ratio(hub.runs[key], own.runs[key], name) for name in ("rate", "p50", "p99", "cpu")}
        cells = (f"{name} {each[0]:.2f} ({each[1]:.2f} to {each[2]:.2f})" for name, each in found.items())
        print(f"  {key[0]}, {key[1]}: " + ", ".join(cells))
    print("\nduring updates / at rest")
    for arm in made:
        for load in LOADS:
            found = {
                name: ratio(arm.runs[load, "updating"], arm.runs[load, "at rest"], name) for name in ("rate", "p99")
            }
            cells = (f"{name} {each[0]:.2f} ({each[1]:.2f} to {each[2]:.2f})" for name, each in found.items())
            print(f"  {arm.name}, {load}: " + ", ".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="how often the arms take turns")
    parser.add_argument("--seconds", type=int, default=5, help="of each measurement")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model that is trained")
    parser.add_argument("--in-flight", action="store_true", help="answers go on across updates")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a call failed")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        print("wrk is not there, and it is the load: apt-get install wrk", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name, arms(options, Path(name)) as made:
        take_turns(made, options, Path(name))
        show(made)
    errors = sum(run["errors"] for arm in made for runs in arm.runs.values() for run in runs)
    print(f"\n{errors:.0f} calls failed")
    return int(options.check and errors > 0)


if __name__ == "__main__":
    sys.exit(main())
