"""Translates errors of PostgreSQL and of connecting to it into StoreErrors that name the way out.

An error of a statement has a code (https://www.postgresql.org/docs/current/errcodes-appendix.html), an error of
connecting has only a text. No text contains a password.
"""

from __future__ import annotations

from typing import Final

import psycopg

from agentlightning.errors import StoreError, StoreFullError

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
