"""The configuration of a gateway: providers with their credentials, limits and prices; budgets, routes, and rules that
recognize agents.

From `agl serve --routes FILE`, the section `[gateway]` of a training run, or Python.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from fnmatch import fnmatchcase
from typing import Final, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from agentlightning.engine.servers.config import ServedModel
from agentlightning.errors import ConfigError
from agentlightning.gateway.answer import Usage
from agentlightning.gateway.dialects.base import ApiPath
from agentlightning.transport.options import ConnectOptions, Proxy, secrets_of, without_credentials
from agentlightning.util.settings import AtLeastOne, Section

MAX_NAME_CHARACTERS: Final = 256
COUNT_TOKENS_PATH: Final = "messages/count_tokens"
"""Served wherever `messages` is."""

_DEFAULT_PATHS: Final[dict[str, tuple[ApiPath, ...]]] = {
    "openai": ("chat/completions", "completions", "embeddings"),
    "anthropic": ("messages",),
}
"""Paths that every server of a dialect serves."""
_NEW_LIMIT_HOSTS: Final = ("api.openai.com", ".openai.azure.com")


class PrivateSection(Section):
    """Settings whose errors hide what was given, since that may contain a provider's key."""

    model_config = ConfigDict(hide_input_in_errors=True)


class Price(PrivateSection):
    """US dollars per million tokens."""

    input: NonNegativeFloat = 0.0
    """For input tokens."""
    output: NonNegativeFloat = 0.0
    """For output tokens, including reasoning."""
    cached_input: NonNegativeFloat | None = None
    """For input tokens read from the provider's cache; None: the same as `input`."""
    cache_write: NonNegativeFloat | None = None
    """For input tokens that the provider writes to its cache for minutes; None: 1.25 times `input`, as at Anthropic."""
    cache_write_hour: NonNegativeFloat | None = None
    """For input tokens that Anthropic caches for an hour; None: twice `input`, as it charges."""

    def dollars(self, usage: Usage) -> float:
        """The cost of a call."""
        cached = self.input if self.cached_input is None else self.cached_input
        written = self.input * 1.25 if self.cache_write is None else self.cache_write
        hour = self.input * 2 if self.cache_write_hour is None else self.cache_write_hour
        cache_cost = usage.cached_tokens * cached + usage.written_tokens * written + usage.written_hour_tokens * hour
        uncached = usage.input_tokens - usage.cached_tokens - usage.written_tokens - usage.written_hour_tokens
        return (max(0, uncached) * self.input + cache_cost + usage.output_tokens * self.output) / 1e6


