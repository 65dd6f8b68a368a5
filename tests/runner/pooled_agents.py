"""Agents that share pools, queues and worker processes between the attempts of one process.

Each asks the model twenty times, with a client of one of four kinds: made in the attempt from what it was given, made
in the attempt from the environment, made once when the first attempt asks for it, or made at import.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache, partial
from multiprocessing.pool import ThreadPool
from typing import Any, TypeVar

import anyio
import httpx

T = TypeVar("T")

CALLS = 20
KIND = os.environ.get("TEST_CLIENT_KIND", "given")


TLS = ssl.create_default_context()
"""What takes most of the time in which a client is made."""
LIMITS = httpx.Limits(max_connections=100)
"""No limit of idle connections: where there is one, a client that many threads share now and then closes a connection
that another thread has just been given (httpcore 1.0)."""


def make(base_url: str, key: str) -> httpx.Client:
    return httpx.Client(
        base_url=base_url, headers={"authorization": f"Bearer {key}"}, timeout=60, limits=LIMITS, verify=TLS
    )


def from_environment() -> httpx.Client:
    return make(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])


_making = threading.RLock()


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Called many times, by many threads, it makes one."""
    made = cache(make)

    def get() -> T:
        with _making:
            return made()

    return get


AT_IMPORT = from_environment() if "OPENAI_BASE_URL" in os.environ else None
kept = once(from_environment)


def client_of(llm: Any) -> httpx.Client:
    if KIND == "module":
        assert AT_IMPORT is not None
        return AT_IMPORT
    if KIND == "cached":
        return kept()
    return from_environment() if KIND == "environment" else make(llm.base_url, llm.api_key)


def ask(client: httpx.Client, word: str) -> str:
    asked = {"model": "scripted", "messages": [{"role": "user", "content": word}]}
    reply = client.post("/chat/completions", json=asked)
    return reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else f"refused {reply.text}"


def ask_at(base_url: str, key: str, word: str) -> str:
    """In another process, where a client of ours is of no use."""
    with make(base_url, key) as client:
        return ask(client, word)


def ask_from_environment(word: str) -> str:
    with from_environment() as client:
        return ask(client, word)


def ask_with_module_client(word: str) -> str:
    assert AT_IMPORT is not None
    return ask(AT_IMPORT, word)


def score(answers: list[str]) -> float:
    refused = [answer for answer in answers if answer.startswith("refused")]
    if refused:
        raise RuntimeError(refused[0])
    return float(len(answers))


# -- pools -----------------------------------------------------------------------------------------------------------


@once
def thread_pool() -> ThreadPool:
    return ThreadPool(8)


