"""The settings of a policy that a server of the Tinker API trains. Imports neither torch nor the `tinker` package."""

from __future__ import annotations

from pydantic import Field

from agentlightning.util.settings import Section


class TinkerConfig(Section):
    """The server, and what it trains.

    >>> agl.TinkerConfig(url="http://trainer.example:4747", base_model="Qwen/Qwen3-8B").key_env
    'TINKER_API_KEY'
    """

    url: str | None = None
    """The server's address. None: TINKER_BASE_URL, else the hosted service of the `tinker` package."""
    base_model: str | None = None
    """The name of the model there. None: that of `policy.model`, whose tokenizer and chat template are used here."""
    key_env: str = "TINKER_API_KEY"
    """The environment variable that holds the API key, which begins with `tml-`."""
    attention: bool = True
    """Whether the adapter changes attention layers."""
    mlp: bool = True
    """Whether it changes MLP layers."""
    head: bool = False
    """Whether it changes the output head."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """A request that takes longer has failed, and ends the run, which can be resumed."""
    unreachable_seconds: float = Field(default=60.0, gt=0)
    """How long the server may be unreachable while a request waits for it. Needs `url` or TINKER_BASE_URL."""
    telemetry: bool = False
    """Whether the `tinker` package may send the server reports on its use."""
