"""What a run says about itself, as figures of each step: here, how old the data is that it learns from.

Pure functions over what is trained; the training run calls them and keeps their figures. They change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentlightning.trajectory import TrainingSample


def staleness(samples: Sequence[TrainingSample], version: int) -> Mapping[str, float]:
    """How many updates lie between the weights that drew a token and `version`, which is about to learn from it.

    `staleness` is the mean over trained tokens, `staleness_max` the most; an answer drawn across an update counts
    token by token. Empty where no token says which weights drew it.
    """
    ages = [(version - age, count) for sample in samples for age, count in _trained(sample)]
    tokens = sum(count for _, count in ages)
    if not tokens:
        return {}
    mean = sum(age * count for age, count in ages) / tokens
    return {"staleness": mean, "staleness_max": float(max(age for age, _ in ages))}


def _trained(sample: TrainingSample) -> Iterator[tuple[int, int]]:
    """(version, how many of its tokens are trained) for each node."""
    for node, weights in zip(sample.tree.nodes, sample.weights, strict=True):
        count = sum(weight != 0 for weight in weights)
        if node.policy_version is not None and count:
            yield node.policy_version, count
