"""What holds for all tests."""

import os

# Two workers with two torch threads each on two cores wait for one another most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
