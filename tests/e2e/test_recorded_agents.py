"""An unchanged agent under `agl run` survives what it survives by itself: the official SDKs, with their own retries."""

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import messages_answer

pytestmark = pytest.mark.integration

AGL = str(Path(sys.executable).parent / "agl")
AGENT = """
import asyncio, json, sys
import anthropic, openai

chat, messages = openai.AsyncOpenAI(), anthropic.AsyncAnthropic()
hi = [{"role": "user", "content": "hi"}]

async def outcome(name):
    try:
        if name.startswith("openai"):
            await chat.chat.completions.create(model=name, messages=hi)
        else:
            await messages.messages.create(model=name, max_tokens=9, messages=hi)
        return "ok"
    except (openai.APIError, anthropic.APIError) as error:
        return f"{type(error).__name__} {getattr(error, 'status_code', '')}"

async def main():
    outcomes = await asyncio.gather(*map(outcome, sys.argv[1:]))
    print(json.dumps(dict(zip(sys.argv[1:], outcomes, strict=True))))

asyncio.run(main())
"""


def failed(status, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply({"error": {"message": "not now", "type": "transient"}}, status, named)


TRANSIENT = {
    "500": failed(500),
    "429": failed(429, retry_after_ms="20"),
    "408": failed(408),
    "409": failed(409),
    "dropped": Reply(head=False, end="close"),
    "529": failed(529),
    "503": failed(503, retry_after="1"),
}
OTHERS = {
    "520": Reply(b"<html>bad gateway</html>", 520, {"content-type": "text/html"}),
    "cut off": Reply(chat_answer("Hello."), end="close"),
    "429 without a time": failed(429),
    "400 to repeat": failed(400, x_should_retry="true"),
    "500 not to repeat": failed(500, x_should_retry="false"),
    "400": failed(400),
    "401": failed(401),
}
FAULTS = TRANSIENT | OTHERS


OTHER = """
import openai
client = openai.OpenAI()
print(client.embeddings.create(model="text-embedding-3", input="x", encoding_format="float").data[0].embedding)
print(client.moderations.create(input="x").id)
print(client.audio.transcriptions.create(model="whisper-1", file=("a.wav", b"RIFF")).text)
print(client.files.create(file=("a.txt", b"x"), purpose="user_data").id)
"""


async def test_a_recorded_agent_makes_every_call_that_it_makes_by_itself(tmp_path):
    body = {"id": "it", "object": "list", "text": "it", "results": [], "data": [{"embedding": [0.5], "index": 0}]}
    async with ScriptedProvider(lambda seen: Reply(body | {"usage": {"prompt_tokens": 1}})) as provider:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OPENAI_", "ANTHR"))}
        own |= {"OPENAI_BASE_URL": f"{provider.url}/v1", "OPENAI_API_KEY": "sk-theirs-0123456789"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(AGL, "run", "--json", "--", sys.executable, "-c", OTHER), cwd=tmp_path, env=own, stdout=pipe, stderr=pipe
        )
        stdout, stderr = await process.communicate()
        *said, summary = stdout.decode().splitlines()
        assert said == ["[0.5]", "it", "it", "it"], stderr.decode()
        assert json.loads(summary)["calls"] == 4
        assert json.loads(summary)["failed_calls"] == 0


async def run_agent(directory, *prefix):
    """(outcome by fault, requests by fault), where the first two requests of each meet the fault."""
    asked = Counter()

    def reply(seen):
        name = seen.json["model"]
        asked[name] += 1
        if asked[name] <= 2:
            return FAULTS[name.partition(" ")[2]]
        return Reply(chat_answer("Hello.") if "completions" in seen.path else messages_answer([]))

    names = [f"{sdk} {fault}" for sdk in ("openai", "anthropic") for fault in FAULTS]
    async with ScriptedProvider(reply) as provider:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OPENAI_", "ANTHR"))}
        own |= {"OPENAI_BASE_URL": f"{provider.url}/v1", "OPENAI_API_KEY": "sk-theirs-0123456789"}
        own |= {"ANTHROPIC_BASE_URL": provider.url, "ANTHROPIC_API_KEY": "sk-ant-theirs-0123456789"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *prefix, sys.executable, "-c", AGENT, *names, cwd=directory, env=own, stdout=pipe, stderr=pipe
        )
        stdout, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        return json.loads(stdout.splitlines()[0]), asked


async def test_a_recorded_agent_survives_what_the_bare_agent_survives(tmp_path):
    (bare, asked_bare), (recorded, asked) = await asyncio.gather(
        run_agent(tmp_path), run_agent(tmp_path, AGL, "run", "--")
    )
    for sdk in ("openai", "anthropic"):
        assert {fault: recorded[f"{sdk} {fault}"] for fault in TRANSIENT} == dict.fromkeys(TRANSIENT, "ok")
        differ = {name for name in bare if bare[name] != recorded[name]}
        assert differ == {f"{name} 401" for name in ("openai", "anthropic")}  # the gateway's key, not the agent's
    assert asked == asked_bare
