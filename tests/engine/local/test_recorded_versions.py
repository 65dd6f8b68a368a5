"""The version that an answer records is that of the weights its tokens were drawn from."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.models import tiny_model
from transformers import PreTrainedModel

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local.scheduler import ContinuousBatcher, Request
from agentlightning.models.lora import Adapters

PROMPT = [5, 6, 7, 8]


def batcher(model: PreTrainedModel, adapters: Adapters | None = None) -> ContinuousBatcher:
    return ContinuousBatcher(
        model, eos_token_ids=frozenset(), decode=lambda tokens: "", context_length=64, adapters=adapters
    )


def finish(engine: ContinuousBatcher) -> None:
    while not engine.idle:
        engine.step()


def change(engine: ContinuousBatcher, model: PreTrainedModel, by_version: dict[int, PreTrainedModel]) -> None:
    """An update of the weights, in the middle of answers."""
    engine.invalidate_cache(in_flight=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    engine.policy_version += 1
    by_version[engine.policy_version] = copy.deepcopy(model)


def runs(request: Request) -> tuple[tuple[int, int], ...]:
    return request.versions or ((request.policy_version, len(request.sampled)),)


@pytest.mark.parametrize("changes", [(), (2,), (0, 3), (1, 1, 4)])
def test_each_token_has_the_probability_that_the_recorded_weights_give_it(changes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = tiny_model()
    engine, by_version = batcher(model), {0: copy.deepcopy(model)}
    first = engine.submit(PROMPT, SamplingParams(max_tokens=8, seed=1))
    for steps in changes:
        for _ in range(steps):
            engine.step()
        change(engine, model, by_version)
    finish(engine)
    later = engine.submit(PROMPT, SamplingParams(max_tokens=4, seed=2))
    finish(engine)
    assert first.policy_version == later.policy_version == len(changes)
    assert later.versions == (), "one version for the whole answer"
    for request in (first, later):
        ids, start = torch.tensor([[*PROMPT, *request.sampled]]), len(PROMPT)
        assert sum(count for _, count in runs(request)) == len(request.sampled)
        for version, count in runs(request):
            with torch.no_grad():
                logprobs = by_version[version](ids).logits[0].log_softmax(-1)
            places = torch.arange(start, start + count)
            expected = logprobs[places - 1].gather(1, ids[0, places, None])[:, 0]
            drawn = torch.tensor(request.logprobs[start - len(PROMPT) : start - len(PROMPT) + count])
            torch.testing.assert_close(drawn, expected, atol=1e-4, rtol=0)
            start += count


@pytest.mark.parametrize(("name", "expected"), [(None, 7), ("a", 3), ("b", 5)])
def test_an_answer_of_an_adapter_records_the_version_of_that_adapter(name: str | None, expected: int) -> None:
    model = tiny_model()
    adapters = Adapters(model)
    for each in "ab":
        adapters.add(each, r=2, alpha=4.0, targets=None, seed=0)
    engine = batcher(model, adapters)
    engine.policy_version, engine.adapter_versions = 7, {"a": 3, "b": 5}
    request = engine.submit(PROMPT, SamplingParams(max_tokens=3, seed=1), adapter=name)
    finish(engine)
    assert (engine.version_of(name), request.policy_version) == (expected, expected)
