"""A provider: someone else's model server that calls are passed on to, as it is written in the configuration.

Responsible for what is known of a provider before the first call. Which calls go to it is `gateway.routing`, which of
its servers is asked `upstream.servers`, and how often `upstream.call`.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterable
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer, field_validator

from agentlightning.errors import ConfigError
from agentlightning.gateway.upstream.pricing import Price
from agentlightning.transport import Headers
from agentlightning.transport.connector import ConnectOptions
from agentlightning.transport.proxy import Proxy, secrets_of, without_credentials

ApiPath = Literal["chat/completions", "completions", "responses", "embeddings", "messages"]
"""What a server may serve, as its dialect's SDK calls it."""
COUNT_TOKENS_PATH: Final = "messages/count_tokens"
"""Served wherever `messages` is."""

_USUAL: Final[dict[str, tuple[ApiPath, ...]]] = {
    "openai": ("chat/completions", "completions", "embeddings"),
    "anthropic": ("messages",),
}
"""What every server of a dialect has."""
_CONFIG: Final = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, hide_input_in_errors=True)
"""What is wrong may be a key, or beside one."""
_PASSED: Final = frozenset(
    {
        *(b"x-request-id", b"request-id", b"apim-request-id", b"x-amzn-requestid", b"cf-ray"),
        *(b"retry-after", b"retry-after-ms", b"openai-processing-ms", b"openai-version"),
    }
)
"""Of an answer's headers: by what its provider finds the call again, how long it took, and when to come back."""
_REQUEST_IDS: Final = {b"x-request-id": b"request-id", b"request-id": b"x-request-id"}
_PASSED_PREFIXES: Final = (b"x-ratelimit-", b"anthropic-ratelimit-")
_LONGEST_HEADER: Final = 1024


