"""Sends the reply to a local call: events while it is sampled if the client streams, else one JSON body.

A client that disconnects ends the sampling, in every dialect. What is sampled by then is still recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.types import Receive

from agentlightning.gateway.asgi import ClientDisconnected, ResponseWriter, wait_for_disconnect
from agentlightning.gateway.dialects.base import ReplyWriter
from agentlightning.gateway.dialects.output import OutputEvent
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.local.answer import Answer
from agentlightning.gateway.local.call import LocalCall, OnEvent

logger = logging.getLogger(__name__)

Events = asyncio.Queue[tuple[Answer, OutputEvent] | None]
"""Events of answers; None if the sampling has ended or the client has disconnected."""


async def stream_reply(
    call: LocalCall,
    run: Callable[[LocalCall, OnEvent | None], Awaitable[None]],
    reply: ReplyWriter,
    *,
    stream: bool,
    finish: Callable[[], None],
    receive: Receive,
    writer: ResponseWriter,
) -> None:
    """Sample with `run` and send the reply. Calls `finish` when everything is sampled and recorded, before the client
    can know. Raises ClientDisconnected, and what `run` raises."""
    events: Events = asyncio.Queue()
    opened = False

    def put(answer: Answer, event: OutputEvent) -> None:
        events.put_nowait((answer, event))

    sampling = asyncio.ensure_future(run(call, put if stream else None))
    disconnect = asyncio.create_task(wait_for_disconnect(receive))
    for task in (sampling, disconnect):
        task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        with writer.kept_alive(lambda: stream):
            while (event := await events.get()) is not None:
                await writer.send_events(_format_events(reply, call, opened, event, events))
                opened = True
            if not sampling.done():
                raise ClientDisconnected
            await sampling
        if stream:
            ending = (b"" if opened else reply.start(call.answers)) + reply.end(call.answers)
            finish()
            await writer.send_events(ending)
            await writer.close()
        else:
            body = reply.body(call.answers)
            finish()
            await writer.send_json(200, body)
    except asyncio.CancelledError as error:
        if error.args and isinstance(error.args[0], ApiError):  # the attempt has ended
            call.end_reason = error.args[0]
        raise
    finally:
        await _finish_task(call, sampling, disconnect)


def _format_events(
    reply: ReplyWriter, call: LocalCall, opened: bool, first: tuple[Answer, OutputEvent], events: Events
) -> bytes:
    """All events so far, to be sent with one write."""
    parts = [] if opened else [reply.start(call.answers)]
    parts.append(reply.event(*first))
    while not events.empty():
        event = events.get_nowait()
        if event is None:
            events.put_nowait(None)
            break
        parts.append(reply.event(*event))
    return b"".join(parts)


async def _finish_task(call: LocalCall, sampling: asyncio.Future[None], disconnect: asyncio.Task[None]) -> None:
    """Leave no task running. Complete answers are recorded even if the client has disconnected."""
    disconnect.cancel()
    if not call.is_sampled:
        sampling.cancel()
    await asyncio.wait({sampling, disconnect})
    if disconnect.cancelled() or sampling.cancelled() or (error := sampling.exception()) is None:
        return
    logger.error("a call whose client disconnected could not be recorded", exc_info=error)
