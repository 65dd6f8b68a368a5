"""Tools, calls and results as the text of messages, for chat templates that have no place for them.

In Hermes' format: the system message lists the tools between `<tools>` and `</tools>`, one JSON object a line; a call
is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in an assistant's turn; results follow as a turn of the
user, each between `<tool_response>` and `</tool_response>`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from agentlightning.chat.base import Message

OFFER: Final = """\
You can call tools. They are listed here, one JSON object a line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object:
<tool_call>
{{"name": "the tool's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>
You may call several, one after another. Results come back between <tool_response> and </tool_response>."""


def offer_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]], takes_system: bool) -> list[Message]:
    """The messages with the tools in the system message, or before the first message of the user where the template
    takes no system message."""
    offer = OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    found = [*messages]
    if takes_system and not (found and found[0]["role"] == "system"):
        return [{"role": "system", "content": offer}, *found]
    place = 0 if takes_system else next((at for at, each in enumerate(found) if each["role"] == "user"), None)
    if place is None:
        return [{"role": "user", "content": offer}, *found]
    own = found[place]["content"]
    before, after = (own, offer) if takes_system else (offer, own)
    found[place] = {**found[place], "content": _joined(before, after)}
    return found


def write_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls in the content of their turns."""
    found: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            text = "\n".join(f"<tool_call>\n{_object(call['function'])}\n</tool_call>" for call in calls)
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = _joined(message.get("content") or "", text, "\n")
        found.append(message)
    return found


def _object(function: dict[str, Any]) -> str:
    """A call in JSON; arguments that are not JSON are a string."""
    arguments = function["arguments"]
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def write_results(messages: Sequence[Message]) -> list[Message]:
    """The messages with results as turns of the user; what the user writes right after them is in the same turn."""
    found: list[Message] = []
    follows = False
    for message in messages:
        result = message["role"] == "tool"
        content = message["content"]
        if result:
            content = f"<tool_response>\n{content}\n</tool_response>"
        if follows and (result or message["role"] == "user"):
            found[-1] = {"role": "user", "content": _joined(found[-1]["content"], content, "\n")}
            follows = result
            continue
        follows = result
        found.append({"role": "user", "content": content} if result else message)
    return found


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents as one; lists hold images too."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}" if first and second else first or second
    lists = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*lists[0], *lists[1]]
