from __future__ import annotations

import functools
from typing import Any

import pytest

from agentlightning.errors import AgentError
from agentlightning.resources import LLM, PromptTemplate, ProxyLLM
from agentlightning.runner.agents.arguments import Invocation, Signature, bind_resources

POLICY = LLM(endpoint="http://elsewhere:1", model="policy", policy_version=3)
PROMPT = PromptTemplate(template="Say {word}")


def call_with(function: Any, call: Invocation) -> Any:
    return Signature.of(function).bind(call)()


def typed(name: str) -> str:
    return name


CASES = {
    "a task by its name": (lambda task: task["a"], 1),
    "the task as the first parameter, whatever its name": (lambda sample: sample["a"], 1),
    "a key of the task": (lambda a: a, 1),
    "the task first and keys after it": (lambda sample, b: (sample["a"], b), (1, 2)),
    "only keywords": (lambda *, b, a: (a, b), (1, 2)),
    "a positional-only parameter": (eval("lambda x, /, b: (x['a'], b)"), (1, 2)),
    "the prompt template": (lambda task, prompt_template: prompt_template.template, "Say {word}"),
    "all resources": (lambda task, resources: sorted(resources), ["main", "words"]),
    "a resource by its name": (lambda task, words: words.template, "Say {word}"),
    "the model's name": (lambda task, model: model, "policy"),
    "the rollout": (lambda task, rollout: rollout.attempt.attempt_id, "at-1"),
    "a default where nothing fits": (lambda task, temperature=0.5: temperature, 0.5),
    "a value over a default where something fits": (lambda task, b=0: b, 2),
    "nothing at all": (lambda: "ran", "ran"),
    "no variadics": (lambda task, *args, **kwargs: (args, kwargs), ((), {})),
    "a partial function": (functools.partial(lambda a, c: (a, c), c=5), (1, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_is_given(name: str, make_call: Any) -> None:
    function, expected = CASES[name]
    call = make_call({"a": 1, "b": 2}, {"main": POLICY, "words": PROMPT})
    assert call_with(function, call) == expected


def test_the_policy_is_reached_through_the_attempt_by_every_way_to_ask(make_call: Any) -> None:
    call = make_call(None)
    call.resources = bind_resources({"main": POLICY}, "http://127.0.0.1:9", call.environment)
    url = f"http://127.0.0.1:9/key/{call.environment['AGL_KEY']}/v1"

    def urls(task: Any, llm: LLM, base_url: str, api_key: str) -> Any:
        return {llm.endpoint, llm.base_url, llm.get_base_url("ro-1", "at-1"), base_url}, llm.api_key == api_key

    assert call_with(urls, call) == ({url}, True)


def test_a_model_of_somebody_else_keeps_its_own_address(make_call: Any) -> None:
    judge = LLM(endpoint="https://judge.example", model="judge", api_key="mine")
    call = make_call(None)
    bound = bind_resources({"judge": judge}, "http://127.0.0.1:9", call.environment)
    assert bound == {"judge": judge}


def test_a_proxy_of_somebody_else_is_reached_at_the_address_of_the_attempt(make_call: Any) -> None:
    call = make_call(None)
    proxy = ProxyLLM(endpoint="http://proxy:4000/v1", model="policy", api_key="theirs")
    call.resources = bind_resources({"main": proxy}, "http://127.0.0.1:9", call.environment)
    answer = call_with(lambda task, llm: (llm.base_url, llm.endpoint, llm.api_key), call)
    url = "http://proxy:4000/rollout/ro-1/attempt/at-1/v1"
    assert answer == (url, url, "theirs")


def test_the_address_is_known_without_any_resource(make_call: Any) -> None:
    call = make_call({})
    assert call_with(lambda base_url: base_url, call) == f"http://127.0.0.1:9/key/{call.environment['AGL_KEY']}/v1"


def test_what_is_known_wins_over_a_key_of_the_task(make_call: Any) -> None:
    assert call_with(lambda task: task, make_call({"task": "inner"})) == {"task": "inner"}


def test_a_parameter_that_nothing_fits_is_named_with_what_there_is(make_call: Any) -> None:
    with pytest.raises(AgentError, match=r"'questoin'.*Did you mean 'question'\?.*base_url, .*question"):
        call_with(lambda task, questoin: None, make_call({"question": "?"}))


def test_a_first_parameter_that_is_a_text_is_never_given_a_whole_object(make_call: Any) -> None:
    signature = Signature.of(typed)
    assert signature.bind(make_call({"name": "Ada"}))() == "Ada"
    assert signature.bind(make_call("Ada"))() == "Ada"
    with pytest.raises(AgentError, match=r"there is no value for the parameter 'name' of typed\. Did you mean 'nam'\?"):
        signature.bind(make_call({"nam": "Ada"}))()


def test_a_resource_that_is_missing_is_named_with_those_that_there_are(make_call: Any) -> None:
    call = make_call({})
    for environment in (call.environment, {}):
        call.resources = bind_resources({"promt": PROMPT}, "http://127.0.0.1:9", environment)
        with pytest.raises(KeyError, match="no resource is called 'prompt'; this rollout has promt"):
            call_with(lambda task, resources: resources["prompt"], call)


def test_an_agent_without_a_prompt_is_told_how_to_give_one(make_call: Any) -> None:
    with pytest.raises(AgentError, match=r"'prompt_template' of .*prompts\.NAME=TEXT.*evaluate\(resources="):
        call_with(lambda task, prompt_template: None, make_call({}))


def test_an_agent_that_needs_a_model_is_told_that_there_is_none(make_call: Any) -> None:
    with pytest.raises(AgentError, match=r"'llm' of .*This rollout has none\. Available here: "):
        call_with(lambda task, llm: None, make_call({}))
