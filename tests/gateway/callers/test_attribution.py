"""Whose call it is."""

import pytest

from agentlightning.attempt_address import (
    attempt_key,
    attempt_secret,
    read_worker_key,
    root_span_id_of,
    trace_id_of,
    worker_key,
)
from agentlightning.attempt_variables import worker_environment
from agentlightning.gateway.callers import AttemptTable, Attribution
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.http import headers_by_name
from agentlightning.ingest.otlp import OtlpReceiver, TraceOwners, ids_of_trace
from agentlightning.span import AGENT_KEY, AGENT_NAME, ATTRIBUTION, ATTRIBUTION_IGNORED, MODE

FOREIGN = "4bf92f3577b34da6a3ce929d0e0e4736"


async def start(store, worker_id=None):
    started = await store.start_rollout("a task", worker_id=worker_id)
    return started.rollout_id, started.attempt.attempt_id


def in_url(ids):
    return {"rollout_id": ids[0], "attempt_id": ids[1]}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def trace(ids):
    return {"traceparent": f"00-{trace_id_of(ids[1])}-00f067aa0ba902b7-03"}


SECRET = "a-secret-nobody-prints"


def new_attribution(store, secret, **options):
    return Attribution(AttemptTable(store, lambda *attempt: None), secret, **options)


@pytest.fixture
def whose(store, secret):
    """whose(headers, path_params) -> the caller."""

    async def ask(headers=None, path_params=None, **options):
        return await new_attribution(store, secret, **options).caller(headers or {}, path_params or {})

    return ask


# -- each way by itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_key_names_its_attempt_in_either_header(whose, secret, header):
    key = attempt_key(secret, "ro-1", "at-1")
    caller = await whose({header: f"Bearer {key}" if header == "authorization" else key})
    assert (caller.attempt, caller.source) == (("ro-1", "at-1"), "key")


async def test_the_trace_of_an_attempt_names_it(store, whose):
    ids = await start(store)
    caller = await whose(trace(ids))
    assert (caller.attempt, caller.source) == (ids, "trace")
    assert (caller.trace_id, caller.parent_id) == (trace_id_of(ids[1]), "00f067aa0ba902b7")


async def test_the_parent_that_an_environment_names_is_no_span(store, whose):
    ids = await start(store)
    caller = await whose({"traceparent": f"00-{trace_id_of(ids[1])}-{root_span_id_of(ids[1])}-01"})
    assert (caller.attempt, caller.parent_id) == (ids, None)


async def test_a_trace_that_was_kept_as_a_rollout_of_its_own_names_that_one(store, whose):
    rollout_id, attempt_id = ids_of_trace(FOREIGN)
    await store.start_rollout(None, rollout_id=rollout_id, claim_id=f"trace-{FOREIGN}")
    caller = await whose({"traceparent": f"00-{FOREIGN}-00f067aa0ba902b7-01"})
    assert (caller.attempt, caller.source) == ((rollout_id, attempt_id), "trace")


async def test_a_trace_that_somebody_knows_names_its_attempt(store, secret):
    attribution, receiver = new_attribution(store, secret), OtlpReceiver(store, secret)
    attribution.traces = receiver
    ids, other = await start(store), await start(store)
    within = {"traceparent": f"00-{FOREIGN}-00f067aa0ba902b7-01"}
    await attribution.caller(within, in_url(ids))  # an agent with tracing of its own calls once by its URL
    caller = await attribution.caller(within, {})
    assert (caller.attempt, caller.source, caller.trace_id) == (ids, "trace", FOREIGN)
    await attribution.caller(within, in_url(other))
    with pytest.raises(ApiError, match="names no attempt"):  # the trace is around both
        await attribution.caller(within, {})


