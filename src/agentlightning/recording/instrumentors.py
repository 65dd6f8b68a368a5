"""`track_all`: switches on the instrumentations of agent libraries that are installed.

They are found by the entry points that OpenTelemetry's own launcher reads (`opentelemetry_instrumentor`), which
OpenInference, OpenTelemetry's GenAI packages, OpenLLMetry and others declare. What they trace within a session is
recorded in it; their conventions are translated (`tracing/conventions.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.tracing.tracer import install_globally, tracer_provider

logger = logging.getLogger("agentlightning.recording")

GROUP: Final = "opentelemetry_instrumentor"
INSTALL: Final = "pip install openinference-instrumentation-openai (or -anthropic, -langchain, ...)"
CONTENT_VARIABLES: Final = {
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "span_only",
}
"""Without these, OpenTelemetry's GenAI instrumentations record calls without messages. Values that are set stay."""
_NO_AGENTS: Final = """
aio-pika aiohttp-client aiohttp-server aiokafka aiopg asgi asyncclick asyncio asyncpg boto boto3 cassandra celery click
confluent_kafka dbapi django elasticsearch falcon fastapi flask grpc_aio_client grpc_aio_server grpc_client grpc_server
httpx jinja2 kafka logging mysql mysqlclient pika psycopg psycopg2 pymemcache pymongo pymssql pymysql pyramid redis
remoulade requests sqlalchemy sqlite3 starlette system_metrics threading tornado tortoiseorm urllib urllib3 wsgi
"""
INFRASTRUCTURE: Final = frozenset(_NO_AGENTS.split())
"""Libraries that are no agents: they are switched on by name alone."""


@dataclass
class Instrumentation(AbstractContextManager["Instrumentation"]):
    """What `track_all` has switched on, until `stop` or the end of its block.

    >>> with agl.track_all() as instrumentation:
    ...     failed = instrumentation.failed
    """

    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Names of those that could not be switched on, and why."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Names of those that were left as they are, and why."""
    _switch_off: dict[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]], repr=False)

    @property
    def switched_on(self) -> tuple[str, ...]:
        """Names of the libraries that are recorded now."""
        return tuple(self._switch_off)

    def stop(self) -> None:
        """Switch off what was switched on; idempotent. What fails is logged and counts as failed."""
        while self._switch_off:
            name, switch_off = self._switch_off.popitem()
            try:
                switch_off()
            except Exception as error:  # noqa: BLE001  code of other libraries
                self.failed[name] = f"it cannot be switched off: {type(error).__name__}: {error}"
                logger.warning("the instrumentation of %s cannot be switched off: %s", name, error)

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _start(self, name: str, entries: Iterable[EntryPoint]) -> None:
        """Switch on the first package that works for a library; two would record each call twice."""
        problems: list[str] = []
        for entry in entries:
            package = _package(entry)
            if name in self._switch_off:
                self.skipped[package] = f"{name} is recorded by another package already"
                continue
            try:
                instrumentor: Any = entry.load()()
                if _is_on(instrumentor):
                    self.skipped[name] = "it was switched on before"
                    return
                instrumentor.instrument(tracer_provider=tracer_provider())
                if _is_on(instrumentor) is False:
                    raise RuntimeError(
                        "its library is not installed, or in a version that the instrumentation does not support"
                    )
            except Exception as error:  # noqa: BLE001  code of other libraries: importing and patching it
                problems.append(f"{package}: {type(error).__name__}: {error}")
                continue
            self._switch_off[name] = instrumentor.uninstrument
        if problems:
            where = self.skipped if name in self._switch_off else self.failed
            where[name] = "; ".join(problems)


def track_all(*, only: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> Instrumentation:
    """Record what installed instrumentations trace: OpenInference's, OpenTelemetry's GenAI packages, OpenLLMetry's, and
    those that frameworks bring along (pydantic-ai; AutoGen and others that trace with OpenTelemetry by themselves).

    only: names of libraries to switch on, `requests` and the like included, which are not by default. exclude: names of
    libraries to leave alone. Returns what was switched on and what failed, and says so in the log; its `stop`, or the
    end of its block, switches it off again. Raises ConfigError for a name in `only` that no installed package has.

        >>> instrumentation = agl.track_all(exclude=["openai"])
        >>> instrumentation.stop()
    """
    found = _installed()
    chosen = [name for name in found if name not in INFRASTRUCTURE] if only is None else list(only)
    for name in chosen:
        if name not in found:
            raise ConfigError(
                f"only={name!r}: no installed package instruments it; those that are installed:"
                f" {', '.join(sorted(found)) or 'none'}. {INSTALL}"
            )
    for variable, value in CONTENT_VARIABLES.items():
        os.environ.setdefault(variable, value)
    install_globally()
    instrumentation = Instrumentation()
    for name in chosen:
        if name not in exclude:
            instrumentation._start(name, found[name])  # pyright: ignore[reportPrivateUsage]
    logger.info("track_all has switched on: %s", ", ".join(instrumentation.switched_on) or "nothing")
    if only is None and not chosen:
        logger.warning("track_all records nothing: no instrumentation of an agent library is installed. %s", INSTALL)
    for name, why in instrumentation.failed.items():
        logger.warning("track_all cannot switch on %s: %s", name, why)
    return instrumentation


def _installed() -> dict[str, list[EntryPoint]]:
    """By name of the library: an entry of each package that instruments it."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    if find_spec("pydantic_ai") is not None:
        found.setdefault("pydantic_ai", [EntryPoint("pydantic_ai", f"{__name__}:PydanticAI", GROUP)])
    return {name: _by_package(entries) for name, entries in found.items()}


def _by_package(entries: Iterable[EntryPoint]) -> list[EntryPoint]:
    """One entry for each package, OpenInference's first: it records messages in every version."""
    packages = {_package(entry): entry for entry in entries}
    return [packages[name] for name in sorted(packages, key=lambda name: (not name.startswith("openinference"), name))]


def _package(entry: EntryPoint) -> str:
    return entry.value.partition(":")[0] if entry.dist is None else entry.dist.name


def _is_on(instrumentor: Any) -> bool | None:
    """None where it does not say."""
    return getattr(instrumentor, "is_instrumented_by_opentelemetry", None)


class PydanticAI:
    """Its own instrumentation, as those of other packages."""

    def instrument(self, **_: Any) -> None:
        import_module("pydantic_ai").Agent.instrument_all(True)

    def uninstrument(self) -> None:
        import_module("pydantic_ai").Agent.instrument_all(False)
