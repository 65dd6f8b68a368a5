"""What a server says about itself, in Prometheus' text format: `/metrics`.

Counting is a few additions to plain integers, so that it costs nothing that can be measured; what is counted in the
database is asked of the store when somebody looks, at most once a second, and less often where it is slow to answer.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.instrumented import WAITING_CALLS, CallRecord
from agentlightning.util.api_key import api_key

PATH: Final = "/metrics"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CACHE_SECONDS: Final = 1.0
"""How long what the database said is good for."""
CACHE_SHARE: Final = 50.0
"""It is good for so many times what asking took, where that is longer: a million rollouts are no small count."""
LATENCIES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the classes of latency, in seconds."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Source = Callable[[], Iterable[Metric]]
"""Gives figures of another part when somebody looks."""


class Classes:
    """A histogram: how many values fell under each bound, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets


class Metrics:
    """Counts calls of the store (as an `Observer`) and HTTP requests; `render` adds what the database knows.

    `sources` give the figures of other parts. One object for one server.
    """

    def __init__(self, store: LightningStoreBase, sources: Iterable[Source] = ()) -> None:
        self._store = store
        self._sources = list(sources)
        self._calls: dict[str, Classes] = {}
        self._errors: Counter[tuple[str, str]] = Counter()
        self._under_way: Counter[str] = Counter()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._request_seconds: dict[str, Classes] = {}
        self._open_requests = 0
        self._claims: Counter[str] = Counter()
        self._spans = 0
        self._batches = Classes(SIZES)
        self._taking = threading.Lock()
        self._taken, self._queued, self._decided = Classes(SIZES), Classes(LATENCIES), Classes(LATENCIES)
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._known: list[Metric] = []
        self._ask_again = float("-inf")
        self._asking = asyncio.Lock()

    def add_source(self, source: Source) -> None:
        """Show the figures of another part too."""
        self._sources.append(source)

    # -- counting ----------------------------------------------------------------------------------------------------

    def on_start(self, method: str) -> None:
        self._under_way[method] += 1

    def on_end(self, call: CallRecord) -> None:
        method = call.method
        self._under_way[method] -= 1
        if call.error is not None:
            self._errors[method, type(call.error).__name__] += 1
        if not call.waits:
            self._class_of(self._calls, method).add(call.seconds)
        if call.result is not None:
            self._count_result(method, call.arguments, call.result)

    def _count_result(self, method: str, arguments: tuple[Any, ...], result: Any) -> None:
        if method == "add_many_spans":
            self._count_spans(len(result))
        elif method == "add_span":
            self._count_spans(1)
        elif method == "add_packs":
            self._count_spans(sum(packed.pack.count for packed in arguments[0]))
        elif method == "dequeue_many_rollouts":
            for rollout in result:
                self._claims[rollout.queue] += 1
        elif method in ("dequeue_rollout", "start_rollout", "start_attempt"):
            self._claims[result.queue] += 1

    def _count_spans(self, count: int) -> None:
        self._spans += count
        self._batches.add(count)

    def took(self, method: str, waited: float, decided: float, together: int) -> None:
        """As `SqlStore.observe`, from the threads of the store."""
        if method in WAITING_CALLS:
            return
        with self._taking:
            self._taken.add(together)
            self._queued.add(waited)
            self._decided.add(decided)

    def request_began(self) -> None:
        self._open_requests += 1

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """`route` is the path as it was declared, so that ids make no new series; `seconds` is without waiting."""
        self._open_requests -= 1
        self._requests[route, method, status] += 1
        self._class_of(self._request_seconds, route).add(seconds)

    @staticmethod
    def _class_of(classes: dict[str, Classes], name: str) -> Classes:
        found = classes.get(name)
        if found is None:
            found = classes[name] = Classes(LATENCIES)
        return found

    # -- saying ------------------------------------------------------------------------------------------------------

    async def render(self) -> bytes:
        """Everything, as Prometheus reads it."""
        async with self._asking:
            if time.monotonic() > self._ask_again:
                started = time.monotonic()
                self._known = await self._ask()
                now = time.monotonic()
                self._ask_again = now + max(CACHE_SECONDS, CACHE_SHARE * (now - started))
        return generate_latest(_Collected([*self._known, *self._counted(), *self._process.collect()]))

    async def _ask(self) -> list[Metric]:
        """What the database knows. A store that cannot answer is a figure too: `agentlightning_up` is then 0."""
        up = GaugeMetricFamily("agentlightning_up", "Whether the store answers.")
        try:
            counts, queues, workers = await asyncio.gather(
                self._store.statistics(), self._store.query_queues(), self._store.query_workers()
            )
        except AgentLightningError:
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        shown = Counter("stopped" if worker.stats.get("stopped") else worker.status for worker in workers)
        shown.update(dict.fromkeys(("idle", "busy", "lost", "stopped"), 0))
        return [
            up,
            *_database(counts),
            _gauge("queue_waiting", "Rollouts that wait to be claimed.", "queue", {q.name: q.waiting for q in queues}),
            _gauge("queue_open", "Rollouts claimed and unfinished.", "queue", {q.name: q.open for q in queues}),
            _gauge(
                "queue_limit",
                "How many rollouts of a queue may be open at once, where that is limited.",
                "queue",
                {queue.name: queue.limit for queue in queues if queue.limit is not None},
            ),
            _gauge("workers", "Runners by status.", "status", shown),
        ]

    def _counted(self) -> Iterable[Metric]:
        yield _counter("claims", "Attempts started, by queue.", "queue", self._claims)
        yield CounterMetricFamily("agentlightning_spans_received", "Spans kept by this server.", self._spans)
        yield _histogram("spans_per_call", "Spans in one call.", "", {"": self._batches})
        yield _histogram(
            "store_call_seconds", "Calls of the store; those that wait are left out.", "method", self._calls
        )
        yield _histogram("store_queue_seconds", "Before a call was taken into a transaction.", "", {"": self._queued})
        yield _histogram("store_transaction_seconds", "The transaction of a call.", "", {"": self._decided})
        yield _histogram("store_calls_together", "Calls in the transaction of a call.", "", {"": self._taken})
        errors = CounterMetricFamily(
            "agentlightning_store_errors", "Calls that failed, by error.", labels=["method", "error"]
        )
        for labels, number in self._errors.items():
            errors.add_metric(labels, number)
        yield errors
        waiting = {method: self._under_way[method] for method in sorted(WAITING_CALLS)}
        yield _gauge("store_waiters", "Calls that wait for rollouts to come or to finish.", "method", waiting)
        yield from self._http()
        for source in self._sources:
            yield from source()

    def _http(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "agentlightning_http_requests", "Requests answered.", labels=["route", "method", "status"]
        )
        for (route, method, status), number in self._requests.items():
            requests.add_metric([route, method, str(status)], number)
        yield requests
        yield _histogram(
            "http_request_seconds", "Time to answer, without waiting for rollouts.", "route", self._request_seconds
        )
        yield GaugeMetricFamily(
            "agentlightning_http_requests_under_way", "Requests not answered yet.", self._open_requests
        )


