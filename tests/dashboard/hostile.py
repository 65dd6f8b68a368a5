"""What an agent that wants its own script to run could write: 200 payloads, in every field that it controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import orjson

from agentlightning import span as names
from agentlightning.resources import PromptTemplate
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.types import RolloutRecord

CODE: Final = "window.injected=1"
BREAKOUTS: Final = ("", '">', "'>", "-->", "</script>", "</textarea>", "</title>", "`}", "]]>", '\\"};')
ELEMENTS: Final = (
    f"<script>{CODE}</script>",
    f"<img src=x onerror={CODE}>",
    f"<svg onload={CODE}>",
    f"<svg><animate onbegin={CODE} attributeName=x dur=1s>",
    f'<iframe srcdoc="<script>parent.{CODE}</script>">',
    f"<iframe src=javascript:{CODE}>",
    f"<video src=x onerror={CODE}>",
    f"<audio src=x onerror={CODE}>",
    f"<details open ontoggle={CODE}>",
    f"<input autofocus onfocus={CODE}>",
    f"<object data=javascript:{CODE}>",
    f"<embed src=javascript:{CODE}>",
    f"<a href=javascript:{CODE}>a</a>",
    f"<math><maction actiontype=statusline xlink:href=javascript:{CODE}>m",
    f"<style>@keyframes x{{}}</style><b style=animation-name:x onanimationstart={CODE}>",
    f"<link rel=stylesheet href=javascript:{CODE}>",
    f"<meta http-equiv=refresh content=0;url=javascript:{CODE}>",
    f"<base href=//127.0.0.1:9/><form action=javascript:{CODE}><button autofocus onfocus={CODE}>",
    f"${{{CODE}}}<${{x}} onload=${{()=>{{{CODE}}}}} />",
    f"<template><img src=x onerror={CODE}></template><select autofocus onfocus={CODE}>",
)
PAYLOADS: Final = tuple(f"{breakout}{element}" for breakout in BREAKOUTS for element in ELEMENTS)
CALLS: Final = 25
"""Payloads of a rollout, one in each of its calls: eight rollouts hold all of them."""


def rollout_id(number: int) -> str:
    return f"hostile-{number:03d}"


def records() -> list[RolloutRecord]:
    """A rollout for each payload, in whose own fields it is; the first ones also have calls, with all payloads. And two
    of a search for prompts."""
    measured = [_measured(number, payload) for number, payload in enumerate(PAYLOADS[:CALLS])]
    return [*map(_tried, range(2)), *measured, *(_record(number, payload) for number, payload in enumerate(PAYLOADS))]


def _measured(number: int, payload: str) -> RolloutRecord:
    """A rollout on a held-out task, before training."""
    own, attempt_id = f"hostile-before-greedy-{number:05d}", f"b-{number}"
    reward = Span(own, attempt_id, names.REWARD, 1.5, 1.5, 1, span_id=f"m{number}", attributes={names.SCORE_VALUE: 1.0})
    rollout = Rollout(own, {"question": payload}, float(number), "succeeded", "test", end_time=2.0)
    return RolloutRecord(rollout, (Attempt(own, attempt_id, 1, 1.0, "succeeded", 2.0, payload),), (reward,))


def _tried(number: int) -> RolloutRecord:
    """A rollout with a candidate of a search."""
    own, attempt_id = f"hostile-trial-000001-{number:016x}-train00000-0", f"t-{number}"
    rollout = Rollout(own, "task", float(number), "succeeded", "train", end_time=2.0, resources_id=trial_id(number))
    return RolloutRecord(rollout, (Attempt(own, attempt_id, 1, 1.0, "succeeded", 2.0, "worker"),), ())


def trial_id(number: int) -> str:
    """The resources of a candidate."""
    return f"hostile-trial-000001-{number}"


def _record(number: int, payload: str) -> RolloutRecord:
    own, attempt_id = rollout_id(number), f"a-{number}"
    calls = PAYLOADS[number * CALLS : (number + 1) * CALLS]
    spans = [span for place, each in enumerate(calls) for span in _spans(own, attempt_id, each, 3 * place)]
    rewards = {names.FEEDBACK_LABEL: payload, names.REWARD_VALUES: {payload: 1.0}}
    spans.append(Span(own, attempt_id, names.REWARD, 900.0, 900.0, 3 * CALLS, span_id=f"r{number}", attributes=rewards))
    error = {"type": payload, "message": payload, "traceback": payload}
    attempt = Attempt(
        own, attempt_id, 1, 1.0, "failed", 2.0, payload, metadata={"error": error, "output": payload, payload: payload}
    )
    vnode = {"type": "script", "props": {"dangerouslySetInnerHTML": {"__html": CODE}}, "constructor": None, "__v": 1}
    task = {payload: payload, "vnode": vnode, "list": [payload, vnode]}
    rollout = Rollout(own, task, float(number), "failed", "train", end_time=2.0, metadata={"group": payload})
    return RolloutRecord(rollout, (attempt,), tuple(spans))


def _spans(own: str, attempt_id: str, payload: str, start: int) -> list[Span]:
    """A model call, a call of a tool that fails, and the reward of the call."""
    text = orjson.dumps([_message(payload)]).decode()
    call = {
        names.OPERATION_NAME: "chat",
        names.REQUEST_MODEL: payload,
        names.RESPONSE_MODEL: payload,
        names.AGENT_NAME: payload,
        names.INPUT_MESSAGES: text,
        names.OUTPUT_MESSAGES: text,
        names.FINISH_REASONS: [payload],
        payload: payload,
    }
    tool = {
        names.OPERATION_NAME: "execute_tool",
        names.TOOL_NAME: payload,
        names.TOOL_ARGUMENTS: payload,
        names.TOOL_RESULT: f"error {payload}",
        names.ERROR_TYPE: payload,
    }
    reward = {names.REWARD_VALUES: {payload: 0.5}, names.EVALUATION_NAME: payload}
    at = 1.0 + start
    key = f"s{attempt_id}{start}"
    return [
        Span(own, attempt_id, payload, at, at + 0.9, start + 1, span_id=key, attributes=call),
        Span(own, attempt_id, payload, at + 0.2, at + 0.5, start + 2, "", f"{key}t", key, "ERROR", payload, tool),
        Span(own, attempt_id, payload, at + 0.6, at + 0.7, start + 3, "", f"{key}r", key, attributes=reward),
    ]


def _message(payload: str) -> dict[str, Any]:
    return {
        "role": payload,
        "parts": [
            {"type": "text", "content": payload},
            {"type": "reasoning", "content": payload},
            {"type": "tool_call", "id": payload, "name": payload, "arguments": {payload: payload}},
            {"type": "tool_call_response", "id": "1", "response": f"error {payload}"},
            {"type": "uri", "modality": "image", "uri": f"javascript:{CODE}"},
            {"type": "uri", "modality": "image", "uri": f"data:image/svg+xml,<svg onload='{CODE}'/>"},
            {"type": "uri", "modality": "image", "uri": f"data:image/png;base64,{payload}"},
            {"type": "uri", "modality": "image", "uri": "http://127.0.0.1:9/pixel.png"},
            {"type": payload, "more": payload},
        ],
    }


async def write_run(run: Path) -> None:
    """A run directory whose store, metrics, warnings and state hold the payloads."""
    store = LightningStore(run / "store.db")
    await store.add_records(records())
    for number in range(2):
        prompt = PromptTemplate(template="\n".join(PAYLOADS[number:]), engine="plain")
        await store.update_resources(trial_id(number), {PAYLOADS[0]: prompt})
    for number in range(10):
        lines = "\n".join(PAYLOADS[number :: len(BREAKOUTS)])
        resources = {PAYLOADS[number]: PromptTemplate(template=f"{lines}\n{number}", engine="plain")}
        await store.add_resources(
            {"prompt": PromptTemplate(template=f"{number}\n{lines}", engine="plain"), **resources}
        )
    for number, payload in enumerate(PAYLOADS[:20]):  # names of workers and queues are checked by the store
        await store.update_worker(f"worker-{number}", {payload: payload})
    await store.close()
    warnings = dict(zip(PAYLOADS[:20], PAYLOADS[20:40], strict=True))
    (run / "state.json").write_bytes(
        orjson.dumps({"run_id": "hostile", "warnings": warnings, "evaluations": {"before-greedy": [1.0] * CALLS}})
    )
    metrics: dict[str, Any] = {"step": 1, "reward": 1.0, "apo_evaluations": 2}
    for payload in PAYLOADS[:20]:
        metrics |= {payload: 1.0, f"reward_of_{payload}": 0.5, f"validation_{payload}": 0.5}
    (run / "metrics.jsonl").write_bytes(orjson.dumps(metrics) + b"\n")
