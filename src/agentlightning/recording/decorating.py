"""Makes a decorator of something that opens a block: each call of the function runs in a block of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

from agentlightning.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def run_within(
    function: Callable[P, R],
    open_block: Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]],
    door: str,
) -> Callable[P, R]:
    """The function, sync or async, with each call in `open_block(args, kwargs)`. `door` is named in the ConfigError for
    a generator, whose code runs between other code."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{door} cannot decorate the generator {function.__qualname__}: its code runs between other code; open"
            f" `with agl.{door}()` around the loop that consumes it"
        )
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def within_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            with open_block(args, kwargs):
                return await function(*args, **kwargs)

        return cast(Callable[P, R], within_async)

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        with open_block(args, kwargs):
            return function(*args, **kwargs)

    return within
