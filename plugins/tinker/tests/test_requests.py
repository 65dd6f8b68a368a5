"""Requests of a model run in their order, and what a server knows of those that have run does not grow with them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning_tinker.server.sessions import Session, Work


def says(number: int, said: list[int]) -> Work:
    async def work() -> Mapping[str, Any]:
        said.append(number)
        if number == 2:
            raise ConfigError("two is refused")
        return {"number": number}

    return work


async def test_requests_run_in_their_order_whatever_one_of_them_raises() -> None:
    session, said = Session("s"), list[int]()
    session.open_queue("s:train:0", says(0, said))
    names = {number: session.enqueue("s:train:0", number, says(number, said)) for number in (3, 1, 2)}
    last = await session.fetch(names[3], 5)
    refused = await session.fetch(names[2], 5)
    assert (said, last and last.body) == ([0, 1, 2, 3], b'{"number":3}')
    assert refused is not None
    assert b"two is refused" in refused.body
    assert session.enqueue("s:train:0", 3, says(3, said)) == names[3], "it was sent again"
    await session.close()


async def test_what_has_run_is_known_by_one_number_and_refused_once_its_result_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentlightning_tinker.server.sessions.FETCHED_BYTES", 0)
    session, said = Session("s"), list[int]()
    await session.fetch(session.open_queue("s:train:0", says(0, said)), 5)
    for number in range(10, 30):
        session.enqueue("s:train:0", number, says(number, said))
    for number in range(1, 30):
        await session.fetch(session.enqueue("s:train:0", number, says(number, said)), 5)
    assert said == list(range(30))
    assert session._passed == {"s:train:0": 29}
    for number in (-1, 0, 7, 28):
        with pytest.raises(ConfigError, match="has run, and its result is no longer kept"):
            session.enqueue("s:train:0", number, says(number, said))
    await session.close()


async def test_a_request_whose_session_ends_while_its_result_is_awaited_is_cancelled_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentlightning_tinker.server.sessions.FETCHED_BYTES", 0)
    session, said = Session("s"), list[int]()
    waiting = asyncio.create_task(session.fetch(session.start(asyncio.Event().wait), 5))  # pyright: ignore
    await asyncio.sleep(0)
    await session.close()
    cancelled = await waiting
    assert cancelled is not None
    assert b"was cancelled" in cancelled.body
    for number in range(2):
        await session.fetch(session.start(says(number, said)), 5)
    assert said == [0, 1]
    await session.close()
