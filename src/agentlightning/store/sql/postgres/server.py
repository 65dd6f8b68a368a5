"""The address of a PostgreSQL database, connections to it, its errors, and what other servers notify of.

An error of a statement has a code (https://www.postgresql.org/docs/current/errcodes-appendix.html), an error of
connecting has only a text. No text contains a password.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from agentlightning.errors import ConfigError, StoreError, StoreFullError
from agentlightning.store.ids import new_hex
from agentlightning.store.sql.tx import Wake

logger = logging.getLogger(__name__)

RECONNECT_SECONDS: Final = 60.0
"""How long a call waits for a lost server to come back."""
CLOSE_SECONDS: Final = 5.0
"""How long all calls together wait for it once the store is being closed."""
SUSPENDED_SECONDS: Final = 30
"""A server that is silent for this long within a transaction (suspended, say) loses it, so that others can go on."""
MAX_NAME_BYTES: Final = 63
"""Of a schema or a channel."""
_SETTINGS: Final = (
    "SET statement_timeout = 0; SET lock_timeout = '120s'; SET client_min_messages = warning; "
    f"SET idle_in_transaction_session_timeout = '{SUSPENDED_SECONDS}s'; "
    # A stronger setting than "on" is the administrator's choice, a weaker one would lose what was acknowledged.
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') IN "
    "('off', 'local'); "
)
_LIBPQ_DEFAULTS: Final = {
    "application_name": "agentlightning",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Parameters of libpq that the URL may override. A server that vanished is noticed within half a minute."""


PAYLOAD_BYTES: Final = 7_900
"""PostgreSQL accepts payloads of less than 8,000 bytes."""
CLOSING_SECONDS: Final = 0.5
"""An idle listener looks this often whether it was closed. Keepalives of TCP test its connection."""
RETRY_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts to reconnect; the last one repeats."""

RETRY: Final = frozenset({"40001", "40P01"})
"""Serialization failure, deadlock: PostgreSQL rolled back the transaction so that another could go on."""
DUPLICATE_KEY: Final = "23505"
"""Another server has just inserted the same id: a retry of the command finds it."""
LOST: Final = frozenset({"25P03", "57P01", "57P02", "57P03", "57P05"})
"""The server ended the connection: it is shutting down or starting, has crashed, or an administrator ended it."""
DISK_FULL: Final = "53100"

_ADVICE: Final = {
    "25006": "the server takes no writes: it is a standby or set to read only; give the address of the primary",
    "28000": "the server does not let this user in from here; see CREATE ROLE and pg_hba.conf",
    "28P01": "the password is wrong; give the right one in the URL, in PGPASSWORD or in ~/.pgpass",
    "3D000": "make the database first: createdb",
    "3F000": "make the schema first, or leave ?schema= out",
    "42501": "grant this user the right to create and change tables in this schema",
    "53200": "the server is out of memory; nothing of this call was stored",
    "53300": "every connection of the server is taken (a store needs three); close some or raise max_connections",
    "55P03": "another transaction held a row for too long; look into pg_stat_activity for it",
    "57014": "someone cancelled the statement, or the server limits how long one may take",
    "58030": "the server's disk refused",
    "XX001": "the server's data is damaged",
}

_CONNECTING: Final = (
    ("password authentication failed", "28P01"),
    ("no password supplied", "28P01"),
    ("no pg_hba.conf entry", "28000"),
    ("too many clients", "53300"),
    ("remaining connection slots", "53300"),
    ("too many connections", "53300"),
    ('role "', "28000"),
    ("does not exist", "3D000"),
    ("permission denied", "42501"),
    ("starting up", "57P03"),
    ("shutting down", "57P03"),
    ("recovery mode", "57P03"),
    ("not yet accepting connections", "57P03"),
)
"""(part of the message with which the server refuses a connection, code of such an error)"""
_HOPELESS: Final = frozenset({"28P01", "28000", "3D000", "42501"})
"""Reasons for a refused connection that do not pass."""


class ConnectError(Exception):
    """No connection could be made. `hopeless`: waiting would not help."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error).strip())
        code = error.sqlstate if isinstance(error, psycopg.Error) else None
        self.code = code or next((code for part, code in _CONNECTING if part in str(error)), None)
        self.hopeless = self.code in _HOPELESS or not isinstance(error, psycopg.OperationalError)


class UnknownOutcomeError(Exception):
    """The connection was lost during a commit, and the outcome could not be queried."""


