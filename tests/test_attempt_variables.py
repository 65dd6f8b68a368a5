"""Promises about the environment variables of an attempt."""

from __future__ import annotations

from urllib.parse import unquote

from agentlightning.attempt_address import read_attempt_key, root_span_id_of, trace_id_of
from agentlightning.attempt_variables import attempt_environment, import_environment, in_process_environment

ATTEMPT = "at-019de2b4c1a3f00c55d0e6b1"
SECRET = "secret"


def environment(server_url: str = "http://127.0.0.1:4747", **inherited: str) -> dict[str, str]:
    return attempt_environment(server_url, SECRET, "ro-1", ATTEMPT, inherited=inherited)


def test_an_agent_in_any_language_starts_in_the_trace_of_its_attempt() -> None:
    assert environment()["TRACEPARENT"] == f"00-{trace_id_of(ATTEMPT)}-{root_span_id_of(ATTEMPT)}-01"
    assert "TRACEPARENT" not in attempt_environment("http://h", SECRET, "ro-1", "at-1", inherited={})


def test_traces_of_an_agent_come_here_and_prove_whose_they_are() -> None:
    found = environment()
    assert found["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://127.0.0.1:4747/v1/traces"
    assert found["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    name, _, value = found["OTEL_EXPORTER_OTLP_TRACES_HEADERS"].partition("=")
    assert name == "authorization"
    assert read_attempt_key(SECRET, unquote(value).removeprefix("Bearer ")) == ("ro-1", ATTEMPT)
    assert found["OTEL_RESOURCE_ATTRIBUTES"] == f"agentlightning.rollout_id=ro-1,agentlightning.attempt_id={ATTEMPT}"


def test_the_users_own_resource_attributes_stay() -> None:
    found = environment(OTEL_RESOURCE_ATTRIBUTES="service.name=shop")["OTEL_RESOURCE_ATTRIBUTES"]
    assert found.startswith("service.name=shop,agentlightning.rollout_id=ro-1,")


def test_an_endpoint_the_user_has_configured_is_left_alone() -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        found = environment(**{name: "http://collector:4318"})
        assert not [key for key in found if key.startswith("OTEL_EXPORTER")]
        assert "TRACEPARENT" in found
        assert "OTEL_RESOURCE_ATTRIBUTES" in found


def test_without_a_server_traces_have_no_address() -> None:
    assert not [key for key in environment(server_url="") if key.startswith("OTEL_EXPORTER")]


def test_without_redirection_events_and_traces_still_have_an_address() -> None:
    found = attempt_environment("http://h", SECRET, "ro-1", ATTEMPT, redirect=False, inherited={})
    assert "OPENAI_BASE_URL" not in found
    assert {"AGL_EVENT_URL", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} <= set(found)


def test_a_proxy_of_the_environment_is_not_asked_for_the_way_to_our_own_server():
    def of(inherited):
        return attempt_environment("http://127.0.0.1:4747", "s", "ro", "at", inherited=inherited)

    assert "NO_PROXY" not in of({})
    through = of({"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "intern, 10.0.0.0/8"})
    assert through["NO_PROXY"] == through["no_proxy"] == "intern,10.0.0.0/8,127.0.0.1"
    assert of({"http_proxy": "http://proxy:3128", "NO_PROXY": "127.0.0.1"})["NO_PROXY"] == "127.0.0.1"


def test_model_calls_are_led_to_the_server_of_the_policy_and_everything_else_to_the_store() -> None:
    given = {"HTTP_PROXY": "http://proxy", "NO_PROXY": "x"}
    found = attempt_environment("http://hub:1", "s", "ro-1", "at-1", inherited=given, model_url="http://trainer:2/")
    assert found["OPENAI_BASE_URL"] == found["AGL_OPENAI_BASE_URL"] == f"http://trainer:2/key/{found['AGL_KEY']}/v1"
    assert found["ANTHROPIC_BASE_URL"] == f"http://trainer:2/key/{found['AGL_KEY']}"
    assert found["AGL_EVENT_URL"] == "http://hub:1/rollout/ro-1/attempt/at-1/events"
    assert found["NO_PROXY"] == "x,hub,trainer"
    shared = in_process_environment(found, "w")
    assert shared["OPENAI_BASE_URL"] == f"http://trainer:2/worker/w/key/{found['AGL_KEY']}/v1"


def test_what_sdks_read_holds_no_key_but_in_the_url() -> None:
    own = environment()
    for variables in (own, in_process_environment(own, "w"), import_environment("http://127.0.0.1:4747", SECRET, "w")):
        values = {variables["OPENAI_API_KEY"], variables["ANTHROPIC_API_KEY"]}
        assert len(values) == 1
        assert not values.pop().startswith("agl-")
