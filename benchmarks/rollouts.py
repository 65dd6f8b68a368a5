"""Trivial agents end to end, ours beside Agent Lightning 0.3 and 1.0: `python benchmarks/rollouts.py`.

The agent returns a reward and does nothing else, so what is measured is the machinery: enqueue, claim, run, record,
finish, be told. Ours works on a durable file, its runner in the process of the store. 0.3 keeps everything in memory:
with its runner as a thread of the process (only one of them can trace), and with its default server and client. 1.0
has one way, a fresh interpreter for each rollout (its local controller, polling every 50 ms instead of every 10 s);
beside it stands ours with a fresh process for each rollout.

    python benchmarks/rollouts.py [--rounds 3] [--number 1000] [--check] [--json]
"""

from __future__ import annotations

import argparse
import sys

from harness import Arm, Case, Limit, add_options, report, take_turns

OURS, FRESH = "ours, durable", "ours, durable, a process for each rollout"
SHARED, DEFAULT, OLD = "0.3, shared memory", "0.3, its default server and client", "1.0, a process for each rollout"
LIMITS = [
    Limit("ours / 0.3 in shared memory", OURS, SHARED, 3),
    Limit("ours / 0.3 by default", OURS, DEFAULT, 3),
    Limit("ours with a process for each / 1.0", FRESH, OLD, 8),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    parser.add_argument("--number", type=int, default=1000, help="rollouts of a measurement (slow arms do fewer)")
    parser.add_argument("--hosts", type=int, default=1, help="processes our agents run in")
    parser.add_argument("--concurrency", type=int, default=64, help="of our runner")
    options = parser.parse_args()
    cases = take_turns(make_cases(options), options.rounds)
    return report("rollouts end to end", cases, LIMITS, options, unit="rollouts/s")


def make_cases(options: argparse.Namespace) -> list[Case]:
    ours, peer, old = Arm("ours"), Arm("agl03"), Arm("agl1")
    where = {"directory": str(options.directory)} if options.directory else {}
    own = {"number": 2 * options.number, "hosts": options.hosts, "concurrency": options.concurrency, **where}
    fresh = {"number": options.number // 4, "hosts": 1, "concurrency": 4, "fresh_process": True, **where}
    shared = {"number": options.number // 2, "strategy": "shm", "runners": 1}
    default = {"number": options.number // 5, "strategy": "cs", "runners": 8}
    slow = {"number": max(8, options.number // 50), "pool": 8, "poll_seconds": 0.05}
    cases = [Case(OURS, ours, "rollouts", own), Case(FRESH, ours, "rollouts", fresh)]
    if not options.ours:
        cases += [
            Case(SHARED, peer, "rollouts", shared),
            Case(DEFAULT, peer, "rollouts", default),
            Case(OLD, old, "rollouts", slow),
        ]
    for case in cases:
        case.value = "rollouts_per_second"
    return cases


if __name__ == "__main__":
    sys.exit(main())
