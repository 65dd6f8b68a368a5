"""`agl train` with agents whose calls outlive their rollouts: updates meet answers under way in every step."""

import asyncio
import json

import pytest

from agentlightning import span as names
from agentlightning.store import LightningStore

AGENT = '''
import os
import threading

from openai import OpenAI

CLIENT = OpenAI(api_key="unused", base_url="http://127.0.0.1:9")


def ramble(client: OpenAI) -> None:
    """Goes on after its rollout has ended."""
    try:
        client.completions.create(model="policy", prompt="and so", max_tokens=600)
    except Exception as error:
        if "attempt" not in str(error):  # The rollout was over before the call began.
            os.write(2, f"FAILED {error!r}\\n".encode())


def say(word: str, base_url: str) -> str:
    client = CLIENT.with_options(base_url=base_url)
    if word < "h":
        threading.Thread(target=ramble, args=(client,), daemon=True).start()
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"say {word}"}], max_tokens=6
    )
    return answer.choices[0].message.content or ""
'''


def calls(directory):
    async def read():
        store = LightningStore(directory / "store.db")
        rollouts = await store.query_rollouts()
        spans = [span for each in rollouts for span in await store.query_spans(each.rollout_id)]
        await store.close()
        return [span for span in spans if span.attributes.get(names.OPERATION_NAME)]

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_flight=true", "in_flight=false", "drain_seconds=0.05"])
def test_a_run_updates_over_answers_that_outlive_their_rollouts(job, mode):
    (job.directory / "agent.py").write_text(AGENT)
    done = job.run(job.command("--run", "run", "--json", "algorithm.steps=4", f"policy.{mode}"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["failed_rollouts"] == 0
    assert "FAILED" not in done.stderr + (job.directory / "run" / "agent.log").read_text()
    crossed = [span for span in calls(job.directory / "run") if names.POLICY_VERSIONS in span.attributes]
    assert bool(crossed) == (mode != "in_flight=false")
    for span in crossed:
        numbers = span.attributes[names.POLICY_VERSIONS]
        assert sum(numbers[1::2]) == len(span.attributes[names.RESPONSE_TOKEN_IDS])
    figures = [json.loads(line) for line in (job.directory / "run" / "metrics.jsonl").read_text().splitlines()]
    drained = [each["drain_seconds"] for each in figures if "drain_seconds" in each]
    assert (max(drained) > 0.02) == (mode != "in_flight=true")
    assert {each["staleness"] for each in figures if "staleness" in each} == {0.0}
