"""Agents that are programs in any language.

A program reads its task as JSON from stdin and from `AGL_TASK` (absent if the task is too long for an environment
variable), and the URLs of its model and events from the environment (`attempt_variables.py`). Its stdout is
its output, of which the last 1 MB is stored. With a non-zero exit code the attempt fails, and the end of stderr is its
traceback. It runs in its own process group, which is killed when the attempt ends.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from agentlightning.errors import AgentError
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.attempt_environ import MAX_VARIABLE_BYTES
from agentlightning.util.json_values import dumps

OUTPUT_BYTES = 1_000_000
ERROR_BYTES = 64_000
PIPE_SECONDS = 0.2
"""How long the pipes of a program that has exited are read: a daemon in another group may keep them open."""


class CommandError(AgentError):
    """A program exited with a non-zero code, or was killed by a signal."""

    def __init__(self, message: str, stderr: str) -> None:
        super().__init__(message)
        if stderr:
            self.add_note(f"stderr:\n{stderr}")


@dataclass(frozen=True, slots=True)
class Command:
    """A program and its arguments, run once per attempt."""

    words: tuple[str, ...]
    grace: float = 2.0
    """Seconds between SIGTERM and SIGKILL."""

    def __call__(self, invocation: Invocation) -> Callable[[], Any]:
        return partial(self.start, invocation)

    async def start(self, invocation: Invocation) -> str:
        """Run the program and return its output. Raises CommandError. Cancelling stops the program and all that is in
        its process group."""
        name = shlex.join(self.words)
        environment = {**os.environ, **invocation.environment, **task_variable(invocation.task)}
        execute = asyncio.get_running_loop().subprocess_exec
        starting = asyncio.ensure_future(execute(_Program, *self.words, env=environment, start_new_session=True))
        cancelled = await wait_through_cancellation(starting)  # once it runs, it is stopped with its children
        try:
            transport, program = starting.result()
        except OSError as error:
            raise AgentError(f"agent {name!r} cannot be started: {error}") from error
        group = transport.get_pid()
        invocation.on_program(group)
        stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
        try:
            if cancelled is not None:
                raise cancelled
            stdin.write(dumps(invocation.task))
            stdin.close()
            await program.exited.wait()
        except asyncio.CancelledError:
            signal_group(group, signal.SIGTERM)
            await _wait(program.exited, self.grace)
            raise
        finally:
            signal_group(group, signal.SIGKILL)  # what it has left behind; its pipes then close
            await program.exited.wait()
            await _wait(program.closed, PIPE_SECONDS)
            invocation.on_program(0)
            transport.close()
        code, (output, errors) = transport.get_returncode() or 0, program.texts()
        if code:
            advice = import_advice(errors, self.words[0])
            ended = f"{name!r} {describe_exit(code)}"
            raise CommandError(f"{ended}: {advice}" if advice else ended, errors)
        return output


async def wait_through_cancellation(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait for the end of a future, even if cancelled meanwhile; the last cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class _Program(asyncio.SubprocessProtocol):
    """A program that runs: the end of its output, and events of its end."""

    def __init__(self) -> None:
        self._tails = {1: (bytearray(), OUTPUT_BYTES), 2: (bytearray(), ERROR_BYTES)}
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        """`closed`: its pipes, too."""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail, limit = self._tails[fd]
        tail += data
        if len(tail) > 2 * limit:
            del tail[:-limit]

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def texts(self) -> list[str]:
        """The end of stdout, and that of stderr."""
        return [bytes(tail[-limit:]).decode(errors="replace") for tail, limit in self._tails.values()]


def task_variable(task: Any) -> dict[str, str]:
    """`AGL_TASK` with the task as JSON; empty if the task is too long for a variable."""
    text = dumps(task)
    return {"AGL_TASK": text.decode()} if len(text) <= MAX_VARIABLE_BYTES else {}


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal what is left of a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def describe_exit(code: int) -> str:
    """Describe a return code: `ended with exit code 3`, `was killed by SIGSEGV`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


# -- import advice ---------------------------------------------------------------------------------------------------

# What to install where an agent could not be imported: a package is missing, or its version lacks what is imported.
#
# Reads the error as Python or Node.js prints it, because a command's own interpreter has raised it. Imports nothing.

_MISSING: Final = re.compile(r"^ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_LACKING: Final = re.compile(r"^ImportError: cannot import name '(\w+)' from '([\w.]+)'", re.M)
_NODE: Final = re.compile(r"Cannot find (?:package|module) '((?:@[\w.-]+/)?[\w-][\w.-]*)'")

_DISTRIBUTIONS: Final = {
    "agent_framework": "agent-framework-core agent-framework-openai",
    "agents": "openai-agents",
    "autogen_agentchat": "autogen-agentchat",
    "autogen_ext": "'autogen-ext[openai]'",
    "google": "google-adk litellm",
    "llama_index": "llama-index-core llama-index-llms-openai",
    "pydantic_ai": "'pydantic-ai-slim[openai]'",
    "strands": "'strands-agents[openai]'",
}
"""What pip calls a module, where that is not the module's name with hyphens."""


def import_advice(errors: str, program: str) -> str | None:
    """What to install, from the last import error in what `program` (the first word of its command) has printed; None
    if it printed none.

    >>> import_advice("ModuleNotFoundError: No module named 'agents'", "python3")
    "the package 'agents' is not installed for python3; run: python3 -m pip install openai-agents"
    """
    if found := _MISSING.findall(errors):
        module = name = found[-1]
    elif found := _LACKING.findall(errors):
        name, module = found[-1]
        name = f"{module}.{name}"
    else:
        found = _NODE.findall(errors)
        advice = "the package {0!r} is not installed; run in the folder of the agent: npm install {0}"
        return advice.format(found[-1]) if found else None
    top = module.partition(".")[0]
    package = _DISTRIBUTIONS.get(top, top.replace("_", "-"))
    pip = f"{shlex.quote(program)} -m pip" if Path(program).name.startswith("python") else "pip"
    if name == top or (name == module and top == "google"):  # a namespace of many packages
        return f"the package {top!r} is not installed for {program}; run: {pip} install {package}"
    return (
        f"the version of {top!r} installed for {program} has no {name}, so it is too old for this agent, or too new;"
        f" for the newest, run: {pip} install --upgrade {package}"
    )
