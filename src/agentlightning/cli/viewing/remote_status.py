"""The state of a run on a server elsewhere, read from the JSON of its dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

import httpx

from agentlightning.errors import NotFoundError, ServerError, StoreAuthError

TIMEOUT: Final = 30.0


def remote_status(link: str, token: str | None, name: str | None) -> tuple[dict[str, Any], list[float | None]]:
    """The state of a run as `status_record` gives it, and its rewards by step. `link`: the address of a server, or
    the link of its dashboard, which may hold the token. `name`: which of its runs; None: the newest one.

    Raises ServerError, StoreAuthError or NotFoundError."""
    parts = urlsplit(link)
    token = token or next(iter(parse_qs(parts.fragment).get("token", [])), None)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    base = f"{parts.scheme}://{parts.netloc}"
    with httpx.Client(base_url=f"{base}/dashboard/api", headers=headers, timeout=TIMEOUT) as client:
        summary = _chosen(_get(client, "/runs", base)["runs"], name, base)
        found = _get(client, f"/runs/{quote(summary['name'], safe='')}/status", base)
    return {**found["status"], "run_dir": f"{base} {summary['name']}"}, found["rewards"]


def _get(client: httpx.Client, path: str, server: str) -> dict[str, Any]:
    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        raise ServerError(f"the server {server} cannot be reached: {error or type(error).__name__}") from error
    if response.status_code == 401:
        raise StoreAuthError(f"the server {server} requires its access token; set AGL_TOKEN, or give --token")
    try:
        body = response.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError) as error:
        raise ServerError(f"{server} has no dashboard that can be read: {error}") from error
    return body


def _chosen(runs: Sequence[dict[str, Any]], name: str | None, server: str) -> dict[str, Any]:
    """The run of a name; None: a running one, else the newest."""
    known = [each for each in runs if each["kind"] == "run" and not each.get("error")]
    if not known:
        raise NotFoundError(f"the server {server} shows no run; start it with --runs DIRECTORY")
    if name is None:
        return next((each for each in known if each["state"] == "running"), known[0])
    for each in known:
        if each["name"] == name:
            return each
    raise NotFoundError(f"the server {server} has no run {name!r}; it has: {', '.join(each['name'] for each in known)}")
