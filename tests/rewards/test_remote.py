"""A reward function behind an HTTP endpoint."""

from __future__ import annotations

import asyncio
import gzip
import pickle
import re
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl

from .conftest import Raw, chat


def remote(service: Any, **settings: Any) -> agl.RemoteReward:
    return agl.RemoteReward(service.url, **{"backoff": 0.001, "timeout": 5.0, **settings})


def lengths(body: dict[str, Any]) -> dict[str, Any]:
    return {"rewards": [len(item["output"]) for item in body["items"]]}


async def test_calls_at_the_same_time_travel_in_one_request(service: Any) -> None:
    service.answers = [lengths]
    reward = remote(service, batch_seconds=0.2)
    outputs = ["a" * count for count in range(10)]
    assert await asyncio.gather(*(reward("task", output) for output in outputs)) == list(range(10))
    assert [len(body["items"]) for body in service.seen] == [10]


async def test_a_full_batch_does_not_wait(service: Any) -> None:
    service.answers = [lengths]
    reward = remote(service, batch_size=4, batch_seconds=60)
    assert await asyncio.gather(*(reward("task", "a" * count) for count in range(8))) == list(range(8))
    assert [len(body["items"]) for body in service.seen] == [4, 4]


async def test_the_service_sees_task_output_and_rollout(service: Any) -> None:
    service.answers = [lengths]
    await remote(service)({"n": 1}, "out", rollout=SimpleNamespace(rollout_id="ro-1"))
    assert service.seen == [{"items": [{"task": {"n": 1}, "output": "out", "rollout_id": "ro-1"}]}]


async def test_rollouts_with_the_same_output_have_their_own_rewards(service: Any) -> None:
    """A service may look up what a rollout did by its id."""
    service.answers = [lambda body: {"rewards": [int(item["rollout_id"][-1]) for item in body["items"]]}]
    reward = remote(service)
    rollouts = [SimpleNamespace(rollout_id=f"ro-{number}") for number in (3, 5)]
    assert [await reward("t", None, rollout=each) for each in rollouts] == [3, 5]


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 503, 520, 529])
async def test_a_service_that_is_busy_is_asked_again(service: Any, status: int) -> None:
    service.answers = [lambda body: (status, "busy"), lengths]
    assert await remote(service)("t", "abc") == 3
    assert len(service.seen) == 2


async def test_named_dimensions_come_back_as_they_are(service: Any) -> None:
    service.answers = [lambda body: {"rewards": [{"right": 1.0, "form": 0.5}]}]
    assert await remote(service)("t", "o") == {"right": 1.0, "form": 0.5}


async def test_no_reward_is_missing_and_not_zero(service: Any) -> None:
    service.answers = [lambda body: {"rewards": [None]}]
    with pytest.raises(agl.errors.MissingRewardError, match="null"):
        await remote(service)("t", "o")


async def test_a_service_that_times_out_leaves_the_reward_missing(service: Any) -> None:
    service.answers = [lambda body: 0.5]
    with pytest.raises(agl.errors.MissingRewardError, match=r"did not answer within 0.05 s, 2 times"):
        await remote(service, timeout=0.05, retries=1)("t", "o")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((400, "no such task"), r"answered 400: 'no such task'"),
        ("nonsense", "answered no JSON: 'nonsense'"),
        ({"rewards": [1.0, 2.0]}, "with 1 rewards was expected"),
        ({"scores": [1.0]}, "with 1 rewards was expected"),
        ([1.0], "with 1 rewards was expected"),
    ],
)
async def test_what_is_no_reward_is_an_error_that_shows_it(service: Any, answer: Any, says: str) -> None:
    service.answers = [lambda body: answer]
    with pytest.raises(agl.errors.RewardServiceError, match=says):
        await remote(service)("t", "o")
    assert len(service.seen) == 1, "asking again would not help"


async def test_a_service_that_is_not_there_is_named(service: Any) -> None:
    service.server.server_close()
    with pytest.raises(agl.errors.RewardServiceError, match="cannot be reached"):
        await remote(service, retries=1)("t", "o")


