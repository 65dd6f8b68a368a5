"""The store over HTTP: the table of operations, and what client and server share to encode them."""

from typing import Final

BASE_PATH: Final = "/v1/agl"
"""Prefix of the paths of the API."""
