"""Replies of our own models on the wire: an id that a report can name, and streams that old clients can read."""

import asyncio

import orjson
import pytest


async def raw(service, version, body):
    """The bytes of the reply to one request."""
    host, port = service.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    path = service.base_url.removeprefix(service.server.url) + "/chat/completions"
    sent = orjson.dumps(body)
    head = f"POST {path} HTTP/{version}\r\nhost: {host}\r\ncontent-length: {len(sent)}\r\nconnection: close\r\n"
    writer.write(head.encode() + f"authorization: Bearer {service.key}\r\n\r\n".encode() + sent)
    reply = await reader.read()
    writer.close()
    await writer.wait_closed()
    return reply.partition(b"\r\n\r\n")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_is_chunked_only_for_who_knows_chunks(serve, version):
    service = await serve(["Hello."], engine={"delay": 0.001})
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    head, _, events = await raw(service, version, body)
    assert (b"transfer-encoding: chunked" in head.lower()) is (version == "1.1")
    if version == "1.0":
        assert b"content-length: %d" % len(events) in head.lower()
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")


async def test_every_reply_has_an_id_of_its_own(serve):
    service = await serve(["Hello.", "Hello."])
    one, two = await service.ask(), await service.ask()
    assert one._request_id.startswith("req_")
    assert one._request_id != two._request_id
    http, headers = await service.http(), {"x-api-key": service.key}
    url = f"{service.environment['ANTHROPIC_BASE_URL']}/v1/messages"
    refused = await http.post(url, json={"model": "scripted"}, headers=headers)
    assert refused.status_code == 400
    assert refused.headers["request-id"].startswith("req_")
