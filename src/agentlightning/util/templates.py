"""Renders Jinja templates that others have written, a model among them: they change nothing, and end.

Values are copied, so that a template cannot rewrite what a reward sees afterwards. A template may run for SECONDS and
write CHARACTERS: loops are stopped by a trace of the lines of the template, and operations that make a large text of a
small one (`"x" * 10**9`) are refused by their numbers.
"""

from __future__ import annotations

import copy
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any, Final

from agentlightning.errors import AgentLightningError, ConfigError

SECONDS: Final = 2.0
CHARACTERS: Final = 10_000_000
LARGEST: Final = 1_000_000
"""The largest number that an operation on texts, or a power, is given."""
SIZED: Final = ("batch", "center", "indent", "slice", "truncate", "wordwrap")
"""Filters whose arguments are sizes."""
WIDTHS: Final = re.compile(
    r"(?:%(?:\([^)%]*+\))?[-+ #0]*+(?:\d*+\.)?|\{[^{}:]*+:(?:[^{}]|\{[^{}]*\})*?)(\d{7,})|%[^%a-zA-Z]*\*|:[^{}]*\{"
)
"""In a text that is a format: a large width or precision, or (no group) one that is a value."""
TEMPLATE_FILE: Final = "<template>"
"""What Jinja calls the code of a template that is not in a file."""


class TemplateLimitError(AgentLightningError):
    """A template that does not end, or writes too much."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a Jinja template. Raises jinja2.UndefinedError for a missing value, jinja2.TemplateError for what is no
    template, TemplateLimitError, and ConfigError for a value that cannot be copied."""
    try:
        own = copy.deepcopy(dict(values))
    except Exception as error:
        raise ConfigError(f"the values of a Jinja prompt cannot be copied ({error}); give it plain data") from error
    with bounded():
        return check_length(sandbox().from_string(template).render(**own))


def check_length(text: str) -> str:
    """Raises TemplateLimitError for a text that is too long."""
    if len(text) > CHARACTERS:
        raise TemplateLimitError(f"the template writes {len(text)} characters; {CHARACTERS} are the most")
    return text


@contextmanager
def bounded() -> Generator[None]:
    """Jinja code that runs in this thread for longer than SECONDS is stopped by a TemplateLimitError, which is also
    raised for what no memory holds."""
    deadline, limit, before = time.monotonic() + SECONDS, time.thread_time() + SECONDS, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != TEMPLATE_FILE:
            return None
        # A busy machine may hold this thread up; the clock of the thread says how long it ran, and is slower to read.
        if time.monotonic() > deadline and time.thread_time() > limit:
            raise TemplateLimitError(f"the template runs for more than {SECONDS:g} s; look for a loop in it")
        return trace

    sys.settrace(trace)
    try:
        yield
    except MemoryError as error:
        raise TemplateLimitError("the template makes a text that does not fit into memory") from error
    finally:
        sys.settrace(before)


@cache
def sandbox() -> Any:
    """The environment in which templates are rendered."""
    from jinja2.exceptions import SecurityError
    from jinja2.runtime import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def check(*numbers: Any) -> None:
        for each in numbers:
            if isinstance(each, int) and abs(each) > LARGEST:
                raise SecurityError(f"an operation is given {each}, and {LARGEST} is the most")
            if isinstance(each, tuple):
                check(*each)

    def check_format(text: str, *values: Any) -> None:
        widths = WIDTHS.findall(text)
        check(*map(int, filter(None, widths)), *(values if "" in widths else ()))

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # with what the function says of its own first argument
        def call(*args: Any, **kwargs: Any) -> Any:
            check(*args[1:], *kwargs.values())
            return function(*args, **kwargs)

        return call

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                check_format(left, right)
            elif operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
                check(left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            method = getattr(obj, "__wrapped__", obj)  # Jinja wraps those that format.
            if isinstance(text := getattr(method, "__self__", None), str):
                given = *args, *kwargs.values()
                check_format(text, *given) if method.__name__.startswith("format") else check(*given)
            return super().call(context, obj, *args, **kwargs)

    made = Sandbox(undefined=StrictUndefined)
    made.filters |= {name: checked(made.filters[name]) for name in SIZED}
    made.filters["format"] = lambda text, *args, **named: made.call_binop(None, "%", str(text), named or args)  # pyright: ignore[reportUnknownLambdaType]
    del made.globals["lipsum"]  # as much text as is asked for
    return made
