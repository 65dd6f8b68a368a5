"""The throw-away PostgreSQL: it is real, alone, durable, and gone when it is closed."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.support import postgres as module
from tests.support.postgres import PostgresCluster, PostgresNotFoundError, find_programs

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(postgres: PostgresCluster) -> Iterator[PostgresCluster]:
    """One of these tests' own, as they stop it."""
    with PostgresCluster({"max_connections": 7}) as cluster:
        yield cluster


@slow
def test_databases_are_empty_and_apart(cluster: PostgresCluster) -> None:
    first, second = cluster.new_database(), cluster.new_database()
    with psycopg.connect(first) as one, psycopg.connect(second) as two:
        one.execute("CREATE TABLE kept (number int)")
        one.commit()
        assert two.execute("SELECT to_regclass('kept')").fetchone() == (None,)


@slow
def test_settings_are_passed_on_and_durability_is_on(cluster: PostgresCluster) -> None:
    assert cluster.run("SHOW max_connections") == [("7",)]
    assert cluster.run("SHOW fsync") == cluster.run("SHOW synchronous_commit") == [("on",)]


@slow
def test_nobody_comes_in_without_the_password(cluster: PostgresCluster) -> None:
    password = cluster.url().split("@")[0].rsplit(":", 1)[1]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(cluster.url().replace(password, "guessed"))


@slow
def test_what_was_committed_survives_a_crash_at_the_same_address(cluster: PostgresCluster) -> None:
    url = cluster.new_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept (number int)")
        connection.execute("INSERT INTO kept VALUES (7)")
    cluster.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    cluster.start()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT number FROM kept").fetchall() == [(7,)]


START_AND_HANG = """
from tests.support.postgres import PostgresCluster
cluster = PostgresCluster()
((data,),) = cluster.run("SHOW data_directory")
print(open(data + "/postmaster.pid").readline().strip(), data, flush=True)
input()
"""


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent has died")
def test_the_server_ends_when_the_tests_are_killed(postgres: PostgresCluster) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", START_AND_HANG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid, data = process.stdout.readline().split()
    process.kill()
    process.communicate()
    ended = os.pidfd_open(int(pid)) if Path(f"/proc/{pid}").exists() else None
    if ended is not None:
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
    shutil.rmtree(Path(data).parent)


def test_a_machine_without_postgresql_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(PostgresNotFoundError, match="apt-get install postgresql"):
        find_programs()


@slow
def test_a_server_that_does_not_start_says_why(postgres: PostgresCluster) -> None:
    with pytest.raises(module.ServerError, match=r"did not start.*max_connections"):
        PostgresCluster({"max_connections": "many"})
