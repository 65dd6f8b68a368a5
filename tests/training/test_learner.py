"""The age of training samples, in updates of the weights."""

from agentlightning.training.learner import staleness
from agentlightning.trajectory import Node, TokenTree, TrainingSample


def sample(*parts: tuple[int | None, float, int]) -> TrainingSample:
    """A chain of sampled nodes: (version, weight of each token, tokens)."""
    nodes = tuple(
        Node(index - 1, (1,) * count, True, (-1.0,) * count, policy_version=version)
        for index, (version, _, count) in enumerate(parts)
    )
    weights = tuple((weight,) * count for _, weight, count in parts)
    return TrainingSample(TokenTree(nodes), advantages=weights, weights=weights)


def test_staleness_counts_updates_token_by_token():
    assert staleness([sample((3, 0.1, 2), (5, 0.1, 1)), sample((5, 0.1, 1))], 5) == {
        "staleness": 1.0,
        "staleness_max": 2.0,
    }


def test_tokens_that_are_not_trained_or_of_unknown_weights_have_no_age():
    assert staleness([sample((1, 0.0, 2), (None, 0.1, 4), (4, 0.1, 1))], 5)["staleness"] == 1.0
    assert staleness([sample((None, 0.1, 4))], 5) == {}
    assert staleness([], 5) == {}
