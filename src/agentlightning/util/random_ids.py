"""One random generator for all ids and pauses, seeded by the operating system and again after a fork.

Asking the operating system for each id would cost a system call, which releases the interpreter lock. The generator is
not that of the `random` module, which users seed. Ids are unique, not secret.
"""

from __future__ import annotations

import os
import random

_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)

random_bits = _random.getrandbits
random_bytes = _random.randbytes
random_uniform = _random.uniform
