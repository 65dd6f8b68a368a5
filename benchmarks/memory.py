"""Memory for 100,000 spans of 1.5 KB, written and read, ours beside Agent Lightning 0.3's.

12,500 rollouts of 8 spans are made, finished and queried by 16 tasks in a new process; what is printed is how much its
resident memory grew. Ours on a file, and in memory (which has to hold the 150 MB themselves); 0.3 has its memory only.

    python benchmarks/memory.py [--rounds 2] [--spans 100000] [--check] [--json]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from harness import Arm, Case, Limit, add_options, report, take_turns

FILE, MEMORY, PEER = "ours, durable file", "ours, in memory", "0.3, in memory"
LIMITS = [Limit("memory: ours, durable / 0.3", FILE, PEER, 0.1, at_most=True)]


class FreshArm(Arm):
    """Another process for every job: memory once taken is seldom given back."""

    def ask(self, job: str, **arguments: Any) -> dict[str, Any]:
        try:
            return super().ask(job, **arguments)
        finally:
            self.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=2)
    parser.add_argument("--spans", type=int, default=100_000)
    options = parser.parse_args()
    where = {"directory": str(options.directory)} if options.directory else {}
    ours, size = FreshArm("ours"), {"spans": options.spans}
    cases = [
        Case(FILE, ours, "memory", {"url": "file", **size, **where}, "grown_mb"),
        Case(MEMORY, ours, "memory", {"url": ":memory:", **size, **where}, "grown_mb"),
    ]
    if not options.ours:
        cases.append(Case(PEER, FreshArm("agl03"), "memory", size, "grown_mb"))
    measured = take_turns(cases, options.rounds)
    return report(f"memory for {options.spans:,} spans", measured, LIMITS, options, unit="MB more", extra=most)


def most(case: Case) -> str:
    return f"  from {case.answers[-1]['before_mb']:.0f} MB, at most {case.answers[-1]['peak_mb']:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
