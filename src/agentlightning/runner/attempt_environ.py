"""Environment variables per attempt in a process that runs many attempts, and what such a process cannot keep apart.

`install()` makes the existing `os.environ` object, and so every reference to it, read through a context variable:
inside `overlay(variables)` those variables lie over the process's own, and what is set or deleted there stays there.
`subprocess` inherits them, and with `carry_context()` so do the threads of a ThreadPoolExecutor.

Not covered, because they bypass Python: `os.system`, `os.posix_spawn` and C code that calls `getenv`.

The working directory, signals, redirected standard streams and pools of processes are those of the whole process: the
functions that change them ask `process_state.on_change` first, which raises where attempts share the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from multiprocessing.process import BaseProcess
from threading import Lock
from typing import Any, Final, cast

from agentlightning.errors import AgentError, ConfigError
from agentlightning.tracing.scope import calls_of_pools
from agentlightning.util.json_values import as_text

_current: ContextVar[dict[str, str | None] | None] = ContextVar("agentlightning_environment", default=None)
"""The overlay of the current attempt; a value of None marks a deleted variable."""


@contextmanager
def overlay(variables: Mapping[str, str]) -> Generator[None]:
    """Within the block, `variables` override those of the process in this context's `os.environ`."""
    token = _current.set(dict(variables))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def own_variables(variables: Mapping[str, str]) -> Generator[None]:
    """Within the block, the process itself has `variables`; whatever was set or deleted there, it has its own again
    afterwards."""
    own = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - own.keys():
            del os.environ[name]
        os.environ.update(own)


@contextmanager
def process_variables(variables: Mapping[str, str]) -> Generator[None]:
    """Within the block, the process itself has `variables`, for agent code that configures the whole process (including
    C libraries). Afterwards the original values are restored; other variables set in the block remain."""
    own = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in own.items():
            if os.environ.get(name) != variables[name]:
                continue
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def check_variables(fields: Mapping[str, str], hidden: Sequence[str]) -> dict[str, str]:
    """Validate the map from variables to task fields. Raises ConfigError for a variable that controls what is
    executed or where calls go, and for a hidden field: tasks are untrusted data."""
    for name, key in fields.items():
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"env: {name!r} is not a valid name of an environment variable")
        if _RESERVED.fullmatch(name.upper()):
            raise ConfigError(
                f"env: the variable {name} decides what is run or where calls go, so no task may set it; "
                "choose another name"
            )
        if key in hidden:
            raise ConfigError(f"env: the variable {name} would show the field {key!r}, which hide keeps from the agent")
    return dict(fields)


_RESERVED: Final = re.compile(
    r"(LD|DYLD|GCONV|PYTHON|PERL5|PERL|RUBY|GEM|NODE|NPM|JAVA|JDK|DOTNET|GIT|SSH|SSL|BASH|AGL|OTEL|OPENAI|ANTHROPIC)(_.*)?"
    r"|(PYTHON|PERL5|RUBY|CLASS).+|(.*_)?PROXY|PATH|HOME|SHELL|IFS|ENV|PS4|PAGER|EDITOR|VISUAL|PWD|TMPDIR|TRACEPARENT"
    r"|_JAVA_OPTIONS|.*_CA_BUNDLE"
)


def task_variables(task: Any, fields: Mapping[str, str]) -> dict[str, str]:
    """Fields of a dict task as environment variables: text unchanged, other values as JSON. `fields` maps variables to
    fields. Raises AgentError for a missing field, or a value that a variable cannot hold."""
    values = cast(Mapping[str, Any], task) if isinstance(task, Mapping) else {}
    found: dict[str, str] = {}
    for name, key in fields.items():
        if key not in values:
            raise AgentError(
                f"the variable {name} is to hold the task's field {key!r}, but the task has:"
                f" {', '.join(map(str, values)) or 'no fields'}"
            )
        value = found[name] = as_text(values[key])
        if "\0" in value or len(value.encode(errors="replace")) > MAX_VARIABLE_BYTES:
            raise AgentError(
                f"the task's field {key!r} cannot be held by the variable {name}: it has a NUL, or more than "
                f"{MAX_VARIABLE_BYTES} bytes; read it from AGL_TASK or standard input"
            )
    return found


