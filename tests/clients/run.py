"""Runs the suites of public clients against our gateway, with a scripted model behind it, and makes the list of
benchmarks/README.md.

    python -m tests.clients.run [NAME...] [--write]

Each suite runs in the environment of its client, .peers/clients/NAME (tests/clients/setup.sh makes them), with nothing
of ours but the addresses and keys in its environment variables.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.explained import EXPLAINED
from tests.clients.model import CapableEngine

from agentlightning.attempt_variables import attempt_environment, telemetry_opt_outs
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore

ROOT = Path(__file__).resolve().parents[2]
SUITES = Path(__file__).parent / "suites"
ENVIRONMENTS = Path(os.environ.get("AGL_CLIENTS", ROOT / ".peers" / "clients"))
PAGE = ROOT / "benchmarks" / "README.md"
MARKS = "<!-- clients -->\n", "<!-- end -->"
SECRET, SECONDS = "a-secret-nobody-prints", 600


@dataclass(frozen=True, slots=True)
class Client:
    """A client, its environment and its suite."""

    name: str
    title: str
    environment: str
    packages: tuple[str, ...]
    """Those whose versions are shown."""

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.environment / "bin" / "python"

    @property
    def missing(self) -> str | None:
        """Why its suite cannot run."""
        return (
            None if self.python.exists() else f"{self.python} is not there: tests/clients/setup.sh {self.environment}"
        )


CLIENTS = (
    Client("openai", "openai: helpers of streams and formats", "sdk", ("openai",)),
    Client("anthropic", "anthropic: helpers of streams, formats and tools", "sdk", ("anthropic",)),
    Client("langchain_openai", "langchain-tests with ChatOpenAI", "langchain", ("langchain-tests", "langchain-openai")),
    Client(
        "langchain_anthropic",
        "langchain-tests with ChatAnthropic",
        "langchain",
        ("langchain-tests", "langchain-anthropic"),
    ),
    Client("litellm", "LiteLLM", "litellm", ("litellm",)),
    Client("instructor", "Instructor", "instructor", ("instructor",)),
    Client("dspy", "DSPy", "dspy", ("dspy",)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test of a suite."""

    test: str
    result: str
    """passed, failed or skipped"""
    message: str = ""


async def run(client: Client, only: str = "") -> list[Outcome]:
    """Run the suite of a client against a gateway of its own."""
    store, engine = InMemoryLightningStore(), CapableEngine()
    gateway = Gateway(store, {"policy": engine}, secret=SECRET, default_model="policy", accept_any_model=True)
    async with Server(store, gateway, secret=SECRET) as server:
        started = await store.start_rollout({"suite": client.name}, "test")
        ids = started.rollout_id, started.attempt.attempt_id
        addresses = attempt_environment(server.url, SECRET, *ids, inherited={})
        with TemporaryDirectory() as folder:
            outcomes = await _pytest(client, {**telemetry_opt_outs({}), **addresses}, Path(folder), only)
    await store.close()
    return outcomes


async def _pytest(client: Client, variables: dict[str, str], folder: Path, only: str) -> list[Outcome]:
    results = folder / "results.xml"
    suite = SUITES / f"{client.name}_suite.py"
    arguments = ["-q", "-p", "no:cacheprovider", "--tb=short", "-c", os.devnull, "--confcutdir", str(SUITES)]
    if "langchain" in client.name:
        arguments += [
            "-o",
            "asyncio_mode=auto",
            "-o",
            "asyncio_default_test_loop_scope=session",
            "--disable-socket",
            "--allow-hosts=127.0.0.1",
            "--allow-unix-socket",
        ]
    process = await asyncio.create_subprocess_exec(
        *[
            str(client.python),
            "-m",
            "pytest",
            str(suite),
            f"--junitxml={results}",
            *arguments,
            *(["-k", only] * bool(only)),
        ],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    if not results.exists():
        raise RuntimeError(f"{suite} did not run:\n{printed.decode()[-4000:]}")
    return list(_outcomes(results))


def _outcomes(results: Path) -> Iterator[Outcome]:
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        group = case.get("classname", "").rpartition(".")[2]
        name = f"{group}.{case.get('name')}" if group.startswith("Test") else str(case.get("name"))
        for problem in (*case.findall("failure"), *case.findall("error")):
            yield Outcome(name, "failed", (problem.get("message") or "") + "\n" + (problem.text or ""))
            break
        else:
            skipped = case.find("skipped")
            if skipped is None:
                yield Outcome(name, "passed")
            else:
                expected = skipped.get("type") == "pytest.xfail"
                yield Outcome(name, "failed" if expected else "skipped", skipped.get("message") or "")


async def versions(client: Client) -> str:
    """The versions of its packages, as the table shows them."""
    code = (
        "import sys, importlib.metadata as m; print(*(f'{name} {m.version(name)}' for name in sys.argv[1:]), sep=', ')"
    )
    arguments = [str(client.python), "-c", code, *client.packages]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    return printed.decode().strip()


def row(client: Client, version: str, outcomes: list[Outcome]) -> str:
    """A line of the table."""
    counts = Counter(each.result for each in outcomes)
    failed = "; ".join(
        f"`{each.test}`: {EXPLAINED[client.name].get(each.test, 'not explained')}"
        for each in outcomes
        if each.result == "failed"
    )
    numbers = f"{counts['passed']} | {counts['failed']} | {counts['skipped']}"
    return f"| {client.title} | {version} | {numbers} | {failed or '-'} |"


HEAD = (
    "| suite | versions | passed | failed | skipped | what failed, and why |\n| --- | --- | --- | --- | --- | --- |\n"
)


def rows() -> dict[str, str]:
    """The lines of the table in the documentation, by title."""
    table = PAGE.read_text().partition(MARKS[0])[2].partition(MARKS[1])[0]
    return {line.split("|")[1].strip(): line for line in table.splitlines()[2:] if line.startswith("|")}


def write(made: dict[str, str]) -> None:
    """Put lines into the table; the others stay."""
    known = rows() | made
    before, start, rest = PAGE.read_text().partition(MARKS[0])
    lines = "".join(f"{known[client.title]}\n" for client in CLIENTS if client.title in known)
    PAGE.write_text(before + start + HEAD + lines + MARKS[1] + rest.partition(MARKS[1])[2])


async def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the suites of public clients against our gateway.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/README.md")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--verbose", action="store_true", help="also print why tests failed")
    given = parser.parse_args()
    unexplained, made = 0, {}
    for client in CLIENTS:
        if given.names and client.name not in given.names:
            continue
        if client.missing:
            sys.stdout.write(f"{client.name}: left out, {client.missing}\n")
            continue
        outcomes = await run(client, given.only)
        made[client.title] = row(client, await versions(client), outcomes)
        sys.stdout.write(f"{made[client.title]}\n")
        for each in outcomes:
            if each.result == "failed":
                unexplained += each.test not in EXPLAINED[client.name]
                if given.verbose:
                    sys.stdout.write(f"--- {each.test}\n{each.message[-1800:]}\n")
            if each.result == "skipped" and given.verbose:
                sys.stdout.write(f"skipped {each.test}: {each.message[:120]}\n")
    if given.write:
        write(made)
    return 1 if unexplained else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
