"""`setup_logging` of 0.x: what the package logs is shown on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Final, TextIO

FORMAT: Final = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, to be found again."""


def setup_logging(level: int | str = "INFO", *, apply_to: Iterable[str] = ()) -> None:
    """Show the log of `agentlightning`, and of the loggers named in `apply_to`, from `level` on. A second call
    changes the level. Handlers of yours stay.

        >>> agl.setup_logging("WARNING", apply_to=["my_agent"])
    """
    for name in ("agentlightning", *apply_to):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not any(isinstance(each, _Handler) for each in logger.handlers):
            handler = _Handler(sys.stderr)
            handler.setFormatter(logging.Formatter(FORMAT))
            logger.addHandler(handler)
