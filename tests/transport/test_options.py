"""Promises about certificates: whose are believed, and what is said of one that does not fit."""

import asyncio
import ssl

import pytest
from tests.support.proxy import LocalProxy

from agentlightning.errors import ConfigError
from agentlightning.transport import Transport, TransportError
from agentlightning.transport.base import Origin
from agentlightning.transport.options import ConnectOptions, ssl_context, tls_error


async def failure(url, dial=None):
    transport = Transport(dial)
    with pytest.raises(TransportError) as caught:
        await transport.send("GET", url, [])
    await transport.close()
    assert url in str(caught.value)
    return caught.value.reason, str(caught.value)


async def test_the_certificate_of_a_stranger_is_named_with_the_way_out(start, authority):
    backend = await start(b"secret", tls=authority.server("127.0.0.1"))
    reason, said = await failure(backend.url)
    assert (reason, "in ca_file or SSL_CERT_FILE" in said, backend.requests) == ("tls", True, [])
    transport = Transport(ConnectOptions.create(ca_file=authority.file))
    async with await transport.send("GET", backend.url, []) as answer:
        assert await answer.read() == b"secret"
    await transport.close()


@pytest.mark.parametrize("tunnel", [False, True])
async def test_a_certificate_for_another_name_is_not_believed(start, authority, tunnel):
    backend = await start(tls=authority.server("other.example"))
    async with LocalProxy() as proxy:
        reason, said = await failure(backend.url, ConnectOptions.create(proxy.url if tunnel else False, authority.file))
    assert (reason, "use a host name that its certificate contains" in said) == ("tls", True)


async def test_a_server_without_tls_is_told_from_one_that_is_away():
    async def plain(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    reason, said = await failure(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    assert (reason, "is it http:// rather than https://?" in said) == ("tls", True)


def test_where_the_system_knows_no_authorities_those_of_the_world_are_believed(monkeypatch):
    paths = ssl.get_default_verify_paths()._replace(cafile=None, capath=None)
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda self, purpose: None)
    assert ssl_context(None).cert_store_stats()["x509_ca"] > 50


def test_a_file_that_holds_no_certificates_is_refused_before_the_first_call(tmp_path, monkeypatch):
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"ca_file: .*contains no certificate"):
        ConnectOptions.create(ca_file=str(tmp_path / "empty.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE: .*cannot be read"):
        ConnectOptions.create()


def test_a_certificate_that_only_newer_pythons_refuse_is_named_with_the_way_out():
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = 92, "CA cert does not include key usage extension"
    said = str(tls_error(Origin(True, "their.host", 443), error))
    assert "their.host" in said
    assert "key usage" in said
    assert "issue a new one" in said
