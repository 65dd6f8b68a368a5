"""A rollout that branches off another is given the recorded answers up to the branch, and then sampled ones."""

import pytest

from agentlightning import span as names
from agentlightning.assemble import REPLAY_MISMATCHES, REPLAYED_CALLS, trajectory
from agentlightning.gateway.config import GatewayConfig
from agentlightning.rollouts import EnqueueRolloutRequest

ASKED = [{"role": "user", "content": "hi"}]


def then(*said):
    """The conversation after these answers."""
    turns = [[{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}] for text in said]
    return [*ASKED, *(message for turn in turns for message in turn)]


async def branching(service, store, calls):
    """The service, as a rollout sees it that branches off the first one after so many calls."""
    spans = await service.spans()
    branch = {"rollout_id": service.rollout_id, "span_ids": [span.span_id for span in spans[:calls]]}
    await store.enqueue_many_rollouts([EnqueueRolloutRequest({}, metadata={"branch": branch})])
    service.attempted = await store.dequeue_rollout()
    return spans


@pytest.mark.parametrize("stream", [False, True])
async def test_the_recorded_answers_are_given_again_token_for_token(serve, store, stream):
    service = await serve(["one", "two", "three", "another"])
    for messages in (ASKED, then("one"), then("one", "two")):
        await service.ask(messages)
    source = await branching(service, store, 2)
    if stream:
        chunks = await service.stream()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one"
    else:
        assert (await service.ask(ASKED)).choices[0].message.content == "one"
    assert (await service.ask(then("one"))).choices[0].message.content == "two"
    assert (await service.ask(then("one", "two"))).choices[0].message.content == "another", "sampled"
    assert len(service.engine.calls) == 4, "the engine answered no recorded call"
    read = trajectory(service.rollout_id, service.attempt_id, await service.spans())
    first = trajectory(source[0].rollout_id, source[0].attempt_id, source)
    for own, recorded in zip(read.transitions[:2], first.transitions, strict=False):
        assert own.replays == (recorded.rollout_id, recorded.span_id)
        assert (own.response_token_ids, own.logprobs) == (recorded.response_token_ids, recorded.logprobs)
        assert own.policy_version == recorded.policy_version
    assert read.transitions[2].replays is None
    assert read.transitions[2].prompt_token_ids == first.transitions[2].prompt_token_ids
    assert (read.metadata[REPLAYED_CALLS], read.metadata.get(REPLAY_MISMATCHES)) == (2, None)


async def test_a_request_that_differs_ends_the_replay_and_is_counted(serve, store):
    service = await serve(["one", "two", "new", "newer"])
    for messages in (ASKED, then("one")):
        await service.ask(messages)
    await branching(service, store, 2)
    assert (await service.ask("something else")).choices[0].message.content == "new"
    assert (await service.ask(ASKED)).choices[0].message.content == "newer", "even where it is recorded"
    read = trajectory(service.rollout_id, service.attempt_id, await service.spans())
    assert (read.metadata.get(REPLAYED_CALLS), read.metadata[REPLAY_MISMATCHES]) == (None, 1)


async def test_recorded_likeliest_tokens_do_not_end_a_replay_and_are_recorded_again(serve, store):
    service = await serve(["one"], config=GatewayConfig(record_top_logprobs=2))
    await service.ask(ASKED)
    (source,) = await branching(service, store, 1)
    await service.ask(ASKED)
    (span,) = await service.spans()
    assert span.attributes[names.REPLAYS] == [source.rollout_id, source.span_id]
    assert span.attributes[names.TOP_LOGPROBS] == source.attributes[names.TOP_LOGPROBS]


async def test_a_branch_of_a_branch_names_the_call_that_was_sampled(serve, store):
    service = await serve(["one", "two", "three"])
    await service.ask(ASKED)
    (source,) = await branching(service, store, 1)
    for messages in (ASKED, then("one")):
        await service.ask(messages)
    await branching(service, store, 2)
    for messages in (ASKED, then("one"), then("one", "two")):
        await service.ask(messages)
    first, second, third = trajectory(service.rollout_id, service.attempt_id, await service.spans()).transitions
    assert first.replays == (source.rollout_id, source.span_id), "so that all three are trained once"
    assert second.replays is not None
    assert second.replays[0] not in (source.rollout_id, service.rollout_id)
    assert third.replays is None


async def test_answers_that_are_gone_are_sampled(serve, store):
    service = await serve(["one", "sampled"])
    await service.ask(ASKED)
    branch = {"rollout_id": service.rollout_id, "span_ids": ["pruned"]}
    await store.enqueue_many_rollouts([EnqueueRolloutRequest({}, metadata={"branch": branch})])
    service.attempted = await store.dequeue_rollout()
    assert (await service.ask(ASKED)).choices[0].message.content == "sampled"


