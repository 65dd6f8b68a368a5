"""Reads the API key or access token that an HTTP request carries."""

from __future__ import annotations

from collections.abc import Mapping


def api_key(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer` or else in `x-api-key`; "" if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    return key if key.isascii() else ""
