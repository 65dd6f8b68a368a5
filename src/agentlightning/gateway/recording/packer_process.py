"""A process that turns raw exchanges into packed spans, so that the gateway's process only forwards calls.

`PackerProcess` is the `Packer` of the journal in the gateway's process. It starts the process at a high rate of
exchanges and stops it at a low one; until then, and whenever the process fails, the journal packs the spans itself.
Nothing is lost with the process: all that it is given is in the journal.

`python -m agentlightning.gateway.recording.packer_process` reads frames from stdin, answers each with
one frame, and ends when stdin does.

A frame is the length of a MessagePack value (4 bytes, little endian) and the value: records, or packed spans.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO, Final

import msgspec

from agentlightning.gateway.recording import raw_exchange
from agentlightning.store.journal.store import pack_records
from agentlightning.store.sql.spans.attempt_spans import PackedSpans

logger = logging.getLogger(__name__)

START_RATE: Final = 200.0
"""Records per second at which a process pays off."""
IDLE_SECONDS: Final = 60.0
"""After this time below the rate, the process is stopped."""
_SECONDS: Final = 30.0
"""Timeout for the answer to a frame."""
_PAUSE_SECONDS: Final = 30.0
"""Pause after a failure."""
_WINDOW_SECONDS: Final = 0.5
_LENGTH: Final = struct.Struct("<I")
_encoder: Final = msgspec.msgpack.Encoder()
_records: Final = msgspec.msgpack.Decoder(list[bytes])
_packs: Final = msgspec.msgpack.Decoder(list[PackedSpans])


class PackerProcess:
    """Packs spans for one journal; see `store.journal.Packer`."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._count = 0
        self._since = time.monotonic()
        self._busy_at = float("-inf")
        self._paused_until = float("-inf")

    @property
    def pid(self) -> int | None:
        """The id of the process, once it is ready."""
        return self._process.pid if self._process is not None else None

    async def pack(self, records: Sequence[bytes]) -> list[PackedSpans] | None:
        """See `Packer.pack`."""
        now = time.monotonic()
        self._count_records(len(records), now)
        process = self._process
        if process is None:
            return None
        if now - self._busy_at > IDLE_SECONDS:
            await self._end()
            return None
        try:
            async with asyncio.timeout(_SECONDS):
                return _packs.decode(await _exchange(process, _encoder.encode(records)))
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            logger.error("the packer process failed, spans are packed in this process: %r", error)
            self._paused_until = now + _PAUSE_SECONDS
            await self._end()
            return None

    def _count_records(self, count: int, now: float) -> None:
        """Start the process if the rate is high."""
        self._count += count
        if (passed := now - self._since) < _WINDOW_SECONDS:
            return
        if self._count / passed >= START_RATE:
            self._busy_at = now
            if self._process is None and self._starting is None and now >= self._paused_until:
                self._starting = asyncio.create_task(self._start())
        self._count, self._since = 0, now

    async def _start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "agentlightning.gateway.recording.packer_process"),
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,
            )
        except OSError as error:
            logger.warning("the packer process cannot be started, spans are packed in this process: %s", error)
            self._paused_until = float("inf")
            return
        finally:
            self._starting = None
        self._starting = asyncio.current_task()
        try:
            async with asyncio.timeout(_SECONDS):
                await _exchange(process, _encoder.encode([]))  # Its imports are done.
            self._process = process
        except (OSError, EOFError, TimeoutError) as error:
            logger.error("the packer process did not start, spans are packed in this process: %r", error)
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            await _kill(process)
        except asyncio.CancelledError:
            await _kill(process)
            raise
        finally:
            self._starting = None

    async def close(self) -> None:
        """Stop the process."""
        if (starting := self._starting) is not None:
            starting.cancel()
            await asyncio.wait({starting})
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _kill(process)


async def _exchange(process: asyncio.subprocess.Process, value: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(value)))
    process.stdin.write(value)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(length)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process, which has no state to save."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


# -- the process -------------------------------------------------------------------------------------------------------


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Pack until the input ends."""
    while (value := _read(source)) is not None:
        packed = _encoder.encode(pack_records(_records.decode(value), raw_exchange.read))
        sink.write(_LENGTH.pack(len(packed)))
        sink.write(packed)
        sink.flush()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    value = source.read(length)
    return value if len(value) == length else None


def main() -> None:
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Prints must not end up between frames.
    with suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, output)


if __name__ == "__main__":
    main()