def in_thread_pool(task: dict[str, str], llm: Any) -> float:
    client, pool = client_of(llm), thread_pool()
    half = CALLS // 2
    answers = pool.map(partial(ask, client), [task["word"]] * half)
    answers += [pool.apply_async(ask, (client, task["word"])).get() for _ in range(half // 2)]
    return score([*answers, *pool.imap_unordered(partial(ask, client), [task["word"]] * (half - half // 2))])


@once
def executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(8)


def in_executor(task: dict[str, str], llm: Any) -> float:
    return score(list(executor().map(partial(ask, client_of(llm)), [task["word"]] * CALLS)))


@once
def process_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(4)


def in_process_pool(task: dict[str, str], llm: Any) -> float:
    work: Callable[[str], str] = partial(ask_at, llm.base_url, llm.api_key)
    if KIND == "environment":
        work = ask_from_environment
    elif KIND == "module":
        work = ask_with_module_client
    return score(list(process_pool().map(work, [task["word"]] * CALLS)))


def in_joblib(task: dict[str, str], llm: Any) -> float:
    import joblib

    client = client_of(llm)
    with joblib.parallel_config(backend="threading", n_jobs=4):
        return score(list(joblib.Parallel()(joblib.delayed(ask)(client, task["word"]) for _ in range(CALLS))))


def in_joblib_processes(task: dict[str, str], llm: Any) -> float:
    import joblib

    with _making:  # joblib shares one pool of processes, and one caller at a time may use it
        parallel = joblib.Parallel(n_jobs=2, backend="loky")
        if KIND == "environment":
            return score(parallel(joblib.delayed(ask_from_environment)(task["word"]) for _ in range(CALLS)))
        work = joblib.delayed(ask_at)
        return score(parallel(work(llm.base_url, llm.api_key, task["word"]) for _ in range(CALLS)))


@once
def worker_pool() -> Any:
    return multiprocessing.Pool(4)


def in_worker_pool(task: dict[str, str], llm: Any) -> float:
    work: Callable[[str], str] = partial(ask_at, llm.base_url, llm.api_key)
    if KIND == "environment":
        work = ask_from_environment
    elif KIND == "module":
        work = ask_with_module_client
    return score(worker_pool().map(work, [task["word"]] * CALLS))


# -- queues ----------------------------------------------------------------------------------------------------------


@once
def work_queue() -> queue.Queue[Any]:
    work: queue.Queue[Any] = queue.Queue()
    for _ in range(4):
        threading.Thread(target=work_off, args=(work,), daemon=True).start()
    return work


def work_off(work: Any) -> None:
    while True:
        client, word, answer = work.get()
        answer.set_result(ask(client, word))


def in_queue_thread(task: dict[str, str], llm: Any) -> float:
    client, work = client_of(llm), work_queue()
    answers: list[Future[str]] = [Future() for _ in range(CALLS)]
    for answer in answers:
        work.put((client, task["word"], answer))
    return score([answer.result() for answer in answers])


@once
def simple_queue() -> queue.SimpleQueue[Any]:
    work: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(4):
        executor().submit(work_off, work)
    return work


def in_simple_queue(task: dict[str, str], llm: Any) -> float:
    client, work = client_of(llm), simple_queue()
    answers: list[Future[str]] = [Future() for _ in range(CALLS)]
    for answer in answers:
        work.put((client, task["word"], answer))
    return score([answer.result() for answer in answers])


@once
def memory_stream() -> Any:
    sender, receiver = anyio.create_memory_object_stream[Any](2)
    CONSUMERS.extend(asyncio.create_task(receive(receiver.clone())) for _ in range(4))
    return sender


async def receive(receiver: Any) -> None:
    async for client, word, answer in receiver:
        answer.set_result(await ask_async(client, word))


async def in_memory_stream(task: dict[str, str], llm: Any) -> float:
    client, sender = client_of(llm), memory_stream()
    answers = [asyncio.get_running_loop().create_future() for _ in range(CALLS)]
    for answer in answers:
        await sender.send((client, task["word"], answer))
    return score(await asyncio.gather(*answers))


CONSUMERS: list[asyncio.Task[None]] = []


@once
def async_queue() -> asyncio.Queue[Any]:
    work: asyncio.Queue[Any] = asyncio.Queue()
    CONSUMERS.extend(asyncio.create_task(consume(work)) for _ in range(4))
    return work


async def ask_async(client: httpx.Client, word: str) -> str:
    async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=60, verify=TLS) as own:
        reply = await own.post(
            "/chat/completions", json={"model": "scripted", "messages": [{"role": "user", "content": word}]}
        )
    return reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else f"refused {reply.text}"


async def consume(work: asyncio.Queue[Any]) -> None:
    while True:
        waits = os.environ.get("TEST_QUEUE_WAIT")
        client, word, answer = await (asyncio.wait_for(work.get(), 60) if waits else work.get())
        answer.set_result(await ask_async(client, word))


async def in_async_queue(task: dict[str, str], llm: Any) -> float:
    client, work = client_of(llm), async_queue()
    answers = [asyncio.get_running_loop().create_future() for _ in range(CALLS)]
    for answer in answers:
        work.put_nowait((client, task["word"], answer))
    return score(await asyncio.gather(*answers))


# -- threads and tasks of the attempt's own ----------------------------------------------------------------------------


def in_threads(task: dict[str, str], llm: Any) -> float:
    client, answers = client_of(llm), list[str]()
    threads = [threading.Thread(target=lambda: answers.append(ask(client, task["word"]))) for _ in range(CALLS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return score(answers)


async def in_tasks(task: dict[str, str], llm: Any) -> float:
    client = client_of(llm)
    return score(list(await asyncio.gather(*(ask_async(client, task["word"]) for _ in range(CALLS)))))


async def in_anyio_threads(task: dict[str, str], llm: Any) -> float:
    client, answers = client_of(llm), list[str]()

    async def one() -> None:
        answers.append(await anyio.to_thread.run_sync(ask, client, task["word"]))

    async with anyio.create_task_group() as group:
        for _ in range(CALLS):
            group.start_soon(one)
    return score(answers)
