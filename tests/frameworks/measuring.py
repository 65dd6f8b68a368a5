"""Measures the examples of `examples/frameworks` and writes what it finds into the table of docs/guides/frameworks.md.

    python -m tests.frameworks.measuring [NAME...]

Without names it measures all whose packages are installed (tests/frameworks/setup.sh); rows of others stay as they are.
Each agent answers one question with a scripted model, and again with the instrumentation of its environment. Then a
tiny model learns to follow it, and is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from tests.frameworks.examples import ALL, BY_NAME, Example
from tests.frameworks.service import ENVIRONMENTS, EXAMPLES, ROOT, serving, starting_models

import agentlightning
from agentlightning import span as names
from agentlightning.assemble import calls as answered
from agentlightning.span import Span

PAGE = ROOT / "docs" / "guides" / "frameworks.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
HEADINGS = (
    "framework",
    "version",
    "endpoint",
    "streams",
    "changed in the agent",
    "turns continue",
    "spans",
    "reward before and after",
)
ENDPOINTS = {"chatcmpl-": "chat completions", "resp_": "responses", "msg_": "messages"}
"""By the beginning of the ids in answers."""
TRAINING_SECONDS = 3000


# -- what an agent says to the gateway ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speech:
    """How an agent talks to a model."""

    endpoint: str
    streams: bool
    tokens: str
    """Calls whose tokens are those of the engine, of all calls that were answered."""
    continues: bool
    tool_calls: bool
    one_key: bool
    """All its calls have the same key."""
    spans: str


async def speech(example: Example, folder: Path) -> Speech:
    """What the gateway recorded of one rollout."""
    start = starting_models()
    given = json.dumps({"question": start.question(start.A, start.B)})
    async with serving(start.teacher(guesses=False)) as service:
        ended = await service.run(example.command(), folder, example.variables(), given)
        assert ended.code == 0, ended.stderr[-2000:]
        assert f"It is {start.A * start.B}." in ended.stdout, ended.stdout + ended.stderr[-2000:]
        spans = answered(await service.calls())
        prompts = [prompt for prompt, _ in service.engine.calls]
        streamed = service.engine.streamed
    kept = sum(span.attributes.get(names.PROMPT_TOKEN_IDS) in prompts for span in spans)
    ids = {prefix for span in spans for prefix in ENDPOINTS if _response_id(span).startswith(prefix)}
    return Speech(
        endpoint=", ".join(sorted(ENDPOINTS[prefix] for prefix in ids)),
        streams=any(streamed),
        tokens=f"{kept} of {len(spans)}",
        continues=all(_continues(*pair) for pair in pairwise(spans)),
        tool_calls='"tool_call"' in str(spans[0].attributes.get(names.OUTPUT_MESSAGES)),
        one_key=len({span.attributes.get(names.AGENT_KEY) for span in spans}) == 1,
        spans=await instrumented(example, folder),
    )


def _response_id(span: Span) -> str:
    return str(span.attributes.get(names.RESPONSE_ID))


def _continues(first: Span, second: Span) -> bool:
    known = first.attributes[names.PROMPT_TOKEN_IDS] + first.attributes[names.RESPONSE_TOKEN_IDS]
    return second.attributes[names.PROMPT_TOKEN_IDS][: len(known)] == known


async def instrumented(example: Example, folder: Path) -> str:
    """The spans that OpenTelemetry's launcher, with the instrumentations of the environment, sent of one rollout."""
    launcher = example.programs / "opentelemetry-instrument"
    if not example.file.endswith(".py") or not launcher.exists():
        return "-"
    start = starting_models()
    given = json.dumps({"question": start.question(start.A, start.B)})
    more = {**example.variables(), "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    async with serving(start.teacher(guesses=False)) as service:
        traced = [example.programs / "python", launcher, *example.command()]  # an environment may have been moved
        ended = await service.run(traced, folder, {**more, "OPENAI_AGENTS_DISABLE_TRACING": "0"}, given)
        assert ended.code == 0, ended.stderr[-2000:]
        found = [span.name for span in await service.spans() if names.PROMPT_TOKEN_IDS not in span.attributes]
    kinds = sorted({name.split(" ")[0] for name in found if not name.startswith(("POST", "GET"))})
    return f"{len(found)}: {', '.join(kinds)}" if kinds else "none"


# -- training ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sharing_imports() -> Iterator[None]:
    """Within it the runs of an agent share a process of warm.py, which ends with it."""
    with tempfile.TemporaryDirectory(prefix="agl") as short, mock.patch.dict(os.environ, TMPDIR=short):
        yield


def starting_model(example: Example, folder: Path) -> Path:
    """The tiny model of an example. Those whose conversations are the same share one, and it is kept; the agent runs
    again only if something changed that its conversations depend on."""
    models = ENVIRONMENTS / "models"
    known = models / "known" / _inputs(example)
    if known.exists() and (model := models / known.read_text() / "model").exists():
        return model
    model = _recorded_model(example, folder)
    known.parent.mkdir(exist_ok=True)
    known.write_text(model.parent.name)
    return model


def _inputs(example: Example) -> str:
    """A digest of what its conversations depend on: the agent and its packages, `start.py` and Agent Lightning."""
    agent, source = (EXAMPLES / example.file).parent, Path(agentlightning.__file__).parent
    given = [path for path in agent.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = [EXAMPLES / "start.py", *sorted(given), *sorted(source.rglob("*.py"))]
    digest = hashlib.sha256(json.dumps([example.name, example.arguments, example.start_steps]).encode())
    for path in (example.home / ".installed", *files):
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:24]


def _recorded_model(example: Example, folder: Path) -> Path:
    start, command = starting_models(), example.command(warm=True)

    def record(guesses: bool, folder: Path, *numbers: Any) -> list[dict[str, Any]]:
        return asyncio.run(start.record(command, guesses, folder, *numbers))

    with mock.patch.dict(os.environ, example.variables()), tempfile.TemporaryDirectory() as elsewhere:
        used, guessed = (record(guesses, folder) for guesses in (False, True))
        other = record(False, Path(elsewhere), start.OTHERS)  # an agent may tell the model its folder
    differs = start.differing(used, other)
    known = json.dumps([example.start_steps, *map(_essence, (*used, *guessed))])
    known = start.renewed(known, differs, random.Random(0))
    digest = hashlib.sha256(known.encode()).hexdigest()[:12]
    model = ENVIRONMENTS / "models" / digest / "model"
    if not model.exists():
        start.learn(used, guessed, model.parent, differs=differs, steps=example.start_steps)
    return model


def _essence(record: dict[str, Any]) -> Any:
    """What the tiny model's chat template shows of a conversation."""
    turns = [
        (
            message["role"],
            message.get("content") or "",
            [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()],
        )
        for message in record["messages"]
    ]
    functions = [tool.get("function") or tool for tool in record["tools"]]
    signatures = [
        (tool.get("name"), list((tool.get("parameters") or {}).get("properties") or {})) for tool in functions
    ]
    return turns, signatures


def train(example: Example, model: Path, folder: Path, *changes: str) -> dict[str, Any]:
    """The report of a training run of an example."""
    agl = Path(sys.executable).with_name("agl")
    settings = [f"reward={EXAMPLES}/reward.py:score", f"data.train={EXAMPLES}/tasks.jsonl", f"runner.cwd={folder}"]
    agent = ["--agent", shlex.join(example.command(warm=True)), f"algorithm.steps={example.steps}"]
    files = ["--config", EXAMPLES / "train.toml", "--model", model, "--run", folder / "run"]
    command = [agl, "train", "--json", *files, *agent, *settings, *changes]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **example.variables(), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=TRAINING_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def verify(example: Example, report: dict[str, Any], folder: Path) -> None:
    """Raise AssertionError unless all rollouts counted and updated the weights, and the agent had turns and rewards."""
    sampled = report["held_out"]["sampled"]
    assert sampled["missing_before"] == sampled["missing_after"] == 0, sampled
    assert report["steps"] == example.steps
    assert report["rejected_rollouts"] == {}
    assert report["failed_rollouts"] <= report["rollouts"] // 10, report
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step.get("tokens_trained", 0) for step in steps) > 0
    assert max(step["calls_per_rollout"] for step in steps) > 1
    assert max(rewards(report)) > 0


