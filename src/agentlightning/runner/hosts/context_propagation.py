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
        context, submitted = copy_context(), Future[Future[Any]]()

        def run() -> Any:
            calls_of_pools.future = submitted.result()
            try:
                return context.run(fn, *args, **kwargs)
            finally:
                del calls_of_pools.future

        future = submit(self, run)
        submitted.set_result(future)
        return future

    ThreadPoolExecutor.submit = submit_in_context
