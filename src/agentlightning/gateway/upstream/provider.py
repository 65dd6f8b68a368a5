"""Configuration of a provider: its servers, dialect, credentials, limits, prices; what is hidden of its responses."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable
from typing import Final, Literal
from urllib.parse import quote, unquote, urlsplit

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SecretStr,
    field_serializer,
    field_validator,
)

from agentlightning.errors import ConfigError
from agentlightning.gateway.answer import Usage
from agentlightning.gateway.dialects.base import ApiPath
from agentlightning.transport import Headers
from agentlightning.transport.connector import ConnectOptions, Proxy, secrets_of, without_credentials
from agentlightning.util.settings import AtLeastOne, Section

COUNT_TOKENS_PATH: Final = "messages/count_tokens"
"""Served wherever `messages` is."""

_DEFAULT_PATHS: Final[dict[str, tuple[ApiPath, ...]]] = {
    "openai": ("chat/completions", "completions", "embeddings"),
    "anthropic": ("messages",),
}
"""Paths that every server of a dialect serves."""
_NEW_LIMIT_HOSTS: Final = ("api.openai.com", ".openai.azure.com")
_VISIBLE_HEADERS: Final = frozenset(
    {
        *(b"x-request-id", b"request-id", b"apim-request-id", b"x-amzn-requestid", b"cf-ray"),
        *(b"retry-after", b"retry-after-ms", b"openai-processing-ms", b"openai-version"),
    }
)
"""Response headers for the caller: request ids, processing time and retry hints."""
_REQUEST_IDS: Final = {b"x-request-id": b"request-id", b"request-id": b"x-request-id"}
_VISIBLE_PREFIXES: Final = (b"x-ratelimit-", b"anthropic-ratelimit-")
_MAX_HEADER_BYTES: Final = 1024
_LINE_BREAKS: Final = frozenset(b"\r\n\0")


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
    headers: dict[str, str] = Field(default_factory=dict[str, str], repr=False)
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

    def credentials(self) -> list[str]:
        """Its key, the passwords of its proxy and URLs, and the credentials in its headers, each also without its
        scheme. The longest first, since one may contain another."""
        credentials = [
            self.api_key.get_secret_value() if self.api_key else "",
            os.environ.get(self.api_key_env or "", ""),
        ]
        if isinstance(self.proxy, SecretStr):
            credentials += secrets_of(self.proxy.get_secret_value())
        for url in self.base_urls:
            secret = urlsplit(url).password or urlsplit(url).username or ""
            credentials += [secret, unquote(secret)]
        for name, value in self.headers.items():
            if _CREDENTIAL.search(name):
                credentials += [value, *value.split()[1:], *_password(value)]
        return _long_enough(credentials)

    def secrets(self) -> list[str]:
        """All texts to redact in errors: its credentials, and the values of its other headers."""
        return _long_enough([*self.credentials(), *self.headers.values()])

    def connect_options(self) -> ConnectOptions:
        """Proxy and certificates for its servers. Raises ConfigError if they cannot be used."""
        proxy = self.proxy.get_secret_value() if isinstance(self.proxy, SecretStr) else self.proxy
        options = ConnectOptions.create(proxy, self.ca_file)
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


def _long_enough(secrets: Iterable[str]) -> list[str]:
    return sorted({secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS}, key=len, reverse=True)


def _password(value: str) -> list[str]:
    """The password in a header for HTTP basic authentication."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != "basic":
        return []
    try:
        return [base64.b64decode(encoded, validate=True).decode().partition(":")[2]]
    except (binascii.Error, UnicodeDecodeError):
        return []


def visible_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a response that the SDK of the caller shows or acts upon: request ids, rate limits, `retry-after`.

    Names are in lower case. Account names, cookies, headers of the connection and values with line breaks are left
    out. The SDKs of OpenAI and Anthropic read the request id from different headers, so it is sent as both.
    """
    visible = [
        (name, value)
        for name, value in headers
        if (name in _VISIBLE_HEADERS or name.startswith(_VISIBLE_PREFIXES))
        and len(value) <= _MAX_HEADER_BYTES
        and not _LINE_BREAKS & set(value)
    ]
    ids = {name: value for name, value in visible if name in _REQUEST_IDS}
    if len(ids) == 1:
        ((id_header, value),) = ids.items()
        visible.append((_REQUEST_IDS[id_header], value))
    return visible


# -- redaction ---------------------------------------------------------------------------------------------------------

# Redacts the credentials of a provider in its responses, stream events, headers and errors.
#
# Otherwise a provider that echoes requests, or names its key in an error, would reveal it to agents and spans. Runs for
# every response before it is parsed, so it only searches the bytes.

HIDDEN: Final = "***"
MIN_BODY_SECRET_CHARS: Final = 16
"""Shorter credentials are redacted in errors and headers only: in a response they may be words of the model, and no
provider issues such keys."""
_ERROR: Final = b'"error"'
_NO_ERROR: Final = (b'"error":null', b'"error": null')


class Redactor:
    """Hides the credentials of one provider."""

    def __init__(self, provider: Provider) -> None:
        credentials = [text for text in provider.credentials() if len(text) >= MIN_BODY_SECRET_CHARS]
        self._in_bodies = _encodings(credentials)
        self._everywhere = _encodings(provider.secrets())

    def redact_body(self, data: bytes) -> bytes:
        """Redact a response or a stream event; errors are searched for every secret."""
        encodings = self._in_bodies
        if encodings != self._everywhere and data.count(_ERROR) > sum(data.count(null) for null in _NO_ERROR):
            encodings = self._everywhere
        return _replace(data, encodings)

    def redact_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        return [(name, _replace(value, self._everywhere)) for name, value in headers]


def redact_text(provider: Provider, text: str) -> str:
    """Redact a text of a provider."""
    data = text.encode("utf-8", "surrogatepass")
    return _replace(data, _encodings(provider.secrets())).decode("utf-8", "surrogatepass")


def _replace(data: bytes, encodings: Iterable[bytes]) -> bytes:
    for encoded in encodings:
        if encoded in data:
            data = data.replace(encoded, HIDDEN.encode())
    return data


def _encodings(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """How secrets may be written in a body or a header; the longest first, since one may contain another."""
    encodings: set[bytes] = set()
    for secret in secrets:
        escaped = json.dumps(secret, ensure_ascii=False)[1:-1]
        texts = (secret, escaped, escaped.replace("/", "\\/"), json.dumps(secret)[1:-1], quote(secret, safe=""))
        encodings |= {text.encode("utf-8", "surrogatepass") for text in texts}
    return tuple(sorted(encodings, key=lambda encoded: (-len(encoded), encoded)))
