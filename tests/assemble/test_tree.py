"""Token trees store every token once, and train every sampled token once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.assemble import token_tree
from agentlightning.trajectory import TokenTree, Trajectory, Transition
from agentlightning.util.kept_sets import KeptSets


def call(
    prompt: tuple[int, ...], sampled: tuple[int, ...], sequence: int = 1, rollout: str = "ro-1", **more: Any
) -> Transition:
    logprobs = tuple(-1.0 - i for i in range(len(sampled)))
    return Transition(rollout, "at-1", f"{rollout}-{sequence}", sequence, prompt, sampled, logprobs, **more)


def tree_of(*given_calls: Transition) -> TokenTree:
    by_rollout: dict[str, list[Transition]] = {}
    for each in given_calls:
        by_rollout.setdefault(each.rollout_id, []).append(each)
    return token_tree(Trajectory(rollout, "at-1", tuple(own)) for rollout, own in by_rollout.items())


def texts(tree: TokenTree) -> list[tuple[int, tuple[int, ...], bool]]:
    return [(node.parent, node.token_ids, node.sampled) for node in tree.nodes]


def test_the_worked_example_of_the_documentation() -> None:
    tree = tree_of(call((1, 2, 3), (10, 11)), call((1, 2, 3, 10, 11, 4, 5), (12,), 2))
    assert texts(tree) == [(-1, (1, 2, 3), False), (0, (10, 11), True), (1, (4, 5), False), (2, (12,), True)]
    assert (tree.nodes[1].call, tree.nodes[3].call) == ("ro-1-1", "ro-1-2")
    assert tree.num_tokens == 8
    assert tree.num_sampled == 3


def test_two_equal_responses_stay_two_samples() -> None:
    tree = tree_of(call((1, 2), (7, 8), 1), call((1, 2), (7, 8), 2))
    assert texts(tree) == [(-1, (1, 2), False), (0, (7, 8), True), (0, (7, 8), True)]
    assert [node.call for node in tree.nodes[1:]] == ["ro-1-1", "ro-1-2"]


def test_rollouts_share_prompts_and_never_samples() -> None:
    answer, follow_up = call((1, 2), (7,), rollout="a"), call((1, 2, 7, 3), (8,), 2, rollout="b")
    tree = tree_of(answer, follow_up)
    assert texts(tree) == [(-1, (1, 2), False), (0, (7,), True), (0, (7, 3), False), (2, (8,), True)]


def test_a_rollout_that_repeats_recorded_answers_goes_on_below_them() -> None:
    first, second = call((1, 2), (7,), rollout="a"), call((1, 2, 7, 3), (8,), 2, rollout="a")
    again = call((1, 2), (7,), rollout="b", replays=("a", "a-1"))
    tree = tree_of(again, call((1, 2, 7, 3), (9,), 2, rollout="b"), first, second)
    assert texts(tree) == [(-1, (1, 2), False), (0, (7,), True), (1, (3,), False), (2, (9,), True), (2, (8,), True)]
    assert [node.call for node in tree.nodes if node.sampled] == ["a-1", "b-2", "a-2"]


def test_where_the_recorded_rollout_is_left_out_the_first_that_repeats_it_stands_for_it() -> None:
    branches = [call((1, 2), (7,), rollout=name, replays=("a", "a-1")) for name in ("b", "c")]
    tree = tree_of(*branches, call((1, 2, 7), (8,), 2, rollout="c"))
    assert texts(tree) == [(-1, (1, 2), False), (0, (7,), True), (1, (8,), True)]
    assert [node.rollout_id for node in tree.nodes] == [None, "b", "c"]


def test_a_sampled_node_is_split_with_its_logprobs_where_a_later_prompt_leaves_it() -> None:
    tree = tree_of(call((1,), (7, 8, 9), agent="writer", policy_version=2), call((1, 7, 5), (6,), 2))
    assert texts(tree) == [(-1, (1,), False), (0, (7,), True), (1, (8, 9), True), (1, (5,), False), (3, (6,), True)]
    upper, lower = tree.nodes[1], tree.nodes[2]
    assert (upper.logprobs, lower.logprobs) == ((-1.0,), (-2.0, -3.0))
    assert {(n.call, n.agent, n.policy_version, n.rollout_id) for n in (upper, lower)} == {
        ("ro-1-1", "writer", 2, "ro-1")
    }


def test_a_node_knows_the_temperature_its_tokens_were_sampled_at() -> None:
    tree = tree_of(call((1,), (7, 8), temperature=0.7), call((1, 7, 5), (6,), 2, temperature=0.3))
    assert [(node.token_ids, node.temperature) for node in tree.nodes if node.sampled] == [
        ((7,), 0.7),
        ((8,), 0.7),
        ((6,), 0.3),
    ]


def test_prompts_with_nothing_in_common_are_roots_in_the_order_of_their_calls() -> None:
    tree = tree_of(call((1,), (7,), 1), call((2,), (8,), 2))
    assert texts(tree) == [(-1, (1,), False), (0, (7,), True), (-1, (2,), False), (2, (8,), True)]


def test_a_call_sampled_by_two_versions_has_two_nodes() -> None:
    tree = tree_of(
        call((1,), (7, 8, 9), policy_version=4, versions=((3, 2), (4, 1))),
        call((1, 7, 8, 9, 5), (6,), 2, policy_version=4),
        call((1, 7, 2), (6,), 3, policy_version=4),
    )
    sampled = [(n.token_ids, n.logprobs, n.policy_version, n.call) for n in tree.nodes if n.sampled]
    assert sorted(sampled) == [
        ((6,), (-1.0,), 4, "ro-1-2"),
        ((6,), (-1.0,), 4, "ro-1-3"),
        ((7,), (-1.0,), 3, "ro-1-1"),
        ((8,), (-2.0,), 3, "ro-1-1"),
        ((9,), (-3.0,), 4, "ro-1-1"),
    ]


def test_the_longest_prefix_is_found_behind_an_equal_sibling() -> None:
    twins = [call((1,), (7,), 1), call((1,), (7,), 2), call((1, 7, 2), (9,), 3), call((1, 7, 2, 9, 3), (4,), 4)]
    assert tree_of(*twins).num_tokens == 7


def test_a_thousand_calls_of_a_long_conversation_are_stored_once() -> None:
    history, made = (1, 2, 3), []
    for turn in range(1000):
        made.append(call(history, (turn, turn + 1), turn))
        history += (turn, turn + 1, 5)
    tree = tree_of(*made)
    assert tree.num_tokens == len(history) - 1
    assert len(tree.leaves()) == 1


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@st.composite
def rollouts(draw: st.DrawFn) -> list[Transition]:
    """Calls of two rollouts that often continue, repeat or leave one another."""
    made: list[Transition] = []
    for number in range(draw(st.integers(1, 8))):
        rollout = draw(st.sampled_from(["a", "b"]))
        histories = [
            (),
            *(c.prompt_token_ids + c.response_token_ids for c in made),
            *(c.prompt_token_ids for c in made),
        ]
        history = draw(st.sampled_from(histories))
        prompt = history[: draw(st.integers(0, len(history)))] + draw(tokens)
        sampled = draw(tokens)
        made.append(call(prompt, sampled, number, rollout, versions=draw(versions(len(sampled)))))
    return made


@st.composite
def versions(draw: st.DrawFn, count: int) -> tuple[tuple[int, int], ...]:
    """Weights that changed at some of the places between so many tokens."""
    ends = [*sorted(draw(st.sets(st.integers(1, count - 1)))), count] if count > 1 else []
    starts = [0, *ends]
    return tuple((version, end - starts[version]) for version, end in enumerate(ends)) if len(ends) > 1 else ()


@given(rollouts())
def test_every_call_is_a_path_of_its_own_tokens(made: list[Transition]) -> None:
    tree = tree_of(*made)
    for each in made:
        own = [
            i for i, node in enumerate(tree.nodes) if (node.rollout_id, node.call) == (each.rollout_id, each.span_id)
        ]
        assert [t for i in own for t in tree.nodes[i].token_ids] == list(each.response_token_ids)
        assert [x for i in own for x in tree.nodes[i].logprobs] == list(each.logprobs)
        drawn_by = [tree.nodes[i].policy_version for i in own for _ in tree.nodes[i].token_ids]
        assert drawn_by == [v for v, n in each.versions for _ in range(n)] or not each.versions
        path = [t for i in tree.path(own[-1]) for t in tree.nodes[i].token_ids]
        assert path == [*each.prompt_token_ids, *each.response_token_ids]


@given(rollouts())
def test_no_sampled_token_is_lost_and_no_prompt_is_stored_twice(made: list[Transition]) -> None:
    tree = tree_of(*made)
    assert tree.num_sampled == sum(len(each.response_token_ids) for each in made)
    assert all(node.parent < i and node.token_ids for i, node in enumerate(tree.nodes))
    prompts = [(node.parent, node.token_ids[0]) for node in tree.nodes if not node.sampled]
    assert len(prompts) == len(set(prompts)), "two prompt nodes with the same parent must differ in their first token"
    assert all(node.rollout_id is None and not node.logprobs for node in tree.nodes if not node.sampled)


@given(rollouts(), st.randoms(use_true_random=False))
def test_the_order_in_which_trajectories_arrive_does_not_matter(made: list[Transition], random: Any) -> None:
    shuffled = random.sample(made, len(made))
    assert tree_of(*made).num_tokens == tree_of(*shuffled).num_tokens


def test_kept_sets_stay_with_their_tokens_where_a_node_is_split_or_versions_change() -> None:
    sets = KeptSets.of([(10, 3), (11,), (), (13, 5, 9)])
    first = call((1, 2), (10, 11, 12, 13), kept_sets=sets, versions=((0, 3), (1, 1)))
    tree = tree_of(first, call((1, 2, 10, 11, 4), (14,), 2))
    found = {node.token_ids: node.kept_sets and node.kept_sets.lists() for node in tree.nodes if node.sampled}
    assert found == {(10, 11): [[10, 3], [11]], (12,): [[]], (13,): [[13, 5, 9]], (14,): None}
