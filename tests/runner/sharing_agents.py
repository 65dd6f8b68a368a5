"""Agents that share a model client, which the first attempt makes, and tasks that it starts."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from typing import Any

import httpx


@cache
def client() -> httpx.AsyncClient:
    key = os.environ["OPENAI_API_KEY"]
    return httpx.AsyncClient(
        base_url=os.environ["OPENAI_BASE_URL"], headers={"authorization": f"Bearer {key}"}, timeout=60
    )


async def ask(word: str) -> str:
    asked = {"model": "scripted", "messages": [{"role": "user", "content": word}]}
    reply = await client().post("/chat/completions", json=asked)
    if reply.status_code != 200:
        raise RuntimeError(reply.json()["error"]["message"])
    return reply.json()["choices"][0]["message"]["content"]


class ToolConnection:
    """A connection to a tool server, as clients of MCP have one: requests go through one queue, a reader hands each
    answer to the queue that the request was made with."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[str, asyncio.Queue[str]]] = asyncio.Queue()
        self._written: list[tuple[str, asyncio.Queue[str]]] = []
        self._readable = asyncio.Event()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def _write(self) -> None:
        while True:
            self._written.append(await self._requests.get())
            self._readable.set()

    async def _read(self) -> None:
        while True:
            await self._readable.wait()
            self._readable.clear()
            while self._written:
                word, answers = self._written.pop()
                await answers.put(f"the tool says {word}")

    async def call(self, word: str) -> str:
        answers: asyncio.Queue[str] = asyncio.Queue()
        await self._requests.put((word, answers))
        return await answers.get()


@cache
def tools() -> ToolConnection:
    return ToolConnection()


async def with_tools(task: dict[str, str]) -> float:
    """A tool is called in a task that ends with it, then the model in another, as AutoGen does; and both in one."""
    connection = tools()
    said = await asyncio.create_task(connection.call(task["word"]))
    await asyncio.create_task(ask(said))

    async def both() -> None:
        await ask(await connection.call(task["word"]))

    await asyncio.gather(both(), both())
    return 1.0


# -- what cannot be known ----------------------------------------------------------------------------------------------


@cache
def jobs() -> asyncio.Queue[tuple[str, asyncio.Future[str]]]:
    found: asyncio.Queue[tuple[str, asyncio.Future[str]]] = asyncio.Queue()
    TASKS.append(asyncio.create_task(work_off(found)))
    return found


TASKS: list[asyncio.Task[Any]] = []


async def work_off(found: asyncio.Queue[tuple[str, asyncio.Future[str]]]) -> None:
    while True:
        word, answer = await asyncio.create_task(found.get())  # taken by a task of its own
        try:
            answer.set_result(await ask(word))
        except RuntimeError as error:
            answer.set_exception(error)


async def with_worker(task: dict[str, str]) -> float:
    client()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    jobs().put_nowait((task["word"], answer))
    await answer
    return 1.0


WAITING: list[tuple[str, asyncio.Future[str]]] = []


@cache
def wake() -> asyncio.Event:
    event = asyncio.Event()
    TASKS.append(asyncio.create_task(work_off_list(event)))
    return event


async def work_off_list(event: asyncio.Event) -> None:
    while True:
        await event.wait()
        event.clear()
        while WAITING:
            word, answer = WAITING.pop(0)
            try:
                answer.set_result(await ask(word))
            except RuntimeError as error:
                answer.set_exception(error)


async def with_list(task: dict[str, str]) -> float:
    """Work that goes through a list, which nobody sees."""
    client()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    WAITING.append((task["word"], answer))
    wake().set()
    await answer
    return 1.0
