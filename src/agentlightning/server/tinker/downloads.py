"""Signed URLs of the files of saved weights: who has one may download the file, without the API key, for an hour."""

from __future__ import annotations

import hmac
import secrets
import time
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from urllib.parse import urlencode

SECONDS: Final = 3600.0
"""How long a URL is valid."""


@dataclass(frozen=True, slots=True)
class Downloads:
    """Signs, with a key that lasts as long as the server."""

    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def query(self, path: str, file: str, expires: float) -> str:
        """The query of the URL of a file of the weights at `path`."""
        until = str(int(expires))
        return urlencode({"path": path, "file": file, "expires": until, "signature": self._sign(path, file, until)})

    def allows(self, path: str, file: str, expires: str, signature: str) -> bool:
        """Whether this server has signed these, and they have not expired."""
        expected = self._sign(path, file, expires)
        return hmac.compare_digest(expected.encode(), signature.encode()) and float(expires) > time.time()

    def _sign(self, path: str, file: str, expires: str) -> str:
        return hmac.new(self.key, "\0".join((path, file, expires)).encode(), sha256).hexdigest()
