"""The address of a PostgreSQL database: its URL, and connections to it."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.engine import Dialect

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.ids import new_hex
from agentlightning.store.sql.postgres import errors
from agentlightning.store.sql.postgres.dialect import DIALECT
from agentlightning.store.sql.postgres.errors import ConnectError, UnknownOutcomeError
from agentlightning.store.sql.postgres.listener import RETRY_SECONDS

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
        self.dialect: Dialect = DIALECT
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

    # -- errors ------------------------------------------------------------------------------------------------------

    def explain(self, error: Exception) -> StoreError:
        return errors.explain(error, self.name)

    def is_fatal(self, error: BaseException) -> bool:
        return errors.is_fatal(error)

    def may_retry(self, error: BaseException) -> bool:
        return errors.may_retry(error)


_EXAMPLE: Final = "an address looks like postgresql://USER:PASSWORD@HOST:5432/DATABASE"


def _read_url(url: str) -> tuple[dict[str, Any], str]:
    """(libpq's parameters, the schema; empty for the default one). No error of it shows what may be a password."""
    scheme, rest = url.split("://", 1) if "://" in url else ("", url)
    if scheme.split("+")[0] not in ("postgresql", "postgres"):
        raise ConfigError(f"this is not the address of a PostgreSQL database; {_EXAMPLE}")
    parts = urlsplit(f"postgresql://{rest}")
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
