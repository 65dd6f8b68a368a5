"""The disk under a server fills up: clients are told, nothing acknowledged is lost, and with space it goes on."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from agentlightning.errors import StoreFullError
from agentlightning.span import PROMPT_TOKEN_IDS, Span
from agentlightning.store import LightningStoreBase

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of twelve megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_server_on_a_full_disk_says_so_and_goes_on_when_there_is_space(
    small_disk: Path, make_server, connect, audit, tell
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 4_000_000)
    server = make_server(small_disk / "store.db")
    server.start()
    rollout_id, kept = asyncio.run(fill_and_free(connect(server.url), server.url, ballast))
    assert server.process.end() == 0, server.process.said()
    found = audit(server.database)
    assert [span.span_id for span in found.spans[rollout_id]] == kept
    assert found.rollouts[rollout_id].status == "succeeded"
    tell(spans_kept_before_it_was_full=len(kept) - 1)


async def fill_and_free(connection, url: str, ballast: Path) -> tuple[str, list[str]]:
    async with connection as store:
        attempted = await store.start_rollout("task")
        ids = attempted.rollout_id, attempted.attempt.attempt_id
        kept = await fill(store, ids)
        assert await asyncio.to_thread(status_of_a_write, url, ids) == 507
        assert [span.span_id for span in await store.query_spans(ids[0])] == kept, "reading goes on"
        ballast.unlink()  # noqa: ASYNC240
        kept.append((await store.add_span(Span(*ids, "after", 1.0))).span_id)
        await store.update_attempt(*ids, status="succeeded")
        return ids[0], kept


async def fill(store: LightningStoreBase, ids: tuple[str, str]) -> list[str]:
    """Write until the disk is full; the ids of the spans that were acknowledged, in order."""
    kept: list[str] = []
    for number in range(2_000):
        tokens = {PROMPT_TOKEN_IDS: [number * 7919 + index * 31 for index in range(5_000)]}
        try:
            kept.append((await store.add_span(Span(*ids, "work", 1.0, attributes=tokens))).span_id)
        except StoreFullError:
            return kept
    raise AssertionError("the disk never filled up")


def status_of_a_write(url: str, ids: tuple[str, str]) -> int:
    span = {"rollout_id": ids[0], "attempt_id": ids[1], "name": "work", "start_time": 1.0, "span_id": "0" * 15 + "1"}
    body = orjson.dumps(span | {"attributes": {"text": "x" * 1_000_000}})
    request = urllib.request.Request(f"{url}/v1/agl/spans", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
