"""`setup_logging` of 0.x: what the package logs is shown on stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

FORMAT: Final = "%(asctime)s [%(levelname)s] (Process-%(process)d %(name)s)   %(message)s"


def setup_logging(level: int | str = "INFO", *, apply_to: Iterable[str] = ()) -> None:
    """Show the log of `agentlightning`, and of the loggers named in `apply_to`, from `level` on. A second call
    changes the level. Handlers of yours stay.

        >>> agl.setup_logging("WARNING", apply_to=["my_agent"])
    """
    for name in ("agentlightning", *apply_to):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not any(each.name == __name__ for each in logger.handlers):
            handler = logging.StreamHandler()
            handler.name = __name__
            handler.setFormatter(logging.Formatter(FORMAT))
            logger.addHandler(handler)
