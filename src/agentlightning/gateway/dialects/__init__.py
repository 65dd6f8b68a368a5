"""The wire formats: each reads requests and writes answers as its official SDK expects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentlightning.gateway.dialects.base import ApiPath, Dialect
from agentlightning.gateway.dialects.chat import CHAT, COMPLETIONS, EMBEDDINGS
from agentlightning.gateway.dialects.messages import MESSAGES
from agentlightning.gateway.dialects.responses import RESPONSES

DIALECTS: Final[Mapping[ApiPath, Dialect]] = {
    "chat/completions": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "embeddings": EMBEDDINGS,
}
"""By the path below `/v1/`."""
