"""Passing an exchange on to its caller while it is drawn: piece by piece where the caller streams, else in one.

A caller that hangs up ends the drawing, in every dialect. What is drawn by then is recorded to the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.types import Receive

from agentlightning.gateway.asgi import ClientGone, Outlet, until_gone
from agentlightning.gateway.dialects.base import Reply
from agentlightning.gateway.dialects.content import Piece
from agentlightning.gateway.errors import Problem
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.call import Exchange, Show

logger = logging.getLogger(__name__)

Events = asyncio.Queue[tuple[Answer, Piece] | None]
"""Pieces of answers; None: somebody is done."""


async def relay(
    exchange: Exchange,
    run: Callable[[Exchange, Show | None], Awaitable[None]],
    reply: Reply,
    *,
    stream: bool,
    finish: Callable[[], None],
    receive: Receive,
    outlet: Outlet,
) -> None:
    """Draw with `run`, and pass on. `finish` is called when all is drawn and recorded, before the caller can know.
    Raises ClientGone where the caller hung up, and what `run` raised."""
    events: Events = asyncio.Queue()
    work = asyncio.ensure_future(run(exchange, partial(_put, events) if stream else None))
    gone = asyncio.create_task(until_gone(receive))
    for task in (work, gone):
        task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            await outlet.write(_pieces(reply, exchange, outlet.started, event, events))
        if not work.done():
            raise ClientGone
        await work
        await _end(reply, exchange, stream, finish, outlet)
    except asyncio.CancelledError as error:
        if error.args and isinstance(error.args[0], Problem):  # its attempt has ended
            exchange.ended = error.args[0]
        raise
    finally:
        await _settle(exchange, work, gone)


def _put(events: Events, answer: Answer, piece: Piece) -> None:
    events.put_nowait((answer, piece))


def _pieces(reply: Reply, exchange: Exchange, started: bool, first: tuple[Answer, Piece], events: Events) -> bytes:
    """Everything that is there by now, to be sent at once."""
    parts = [] if started else [reply.opening(exchange.answers)]
    parts.append(reply.piece(*first))
    while not events.empty():
        event = events.get_nowait()
        if event is None:
            events.put_nowait(None)
            break
        parts.append(reply.piece(*event))
    return b"".join(parts)


async def _end(reply: Reply, exchange: Exchange, stream: bool, finish: Callable[[], None], outlet: Outlet) -> None:
    answers = exchange.answers
    if not stream:
        body = reply.whole(answers)
        finish()
        return await outlet.whole(200, body)
    opening = b"" if outlet.started else reply.opening(answers)
    ending = opening + reply.ending(answers)
    finish()
    await outlet.write(ending)
    await outlet.close()


async def _settle(exchange: Exchange, work: asyncio.Future[None], gone: asyncio.Task[None]) -> None:
    """Leave nothing running. What is drawn is recorded to the end, even for a caller that has hung up."""
    gone.cancel()
    if not exchange.drawn:
        work.cancel()
    await asyncio.wait({work, gone})
    if gone.cancelled() or work.cancelled() or (error := work.exception()) is None:
        return
    logger.error("the call of a caller that hung up could not be recorded", exc_info=error)