def rewards(report: dict[str, Any]) -> tuple[float, float]:
    """The mean held-out rewards before and after."""
    sampled = report["held_out"]["sampled"]
    return sampled["before"], sampled["after"]


# -- the table ---------------------------------------------------------------------------------------------------------


def row(example: Example, found: Speech, report: dict[str, Any]) -> str:
    before, after = rewards(report)
    values = (
        f"[{example.title}](../../examples/frameworks/{example.file.partition('/')[0]}/README.md)",
        example.version(),
        found.endpoint,
        _yes(found.streams),
        example.changed,
        _yes(found.continues),
        found.spans,
        f"{before:.2f} → {after:.2f}",
    )
    return f"| {' | '.join(values)} |\n"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def rows() -> dict[str, str]:
    """The lines of the table by the title of their example."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    lines = rest.partition(END)[0].splitlines(keepends=True)[2:]
    return {line.split("[")[1].split("]")[0]: line for line in lines}


def write(new: dict[str, str]) -> None:
    known = rows() | new
    head = f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}\n"
    table = head + "".join(known[each.title] for each in ALL if each.title in known)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


def measure(example: Example) -> str:
    """The row of an example."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = asyncio.run(speech(example, folder))
        kept, _, calls = found.tokens.partition(" of ")
        as_page_says = kept == calls and ((found.tool_calls and found.one_key) or example.name == "dspy")
        assert as_page_says, f"the page says of all frameworks what is not so here: {found}"
        with sharing_imports():
            report = train(example, starting_model(example, folder), folder)
        verify(example, report, folder)
    return row(example, found, report)


def main() -> None:
    chosen = [BY_NAME[name] for name in sys.argv[1:]] or ALL
    for example in chosen:
        if missing := example.missing():
            print(f"{example.name}: left out, {missing}")  # noqa: T201
            continue
        line = measure(example)
        write({example.title: line})
        print(line, end="", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
