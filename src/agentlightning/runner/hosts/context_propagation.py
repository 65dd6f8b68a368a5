"""Carries the context of an attempt into the threads of a ThreadPoolExecutor, as `asyncio.to_thread` does.

asyncio's tasks carry it by themselves. For other threads and for processes no attempt is guessed: what they do is
refused where attempts share a process (`tracing.scope.uncertainty`), and attempts of that agent get processes of their
own, in which everything belongs to the one that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from typing import Any

from agentlightning.tracing.scope import calls_of_pools


def install() -> None:
    """Patch this process. Idempotent."""
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