def test_processes_that_share_a_folder_share_whose_traces_are(tmp_path):
    one, other = TraceOwners(tmp_path), TraceOwners(tmp_path)
    first, second = ("ro-1", "at-1"), ("ro-2", "at-2")
    one.note("t", first, by_token=False)
    assert other.find("t") == first
    other.note("t", second, by_token=False)
    assert (one.find("t"), other.find("t")) == (None, None)
    one.note("t", first, by_token=False)  # claimed by two attempts once, it belongs to none of them
    assert other.find("t") is None
    other.note("t", second, by_token=True)
    one.note("t", first, by_token=True)
    assert other.find("t") == first


async def test_a_trace_nobody_knows_becomes_a_rollout_where_such_are_kept(store, secret):
    attribution = new_attribution(store, secret)
    attribution.traces = OtlpReceiver(store, secret, adopt=True)
    within = {"traceparent": f"00-{FOREIGN}-00f067aa0ba902b7-01"}
    for _ in range(2):
        caller = await attribution.caller(within, {})
        assert (caller.attempt, caller.source) == (ids_of_trace(FOREIGN), "trace")
    assert (await store.get_rollout_by_id(caller.rollout_id)).metadata["trace_id"] == FOREIGN


async def test_baggage_names_an_attempt_or_the_latest_one_of_a_rollout(store, whose):
    ids = await start(store)
    for entry in (f"agentlightning.attempt_id={ids[1]}", f"x=1,agentlightning.rollout_id={ids[0]};p=2"):
        caller = await whose({"baggage": entry})
        assert (caller.attempt, caller.source) == (ids, "baggage")


async def test_a_worker_is_asked_for_what_it_runs_at_the_time_of_the_call(store, whose, secret):
    first = await start(store, "w")
    by_url, by_key = {"worker_id": "w"}, bearer(worker_key(secret, "w"))
    assert (await whose(path_params=by_url)).attempt == first
    await store.update_attempt(*first, status="succeeded")
    second = await start(store, "w")
    assert (await whose(path_params=by_url)).attempt == second
    caller = await whose(by_key, by_url, require_key=True)
    assert (caller.attempt, caller.source) == (second, "worker")
    assert (await whose(by_key)).attempt == second


async def test_between_two_attempts_a_call_of_a_worker_is_nobodys(store, whose):
    ids = await start(store, "w")
    await store.update_attempt(*ids, status="succeeded")
    with pytest.raises(ApiError, match="'w' runs no attempt at the moment") as refused:
        await whose(path_params={"worker_id": "w"})
    assert (refused.value.status, refused.value.retry) == (409, False)


async def test_a_worker_with_several_attempts_has_to_be_told_which(store, whose):
    first, second = await start(store, "w"), await start(store, "w")
    with pytest.raises(ApiError, match="runs 2 attempts at once") as refused:
        await whose(path_params={"worker_id": "w"})
    assert (refused.value.status, refused.value.code) == (409, "worker_ambiguous")
    assert (await whose(trace(first), {"worker_id": "w"})).attempt == first
    assert (await whose(trace(second), {"worker_id": "w"})).attempt == second


async def test_a_worker_nobody_has_heard_of_is_not_found(whose):
    with pytest.raises(ApiError, match="knows no worker 'w'") as refused:
        await whose(path_params={"worker_id": "w"})
    assert refused.value.status == 404


@pytest.mark.parametrize("name", ["w", "host.example-7", "ein Läufer/1", "-"])
def test_a_workers_key_names_it_and_no_other(secret, name):
    key = worker_key(secret, name)
    assert read_worker_key(secret, key) == name
    assert read_worker_key("another secret", key) is None
    assert read_worker_key(secret, key[:-1] + ("0" if key[-1] != "0" else "1")) is None
    assert key.isascii()


def test_the_environment_of_a_worker_holds_its_url_and_its_key(secret):
    environment = worker_environment("http://127.0.0.1:4747/", secret, "a b")
    assert environment["AGL_WORKER_BASE_URL"] == "http://127.0.0.1:4747/worker/a%20b/v1"
    assert read_worker_key(secret, environment["AGL_WORKER_KEY"]) == "a b"


