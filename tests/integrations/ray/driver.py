"""Runs in an environment with Ray: `driver.py URL COUNT CONCURRENCY`. Prints the workers; stops at a line on stdin."""

import json
import sys

import ray

from agentlightning.integrations.ray import RayRunners


def say(content):
    sys.stdout.write(f"driver: {json.dumps(content)}\n")
    sys.stdout.flush()


url, count, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ray.init(num_cpus=count, include_dashboard=False, logging_level="ERROR", object_store_memory=100_000_000)
with RayRunners(
    url,
    "agent.py:solve",
    count=count,
    concurrency=concurrency,
    actor={"num_cpus": 1},
    lease_seconds=4.0,
    redirect=False,
) as runners:
    say(runners.workers())
    sys.stdin.readline()
    say(runners.workers())
    say(runners.stop(5))
ray.shutdown()
