"""What an LLM says of its address, and what resources look like as JSON."""

import pytest

from agentlightning.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, named_resources
from agentlightning.rollouts import Attempt, AttemptedRollout


@pytest.mark.parametrize("endpoint", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_an_endpoint_may_end_in_v1_or_not(endpoint: str) -> None:
    llm = LLM(endpoint=endpoint, model="m")
    assert llm.base_url == llm.get_base_url() == "http://h:8000/v1"
    assert llm.get_base_url("ro-1", "at-1") == "http://h:8000/rollout/ro-1/attempt/at-1/v1"
    assert llm.endpoint == endpoint


def test_an_endpoint_under_a_path_keeps_it() -> None:
    assert LLM(endpoint="http://h/proxy/v1", model="m").base_url == "http://h/proxy/v1"


def test_a_proxy_gives_an_attempt_an_address_of_its_own() -> None:
    proxy = ProxyLLM(endpoint="http://h:4000/v1", model="m", api_key="k", sampling_parameters={"temperature": 0.5})
    attempt = Attempt("ro-1", "at-1", 1, 0.0)
    llm = proxy.with_attempted_rollout(AttemptedRollout("ro-1", "task", 0.0, attempt=attempt))
    assert type(llm) is LLM
    assert llm.base_url == "http://h:4000/rollout/ro-1/attempt/at-1/v1"
    assert (llm.api_key, llm.sampling_parameters) == ("k", {"temperature": 0.5})


def test_every_kind_of_resource_is_read_back_as_it_was() -> None:
    resources: NamedResources = {
        "llm": LLM(endpoint="http://x", model="m"),
        "proxy": ProxyLLM(endpoint="http://x", model="m"),
        "prompt": PromptTemplate(template="{q}"),
    }
    again = named_resources.validate_json(named_resources.dump_json(resources))
    assert again == resources
    assert {name: type(each) for name, each in again.items()} == {
        "llm": LLM,
        "proxy": ProxyLLM,
        "prompt": PromptTemplate,
    }