class Provider(BaseModel):
    """One provider, or several servers of one model that stand in for one another."""

    model_config = _CONFIG

    name: str = Field(min_length=1)
    """What rules and spans call it (OTel's `gen_ai.provider.name`)."""
    dialect: Literal["openai", "anthropic"] = "openai"
    """What it speaks: OpenAI's paths, or Anthropic's `/v1/messages`."""
    paths: tuple[ApiPath, ...] | None = None
    """What it serves of them; None: chat/completions, completions and embeddings of OpenAI's, messages of Anthropic's.
    A call to a path it does not serve is translated."""
    base_urls: tuple[str, ...] = Field(min_length=1)
    """As its SDK is given them: with `/v1` for OpenAI, without for Anthropic."""
    api_key: SecretStr | None = None
    """Never written to a log, a span or an error."""
    api_key_env: str | None = None
    """The environment variable that holds the key, read at the start."""
    headers: dict[str, str] = Field(default_factory=dict[str, str], repr=False)
    """Sent with every call, beside its own."""
    model: str | None = None
    """What the provider calls the model; None: the name that was asked for."""
    price: Price | None = None
    """US dollars for a million tokens; None: its calls cost nothing."""
    max_output_tokens: int = Field(default=8192, ge=1)
    """The longest answer to a call that sets no limit itself: what a budget reckons with, and what is asked of
    Anthropic where the caller's dialect needs no limit."""
    image_tokens: int = Field(default=6500, ge=1)
    """What a budget and `tokens_per_minute` reckon with for an image, until its true cost is known. More than most
    charge at most: Anthropic about 1,600, OpenAI 1,500 to 3,800, Together 6,404; but gpt-4o-mini up to 48,000."""
    max_concurrency: int = Field(default=256, ge=1)
    """Calls under way at once; more wait."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """More wait; None: no limit."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Of prompts and answers; more wait. None: no limit."""
    max_wait_seconds: float = Field(default=60.0, ge=0)
    """A call that would have to wait longer for its turn is refused with 429 and `Retry-After`."""
    connect_seconds: float = Field(default=10.0, gt=0)
    """A server that cannot be reached for so long is asked no more."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """Without a byte from it for so long, the call has failed."""
    retries: int = Field(default=1, ge=0)
    """How many times a call that failed before its first byte is sent again, to another server where there is one."""
    proxy: SecretStr | Literal[False] | None = None
    """The proxy its servers are reached through, `http://[USER:PASSWORD@]HOST:PORT` or `https://`; false: none. Not
    set: the one HTTPS_PROXY or HTTP_PROXY names, unless NO_PROXY excepts the server; never for this machine itself."""
    ca_file: str | None = None
    """A file with the certificates (PEM) of authorities to believe besides those of the system, or of SSL_CERT_FILE."""
    health_seconds: float = Field(default=10.0, gt=0)
    """How often servers that stand in for one another are asked whether they are well."""
    token_ids: bool = False
    """Whether to ask for token ids and log-probabilities, as vLLM and SGLang give them."""

    @field_validator("base_urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no address; give one as its SDK takes it, such as http://host:8000/v1")
        return tuple(url.rstrip("/") for url in urls)

    @field_validator("proxy")
    @classmethod
    def _check_proxy(cls, proxy: SecretStr | Literal[False] | None) -> SecretStr | Literal[False] | None:
        if isinstance(proxy, SecretStr):
            if "//***@" in (url := proxy.get_secret_value()):
                raise ValueError("a configuration that was written down has no passwords; leave proxy to HTTPS_PROXY")
            Proxy.parse(url, "proxy")
        return proxy

    @field_serializer("proxy", when_used="unless-none")
    def _show_proxy(self, proxy: SecretStr | Literal[False]) -> str | Literal[False]:
        return without_credentials(proxy.get_secret_value()) if isinstance(proxy, SecretStr) else False

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and set(key.get_secret_value()) == {"*"}:
            raise ValueError("a configuration that was written down has no keys; name one by api_key_env")
        return key

    def serves(self, path: str) -> bool:
        return path in (_USUAL[self.dialect] if self.paths is None else self.paths)

    def key(self) -> str:
        """The key its calls carry, "" for none. Raises ConfigError where the environment lacks it."""
        if self.api_key is not None:
            return self.api_key.get_secret_value()
        if self.api_key_env is None:
            return ""
        if key := os.environ.get(self.api_key_env):
            return key
        raise ConfigError(f"the provider {self.name!r} takes its key from {self.api_key_env}, which is not set; set it")

    def credentials(self) -> list[str]:
        """What lets somebody in: its key, its proxy's password, and what its headers hold of the kind, each also
        without the scheme before it. The longest first, as one may hold another."""
        found = [self.api_key.get_secret_value() if self.api_key else "", os.environ.get(self.api_key_env or "", "")]
        if isinstance(self.proxy, SecretStr):
            found += secrets_of(self.proxy.get_secret_value())
        for url in self.base_urls:
            found += [password, unquote(password)] if (password := urlsplit(url).password) else ()
        for name, value in self.headers.items():
            if _CREDENTIAL.search(name):
                found += [value, *value.split()[1:], *_password(value)]
        return _long_enough(found)

    def secrets(self) -> list[str]:
        """What must not be shown: its credentials, and the values of its other headers."""
        return _long_enough([*self.credentials(), *self.headers.values()])

    def connect_options(self) -> ConnectOptions:
        """How its servers are reached. Raises ConfigError where a proxy or a file of certificates cannot be used."""
        proxy = self.proxy.get_secret_value() if isinstance(self.proxy, SecretStr) else self.proxy
        options = ConnectOptions.create(proxy, self.ca_file)
        for url in self.base_urls:
            options.check(url)
        return options

    def url(self, base: str, path: str) -> str:
        """Where a path is served."""
        return f"{base}/v1/{path}" if self.dialect == "anthropic" else f"{base}/{path}"


_CREDENTIAL: Final = re.compile("auth|key|token|secret|password|cookie|credential|signature", re.IGNORECASE)
"""Names of headers that hold one."""
_SHORTEST_SECRET: Final = 8
"""Characters. What is shorter stands in too many texts that have nothing to do with it."""


def _long_enough(secrets: Iterable[str]) -> list[str]:
    return sorted({secret for secret in secrets if len(secret) >= _SHORTEST_SECRET}, key=len, reverse=True)


def _password(value: str) -> list[str]:
    """Of a header of HTTP's basic authentication."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic":
        return []
    try:
        return [base64.b64decode(encoded, validate=True).decode().partition(":")[2]]
    except (binascii.Error, UnicodeDecodeError):
        return []


def visible_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Of a provider's answer, the headers that its caller's SDK shows or acts upon, in their order: request ids, rate
    limits, `retry-after`. Names are in lower case. Whose account it is, cookies and everything of the connection stay
    here, and so does what would not fit one line of our own answer. OpenAI's SDK and Anthropic's look for the request
    id under two names: it goes by both."""
    passed = [
        (name, value)
        for name, value in headers
        if (name in _PASSED or name.startswith(_PASSED_PREFIXES)) and len(value) <= _LONGEST_HEADER and _is_line(value)
    ]
    ids = {name: value for name, value in passed if name in _REQUEST_IDS}
    if len(ids) == 1:
        ((given, value),) = ids.items()
        passed.append((_REQUEST_IDS[given], value))
    return passed


def _is_line(value: bytes) -> bool:
    return not (b"\r" in value or b"\n" in value or b"\0" in value)
