"""Adds the attempt's headers to requests that HTTP clients send to the attempt's own server.

`install()` patches `httpx`, `httpx2`, `aiohttp`, `urllib3` (and so `requests`) and `urllib`. Requests to the server of
the current attempt, and to no other, get the attempt's key, W3C `traceparent` and `baggage`, so that calls of a client
shared between attempts are attributed one by one. Headers that are already present are kept; nothing else changes.
Requests whose attempt is uncertain or has ended, and those of reward functions, are marked as such.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final
from urllib.parse import quote, urlsplit

from opentelemetry import trace
from opentelemetry.trace import format_span_id, format_trace_id

from agentlightning import attempt_address
from agentlightning.tracing.scope import Scope, current_agent, inherited_scope, runner_process, uncertainty


def attempt_headers(url: str) -> dict[str, str]:
    """Headers for a request to `url` in the current context; empty for other servers."""
    process = runner_process()
    inside = inherited_scope() or (None if process is None else process.attempt)
    address = inside.address if inside is not None else process.address if process else _address_of_process()
    if not address or not (url.startswith(address) and url[len(address) : len(address) + 1] in ("", "/", "?")):
        return {}
    if inside is None and process is None:
        return _baggage({})
    if inside is not None and inside.role == "judge":
        return {attempt_address.JUDGE_HEADER: inside.attempt_id}
    is_explicit = EXPLICIT.match(url, len(address)) is not None
    if uncertain := uncertainty(report=not is_explicit):
        return (
            {} if is_explicit or (inside is not None and not inside.key) else {attempt_address.WORK_HEADER: uncertain}
        )
    return {} if inside is None else _headers_of(inside)


EXPLICIT: Final = re.compile("/(key/(?!agl-worker-)|rollout/|proxy/rollout/|v1/traces|v1/agl)")
"""Paths that name an attempt, or are none of model calls."""


def _headers_of(scope: Scope) -> dict[str, str]:
    if scope.is_known is not None and not scope.is_known():
        return {}
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        ids = f"{format_trace_id(span.trace_id)}-{format_span_id(span.span_id)}"
    else:
        ids = f"{scope.trace_id}-{attempt_address.root_span_id_of(scope.attempt_id) or scope.trace_id[:16]}"
    headers = {"traceparent": f"00-{ids}-01"}
    if scope.key:
        headers[attempt_address.ATTEMPT_HEADER] = scope.key
    return headers | _baggage(
        {attempt_address.ROLLOUT_BAGGAGE: scope.rollout_id, attempt_address.ATTEMPT_BAGGAGE: scope.attempt_id}
    )


def _baggage(entries: dict[str, str]) -> dict[str, str]:
    if (agent := current_agent()) is not None:
        entries[attempt_address.AGENT_BAGGAGE] = agent
    text = ",".join(f"{name}={quote(value, safe='')}" for name, value in entries.items())
    return {"baggage": text} if text else {}


def _address_of_process() -> str:
    """The server that the environment of a single-attempt program names."""
    url = urlsplit(os.environ.get("AGL_EVENT_URL", ""))
    return f"{url.scheme}://{url.netloc}" if url.netloc else ""


def _add_missing(headers: MutableMapping[str, str], more: dict[str, str]) -> None:
    """Add to headers with case-insensitive names."""
    for name, value in more.items():
        present = headers.get(name)
        if present is None:
            headers[name] = value
        elif name == "baggage" and "agentlightning." not in present:
            headers[name] = f"{present},{value}"


# -- the clients -------------------------------------------------------------------------------------------------------


def _patch_httpx(module: ModuleType) -> None:
    def wrap(send: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(send)
        def sent(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            _add_missing(request.headers, attempt_headers(str(request.url)))
            return send(self, request, *args, **kwargs)

        return sent

    for client in (module.Client, module.AsyncClient):
        client.send = wrap(client.send)


def _patch_aiohttp(module: ModuleType) -> None:
    from multidict import CIMultiDict

    request = module.ClientSession._request

    @wraps(request)
    async def requested(self: Any, method: str, str_or_url: Any, **kwargs: Any) -> Any:
        url = str(str_or_url)
        if more := attempt_headers(url if "://" in url else str(getattr(self, "_base_url", ""))):
            headers: Any = CIMultiDict(kwargs.get("headers") or ())
            for name in self.headers.keys() & more.keys() - headers.keys():
                headers[name] = self.headers[name]
            _add_missing(headers, more)
            kwargs["headers"] = headers
        return await request(self, method, str_or_url, **kwargs)

    module.ClientSession._request = requested


_HEADERS_POSITION: Final = 3
"""Position of `headers` among the parameters of urllib3's `urlopen`, counted from `method`."""


def _patch_urllib3(module: ModuleType) -> None:
    pool = module.HTTPConnectionPool
    urlopen = pool.urlopen

    @wraps(urlopen)
    def opened(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = kwargs.get("url") or (args[1] if len(args) > 1 else "/")
        port = "" if self.port in (None, module.connection.port_by_scheme.get(self.scheme)) else f":{self.port}"
        url = f"{self.scheme}://{self.host}{port}{path if str(path).startswith('/') else '/'}"
        if (more := attempt_headers(url)) and len(args) <= _HEADERS_POSITION:
            given = kwargs.get("headers")
            headers = module.HTTPHeaderDict(self.headers if given is None else given)
            _add_missing(headers, more)
            kwargs["headers"] = headers
        return urlopen(self, *args, **kwargs)

    pool.urlopen = opened


def _patch_urllib(module: ModuleType) -> None:
    handler = module.AbstractHTTPHandler
    do_open = handler.do_open

    @wraps(do_open)
    def opened(self: Any, http_class: Any, req: Any, **kwargs: Any) -> Any:
        if more := attempt_headers(req.full_url):
            headers = {name: req.get_header(name.capitalize()) for name in more if req.has_header(name.capitalize())}
            _add_missing(headers, more)
            for name, value in headers.items():
                req.add_unredirected_header(name, value)  # these take precedence over those of the request
        return do_open(self, http_class, req, **kwargs)

    handler.do_open = opened


_PATCHES: Final = {
    "httpx": _patch_httpx,
    "httpx2": _patch_httpx,
    "aiohttp": _patch_aiohttp,
    "urllib3": _patch_urllib3,
    "urllib.request": _patch_urllib,
}

# -- when they are patched ---------------------------------------------------------------------------------------------

_lock = threading.Lock()
_patched_modules: set[str] = set()


def install() -> None:
    """Patch the clients that are imported already, and others when they are imported. Idempotent."""
    with _lock:
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    for name in list(_PATCHES):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):  # its import has finished
            _patch(name, module)


def _patch(name: str, module: ModuleType) -> None:
    with _lock:
        if name in _patched_modules:
            return
        _patched_modules.add(name)
    _PATCHES[name](module)


class _Finder(MetaPathFinder):
    """Finds the modules of the clients as Python itself does, and has them patched once they are imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _patch(fullname, module)

            loader.exec_module = exec_module
        return spec
