"""What holds for all tests, and what many of them need."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.support.postgres import PostgresCluster
    from tests.support.store_hub import StoreHub

    from agentlightning.store.memory import InMemoryLightningStore

# Two workers with two torch threads each on two cores wait for one another most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on what else the machine does: no test may fail of it.
# Fewer examples than the 100 of hypothesis keep the default tier short; set the variable to search longer.
settings.register_profile(
    "agentlightning",
    deadline=None,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("agentlightning")


CHECKOUT_STORE = Path(__file__).parent / ".agentlightning"


def _stored() -> dict[str, int]:
    """The files of the store in the checkout, which a user may have, and when they were last written."""
    return {file.name: file.stat().st_mtime_ns for file in CHECKOUT_STORE.glob("*")}


@pytest.fixture(autouse=True)
def _leaves_the_checkout_alone() -> Iterator[None]:
    """A test that opens the default store works in a directory of its own (`monkeypatch.chdir(tmp_path)`)."""
    before = _stored()
    yield
    assert _stored() == before, (
        f"this test, or one beside it, has written to {CHECKOUT_STORE}; give it a store or chdir"
    )


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    """A store that is gone with the test. Where what is on disk matters, a folder or file has one of its own."""
    from agentlightning.store.memory import InMemoryLightningStore

    made = InMemoryLightningStore()
    yield made
    await made.close()


TEST_PROCESS = "AGL_TEST_PROCESS"
"""Variable by which the processes that the tests of one pytest process have started are found, whoever adopted them."""
_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "loky.backend.resource_tracker",
)
"""Processes that end with the one that started them."""


@pytest.fixture(scope="session", autouse=True)
def _leaves_no_process_behind() -> Iterator[None]:
    """After all tests of this process: what they have started has ended, a moment later at the latest."""
    os.environ[TEST_PROCESS] = mark = f"{os.getpid()}-{time.time_ns()}"
    yield
    deadline = time.monotonic() + 10
    while (left := _processes_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"tests have left {len(left)} processes running: " + "; ".join(left)


def _processes_marked(mark: str) -> list[str]:
    """The live processes that carry the mark, or are children of this one."""
    found: dict[int, str] = {}
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            is_ours = process.pid in children or process.environ().get(TEST_PROCESS) == mark
            command = " ".join(process.cmdline())
            alive = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
            if is_ours and alive and not any(name in command for name in _HELPERS):
                found[process.pid] = f"{process.pid} (parent {process.ppid()}): {command[:200]}"
        except (psutil.Error, OSError):
            continue
    return [found[pid] for pid in sorted(found)]


@pytest.fixture(scope="session")
def hub() -> Iterator[StoreHub]:
    """A server of this test process: `hub.serve(store)` is the address of a store on it."""
    from tests.support.store_hub import StoreHub

    with StoreHub() as hub:
        yield hub


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresCluster]:
    """A PostgreSQL server of this test process. Tests that stop it make one of their own."""
    from tests.support.postgres import PostgresCluster, PostgresNotFoundError

    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'agentlightning[postgres]'")
    try:
        cluster = PostgresCluster()
    except PostgresNotFoundError as error:
        pytest.skip(str(error))
    with cluster:
        yield cluster


@pytest.fixture
def postgres_url(postgres: PostgresCluster) -> str:
    """The address of an empty database on it."""
    return postgres.new_database()


@pytest.fixture(scope="session")
def _tables_url(postgres: PostgresCluster) -> str:
    from agentlightning.store.sql.postgres import PostgresDatabase

    url = postgres.new_database()
    PostgresDatabase(url).prepare()
    return url


@pytest.fixture
def postgres_store_url(postgres: PostgresCluster, _tables_url: str) -> str:
    """The address of a store without anything in it: quicker than a database of its own for each test."""
    from agentlightning.store.sql.postgres import TABLES

    emptied = "; ".join(f"DELETE FROM {name}" for name in TABLES if name != "about")
    postgres.run(emptied, _tables_url.rsplit("/", 1)[1])
    return _tables_url
