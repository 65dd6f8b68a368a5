"""Tool-call formats of model families, by name; `agentlightning.chat.hf` detects which one a template uses."""

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


def call_format(name: str) -> CallFormat:
    """The format of this name. Raises ConfigError that lists the known ones."""
    if name not in FORMATS:
        raise ConfigError(f"tool_calls={name!r} is not a format of tool calls; use one of {', '.join(FORMATS)}")
    return FORMATS[name]