class PostgresServer:
    """The PostgreSQL database at `url`: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`, with libpq's parameters and
    `schema=NAME` (created if missing). Raises ConfigError for an invalid URL.

    What the URL leaves out comes from libpq's environment (PGUSER, PGPASSWORD, ...) and files. Connect to the server
    itself or to a pooler that pools sessions: LISTEN and prepared statements do not work through any other.
    """

    shared = True
    single = False
    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, ConnectError, UnknownOutcomeError)

    def __init__(self, url: str) -> None:
        self._parameters, self.schema = _read_url(url)
        self.name = _name_of(self._parameters, self.schema)
        self.id = new_hex()
        """The id of this Agent Lightning server among those of the database."""
        self.closing = threading.Event()
        """Set when the store is closed: nothing waits for a lost server any more."""
        self._close_deadline = math.inf

    def open(self) -> psycopg.Connection[Any]:
        """A new connection, outside of any transaction. Raises ConnectError."""
        try:
            connection = psycopg.connect(**self._parameters, autocommit=True)
        except (psycopg.Error, UnicodeError) as error:
            raise ConnectError(error) from None
        try:
            place = sql.SQL("SET search_path = {}").format(sql.Identifier(self.schema)).as_string(connection)
            connection.execute((_SETTINGS + (place if self.schema else "")).encode())
        except psycopg.Error as error:
            connection.close()
            raise ConnectError(error) from None
        return connection

    def begin_close(self) -> None:
        self._close_deadline = time.monotonic() + CLOSE_SECONDS

    def reopen(self) -> psycopg.Connection[Any]:
        """Replace a connection that was lost: tries for as long as a call may wait."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        failures = 0
        while True:
            try:
                return self.open()
            except ConnectError as error:
                pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                late = time.monotonic() + pause > min(deadline, self._close_deadline)
                if error.hopeless or late or self.closing.wait(pause):
                    raise
                failures += 1

    @property
    def channel(self) -> str:
        """The channel on which servers notify one another of what they committed."""
        if not self.schema:
            return "agentlightning"
        name = f"agentlightning_{self.schema}"
        if len(name.encode()) <= MAX_NAME_BYTES:
            return name
        return f"agentlightning_{hashlib.blake2b(self.schema.encode(), digest_size=16).hexdigest()}"

    def explain(self, error: Exception) -> StoreError:
        return explain(error, self.name)


_EXAMPLE: Final = "an address looks like postgresql://USER:PASSWORD@HOST:5432/DATABASE"


def _read_url(url: str) -> tuple[dict[str, Any], str]:
    """(libpq's parameters, the schema; empty for the default one). No error of it shows what may be a password."""
    scheme, rest = url.split("://", 1) if "://" in url else ("", url)
    if scheme.split("+")[0] not in ("postgresql", "postgres"):
        raise ConfigError(f"this is not the address of a PostgreSQL database; {_EXAMPLE}")
    try:
        parts = urlsplit(f"postgresql://{rest}")
    except ValueError as error:  # It names no part of the address.
        raise ConfigError(f"this is not the address of a PostgreSQL database ({error}); {_EXAMPLE}") from None
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    schema = query.pop("schema", "")
    if len(schema.encode()) > MAX_NAME_BYTES:
        raise ConfigError(f"schema={schema!r} is longer than the {MAX_NAME_BYTES} bytes that PostgreSQL's names have")
    unknown = sorted(query.keys() - _parameter_names())
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is neither schema nor a parameter of libpq; leave it out of the address")
    try:
        param = conninfo_to_dict(urlunsplit(parts._replace(query=urlencode(query, quote_via=quote))))
    except psycopg.ProgrammingError:
        param = {"dbname": "@"}
    if "@" in str(param.get("dbname", "")) or not str(param.get("port", "0")).replace(",", "").isdigit():
        raise ConfigError(
            "the address of the PostgreSQL database cannot be read; write @ : / % ? # in a user or password as "
            f"%40 %3A %2F %25 %3F %23; {_EXAMPLE}"
        )
    return {**_LIBPQ_DEFAULTS, **param}, schema


def _parameter_names() -> set[str]:
    return {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}


def _name_of(parameters: Mapping[str, Any], schema: str) -> str:
    host = parameters.get("host") or parameters.get("hostaddr") or "localhost"
    port = f":{parameters['port']}" if "port" in parameters else ""
    database = parameters.get("dbname") or parameters.get("user") or ""
    return f"postgresql://{host}{port}/{database}{f'?schema={schema}' if schema else ''}"


# -- errors ------------------------------------------------------------------------------------------------------------


def is_lost(error: BaseException) -> bool:
    """Whether the connection is lost, and with it the transaction."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, ConnectError)
    code = error.sqlstate
    if code is None:
        return isinstance(error, psycopg.OperationalError)  # an error of libpq: the socket was closed
    return code in LOST or code.startswith("08")


def may_retry(error: BaseException) -> bool:
    """Whether the same transaction may succeed when retried."""
    if isinstance(error, ConnectError):
        return False  # connecting was retried for as long as a call may wait
    return is_lost(error) or (isinstance(error, psycopg.Error) and error.sqlstate in (*RETRY, DUPLICATE_KEY))


def is_fatal(error: BaseException) -> bool:
    """Whether the whole transaction failed for a reason that no single command causes."""
    code = error.sqlstate if isinstance(error, psycopg.Error) else None
    if isinstance(error, (ConnectError, UnknownOutcomeError)) or (may_retry(error) and code != DUPLICATE_KEY):
        return True
    return code is not None and (code in _ADVICE or code[:2] in ("53", "57", "58", "XX"))


def explain(error: Exception, where: str) -> StoreError:
    """The error to raise instead of `error`; `where` is the name of the database."""
    if isinstance(error, UnknownOutcomeError):
        return StoreError(f"{where}: {error}")
    if isinstance(error, ConnectError):
        return StoreError(f"{where} cannot be reached: {_first_line(error)}; {_how_to_reach(error)}")
    code = error.sqlstate if isinstance(error, psycopg.Error) else None
    if code == DISK_FULL:
        return StoreFullError(
            f"the disk of {where} is full ({_first_line(error)}); nothing of this call was stored; free some space "
            "and call again"
        )
    if is_lost(error):
        return StoreError(f"the connection to {where} was lost ({_first_line(error)}); call again")
    advice = _ADVICE.get(code or "", "this is not expected; the transaction was undone")
    return StoreError(f"{where}: {_first_line(error)}{f' ({code})' if code else ''}; {advice}")


def _how_to_reach(error: ConnectError) -> str:
    if error.code in _ADVICE:
        return _ADVICE[error.code]
    if error.code == "57P03":
        return "it is just starting or stopping; try again in a moment"
    if error.hopeless:
        return "an address looks like postgresql://USER:PASSWORD@HOST:5432/DATABASE"
    return "check that PostgreSQL runs there and that host and port are right"


def _first_line(error: Exception) -> str:
    """Without the addresses that libpq repeats."""
    text = str(error).strip().replace("\n\t", " ").split("\n")[0]
    return text.removeprefix("connection failed: ").removeprefix("connection is bad: ")


# -- notifications -----------------------------------------------------------------------------------------------------

# A transaction that commits something others may wait for notifies them on a channel of the schema. PostgreSQL delivers
# only to those who listen at that moment, so after a lost connection the listener reports once that anything may have
# happened.

Connect = Callable[[], "psycopg.Connection[Any]"]
"""Raises ConnectError."""


def payload(server: str, queued: bool, finished: Sequence[str]) -> str:
    """The notification of a transaction: `SERVER 1 ID,ID`, or `SERVER 1 *` for too many ids."""
    text = f"{server} {int(queued)} {','.join(finished)}"
    return text if len(text) <= PAYLOAD_BYTES else f"{server} {int(queued)} *"


def read_payload(text: str) -> tuple[str, bool, list[str] | None]:
    """(server, queued, finished; None: any may have). Raises ValueError for a payload of another program."""
    server, queued, ids = text.split(" ")
    return server, queued == "1", None if ids == "*" else ids.split(",") if ids else []


class PostgresListener:
    """Calls `wake` for notifications of servers other than `server` on `channel`. It listens once it is created.
    `closed` is set when it is closed."""

    def __init__(self, connect: Connect, channel: str, server: str, wake: Wake, closed: threading.Event) -> None:
        self._connect = connect
        self._channel = channel
        self._server = server
        self._wake = wake
        self._closed = closed
        self._connection: psycopg.Connection[Any] | None = self._listen()
        self._thread = threading.Thread(target=self._work, name="agl-store-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Does not wait for the thread."""
        self._closed.set()

    def _listen(self) -> psycopg.Connection[Any]:
        connection = self._connect()
        try:
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        except psycopg.Error as error:
            connection.close()
            raise ConnectError(error) from error
        return connection

    def _work(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                if self._connection is None:
                    self._connection = self._listen()
                    self._wake(True, None)
                failures = 0
                # At the end of a pause, or when something has arrived: all of it.
                self._pass_on(list(self._connection.notifies(timeout=CLOSING_SECONDS, stop_after=1)))
            except (psycopg.Error, ConnectError) as error:
                if not failures and not self._closed.is_set():
                    logger.warning(
                        "notifications of other servers cannot be received; retrying: %s", str(error).strip()
                    )
                self._drop()
                self._closed.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _pass_on(self, notices: Sequence[psycopg.Notify]) -> None:
        """Report them in one call."""
        queued, finished, anything, others = False, list[str](), False, False
        for notice in notices:
            try:
                server, claims, ids = read_payload(notice.payload)
            except ValueError:
                logger.warning("unexpected notification on the channel %r: %r", self._channel, notice.payload)
                continue
            if server == self._server:
                continue
            others, queued, anything = True, queued or claims, anything or ids is None
            finished += ids or ()
        if others:
            self._wake(queued, None if anything else finished)