class Provider(PrivateSection):
    """One provider, with one or several interchangeable servers."""

    name: str = Field(min_length=1)
    """Its name in routing rules and spans (OTel's `gen_ai.provider.name`)."""
    dialect: Literal["openai", "anthropic"] = "openai"
    """The API it serves: OpenAI's paths, or Anthropic's `/v1/messages`."""
    paths: tuple[ApiPath, ...] | None = None
    """The paths it serves; None: chat/completions, completions and embeddings for OpenAI, messages for Anthropic. Calls
    to other paths are translated."""
    all_paths: bool = False
    """Whether requests to all other paths (files, moderations, audio, images ...) are forwarded to it as they are, and
    recorded without their content. Its key then gives agents everything that its owner may do; limits, budgets and
    retries do not apply. With several such providers the caller's SDK decides. `agl run` sets it."""
    base_urls: tuple[str, ...] = Field(min_length=1)
    """Base URLs of its servers as for its SDK: with `/v1` for OpenAI, without for Anthropic."""
    api_key: SecretStr | None = None
    """The API key. Never written to a log, a span or an error."""
    api_key_env: str | None = None
    """The environment variable with the API key, read at the start."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Additional headers of every call."""
    model: str | None = None
    """The provider's name of the model; None: the requested name."""
    price: Price | None = None
    """US dollars per million tokens; None: its calls cost nothing."""
    max_output_tokens: AtLeastOne = 8192
    """The output limit of calls that set none: budgets reserve it, and requests translated for Anthropic, which needs
    a limit, contain it."""
    image_tokens: AtLeastOne = 6500
    """Tokens that budgets and `tokens_per_minute` reserve for an image until its actual cost is known. Most providers
    charge less: Anthropic about 1,600, OpenAI 1,500 to 3,800, Together 6,404; but gpt-4o-mini up to 48,000."""
    max_concurrency: AtLeastOne = 256
    """Concurrent calls; further calls wait."""
    requests_per_minute: AtLeastOne | None = None
    """Requests per minute; further calls wait. None: no limit."""
    tokens_per_minute: AtLeastOne | None = None
    """Input and output tokens per minute; further calls wait. None: no limit."""
    max_wait_seconds: NonNegativeFloat = 60.0
    """Calls that would have to wait longer are rejected with 429 and `Retry-After`."""
    connect_seconds: PositiveFloat = 10.0
    """Timeout for connecting to a server."""
    timeout_seconds: PositiveFloat = 600.0
    """Timeout for the next byte of a response."""
    retries: NonNegativeInt = 1
    """Retries of a call that failed before its first byte, on another server if there is one. 0: failures are passed
    on as they are, and the caller's SDK retries them as it would without a gateway."""
    proxy: SecretStr | Literal[False] | None = None
    """The proxy for its servers, `http://[USER:PASSWORD@]HOST:PORT` or `https://`; false: none. Not set: HTTPS_PROXY or
    HTTP_PROXY, unless NO_PROXY excludes the server; never for this machine itself."""
    ca_file: str | None = None
    """A file with certificates (PEM) of trusted authorities, besides those of the system or SSL_CERT_FILE."""
    health_seconds: PositiveFloat = 10.0
    """Seconds between health probes, if there are several servers."""
    token_ids: bool = False
    """Whether to request token ids and log-probabilities, which vLLM and SGLang return."""

    @field_validator("base_urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no URL; give the base URL of its SDK, such as http://host:8000/v1")
        return tuple(url.rstrip("/") for url in urls)

    @field_validator("proxy")
    @classmethod
    def _check_proxy(cls, proxy: SecretStr | Literal[False] | None) -> SecretStr | Literal[False] | None:
        if isinstance(proxy, SecretStr):
            if "//***@" in (url := proxy.get_secret_value()):
                raise ValueError("a recorded configuration has no passwords; leave proxy to HTTPS_PROXY")
            Proxy.parse(url, "proxy")
        return proxy

    @field_serializer("proxy", when_used="unless-none")
    def _show_proxy(self, proxy: SecretStr | Literal[False]) -> str | Literal[False]:
        return without_credentials(proxy.get_secret_value()) if isinstance(proxy, SecretStr) else False

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and set(key.get_secret_value()) == {"*"}:
            raise ValueError("a recorded configuration has no keys; name one by api_key_env")
        return key

    @property
    def final(self) -> Literal[False] | None:
        """Value of `x-should-retry` for failures that the provider leaves open: who retries is the gateway or the
        caller, never both."""
        return False if self.retries else None

    @property
    def limit_name(self) -> str:
        """The output limit of chat completions: OpenAI requires a name that other servers may not know."""
        host = urlsplit(self.base_urls[0]).hostname or ""
        return "max_completion_tokens" if host.endswith(_NEW_LIMIT_HOSTS) else "max_tokens"

    def divided(self, number: int, count: int) -> Provider:
        """See `GatewayConfig.divided`."""
        parts: dict[str, int] = {}
        for name in ("max_concurrency", "requests_per_minute", "tokens_per_minute"):
            if (limit := getattr(self, name)) is None:
                continue
            if limit < count:
                raise ConfigError(
                    f"{name}={limit} of the provider {self.name!r} cannot be divided between {count} processes; use at"
                    f" most {limit}, or raise it"
                )
            parts[name] = limit // count + (number <= limit % count)
        return self.model_copy(update=parts)

    def serves(self, path: str) -> bool:
        return path in (_DEFAULT_PATHS[self.dialect] if self.paths is None else self.paths)

    def key(self) -> str:
        """The API key, "" for none. Raises ConfigError if `api_key_env` is not set."""
        if self.api_key is not None:
            return self.api_key.get_secret_value()
        if self.api_key_env is None:
            return ""
        if key := os.environ.get(self.api_key_env):
            return key
        raise ConfigError(f"the provider {self.name!r} takes its key from {self.api_key_env}, which is not set; set it")

    def credentials(self) -> set[str]:
        """Its key, the passwords of its proxy and URLs, and the credentials in its headers, each also without its
        scheme."""
        key, proxy = self.api_key, self._proxy_url
        found = {key.get_secret_value() if key else "", os.environ.get(self.api_key_env or "", "")}
        found.update(secrets_of(proxy) if proxy else ())
        for url in self.base_urls:
            secret = urlsplit(url).password or urlsplit(url).username or ""
            found |= {secret, unquote(secret)}
        for name, value in self.headers.items():
            if _CREDENTIAL.search(name):
                found |= {value, *value.split()[1:], *_password(value)}
        return {secret for secret in found if len(secret) >= _MIN_SECRET_CHARS}

    def secrets(self) -> set[str]:
        """All texts to redact in errors: its credentials, and the values of its other headers."""
        return self.credentials() | {value for value in self.headers.values() if len(value) >= _MIN_SECRET_CHARS}

    @property
    def _proxy_url(self) -> str | Literal[False] | None:
        return self.proxy.get_secret_value() if isinstance(self.proxy, SecretStr) else self.proxy

    def connect_options(self) -> ConnectOptions:
        """Proxy and certificates for its servers. Raises ConfigError if they cannot be used."""
        options = ConnectOptions.create(self._proxy_url, self.ca_file)
        for url in self.base_urls:
            options.check(url)
        return options

    def url(self, base: str, path: str) -> str:
        """The URL of a path."""
        return f"{base}/v1/{path}" if self.dialect == "anthropic" else f"{base}/{path}"


