"""Metrics of a server in the text format of Prometheus: `GET /metrics`.

Counters and histograms are plain integers: `Histogram.observe` takes 0.13 microseconds, that of prometheus_client 0.9
to 1.8, and each call of the store makes several. Counts in the database are queried when somebody reads the metrics, at
most once a second, and less often if the query is slow.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.http.endpoint import endpoint
from agentlightning.store.instrumented import WAITING_CALLS, CallRecord

CACHE_SECONDS: Final = 1.0
"""Minimum lifetime of cached counts of the database."""
CACHE_FACTOR: Final = 50.0
"""Lifetime of cached counts as a multiple of the duration of the query, if that is longer."""
LATENCIES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of latencies, in seconds."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Source = Callable[[], Iterable[Metric]]
"""Returns the current metrics of another part."""


class Histogram:
    """The number of values up to each bound, and the sum of all values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = LATENCIES) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """Cumulative counts, as Prometheus expects them."""
        return list(zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True))


class Metrics:
    """Counts calls of the store, as an `Observer`, and HTTP requests; `render` adds counts in the database.

    Each server has its own object.
    """

    def __init__(self, store: LightningStoreBase) -> None:
        self._store = store
        self._sources: list[Source] = []
        self._calls = defaultdict[str, Histogram](Histogram)
        self._errors: Counter[tuple[str, str]] = Counter()
        self._in_progress: Counter[str] = Counter()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._request_seconds = defaultdict[str, Histogram](Histogram)
        self._claims: Counter[str] = Counter()
        self._spans = 0
        self._batches = Histogram(SIZES)
        self._transaction_lock = threading.Lock()
        self._transaction_sizes = Histogram(SIZES)
        self._queue_seconds, self._transaction_seconds = Histogram(), Histogram()
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._database_metrics: list[Metric] = []
        self._cached_until = float("-inf")
        self._query_lock = asyncio.Lock()
        self.process = 0
        """The number of this process, where several serve one port; 0: it is alone."""
        self.others: Callable[[], Awaitable[Mapping[int, bytes]]] | None = None
        """Returns what `render_own` gives in each of the other processes."""

    def add_source(self, source: Source) -> None:
        """Add the metrics of another part."""
        self._sources.append(source)

    # -- observing ---------------------------------------------------------------------------------------------------

    def on_start(self, method: str) -> None:
        self._in_progress[method] += 1

    def on_end(self, call: CallRecord) -> None:
        method = call.method
        self._in_progress[method] -= 1
        if call.error is not None:
            self._errors[method, type(call.error).__name__] += 1
        if not call.waits:
            self._calls[method].observe(call.seconds)
        if (result := call.result) is None:
            return
        if call.spans:
            self._spans += len(call.spans)
            self._batches.observe(len(call.spans))
        elif method == "dequeue_many_rollouts":
            for rollout in result:
                self._claims[rollout.queue] += 1
        elif method in ("dequeue_rollout", "start_rollout", "start_attempt"):
            self._claims[result.queue] += 1

    def took(self, method: str, waited: float, decided: float, together: int) -> None:
        """`SqlStore.observe`: called from the threads of the store."""
        if method in WAITING_CALLS:
            return
        with self._transaction_lock:
            self._transaction_sizes.observe(together)
            self._queue_seconds.observe(waited)
            self._transaction_seconds.observe(decided)

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """`route` is the path template, so that ids create no series; `seconds` excludes waiting for rollouts."""
        self._requests[route, method, status] += 1
        self._request_seconds[route].observe(seconds)

    # -- rendering ---------------------------------------------------------------------------------------------------

    async def render(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        async with self._query_lock:
            if time.monotonic() > self._cached_until:
                started = time.monotonic()
                self._database_metrics = await self._query_database()
                now = time.monotonic()
                self._cached_until = now + max(CACHE_SECONDS, CACHE_FACTOR * (now - started))
        own: Iterable[Metric] = self._own_metrics()
        if self.others is not None:
            texts = await self.others()
            others = {number: text_string_to_metric_families(text.decode()) for number, text in texts.items()}
            own = _by_process({self.process: own, **others})
        return generate_latest(_Registry([*self._database_metrics, *own]))

    def render_own(self) -> bytes:
        """The metrics of this process, without the counts of the database."""
        return generate_latest(_Registry(self._own_metrics()))

    def _own_metrics(self) -> Iterable[Metric]:
        return *self._observed_metrics(), *self._process.collect()

    async def _query_database(self) -> list[Metric]:
        """The counts of the database. `agentlightning_up` is 0 if the store fails."""
        up = "Whether the store answers."
        try:
            counts, queues, workers = await asyncio.gather(
                self._store.statistics(), self._store.query_queues(), self._store.query_workers()
            )
        except AgentLightningError:
            return [metric_of("up", up, 0)]
        prefix, totals = "rollouts.", ("attempts", "spans", "resources", "store_bytes")
        rollouts = {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}
        statuses = Counter("stopped" if worker.stats.get("stopped") else worker.status for worker in workers)
        statuses.update(dict.fromkeys(("idle", "busy", "lost", "stopped"), 0))
        return [
            metric_of("up", up, 1),
            metric_of("rollouts", "Rollouts in the store, by status.", rollouts, "status"),
            *(
                metric_of(name, f"{own.capitalize()} in the store.", counts[own])
                for name in totals
                if (own := name.removeprefix("store_")) in counts
            ),
            metric_of(
                "queue_waiting", "Rollouts that wait to be claimed.", {q.name: q.waiting for q in queues}, "queue"
            ),
            metric_of("queue_open", "Rollouts claimed and unfinished.", {q.name: q.open for q in queues}, "queue"),
            metric_of(
                "queue_limit",
                "How many rollouts of a queue may be open at once, where that is limited.",
                {queue.name: queue.limit for queue in queues if queue.limit is not None},
                "queue",
            ),
            metric_of("workers", "Runners by status.", statuses, "status"),
        ]

    def _observed_metrics(self) -> Iterable[Metric]:
        yield metric_of("claims", "Attempts started, by queue.", self._claims, "queue", kind=CounterMetricFamily)
        yield metric_of("spans_received", "Spans kept by this server.", self._spans, kind=CounterMetricFamily)
        yield _histogram("spans_per_call", "Spans in one call.", {"": self._batches})
        yield _histogram(
            "store_call_seconds", "Calls of the store; those that wait are left out.", self._calls, "method"
        )
        yield _histogram(
            "store_queue_seconds", "Before a call was taken into a transaction.", {"": self._queue_seconds}
        )
        yield _histogram("store_transaction_seconds", "The transaction of a call.", {"": self._transaction_seconds})
        yield _histogram("store_calls_together", "Calls in the transaction of a call.", {"": self._transaction_sizes})
        yield metric_of(
            "store_errors", "Calls that failed, by error.", self._errors, "method", "error", kind=CounterMetricFamily
        )
        waiting = {method: self._in_progress[method] for method in sorted(WAITING_CALLS)}
        yield metric_of("store_waiters", "Calls that wait for rollouts to come or to finish.", waiting, "method")
        labels = "route", "method", "status"
        yield metric_of("http_requests", "Requests answered.", self._requests, *labels, kind=CounterMetricFamily)
        yield _histogram(
            "http_request_seconds", "Time to answer, without waiting for rollouts.", self._request_seconds, "route"
        )
        for source in self._sources:
            yield from source()


class _Registry(list[Metric]):
    """With the interface that `generate_latest` expects."""

    def collect(self) -> list[Metric]:
        return self


def _by_process(processes: Mapping[int, Iterable[Metric]]) -> Iterable[Metric]:
    """The metrics of several processes, each sample with the label `process`. They are not added up: after a process
    was started again, the sum would fall, which Prometheus takes for a restart of all."""
    families: dict[str, Metric] = {}
    for number, metrics in sorted(processes.items()):
        for metric in metrics:
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += [each._replace(labels={**each.labels, "process": str(number)}) for each in metric.samples]
    return families.values()


def counters(prefix: str, help_text: str, values: Mapping[str, float]) -> Iterable[Metric]:
    """A counter `agentlightning_<prefix>_<name>_total` for each value."""
    for name, value in values.items():
        yield CounterMetricFamily(f"agentlightning_{prefix}_{name}", f"{help_text}: {name.replace('_', ' ')}.", value)


def metric_of(
    name: str,
    help_text: str,
    values: float | Mapping[str, float] | Mapping[tuple[Any, ...], float],
    *labels: str,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """`values` by their label, or by several; a single one has none."""
    metric = kind(f"agentlightning_{name}", help_text, labels=labels)
    for value, number in values.items() if isinstance(values, Mapping) else [((), values)]:
        metric.add_metric([value] if isinstance(value, str) else [*map(str, value)], number)
    return metric


def _histogram(name: str, help_text: str, values: Mapping[str, Histogram], *labels: str) -> Metric:
    metric = HistogramMetricFamily(f"agentlightning_{name}", help_text, labels=labels)
    for value, histogram in values.items():
        metric.add_metric([value] if labels else [], buckets=histogram.buckets(), sum_value=histogram.sum)
    return metric


def metrics_routes(metrics: Metrics, token: str | None = None) -> list[Route]:
    """`GET /metrics`; with a `token`, requests must carry it."""

    async def show(request: Request) -> Response:
        return Response(await metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return [Route("/metrics", endpoint(show, token), methods=["GET"])]