@pytest.mark.parametrize("key", ["agl-worker-", "agl-worker-!!.0", "agl-worker-/w.0", "agl-a.b.c", "agl-worker-ß.0"])
async def test_a_key_nobody_made_is_refused(whose, key):
    if key.isascii():
        with pytest.raises(ApiError, match="not valid here"):
            await whose(bearer(key), {"worker_id": "w"})


# -- where they disagree -----------------------------------------------------------------------------------------------


def in_process_of(worker_id, ids):
    return {"worker_id": worker_id, "key": attempt_key(SECRET, *ids)}


@pytest.mark.parametrize("path", ["url", "key"])
async def test_what_a_request_names_beats_the_context_it_is_made_in(store, secret, path):
    mine, inherited = await start(store), await start(store)
    attribution = new_attribution(store, secret, require_key=True)
    headers = bearer(attempt_key(secret, *mine)) | {"x-agentlightning-attempt": attempt_key(secret, *inherited)}
    caller = await attribution.caller(headers, in_url(mine) if path == "url" else {})
    assert (caller.attempt, caller.source) == (mine, path)
    assert caller.ignored == (f"{inherited[1]} of the header",)
    assert attribution.conflicts == 1


async def test_a_client_kept_from_an_earlier_attempt_is_the_one_of_whoever_calls(store, secret, whose):
    now, before = await start(store), await start(store)
    kept = in_process_of("w", before)
    for key in (attempt_key(secret, *before), "of its user's own"):
        headers = bearer(key) | {"x-agentlightning-attempt": attempt_key(secret, *now)}
        caller = await whose(headers, kept, require_key=True)
        assert (caller.attempt, caller.source) == (now, "header")
    assert (await whose({}, kept)).attempt == before  # where no context says otherwise


async def test_the_url_with_the_key_of_another_attempt_is_refused_whatever_the_context(store, secret, whose):
    mine, other = await start(store), await start(store)
    headers = bearer(attempt_key(secret, *other)) | {"x-agentlightning-attempt": attempt_key(secret, *mine)}
    with pytest.raises(ApiError, match="belongs to another attempt"):
        await whose(headers, in_url(mine))
    with pytest.raises(ApiError, match="requires the AGL_KEY"):  # a proof for another attempt opens nothing
        await whose({"x-agentlightning-attempt": attempt_key(secret, *other)}, in_url(mine), require_key=True)


@pytest.mark.parametrize("why", ["uncertain", "ended", "at-of-another"])
async def test_a_caller_that_may_work_for_any_attempt_needs_a_url_or_key_of_one(store, secret, whose, why):
    ids, doubt = await start(store, "w"), {"x-agentlightning-work-of": why}
    assert (await whose(doubt, in_url(ids))).attempt == ids
    assert (await whose(doubt | bearer(attempt_key(secret, *ids)))).attempt == ids
    for headers, path in (({}, in_process_of("w", ids)), (trace(ids), {}), ({}, {"worker_id": "w"})):
        with pytest.raises(ApiError, match="the attempt of this call is uncertain") as refused:
            await whose(doubt | headers, path)
        assert (refused.value.status, refused.value.code) == (409, "attempt_ambiguous")


async def test_a_reward_function_cannot_use_a_client_of_the_agents(store, secret, whose):
    ids = await start(store, "w")
    judge = {"x-agentlightning-judge": ids[1]}
    for headers, path in (
        ({}, in_url(ids)),
        ({}, {"worker_id": "w"}),
        (bearer(attempt_key(secret, *ids)), {}),
        (bearer(worker_key(secret, "w")), {}),
    ):
        with pytest.raises(ApiError, match="reward function") as refused:
            await whose(judge | headers, path)
        assert (refused.value.status, refused.value.code) == (409, "judge_as_agent")
    assert (await whose(judge, allow_unattributed=True)).attempt is None