async def test_tool_calls_have_their_recorded_ids(serve, store):
    """Agents send them back with the results of tools, and some templates write them into the prompt."""
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    service = await serve([call * 2, "end", "sampled"])
    first = (await service.ask(ASKED, tools=tools)).choices[0].message
    await branching(service, store, 1)
    again = (await service.ask(ASKED, tools=tools)).choices[0].message
    assert [each.id for each in again.tool_calls] == [each.id for each in first.tool_calls]
    assert len({each.id for each in again.tool_calls}) == 2


# -- inside an answer --------------------------------------------------------------------------------------------------


async def branching_inside(service, store, source, call, kept):
    """The service, as a rollout sees it that branches off after so many tokens of the answer to this call."""
    number = next(number for number, span in enumerate(source) if span.span_id == call)
    branch = {
        "rollout_id": source[0].rollout_id,
        "span_ids": [span.span_id for span in source[:number]],
        "kept": {call: kept},
    }
    await store.enqueue_many_rollouts([EnqueueRolloutRequest({}, metadata={"branch": branch})])
    service.attempted = await store.dequeue_rollout()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_goes_on_from_the_tokens_that_are_kept(serve, store, stream):
    service = await serve(["one", "two"])
    await service.ask(ASKED, max_tokens=20)
    (source,) = await service.spans()
    await branching_inside(service, store, [source], source.span_id, 2)
    if stream:
        chunks = await service.stream(max_tokens=20, logprobs=True)
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == "ontwo"
        listed = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert "".join(listed).startswith("two"), "of what was sampled"
    else:
        assert (await service.ask(ASKED, max_tokens=20)).choices[0].message.content == "ontwo"
    (span,) = await service.spans()
    prompt = source.attributes[names.PROMPT_TOKEN_IDS] + source.attributes[names.RESPONSE_TOKEN_IDS][:2]
    assert span.attributes[names.PROMPT_TOKEN_IDS] == prompt, "they are not trained again"
    assert list(service.engine.calls[-1][0]) == prompt
    assert service.engine.calls[-1][1].max_tokens == 18
    assert span.attributes[names.BEGUN] == 2
    assert '"ontwo"' in span.attributes[names.OUTPUT_MESSAGES]
    (call,) = trajectory(service.rollout_id, service.attempt_id, [span]).transitions
    assert call.replays is None
    assert service.engine.chat.decode(call.response_token_ids, skip_special_tokens=True) == "two"


async def test_the_next_call_of_such_a_rollout_continues_its_tokens(serve, store):
    service = await serve(["one", "two", "three"])
    await service.ask(ASKED)
    source = await service.spans()
    await branching_inside(service, store, source, source[0].span_id, 1)
    await service.ask(ASKED)
    await service.ask(then("otwo"))
    first, second = await service.spans()
    whole = first.attributes[names.PROMPT_TOKEN_IDS] + first.attributes[names.RESPONSE_TOKEN_IDS]
    assert second.attributes[names.PROMPT_TOKEN_IDS][: len(whole)] == whole
    assert second.attributes[names.CONTINUES] == first.span_id


async def test_a_branch_off_a_rollout_that_branched_inside_an_answer_is_given_the_whole_of_it(serve, store):
    service = await serve(["one", "two", "three", "four"])
    await service.ask(ASKED)
    source = await service.spans()
    await branching_inside(service, store, source, source[0].span_id, 1)
    for messages in (ASKED, then("otwo")):
        await service.ask(messages)
    middle = await service.spans()
    await branching_inside(service, store, middle, middle[1].span_id, 3)
    assert (await service.ask(ASKED)).choices[0].message.content == "otwo"
    assert (await service.ask(then("otwo"))).choices[0].message.content == "thrfour"
    again, last = trajectory(service.rollout_id, service.attempt_id, await service.spans()).transitions
    assert again.replays == (middle[0].rollout_id, middle[0].span_id)
    assert again.prompt_token_ids == tuple(middle[0].attributes[names.PROMPT_TOKEN_IDS])
    assert last.replays is None


async def test_a_constrained_answer_is_sampled_from_its_beginning(serve, store):
    """A grammar describes whole answers."""
    service = await serve(['{"a": 1}', '{"a": 2}'], config=GatewayConfig(structured_output="always"))
    service.engine.supported_params = frozenset({"json_schema", "grammar"})
    service.engine.can_enforce = can_enforce
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    await service.ask(ASKED, response_format=form)
    source = await service.spans()
    await branching_inside(service, store, source, source[0].span_id, 2)
    assert (await service.ask(ASKED, response_format=form)).choices[0].message.content == '{"a": 2}'
    (span,) = await service.spans()
    assert span.attributes[names.REPLAY_MISMATCH]
    assert names.BEGUN not in span.attributes


async def can_enforce(text, kind="json_schema"):
    return True


@pytest.mark.parametrize("branch", ["main", {"rollout_id": "ro-1"}, ["main"]])
async def test_a_branch_that_is_metadata_of_the_users_own_changes_nothing(serve, store, branch):
    service = await serve(["one"])
    await store.enqueue_many_rollouts([EnqueueRolloutRequest({}, metadata={"branch": branch})])
    service.attempted = await store.dequeue_rollout()
    assert (await service.ask(ASKED)).choices[0].message.content == "one"
