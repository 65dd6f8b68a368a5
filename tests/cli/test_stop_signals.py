"""Promises about SIGINT and SIGTERM while a verb of the command line runs, and afterwards."""

from __future__ import annotations

import asyncio
import os
import signal

import uvloop

from agentlightning.cli.serve import StopSignals


def test_the_first_signal_requests_a_stop_and_afterwards_the_default_handler_is_back() -> None:
    async def verb() -> bool:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            return await signals.while_running(asyncio.sleep(60))

    assert uvloop.run(verb())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
