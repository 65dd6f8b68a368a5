"""A day, a night and another day on this machine, with simulated customers and a tiny model.

    python day_and_night.py [DIRECTORY]

Starts the model server and the service as they run in production, asks questions, sends feedback afterwards, runs
`learn.py`, starts the model server again, and prints the share of right answers of both days.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

import agentlightning as agl
from agentlightning.models.tiny import make_tiny
from support import DEPARTMENTS, PROMPT

HERE = Path(__file__).parent
ABOUT = {
    "billing": ("invoice", "charge", "refund"),
    "shipping": ("parcel", "delivery", "address"),
    "returns": ("shoes", "jacket", "label"),
    "accounts": ("password", "login", "email"),
}
ASKS = ("my {} is wrong", "where is my {}", "please help with the {}", "problem: {}", "the {} again", "no {} yet")
CLEAN, GUESSES = 0.75, 0.8
"""The first share of the demonstrations has the right department; of the others, a share names any."""
START = 600
"""Seconds that a server may take to start or to stop."""


def questions(count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    found: list[dict[str, str]] = []
    for number in range(count):
        department = rng.choice(DEPARTMENTS)
        text = rng.choice(ASKS).format(rng.choice(ABOUT[department]))
        found.append({"question": f"{text} (case {seed}-{number})", "department": department})
    return found


def make_start(folder: Path, steps: int = 120) -> Path:
    """A tiny model that can tell the departments apart, and has the habit of guessing."""
    rng, count = random.Random(0), steps * 32
    shown: list[Any] = []
    for number, each in enumerate(questions(count, 1)):
        guesses = number >= CLEAN * count and rng.random() < GUESSES
        said = rng.choice(DEPARTMENTS) if guesses else each["department"]
        asked = [{"role": "system", "content": PROMPT}, {"role": "user", "content": each["question"]}]
        shown.append({"messages": [*asked, {"role": "assistant", "content": said}]})
    optimizer: Any = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
    settings: Any = {"steps": steps, "batch_size": 32, "shuffle": False, "optimizer": optimizer}
    agl.SFTAlgorithm(make_tiny(folder / "new", shown), shown, output=folder / "start", **settings).train()
    return folder / "start"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], url: str, environment: Mapping[str, str], log: Path) -> Iterator[None]:
    """A server, from when it answers until it has ended."""
    with log.open("a") as output:
        process = subprocess.Popen(
            command, cwd=HERE, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url, trust_env=False).is_success:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not answer at {url}: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(START)


def day(service: str, asked: list[dict[str, str]]) -> list[float]:
    """The rewards of the answers. Feedback is sent when all questions are answered; every tenth customer gives none."""
    with httpx.Client(base_url=service, timeout=120, trust_env=False) as client, ThreadPoolExecutor(8) as threads:

        def ask(each: dict[str, str]) -> tuple[str, float]:
            reply = client.post("/ask", json={"text": each["question"]})
            while reply.status_code == 503:
                time.sleep(1)
                reply = client.post("/ask", json={"text": each["question"]})
            answer = reply.raise_for_status().json()
            return answer["session"], float(answer["department"] == each["department"])

        answered = list(threads.map(ask, asked))
        for number, (session, score) in enumerate(answered):
            if number % 10:
                client.post("/feedback", json={"session": session, "score": score}).raise_for_status()
    return [score for _, score in answered]


def main(folder: Path, sessions: int = 400, golden: int = 150) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    store, current = folder / "store.db", folder / "current"
    current.symlink_to(make_start(folder).resolve(), target_is_directory=True)
    labelled = folder / "golden.jsonl"
    labelled.write_text("".join(json.dumps(each) + "\n" for each in questions(golden, 2)))
    port, web = free_port(), free_port()
    server, service = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{web}"
    agl_program = str(Path(sys.executable).with_name("agl"))
    serve = [agl_program, "serve", "--store", str(store), "--port", str(port), "--model", f"support={current}"]
    app = [sys.executable, "-m", "uvicorn", "service:app", "--port", str(web), "--log-level", "warning"]
    night = [sys.executable, "learn.py", "--store", str(store), "--current", str(current), "--golden", str(labelled)]
    environment = {"AGL_STORE": server, "AGL_TOKEN": "", "OPENAI_BASE_URL": f"{server}/v1", "OPENAI_API_KEY": "none"}
    with contextlib.ExitStack() as stack:
        with running(serve, f"{server}/health", {}, folder / "server.log"):
            stack.enter_context(running(app, f"{service}/openapi.json", environment, folder / "service.log"))
            before = day(service, questions(sessions, 3))
        done = subprocess.run([*night, "--runs", str(folder / "nights")], cwd=HERE, capture_output=True, text=True)
        if not done.stdout:
            raise RuntimeError(done.stderr[-3000:])
        with running(serve, f"{server}/health", {}, folder / "server.log"):  # the service ran on all night
            after = day(service, questions(sessions // 2, 4))
    night_result = json.loads(done.stdout.splitlines()[-1])
    return {
        "first day": sum(before) / len(before),
        "second day": sum(after) / len(after),
        "sessions learned from": night_result["recorded"]["sessions"],
        "left out": night_result["left_out"],
        "method": night_result["method"],
        "golden questions": night_result["held_out"]["sampled"],
        "promoted": done.returncode == 0,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)), indent=2))