class _Collected:
    """What `generate_latest` wants to be given."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def counters(prefix: str, help_text: str, values: Mapping[str, float]) -> Iterable[Metric]:
    """A counter `agentlightning_<prefix>_<name>_total` for each value."""
    for name, value in values.items():
        yield CounterMetricFamily(f"agentlightning_{prefix}_{name}", f"{help_text}: {name.replace('_', ' ')}.", value)


def _database(counts: Mapping[str, int]) -> Iterable[Metric]:
    rollouts = {name.removeprefix("rollouts."): n for name, n in counts.items() if name.startswith("rollouts.")}
    yield _gauge("rollouts", "Rollouts in the store, by status.", "status", rollouts)
    for name in ("attempts", "spans", "resources"):
        if name in counts:
            yield GaugeMetricFamily(f"agentlightning_{name}", f"{name.capitalize()} in the store.", counts[name])
    if "bytes" in counts:
        yield GaugeMetricFamily("agentlightning_store_bytes", "Size of the database.", counts["bytes"])


def _gauge(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = GaugeMetricFamily(f"agentlightning_{name}", help_text, labels=[label])
    for value, number in values.items():
        metric.add_metric([value], number)
    return metric


def _counter(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    metric = CounterMetricFamily(f"agentlightning_{name}", help_text, labels=[label])
    for value, number in values.items():
        metric.add_metric([value], number)
    return metric


def _histogram(name: str, help_text: str, label: str, values: Mapping[str, Classes]) -> Metric:
    metric = HistogramMetricFamily(f"agentlightning_{name}", help_text, labels=[label] if label else [])
    for value, classes in values.items():
        metric.add_metric([value] if label else [], buckets=classes.buckets(), sum_value=classes.sum)
    return metric


def metrics_routes(metrics: Metrics, token: str | None = None) -> list[Route]:
    """`GET /metrics`; with a `token`, for those who present it."""

    async def show(request: Request) -> Response:
        if token is not None and not hmac.compare_digest(api_key(request.headers).encode(), token.encode()):
            message = b"/metrics needs the access token of this server, as `Authorization: Bearer TOKEN`\n"
            return Response(message, 401, {"WWW-Authenticate": "Bearer"}, media_type="text/plain")
        return Response(await metrics.render(), headers={"content-type": CONTENT_TYPE})

    return [Route(PATH, show, methods=["GET"])]
