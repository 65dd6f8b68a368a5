"""What is printed shows no password."""

from __future__ import annotations

import pytest

from agentlightning.errors import ConfigError
from agentlightning.store import LightningStore
from agentlightning.tracing.otlp.exporter import OtlpExporter
from agentlightning.util.printable import shown_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host:8000/score", "http://host:8000/score"),
        ("http://me:se@cret@host/a@b?key=secret#part", "http://host/a@b"),
        ("https://secret@[::1]:80", "https://[::1]:80"),
        ("no address at all", "no address at all"),
        ("http://me:secret@[::1/x", "http://[::1/x"),
    ],
)
def test_an_address_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_an_address_that_is_refused_is_shown_without_its_password() -> None:
    for refused in (lambda: LightningStore("mysql://me:secret@host/db"), lambda: OtlpExporter("ftp://me:secret@host")):
        with pytest.raises(ConfigError, match=r"//host") as raised:
            refused()
        assert "secret" not in str(raised.value)
