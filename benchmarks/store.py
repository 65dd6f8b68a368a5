"""How many rollouts a store in process carries, ours beside Agent Lightning 0.3's: `python benchmarks/store.py`.

A cycle is what one rollout costs: enqueue, dequeue, eight spans of 1.5 KB, finish, query its spans. Ours is durable:
every answer is on the disk before the caller sees it, and throughput comes from many callers at once (64). 0.3 keeps
everything in memory, and is measured with the number of callers that suits it best. The arms are processes of their
own and take turns; each round begins with a new store. For orientation: bare rows into SQLite, and COPY into
PostgreSQL with `--postgres [URL]` (which also measures ours there).

    python benchmarks/store.py [--rounds 5] [--seconds 2] [--callers 64] [--postgres] [--uvloop] [--check] [--json]
"""

from __future__ import annotations

import argparse
import sys

from harness import Arm, Case, Limit, add_options, best, postgres, report, take_turns

ONE, BATCH = "ours, durable file, add_span one by one", "ours, durable file, add_many_spans of 8"
PEER_ONE, PEER_BATCH = "0.3 in memory, add_span one by one", "0.3 in memory, add_many_spans of 8"
LIMITS = [
    Limit("ours, durable, one by one / 0.3 in memory, one by one", ONE, PEER_ONE, 10),
    Limit("ours, durable, batches / 0.3 in memory, one by one", BATCH, PEER_ONE, 10),
    Limit("ours, durable, batches / 0.3 in memory, batches", BATCH, PEER_BATCH, 4),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5, seconds=2.0)
    parser.add_argument("--callers", type=int, default=64, help="tasks that call our store at once")
    parser.add_argument("--uvloop", action="store_true", help="all arms on uvloop instead of asyncio's own loop")
    options = parser.parse_args()
    with postgres(options.postgres) as options.postgres:
        cases = take_turns(make_cases(options), options.rounds)
    return report("store in process", cases, LIMITS, options, extra=cost)


def cost(case: Case) -> str:
    answer = case.answers[-1]
    return f"  {answer['cpu_us']:,.0f} us of CPU each, p99 {answer['p99_ms']:.0f} ms" if "cpu_us" in answer else ""


def make_cases(options: argparse.Namespace) -> list[Case]:
    environment = {"BENCH_UVLOOP": "1"} if options.uvloop else {}
    ours, raw, peer = Arm("ours", environment), Arm("raw"), Arm("agl03", environment)
    where = {"directory": str(options.directory)} if options.directory else {}
    common = {"callers": options.callers, "seconds": options.seconds, **where}
    cases = [
        Case(BATCH, ours, "cycles", {"url": "file", "batched": True, **common}),
        Case(ONE, ours, "cycles", {"url": "file", "batched": False, **common}),
        Case("ours, in memory, add_many_spans of 8", ours, "cycles", {"url": ":memory:", "batched": True, **common}),
    ]
    if not options.ours:
        cases += peer_cases(peer, options.seconds)
    cases.append(Case("raw SQLite, rows/s", raw, "sqlite", {"seconds": options.seconds, **where}, "rows_per_second"))
    if options.postgres:
        there = {"url": options.postgres}
        arguments = {"batched": True, **common, **there}
        cases.append(Case("ours, PostgreSQL, add_many_spans of 8", ours, "cycles", arguments))
        copy = {"seconds": options.seconds, **there}
        cases.append(Case("PostgreSQL COPY, rows/s", raw, "postgres_copy", copy, "rows_per_second"))
    return cases


def peer_cases(peer: Arm, seconds: float) -> list[Case]:
    cases = []
    for name, batched in ((PEER_ONE, False), (PEER_BATCH, True)):
        callers = best(peer, "cycles", "callers", (1, 8, 64), {"batched": batched, "seconds": 0.7})
        arguments = {"batched": batched, "callers": callers, "seconds": seconds}
        cases.append(Case(name, peer, "cycles", arguments))
    return cases


if __name__ == "__main__":
    sys.exit(main())