_CREDENTIAL: Final = re.compile("auth|key|token|secret|password|cookie|credential|signature", re.IGNORECASE)
"""Names of headers with credentials."""
_MIN_SECRET_CHARS: Final = 8
"""Shorter values occur in too many unrelated texts."""


def _password(value: str) -> list[str]:
    """The password in a header for HTTP basic authentication."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic":
        return []
    try:
        return [base64.b64decode(encoded, validate=True).decode().partition(":")[2]]
    except (binascii.Error, UnicodeDecodeError):
        return []


# -- budgets and routes ---


class BudgetConfig(PrivateSection):
    """Limits for the cost of calls to providers. Calls to local policies are not counted."""

    dollars: PositiveFloat | None = None
    """US dollars for all rollouts together; None: no limit."""
    tokens: AtLeastOne | None = None
    """Input and output tokens of all rollouts together; None: no limit."""
    rollout_dollars: PositiveFloat | None = None
    """US dollars for each rollout, over all its attempts; None: no limit."""
    rollout_tokens: AtLeastOne | None = None
    """Tokens of each rollout, over all its attempts; None: no limit."""
    file: str | None = None
    """The file that keeps the total across restarts of the server; remove it to start at zero. None: beside the store's
    file, or in memory if the store has none."""

    def __bool__(self) -> bool:
        return any((self.dollars, self.tokens, self.rollout_dollars, self.rollout_tokens))


class AgentRule(Section):
    """How calls of one agent are recognized: an entry of `[[agents]]` in the configuration.

    A rule without a `name` takes it from the group `agent` of `matches`.
    """

    name: str | None = Field(default=None, min_length=1, max_length=MAX_NAME_CHARACTERS)
    """The name of the agent on spans."""
    models: tuple[str, ...] = ()
    """Model names that mean this agent."""
    serve: str | None = None
    """The model that serves these names; None: the model of that name, or else the default model."""
    contains: str | None = Field(default=None, min_length=1)
    """Text that the agent's system prompt contains."""
    matches: str | None = Field(default=None, min_length=1)
    """Regular expression that is searched for in the agent's system prompt."""

    @field_validator("matches")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"matches={pattern!r} is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if self.name is None and "agent" not in re.compile(self.matches or "").groupindex:
            raise ValueError("an agent without a name needs `matches` with a group (?P<agent>...) for it")
        if not self.models and self.contains is None and self.matches is None:
            raise ValueError(f"nothing identifies the calls of agent {self.name!r}: set models, contains or matches")
        if self.serve is not None and not self.models:
            raise ValueError(f"agent {self.name!r} has serve={self.serve!r} but no models to serve")
        if self.models and self.name is None:
            raise ValueError(f"models={list(self.models)} need the name of their agent")
        return self


