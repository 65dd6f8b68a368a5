"""A temporary PostgreSQL server on loopback, for tests and benchmarks.

    with PostgresCluster() as cluster:
        store = LightningStore(cluster.new_database())

It has its own directory, port and password, does not affect other servers of the machine, and is removed afterwards,
even if this process is killed. It needs PostgreSQL's programs (Debian and Ubuntu: `apt-get install postgresql`) and,
when run by root, the user `postgres` or `nobody`, because PostgreSQL does not run as root. POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from agentlightning.errors import MissingExtraError, ServerError

if TYPE_CHECKING:
    from pwd import struct_passwd

START_SECONDS: Final = 30.0
"""Time limit for starting and stopping the server."""
USERS: Final = ("postgres", "nobody")
"""Users to run it as instead of root."""


class PostgresNotFoundError(ServerError):
    """PostgreSQL is not installed on this machine."""


def find_programs() -> Path:
    """The directory of `initdb` and `postgres`. Raises PostgresNotFoundError."""
    named = shutil.which("pg_config")
    asked = subprocess.run([named, "--bindir"], capture_output=True, text=True).stdout.strip() if named else ""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    found = shutil.which("initdb")
    for folder in ([Path(found).resolve().parent] if found else []) + debian + ([Path(asked)] if asked else []):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise PostgresNotFoundError("PostgreSQL is not installed; on Debian and Ubuntu run: apt-get install postgresql")


def _version(folder: Path) -> int:
    """Of `/usr/lib/postgresql/15/bin`: 15."""
    return int(folder.parent.name) if folder.parent.name.isdigit() else 0


class PostgresCluster:
    """One PostgreSQL server and its databases. Raises PostgresNotFoundError if it is not installed, and ServerError if
    it does not start.

    `settings` are PostgreSQL's own, such as `{"max_connections": 20}`. Durability is on as in production.
    """

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        self._programs = find_programs()
        self._settings = {"shared_buffers": "64MB", **(settings or {})}
        self._user = _user()
        self._password = secrets.token_hex(12)
        self._folder = Path(tempfile.mkdtemp(prefix="agl-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._launcher = ThreadPoolExecutor(1, "agl-postgres")
        """The server stops when the thread that started it ends (PR_SET_PDEATHSIG), so that thread must live on."""
        self._databases = 0
        self.port = 0
        """Its port on 127.0.0.1."""
        try:
            self._make()
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def url(self, database: str = "postgres") -> str:
        """The URL of a database, including the password."""
        return f"postgresql://agl:{self._password}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        self._databases += 1
        name = f"test{self._databases}"
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def run(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, outside any transaction; returns its rows."""
        with _psycopg().connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        """Start the server after `stop` or `kill`, on the same port."""
        for attempt in range(3):
            fresh = self.port == 0
            if fresh:
                self.port = _free_port()
            self._process = self._launcher.submit(self._launch).result()
            if self._answers():
                return
            self.stop()
            if not fresh or attempt == 2:
                raise ServerError(f"PostgreSQL did not start: {self.log()[-1000:]}")
            self.port = 0  # someone else took it meanwhile

    def stop(self) -> None:
        """Stop the server cleanly; connections are closed immediately."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kill the server as a crash would: the write-ahead log is replayed at the next start."""
        self._end(signal.SIGQUIT)

    def log(self) -> str:
        """The server's log so far."""
        path = self._folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Stop the server and delete its files. Idempotent."""
        self.kill()  # what it would take care to write is thrown away
        self._launcher.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- how ---------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        password = self._folder / "password"
        password.write_text(self._password)
        if self._user is not None:
            os.chown(password, self._user.pw_uid, self._user.pw_gid)
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        # md5 takes a hundredth of the time of scram-sha-256, for each connection of each test.
        options = ["-D", str(self._folder / "data"), "-U", "agl", f"--pwfile={password}", "-A", "md5"]
        # --no-sync: an empty cluster is not worth waiting for the disk; the running server syncs as usual.
        made = self._spawn("initdb", [*options, "--no-locale", "-E", "UTF8", "--no-sync"], subprocess.PIPE)
        said, _ = made.communicate()
        if made.returncode:
            raise ServerError(f"initdb could not make a PostgreSQL cluster in {self._folder}: {said.decode()[-1000:]}")

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self._folder,
            **self._settings,
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            return self._spawn("postgres", ["-D", str(self._folder / "data"), *options], log)

    def _spawn(self, program: str, options: Sequence[str], output: int | IO[bytes]) -> subprocess.Popen[bytes]:
        setpriv = shutil.which("setpriv")
        bound = [setpriv, "--pdeathsig", "INT"] if setpriv and os.uname().sysname == "Linux" else []
        person: dict[str, Any] = {}
        if self._user is not None:
            person = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return subprocess.Popen[bytes](
            [*bound, str(self._programs / program), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            start_new_session=True,  # Ctrl-C ends the tests, and they the server
            **person,
        )

    def _answers(self) -> bool:
        psycopg = _psycopg()
        give_up = time.monotonic() + START_SECONDS
        while self._process is not None and self._process.poll() is None and time.monotonic() < give_up:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url()).close()
                return True
            time.sleep(0.01)
        return False

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _user() -> struct_passwd | None:
    """The user to run the server as; None for the current one."""
    if os.geteuid() != 0:
        return None
    import pwd

    for name in USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ServerError(f"PostgreSQL refuses to run as root, and there is no user {' or '.join(USERS)} to run it instead")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtraError("psycopg", "postgres") from error
    return psycopg
