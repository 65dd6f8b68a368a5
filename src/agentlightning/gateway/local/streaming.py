"""Passing an exchange on to its caller while it is drawn: piece by piece where the caller streams, else in one.

A caller that hangs up ends the drawing, in every dialect. What is drawn by then is recorded to the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.types import Receive

from agentlightning.gateway.asgi import ClientDisconnected, ResponseWriter, wait_for_disconnect
from agentlightning.gateway.dialects.base import ReplyWriter
from agentlightning.gateway.dialects.output import OutputEvent
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.call import LocalCall, OnEvent

logger = logging.getLogger(__name__)

Events = asyncio.Queue[tuple[Answer, OutputEvent] | None]
"""Pieces of answers; None: somebody is done."""


async def stream_reply(
    exchange: LocalCall,
    run: Callable[[LocalCall, OnEvent | None], Awaitable[None]],
    reply: ReplyWriter,
    *,
    stream: bool,
    finish: Callable[[], None],
    receive: Receive,
    writer: ResponseWriter,
) -> None:
    """Draw with `run`, and pass on. `finish` is called when all is drawn and recorded, before the caller can know.
    Raises ClientDisconnected where the caller hung up, and what `run` raised."""
    events: Events = asyncio.Queue()
    work = asyncio.ensure_future(run(exchange, partial(_put, events) if stream else None))
    gone = asyncio.create_task(wait_for_disconnect(receive))
    for task in (work, gone):
        task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            await writer.send_events(_format_events(reply, exchange, writer.started, event, events))
        if not work.done():
            raise ClientDisconnected
        await work
        await _send_end(reply, exchange, stream, finish, writer)
    except asyncio.CancelledError as error:
        if error.args and isinstance(error.args[0], ApiError):  # its attempt has ended
            exchange.end_reason = error.args[0]
        raise
    finally:
        await _finish_task(exchange, work, gone)


def _put(events: Events, answer: Answer, piece: OutputEvent) -> None:
    events.put_nowait((answer, piece))


def _format_events(
    reply: ReplyWriter, exchange: LocalCall, started: bool, first: tuple[Answer, OutputEvent], events: Events
) -> bytes:
    """Everything that is there by now, to be sent at once."""
    parts = [] if started else [reply.start(exchange.answers)]
    parts.append(reply.event(*first))
    while not events.empty():
        event = events.get_nowait()
        if event is None:
            events.put_nowait(None)
            break
        parts.append(reply.event(*event))
    return b"".join(parts)


async def _send_end(
    reply: ReplyWriter, exchange: LocalCall, stream: bool, finish: Callable[[], None], writer: ResponseWriter
) -> None:
    answers = exchange.answers
    if not stream:
        body = reply.body(answers)
        finish()
        return await writer.send_json(200, body)
    opening = b"" if writer.started else reply.start(answers)
    ending = opening + reply.end(answers)
    finish()
    await writer.send_events(ending)
    await writer.close()


async def _finish_task(exchange: LocalCall, work: asyncio.Future[None], gone: asyncio.Task[None]) -> None:
    """Leave nothing running. What is drawn is recorded to the end, even for a caller that has hung up."""
    gone.cancel()
    if not exchange.is_sampled:
        work.cancel()
    await asyncio.wait({work, gone})
    if gone.cancelled() or work.cancelled() or (error := work.exception()) is None:
        return
    logger.error("the call of a caller that hung up could not be recorded", exc_info=error)