class RouteRule(PrivateSection):
    """A route: the calls that match go to an engine or a provider."""

    model: str = "*"
    """The requested model name, or a pattern with `*`, `?` and `[...]`."""
    agent: str = "*"
    """The agent's name, or a pattern. A call of an unknown agent matches only `*`."""
    dialect: Literal["openai", "anthropic"] | None = None
    """anthropic: calls to `/v1/messages`; openai: calls to all other paths; None: both."""
    engine: str | None = None
    """The engine that serves the calls: the policy, an adapter, a frozen reference."""
    provider: str | None = None
    """The provider that serves the calls."""
    send_model: str | None = None
    """The provider's name of the model; None: as configured for the provider."""
    price: Price | None = None
    """US dollars per million tokens of this model; None: as configured for the provider."""

    @model_validator(mode="after")
    def _check_target(self) -> RouteRule:
        if (self.engine is None) == (self.provider is None):
            raise ValueError("a rule names an engine or a provider, one of them")
        if self.engine is not None and (self.send_model is not None or self.price is not None):
            raise ValueError("send_model and price are for a provider; an engine has neither")
        return self

    @property
    def is_pattern(self) -> bool:
        """Whether it matches more than one model name."""
        return bool(set(self.model) & set("*?["))

    def matches(self, model: str | None, agent: str | None, dialect: str | None = None) -> bool:
        """Whether the rule applies to a call; `dialect` None means any."""
        if self.dialect is not None and dialect is not None and self.dialect != dialect:
            return False
        return fnmatchcase(model or "", self.model) and (self.agent == "*" or fnmatchcase(agent or "", self.agent))


class GatewayConfig(PrivateSection):
    """Where model calls go.

    >>> agl.config.GatewayConfig(default_model="policy").routes
    ()
    """

    default_model: str | None = None
    """Serves requests without a model; None: the only engine, or the first `--model` of `agl serve`."""
    accept_any_model: bool | None = None
    """Whether the default model also serves requests for unknown models; None: in training, and without routes."""
    models: dict[str, str | ServedModel] = Field(default={})
    """Further models that are served but not trained, such as a frozen reference: name -> directory that transformers
    loads, or a table of the servers that sample from it."""
    routes: tuple[RouteRule, ...] = ()
    """Routes, in order: the first that matches decides. Engines follow, by name."""
    providers: tuple[Provider, ...] = ()
    """Third-party APIs, and vLLM or SGLang servers, that routes use."""
    agents: tuple[AgentRule, ...] = ()
    """Rules that recognize agents that do not name themselves."""
    structured_output: Literal["auto", "always", "never"] = "auto"
    """Which answers are constrained to the tool calls and JSON schemas of their request, if the engine can. auto: those
    that nobody learns from (rollouts in the modes val and test, calls of no rollout); others are sampled freely and
    checked."""
    record_top_logprobs: int = Field(default=0, ge=0, le=20)
    """The number of likeliest tokens that spans keep for each token our own engines sample, for the dashboard's token
    view: about 5 bytes each in the store. A call that asks for more is recorded with those. 0: only what calls ask
    for."""
    budget: BudgetConfig = BudgetConfig()
    """Limits of what calls to providers may cost."""

    @model_validator(mode="after")
    def _check_names(self) -> GatewayConfig:
        known = [provider.name for provider in self.providers]
        if duplicates := [name for name in known if known.count(name) > 1]:
            raise ValueError(f"two providers are called {duplicates[0]!r}; give each a name of its own")
        for number, rule in enumerate(self.routes):
            if rule.provider is not None and rule.provider not in known:
                listed = ", ".join(sorted(known)) or "none"
                raise ValueError(f"routes.{number} leads to the provider {rule.provider!r}; known: {listed}")
        return self

    def divided(self, number: int, count: int) -> GatewayConfig:
        """The configuration of one of `count` processes, by number from 1, which share the limits of providers. Raises
        ConfigError for a limit that cannot be divided."""
        return self.model_copy(update={"providers": tuple(each.divided(number, count) for each in self.providers)})