@pytest.mark.parametrize("answer", [{"rewards": []}, "no JSON", (500, ""), {"rewards": [None]}, 0.3])
async def test_no_error_shows_a_password_in_the_address(service: Any, answer: Any) -> None:
    service.answers = [lambda body: answer]
    service.url = service.url.replace("//", "//me:pass@") + "?key=word"
    with pytest.raises(agl.errors.AgentLightningError, match=r"reward service at http://127\.0\.0\.1") as raised:
        await remote(service, retries=0, timeout=0.2)("t", "o")
    assert not re.search("pass|word", str(raised.value))
    with pytest.raises(agl.errors.ConfigError, match="url='ftp://host' is no address"):
        agl.RemoteReward("ftp://me:pass@host")


async def test_a_token_is_sent_where_one_is_named(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    service.answers = [lengths]
    await remote(service, token_variable="SCORER_TOKEN")("t", "o")
    assert service.headers[0]["authorization"] == "Bearer secret"


async def test_it_travels_to_the_process_of_a_runner(service: Any) -> None:
    service.answers = [lengths]
    reward = remote(service, batch_size=3)
    await reward("t", "o")
    arrived = pickle.loads(pickle.dumps(reward))
    assert (arrived.url, arrived.batch_size) == (reward.url, 3)
    assert await arrived("t", "oo") == 2


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"timeout": 0}, {"retries": -1}, {"backoff": -1.0}])
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(agl.errors.ConfigError, match=next(iter(settings))):
        agl.RemoteReward("http://127.0.0.1:1", **settings)


@pytest.mark.parametrize("url", ["localhost:1", "ftp://host/x", "", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(agl.errors.ConfigError, match="url="):
        agl.RemoteReward(url)


def bomb(size: int) -> bytes:
    return gzip.compress(bytes(size), 1)


NONSENSE = {
    "nested without end": Raw([b"[" * 200_000]),
    "nested objects": Raw([b'{"a":' * 100_000]),
    "no UTF-8": Raw([b"\xff\xfe"]),
    "much compressed": Raw([bomb(64 << 20)], {"Content-Encoding": "gzip"}),
    "compressed twice": Raw([gzip.compress(b"{}")[:9]], {"Content-Encoding": "gzip"}),
    "an unknown coding": Raw([b"{}"], {"Content-Encoding": "x-own"}),
    "a list": Raw([b"[1.0]"]),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE)
async def test_whatever_a_service_answers_every_rollout_of_the_batch_hears_of_it(service: Any, answer: Raw) -> None:
    service.answers = [lambda body: answer, lengths]
    reward = remote(service, retries=0, batch_seconds=0.05)
    async with asyncio.timeout(30):
        found = await asyncio.gather(reward("t", "a"), reward("t", "bb"), return_exceptions=True)
        assert [type(each) for each in found] == [agl.errors.RewardServiceError] * 2
        assert await reward("t", "ccc") == 3, "the next one is asked for as usual"


async def test_a_compressed_answer_costs_no_more_than_an_answer_may(service: Any) -> None:
    answer = Raw([bomb(256 << 20)], {"Content-Encoding": "gzip"})
    service.answers = [lambda body: answer]
    tracemalloc.start()
    with pytest.raises(agl.errors.RewardServiceError, match="has more than 16777216 bytes"):
        await remote(service, retries=0)("t", "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 128 << 20


async def test_the_timeout_is_of_the_whole_answer(service: Any) -> None:
    slow = Raw([b" "] * 200, pause=0.05)
    service.answers = [lambda body: slow]
    with pytest.raises(agl.errors.MissingRewardError, match=r"did not answer within 0\.3 s"):
        await remote(service, retries=0, timeout=0.3)("t", "a")


async def test_a_compressed_answer_is_read(service: Any) -> None:
    body = gzip.compress(b'{"rewards": [0.5]}')
    service.answers = [lambda body_: Raw([body[:5], body[5:]], {"Content-Encoding": "gzip"})]
    assert await remote(service)("t", "a") == 0.5


async def test_a_judge_that_nests_without_end_gives_no_reward(service: Any) -> None:
    service.answers = [lambda body: Raw([b"[" * 200_000])]
    judge = agl.LLMJudge(model="j", rubric="r", base_url=service.url, retries=0)
    with pytest.raises(agl.errors.RewardServiceError, match="answered no JSON"):
        await judge("t", "a")
    service.answers = [lambda body: chat('{"score":' * 50_000)]
    with pytest.raises(agl.errors.MissingRewardError):
        await judge("t", "a")
