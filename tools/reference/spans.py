"""The page of names and attributes of spans, from `span.py`."""

from __future__ import annotations

from agentlightning import span
from tools.reference.docstrings import cell, module_constants
from tools.reference.python_names import MADE

NAMES = ("REWARD", "MESSAGE", "PROMPT", "RESPONSE", "FEEDBACK", "OBJECT", "EXCEPTION", "OPERATION", "ANNOTATION")
"""The constants that are names of spans; model calls and tools have those of OpenTelemetry."""
VALUES = ("SENT_ONCE", "TURN_LIMIT_REACHED", "MAX_REWARD", "TOKEN_ATTRIBUTES")
"""Constants that are neither."""
START = f"""# Spans

{MADE}
A span is one recorded operation of an attempt, in the shape of OpenTelemetry: a name, times, attributes, events. Names
and attributes are those of OpenTelemetry's GenAI conventions where it has them, and `agentlightning.*` otherwise. Spans
of an attempt are ordered by `sequence_id`, which the store assigns, not by time. Traces of other conventions are
[translated](../guides/operations/opentelemetry.md).

Only the gateway and the store write what training relies on: tokens, log-probabilities, versions and marks. An agent
that sends such an attribute has it removed, and the span says so (`{span.STRIPPED}`).
"""


def attributes() -> dict[str, str]:
    """Attribute -> its meaning."""
    found = module_constants(span)
    return {str(value): text for name, (value, text) in found.items() if name not in {*NAMES, *VALUES}}


def names() -> dict[str, str]:
    """Name of a span -> its meaning."""
    found = module_constants(span)
    return {str(value): text for name, (value, text) in found.items() if name in NAMES}


def page() -> str:
    """The whole page."""
    lines = [START, "## Names of spans\n", "| span | |", "| --- | --- |"]
    lines.append(
        "| `chat MODEL`, `text_completion MODEL` | A model call, with OpenTelemetry's `gen_ai.operation.name`. |"
    )
    lines.append("| `execute_tool NAME` | A call of a tool. |")
    lines += [f"| `{name}` | {cell(text)} |" for name, text in names().items()]
    every = attributes()
    for title, standard in (("Attributes of OpenTelemetry", True), ("Attributes of Agent Lightning", False)):
        lines += [f"\n## {title}\n", "| attribute | |", "| --- | --- |"]
        lines += [
            f"| `{name}` | {cell(text)} |"
            for name, text in every.items()
            if standard is not name.startswith("agentlightning.")
        ]
    return "\n".join(lines) + "\n"
