"""One process, many attempts, and each sees its own environment variables.

`install()` makes the existing `os.environ` object, and so every reference to it, read through a context variable:
inside `overlay(variables)` those variables lie over the process's own, and what is set or deleted there stays there.
`subprocess` passes them on; threads and pools carry them with the context they run in (`propagation.py`).

Not covered, because they bypass Python: `os.system`, `os.posix_spawn` and C code that calls `getenv`.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

import orjson

from agentlightning.errors import AgentError, ConfigError

_current: ContextVar[dict[str, str | None] | None] = ContextVar("agentlightning_environment", default=None)
"""The overlay of the current attempt; None marks a variable that was deleted in it."""


@contextmanager
def overlay(variables: Mapping[str, str]) -> Generator[None]:
    """Inside, `os.environ` of this context has `variables` over those of the process."""
    token = _current.set(dict(variables))
    try:
        yield
    finally:
        _current.reset(token)


def current_variables() -> dict[str, str]:
    """What lies over the variables of the process here."""
    return {name: value for name, value in (_current.get() or {}).items() if value is not None}


@contextmanager
def borrowed(variables: Mapping[str, str]) -> Generator[None]:
    """Inside, the process itself has `variables`; afterwards it has its own again, and whatever was set inside stays
    set: for code of the agent's that prepares the whole process, libraries in C included."""
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
    """The map from variables to fields, as it was given. Raises ConfigError for a name that decides what is run, or
    where calls go, and for a field that is hidden from the agent: a task is data, and may come from anywhere."""
    for name, key in fields.items():
        if not name.isidentifier() or not name.isascii():
            raise ConfigError(f"env: {name!r} is no name of an environment variable")
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
    """Fields of a dict task as environment variables; text as it is, other values as JSON. `fields` maps each variable
    to the field it holds. Raises AgentError for a field the task does not have, or that no variable can hold."""
    values = cast(Mapping[str, Any], task) if isinstance(task, Mapping) else {}
    return {name: _fitting(name, key, _text(_field(values, name, key))) for name, key in fields.items()}


def _fitting(name: str, key: str, value: str) -> str:
    if "\0" in value or len(value.encode(errors="replace")) > LONGEST:
        raise AgentError(
            f"the task's field {key!r} cannot be held by the variable {name}: it has a NUL, or more than {LONGEST} "
            "bytes; read it from AGL_TASK or standard input"
        )
    return value


def _field(values: Mapping[str, Any], name: str, key: str) -> Any:
    if key not in values:
        has = ", ".join(map(str, values)) or "no fields"
        raise AgentError(f"the variable {name} is to hold the task's field {key!r}, but the task has: {has}")
    return values[key]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=repr).decode()


LONGEST = 100_000
"""Linux takes 128 KiB for one variable."""


class _Environ(os._Environ[str]):  # pyright: ignore[reportPrivateUsage]
    """`os.environ` with the overlay of the current context on top."""

    def __getitem__(self, key: str) -> str:
        layer = _current.get()
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
            self.encodekey(key)  # the same TypeError as ever for what is not a string
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
    """Switch this process over. Safe to call twice."""
    if isinstance(os.environ, _Environ):
        return
    os.environ.__class__ = _Environ
    original = subprocess.Popen.__init__

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        _popen(self, original, *args, **kwargs)

    subprocess.Popen.__init__ = method


_ENV_POSITION = 10
"""Where `env` stands among the positional parameters of Popen, `args` being the first."""


def _popen(process: subprocess.Popen[Any], original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if _current.get() is not None and len(args) <= _ENV_POSITION and kwargs.get("env") is None:
        kwargs["env"] = cast(Mapping[str, str], os.environ.copy())
    original(process, *args, **kwargs)
