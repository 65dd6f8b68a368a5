"""The formats models write tool calls in, by name.

Called by a chat format, which finds out which one a template writes (`agentlightning.chat.hf`). Nothing here
knows a template or a tokenizer, but for `declared`, which reads what a tokenizer says of itself.
"""

from typing import Final

from agentlightning.chat.tool_calls.deepseek import DEEPSEEK
from agentlightning.chat.tool_calls.format import CallFormat
from agentlightning.chat.tool_calls.hermes import HERMES
from agentlightning.chat.tool_calls.llama3 import LLAMA3
from agentlightning.chat.tool_calls.mistral import MISTRAL
from agentlightning.chat.tool_calls.pythonic import PYTHONIC
from agentlightning.chat.tool_calls.qwen_coder import QWEN_CODER
from agentlightning.errors import ConfigError

FORMATS: Final[dict[str, CallFormat]] = {
    format.name: format for format in (HERMES, QWEN_CODER, LLAMA3, PYTHONIC, MISTRAL, DEEPSEEK)
}


def named(name: str) -> CallFormat:
    """The format of that name. Raises ConfigError, listing them."""
    if name not in FORMATS:
        raise ConfigError(f"tool_calls={name!r} is not a format of tool calls; use one of {', '.join(FORMATS)}")
    return FORMATS[name]