async def test_a_header_that_proves_nothing_is_refused(whose):
    with pytest.raises(ApiError, match="x-agentlightning-attempt") as refused:
        await whose({"x-agentlightning-attempt": "agl-ro.at.sig"}, {"rollout_id": "ro", "attempt_id": "at"})
    assert refused.value.status == 401
    assert "sig" not in refused.value.message


async def test_hints_that_disagree_with_the_url_are_recorded_and_not_followed(store, whose):
    ids, other = await start(store), await start(store)
    headers = trace(other) | {"baggage": f"agentlightning.rollout_id={other[0]}"}
    caller = await whose(headers, in_url(ids))
    assert caller.attempt == ids
    assert caller.ignored == (f"{other[1]} of the trace", f"{other[0]} of the baggage")
    assert caller.trace_id is None  # the call is no part of the other attempt's trace
    assert caller.attributes()[ATTRIBUTION_IGNORED] == list(caller.ignored)


async def test_hints_that_agree_are_no_news(store, whose):
    ids = await start(store)
    caller = await whose(trace(ids) | {"baggage": f"agentlightning.attempt_id={ids[1]}"}, in_url(ids))
    assert caller.ignored == ()
    assert caller.attributes() == {ATTRIBUTION: "url"}


async def test_baggage_may_come_in_several_headers(store, whose):
    ids = await start(store)
    named = (b"baggage", f"agentlightning.attempt_id={ids[1]}".encode())
    for headers in ([named, (b"baggage", b"tenant=7")], [(b"baggage", b"tenant=7"), (b"x", b"y"), named]):
        assert (await whose(headers_by_name({"headers": headers}))).attempt == ids


async def test_baggage_of_an_attempt_that_is_not_of_its_rollout_is_not_followed(store, whose):
    one, two = await start(store), await start(store)
    with pytest.raises(ApiError, match="names no attempt"):
        await whose({"baggage": f"agentlightning.rollout_id={one[0]},agentlightning.attempt_id={two[1]}"})


async def test_keys_of_two_parties_are_refused(store, whose, secret):
    ids, mine = await start(store), await start(store, "w")
    for headers, path in (
        (bearer(attempt_key(secret, *mine)), in_url(ids)),
        (bearer(worker_key(secret, "w")), in_url(ids)),
        (bearer(worker_key(secret, "w")), {"worker_id": "v"}),
        (bearer(worker_key(secret, "w")) | trace(ids), {"worker_id": "w"}),
    ):
        with pytest.raises(ApiError, match="API key belongs to") as refused:
            await whose(headers, path)
        assert refused.value.status == 401
    assert (await whose(bearer(worker_key(secret, "w")), in_url(mine))).attempt == mine


@pytest.mark.parametrize("hint", ["url", "worker", "trace", "baggage", "nothing"])
async def test_where_keys_are_asked_for_nothing_else_is_enough(store, whose, hint):
    ids = await start(store, "w")
    headers = {"trace": trace(ids), "baggage": {"baggage": f"agentlightning.attempt_id={ids[1]}"}}.get(hint, {})
    path = {"url": in_url(ids), "worker": {"worker_id": "w"}}.get(hint, {})
    with pytest.raises(ApiError, match="requires the AGL_KEY") as refused:
        await whose(headers, path, require_key=True)
    assert refused.value.status == 401


async def test_a_call_that_names_nobody_is_refused_unless_that_is_allowed(whose):
    with pytest.raises(ApiError, match="names no attempt"):
        await whose({"traceparent": f"00-{FOREIGN}-00f067aa0ba902b7-01"})
    assert (await whose(allow_unattributed=True)).attempt is None


