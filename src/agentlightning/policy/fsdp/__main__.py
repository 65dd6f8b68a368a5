"""A rank that the trainer has started on its own machine. It ends when its standard input does."""

import os
import pickle
import sys
import threading
from pathlib import Path

from agentlightning.policy.fsdp.policy import SETTINGS, follow, store_url


def _end_with_trainer() -> None:
    sys.stdin.read()
    os._exit(0)  # This process may wait for a rank that has ended.


threading.Thread(target=_end_with_trainer, daemon=True).start()
follow(pickle.loads(Path(sys.argv[1], SETTINGS).read_bytes()), store_url(sys.argv[1]))
