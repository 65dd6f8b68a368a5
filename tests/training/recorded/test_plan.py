"""What a run without an agent says of the sessions that it learns from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.tokenizer import tiny_tokenizer

import agentlightning as agl
from agentlightning.algorithms.recorded.sessions import TokenizedSession, Tokenizer, read_sessions
from agentlightning.algorithms.training import RolloutRequest, Want
from agentlightning.chat.hf import HFChatFormat
from agentlightning.config import DataConfig
from agentlightning.training.persistence.run_dir import RecordedData
from agentlightning.training.recorded import NothingArrived, RecordedSource
from agentlightning.trajectory import Trajectory
from agentlightning.util.progress import Progress

ENDLESS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes no end of a turn."""


def messages(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


@pytest.mark.parametrize("method", ["auto", "awr", "rejection"])
async def test_sessions_are_put_into_tokens_once_and_what_the_template_cannot_write_is_counted_once(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    tokens = Tokenizer.tokens

    def counted(self: Tokenizer, call: Any) -> Any:
        read.append(call.span_id)
        return tokens(self, call)

    monkeypatch.setattr(Tokenizer, "tokens", counted)
    store: Any = agl.LightningStore(":memory:")
    for answer, reward in (("yes", 1.0), ("no", 0.0), ("maybe", 0.5)):
        rollout = await store.start_rollout("which?")
        recorded = {
            "chat": {
                "gen_ai.operation.name": "chat",
                "gen_ai.input.messages": messages("user", "which?"),
                "gen_ai.output.messages": messages("assistant", answer),
            },
            "gen_ai.evaluation.result": {"gen_ai.evaluation.score.value": reward},
        }
        for number, (name, attributes) in enumerate(recorded.items()):
            place = rollout.rollout_id, rollout.attempt.attempt_id
            await store.add_span(agl.Span(*place, name, 1.0, span_id=f"{number:016x}", attributes=attributes))
        await store.update_attempt(*place, status="succeeded")
    sessions = (await read_sessions(store)).usable
    tokenizer = Tokenizer(HFChatFormat(tiny_tokenizer(ENDLESS)), 10_000)
    data, progress = RecordedData(), Progress(enabled=False)
    RecordedSource(agl.LightningRL(), sessions, tokenizer, DataConfig(method=method), data, progress, store, 0).choose()
    assert data.method == ("awr" if method == "auto" else method)
    [note] = [each for each in data.notes if "end-of-sequence" in each]
    assert note.startswith("3 answers")
    assert len(read) == 3


async def test_what_is_left_of_a_session_when_a_run_that_follows_is_killed_is_learned_from_later() -> None:
    parts = [Trajectory(f"s part {number}", "at", (), reward=1.0, group="g") for number in (1, 2)]
    data, settings = RecordedData(method="awr"), DataConfig(follow=True, follow_timeout=0.0)
    store: Any = agl.LightningStore(":memory:")

    async def learned() -> list[str]:
        tokenizer, progress = Tokenizer(HFChatFormat(tiny_tokenizer(ENDLESS)), 10_000), Progress(enabled=False)
        source = RecordedSource(agl.LightningRL(), [], tokenizer, settings, data, progress, store, 0)
        source.learn_from([TokenizedSession(each) for each in parts])
        return [each.rollout_id for each in (await source.next(RolloutRequest([Want()]))).trajectories]

    assert [await learned(), await learned()] == [["s part 1"], ["s part 2"]]
    assert data.sessions == 2, "what was learned from, and not what was there at first"
    with pytest.raises(NothingArrived):
        await learned()