async def test_one_that_is_allowed_needs_the_access_token_where_keys_are_asked_for(store):
    shared = new_attribution(store, attempt_secret("a token"), require_key=True, allow_unattributed=True)
    assert (await shared.caller(bearer("a token"), {})).attempt is None
    for headers in ({}, bearer("another")):
        with pytest.raises(ApiError, match="requires the AGL_KEY"):
            await shared.caller(headers, {})
    strict = new_attribution(store, attempt_secret("a token"), require_key=True)
    with pytest.raises(ApiError, match="requires the AGL_KEY"):
        await strict.caller(bearer("a token"), {})


async def test_a_url_of_one_point_o_says_its_mode(store, whose):
    ids = await start(store)
    caller = await whose(path_params={**in_url(ids), "mode": "val"})
    assert caller.attributes() == {ATTRIBUTION: "url", MODE: "val"}
    with pytest.raises(ApiError, match="mode 'test'") as refused:
        await whose(path_params={**in_url(ids), "mode": "test"})
    assert refused.value.status == 404


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def test_the_agent_and_what_named_the_attempt_are_on_the_span_in_every_dialect(serve):
    service = await serve(lambda messages: "ok")
    named, given = service.environment, {"default_headers": {"x-agentlightning-agent": "writer"}}
    client = await service.client(base_url=named["OPENAI_BASE_URL"], **given)
    await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    await client.completions.create(model="scripted", prompt="hi")
    await client.responses.create(model="scripted", input="hi", instructions="You plan.")
    anthropic = await service.anthropic(base_url=named["ANTHROPIC_BASE_URL"], **given)
    await anthropic.messages.create(model="scripted", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    spans = await service.spans()
    assert [span.attributes[AGENT_NAME] for span in spans] == ["writer"] * 4
    assert [span.attributes[ATTRIBUTION] for span in spans] == ["key"] * 4
    assert [AGENT_KEY in span.attributes for span in spans] == [False, False, True, False]


async def test_the_url_of_one_point_o_serves_the_policy_at_the_temperature_of_its_mode(serve):
    service = await serve(["one", "two"])
    base = f"{service.server.url}/proxy/rollout/{service.rollout_id}/attempt/{service.attempt_id}"
    for mode in ("train", "val"):
        client = await service.client(base_url=f"{base}/mode/{mode}/openai/v1")
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="any-model", messages=messages, temperature=0)
        assert answer.model == "scripted"
    assert [params.temperature for _, params in service.engine.calls] == [1.0, 0.7]
    assert [span.attributes[MODE] for span in await service.spans()] == ["train", "val"]


async def test_a_client_made_once_is_known_by_its_worker(serve, store):
    service = await serve(["one", "two"])
    environment = worker_environment(service.server.url, SECRET, "w")
    client = await service.client(base_url=environment["AGL_WORKER_BASE_URL"], api_key=environment["AGL_WORKER_KEY"])
    asked = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(2):
        ids = await start(store, "w")
        await client.chat.completions.create(**asked)
        assert [span.attributes[ATTRIBUTION] for span in await store.query_spans(ids[0])] == ["worker"]
        await store.update_attempt(*ids, status="succeeded")


async def test_the_agent_in_the_model_name_is_taken_off_it(serve):
    service = await serve(["one"])
    client = await service.client()
    messages = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model="writer@scripted", messages=messages)
    assert answer.model == "scripted"
    [span] = await service.spans()
    assert span.attributes[AGENT_NAME] == "writer"


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer sk-own"}, {"x-api-key": "agl-a.b.c"}])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "models"])
async def test_a_key_in_the_url_takes_the_place_of_the_callers_own(header, path, serve, secret):
    service = await serve(["Hello."], require_key=True)
    client = await service.http()
    body = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    for key, status in ((service.key, 200), (service.key[:-1] + "x", 401), ("sk-own", 401)):
        method, sent = ("GET", None) if path == "models" else ("POST", body)
        url = f"{service.server.url}/key/{key}/v1/{path}"
        reply = await client.request(method, url, json=sent, headers=header)
        assert reply.status_code == status
    assert len(await service.spans()) == (0 if path == "models" else 1)