MAX_VARIABLE_BYTES = 100_000
"""Linux limits one variable to 128 KiB."""


PROCESS_STATE: Final = (
    *((os, name) for name in ("chdir", "fchdir")),
    *((signal, name) for name in ("signal", "alarm", "setitimer")),
    *((kind, "__enter__") for kind in (contextlib.redirect_stdout, contextlib.redirect_stderr)),
    (BaseProcess, "start"),
)
"""Functions that change what all attempts in a process share, or start another one that attempts may share."""


class ProcessState:
    """Says who wants to change the state of this process. Without `on_change`, it may be changed."""

    on_change: Callable[[str], None] | None = None
    on_bare_use: Callable[[str], None] | None = None
    """Told of each variable that is read outside of any attempt's, and of programs that are started there."""

    def watch(self, owner: Any, name: str) -> None:
        """Before the agent is imported, so that it finds the function by every name."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.on_change is not None:
                self.on_change(f"{owner.__name__}.{name}".removesuffix(".__enter__"))
            return original(*args, **kwargs)

        setattr(owner, name, watched)


process_state = ProcessState()


class _Environ(os._Environ[str]):  # pyright: ignore[reportPrivateUsage]
    """`os.environ` with the overlay of the current context on top."""

    def __getitem__(self, key: str) -> str:
        layer = _current.get()
        if layer is None and process_state.on_bare_use is not None:
            process_state.on_bare_use(key)
        if layer is None or key not in layer:
            return super().__getitem__(key)
        value = layer[key]
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        layer = _current.get()
        if layer is None:
            super().__setitem__(key, value)
        else:
            self.encodekey(key)  # raises the usual TypeError for a value that is not a string
            self.encodevalue(value)
            layer[key] = value

    def __delitem__(self, key: str) -> None:
        layer = _current.get()
        if layer is None:
            super().__delitem__(key)
        else:
            self[key]
            layer[key] = None

    def __iter__(self) -> Iterator[str]:
        layer = _current.get()
        if layer is None:
            yield from super().__iter__()
            return
        yield from [key for key in super().__iter__() if key not in layer]
        yield from [key for key, value in layer.items() if value is not None]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def install() -> None:
    """Replace the class of `os.environ` in this process. Idempotent."""
    if isinstance(os.environ, _Environ):
        return
    os.environ.__class__ = _Environ
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def popen(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) <= _ENV_POSITION and kwargs.get("env") is None:
            if _current.get() is not None:
                kwargs["env"] = os.environ.copy()
            elif process_state.on_bare_use is not None:
                process_state.on_bare_use("subprocess.Popen")
        original(self, *args, **kwargs)

    subprocess.Popen.__init__ = popen


_ENV_POSITION = 10
"""Where `env` stands among the positional parameters of Popen, `args` being the first."""


def carry_context() -> None:
    """Have the threads of a ThreadPoolExecutor run each function in the context that it was submitted in, as
    `asyncio.to_thread` does. Idempotent.

    asyncio's tasks carry it by themselves. For other threads and for processes no attempt is guessed: what they do is
    refused where attempts share a process (`tracing.scope.uncertainty`), and attempts of that agent get processes of
    their own, in which everything belongs to the one that runs."""
    submit = ThreadPoolExecutor.submit
    if hasattr(submit, "__wrapped__"):
        return

    @functools.wraps(submit)
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        context, submitted, futures = copy_context(), Lock(), list[Future[Any]]()
        submitted.acquire()

        def run() -> Any:
            with submitted:  # until `submit` has returned
                calls_of_pools.future = futures[0]
            try:
                return context.run(fn, *args, **kwargs)
            finally:
                del calls_of_pools.future

        try:
            futures.append(submit(self, run))
        finally:
            submitted.release()
        return futures[0]

    ThreadPoolExecutor.submit = submit_in_context
