"""Finds the providers that a command uses in its environment, so that its calls are recorded and still go there.

Used by `agl run`, and by runs that train no model, if neither a model nor routes are given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from agentlightning.gateway.config import GatewayConfig, Provider, RouteRule

if TYPE_CHECKING:
    from agentlightning.config import TrainConfig

OPENAI_URL = "https://api.openai.com/v1"
ANTHROPIC_URL = "https://api.anthropic.com"
_OPENAI_MODELS = ("gpt-*", "o[0-9]*", "chatgpt-*", "codex-*", "text-embedding-*")


def inherited_config(environment: Mapping[str, str]) -> GatewayConfig | None:
    """Routes to the providers whose keys or URLs are in the environment; None if there are none.

    With one provider, all calls go there. With both, the model name decides: Claude models go to Anthropic, and models
    of neither provider go to the one with a URL other than its default.
    """
    paths = ("chat/completions", "completions", "responses", "embeddings")
    openai = _provider(environment, "openai", OPENAI_URL, ("OPENAI_BASE_URL", "OPENAI_API_BASE"), paths=paths)
    token = environment.get("ANTHROPIC_AUTH_TOKEN")
    anthropic = _provider(environment, "anthropic", ANTHROPIC_URL, ("ANTHROPIC_BASE_URL",), token, dialect="anthropic")
    providers = tuple(provider for provider in (openai, anthropic) if provider is not None)
    if not providers:
        return None
    if openai is None or anthropic is None:
        rules: tuple[RouteRule, ...] = (RouteRule(provider=providers[0].name),)
    elif anthropic.base_urls != (ANTHROPIC_URL,) and openai.base_urls == (OPENAI_URL,):
        rules = (
            *(RouteRule(model=model, provider="openai") for model in _OPENAI_MODELS),
            RouteRule(provider="anthropic"),
        )
    else:
        rules = (RouteRule(model="claude*", provider="anthropic"), RouteRule(provider="openai"))
    return GatewayConfig(providers=providers, routes=rules)


def _provider(
    environment: Mapping[str, str],
    name: str,
    default: str,
    urls: Sequence[str],
    token: str | None = None,
    **settings: Any,
) -> Provider | None:
    """The provider whose key or `token` is in the environment, or whose address is in one of its variables `urls`."""
    key = environment.get(f"{name.upper()}_API_KEY")
    url = next((environment[each] for each in urls if environment.get(each)), None)
    if not (key or token or url):
        return None
    return Provider(
        name=name,
        base_urls=(url or default,),
        api_key=SecretStr(key) if key else None,
        headers={} if key or not token else {"authorization": f"Bearer {token}"},
        all_paths=True,
        retries=0,  # the command retries as it does without us
        **settings,
    )


def with_own_providers(config: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """The settings of a run that trains no model, with the providers of this environment where [gateway] names nothing:
    its agent's calls are recorded, and go where they went before. They are not kept with the run."""
    if config.gateway.providers or config.gateway.routes or config.gateway.models:
        return config
    found = inherited_config(os.environ)
    if found is None:
        return config
    named = ", ".join(f"{each.name} at {each.base_urls[0]}" for each in found.providers)
    say(f"calls of the agent are recorded and go to {named}, as the environment says")
    return config.with_section("gateway", providers=found.providers, routes=found.routes)
