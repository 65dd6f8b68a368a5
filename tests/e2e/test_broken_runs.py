"""Runs that are broken on purpose: the doctor and the page of the run say the cause within one screen."""

from __future__ import annotations

import json
import subprocess

import httpx
import pytest
from starlette.applications import Starlette

from agentlightning.dashboard.app import dashboard_routes
from agentlightning.dashboard.data.run_data import Catalog

from .conftest import AGENT, AGL, Job

pytestmark = pytest.mark.slow
SCREEN = 40
"""Lines of a terminal."""
NEVER = """
def letters(task, output):
    return 1.0 if output.startswith("ANSWER: ") else 0.0   # the model never says so
"""
ELSEWHERE = '''
import http.server
import threading

import httpx


class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"red")

    def log_message(self, *_):
        """Says nothing."""


SERVER = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=SERVER.serve_forever, daemon=True).start()


def say(word: str) -> str:
    """Asks a model server at an address of its own."""
    return httpx.post(f"http://127.0.0.1:{SERVER.server_port}/v1/chat/completions", json={"word": word}).text
'''
LEAKY = AGENT.replace("say(word: str)", "say(task: dict)").replace("say {word}", "translate {task}")


def train(job: Job, *settings: str) -> subprocess.CompletedProcess[str]:
    return job.run(job.command("--run", "run", *settings))


def doctor(job: Job) -> str:
    done = job.run([AGL, "doctor", "run"])
    assert len(done.stdout.splitlines()) <= SCREEN, done.stdout
    return " ".join(done.stdout.split())


async def warnings_of_page(job: Job) -> dict[str, str]:
    """By name, what the page of the run warns of, with what to try."""
    data = Catalog(roots=[job.directory / "run"])
    transport = httpx.ASGITransport(Starlette(routes=list(dashboard_routes(data, None))))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        found = (await client.get("/dashboard/api/runs/run")).json()
    await data.close()
    return {each["name"]: f"{each['what']}. {each['advice']}" for each in found["warnings"]}


async def test_a_reward_that_never_finds_the_answer_for_its_format(job: Job):
    (job.directory / "reward.py").write_text(NEVER)
    train(job, "algorithm.steps=3")
    said = doctor(job)
    assert "rewards_without_spread" in said
    assert "every rollout since the first step has the reward 0" in said
    assert "it has to find the answer in it, whatever the case, the spaces or the words around it" in said
    assert "find the answer in it" in (await warnings_of_page(job))["rewards_without_spread"]


async def test_an_agent_that_ignores_the_address_it_is_given(job: Job):
    (job.directory / "agent.py").write_text(ELSEWHERE)
    (job.directory / "reward.py").write_text("def letters(task, output):\n    return 1.0\n")
    tried = job.run(job.command("--dry-run"))
    assert tried.returncode != 0
    assert "ignores the address of the rollout. Look for base_url=" in " ".join(tried.stdout.split())
    done = train(job, "algorithm.steps=3")
    assert done.returncode != 0
    assert "base_url" in done.stderr + done.stdout
    said = doctor(job)
    assert "base_url" in said, said
    assert "base_url" in json.dumps(await warnings_of_page(job))


async def test_a_learning_rate_that_is_a_hundred_times_too_high(job: Job):
    train(job, "algorithm.steps=3", "algorithm.optimizer.lr=0.1", "algorithm.minibatches=2")
    said = doctor(job)
    assert "large_updates (since step 1" in said, said
    assert "lower algorithm.optimizer.lr" in said
    assert "lower algorithm.optimizer.lr" in (await warnings_of_page(job))["large_updates"]


async def test_an_answer_that_leaks_into_the_prompt(job: Job):
    (job.directory / "agent.py").write_text(LEAKY)
    words = ["rouge", "vert", "bleu", "blanc", "noir", "rose", "gris", "brun", "or", "sarcelle"]
    tasks = [{"number": n, "answer": word} for n, word in enumerate(words)]
    (job.directory / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (job.directory / "reward.py").write_text(
        "def letters(task, output):\n    return float(task['answer'][0] in output) / max(1, len(output))\n"
    )
    tried = job.run(job.command("--dry-run"))
    assert "the answer of the task is in the prompt of 100% of the tasks" in " ".join(tried.stdout.split())
    train(job, "algorithm.steps=2")
    assert "answer_in_prompt" in doctor(job)
    assert "do not give the agent the field" in (await warnings_of_page(job))["answer_in_prompt"]
