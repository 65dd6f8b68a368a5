"""What the arms of prompt_search.py share: the simulated world over HTTP, with nothing but the standard library.

An arm is started with a JSON object: `urls` (one world for each seed), `budget` (evaluations), `share` (of the optimum
that must be reached), and the template and tasks. For each seed it prints a line: {"calls": N or null, "share": ...}.
"""

import http.client
import json
import re
import sys
import threading
from urllib.parse import urlsplit


def grade(answer: str) -> float:
    """The share of the instructions that a task needs and its answer keeps to."""
    found = re.search(r"ignores: ([\d, ]+) of (\d) points", answer)
    return 1 - (found[1].count(",") + 1) / int(found[2]) if found else float("is complete" in answer)


class Reached(Exception):
    """The favourite is good enough."""


class World:
    """One world, and whether the search has reached its goal."""

    def __init__(self, url: str, budget: int, share: float) -> None:
        self.url, self.budget, self.goal = url, budget, share
        self.address = urlsplit(url)
        self.local = threading.local()
        self.share = 0.0
        self.calls: int | None = None

    def post(self, path: str, body: dict) -> dict:
        connection = getattr(self.local, "connection", None)
        if connection is None:
            connection = self.local.connection = http.client.HTTPConnection(self.address.hostname, self.address.port)
        connection.request("POST", f"/v1{path}", json.dumps(body), {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())

    def ask(self, model: str, text: str) -> str:
        reply = self.post("/chat/completions", {"model": model, "messages": [{"role": "user", "content": text}]})
        return reply["choices"][0]["message"]["content"]

    def answer(self, template: str, task: dict) -> tuple[str, float]:
        """The follower's answer to a task, and its reward."""
        answer = self.ask("follower", template.replace("{task}", task["task"]))
        return answer, grade(answer)

    def consider(self, template: str, calls: int | None = None) -> bool:
        """Whether a favourite reaches the goal; the first that does is recorded."""
        found = self.post("/quality", {"prompt": template})
        self.share = found["quality"] / found["optimum"]
        if self.calls is None and self.share >= self.goal:
            self.calls = found["calls"] if calls is None else calls
        return self.calls is not None

    def spent(self) -> bool:
        return self.post("/quality", {"prompt": ""})["calls"] >= self.budget

    def report(self) -> None:
        print(json.dumps({"calls": self.calls, "share": self.share}), flush=True)


def job() -> dict:
    return json.loads(sys.argv[1])


def worlds(given: dict) -> list[World]:
    return [World(url, given["budget"], given["share"]) for url in given["urls"]]
