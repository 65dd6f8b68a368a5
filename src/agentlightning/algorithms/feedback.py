"""Feedback for self-distillation: what the policy learned only after it had answered, as a message in its prompt.

A call has feedback if a tool it called failed, or if another rollout of its group solved the task that its own did not.
The same answer is then scored after a prompt that ends with this feedback: `teacher_logprobs` (SDPO, arXiv:2601.20802).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentlightning.algorithms.columns import learner_of, scores_by_adapter
from agentlightning.algorithms.training import Training
from agentlightning.assemble import token_tree
from agentlightning.chat.base import ChatFormat, Message
from agentlightning.credit import group_trajectories, is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.base import by_call, by_node
from agentlightning.credit.training_samples import Trains
from agentlightning.policy.base import ScoreColumn
from agentlightning.policy.losses import ADVANTAGES, STREAM_WEIGHTS, TEACHER_LOGPROBS, WEIGHTS
from agentlightning.trajectory import (
    CallId,
    FloatArray,
    RewardWeights,
    TokenTree,
    TrainingSample,
    Trajectory,
    Transition,
)
from agentlightning.util.settings import PositiveShare, Section


class Feedback(Section):
    """What the policy is shown when it judges its own answers."""

    errors: bool = True
    """The errors of tools, for the calls that led to them."""
    siblings: bool = True
    """The answers of the best rollout of the group, for the calls of those with less reward."""
    success: float | None = None
    """The least reward of a rollout whose answers are shown. None: any that is higher than one's own."""
    rate: PositiveShare = 0.05
    """How fast the teacher follows the policy: the share of the new weights in their moving average after each step. 1:
    the teacher is the policy."""


async def with_feedback(
    training: Training,
    samples: Sequence[TrainingSample],
    trajectories: Sequence[Trajectory],
    setting: Feedback,
    target_agent: str | None,
    weights: RewardWeights,
    trains: Trains,
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The samples with the log-probabilities of a teacher that was given feedback, and the number of calls that have
    some, and that could not be given theirs. The teacher of a call is that of the weights that it trains."""
    learner = learner_of(training)
    reprompt = Reprompt(learner.chat, learner.context_length)
    asked: list[tuple[Sequence[Trajectory], str | None, TokenTree]] = []
    counts = {"calls_with_feedback": 0.0, "feedback_left_out": 0.0}
    for group in group_trajectories(trajectories):
        texts = feedback_of(group, setting, learner.chat, weights)
        changed, left_out = reprompted(group, texts, reprompt, target_agent, trains)
        counts["feedback_left_out"] += left_out
        for adapter, rollouts in changed.items():
            counts["calls_with_feedback"] += sum(len(each.transitions) for each in rollouts)
            asked.append((group, adapter, token_tree(rollouts)))
    column: ScoreColumn = "average_logprobs" if setting.rate < 1 else "logprobs"
    trees, adapters = [tree for *_, tree in asked], [adapter for _, adapter, _ in asked]
    scores = await scores_by_adapter(learner, trees, column, adapters)
    known: dict[str | None, dict[CallId, FloatArray]] = {}
    for (_, adapter, tree), values in zip(asked, scores, strict=True):
        known.setdefault(adapter, {}).update(by_call([tree], [values]))
    trained = {(each.adapter, node.rollout_id) for each in samples for node in each.tree.nodes if node.sampled}
    # A group that is in no sample of its adapter, because its rewards are all equal, gets one of its own.
    unrewarded = [
        _unrewarded(group, adapter)
        for group, adapter, _ in asked
        if not any((adapter, each.rollout_id) in trained for each in group)
    ]
    return [_with_columns(each, known.get(each.adapter, {})) for each in (*samples, *unrewarded)], counts


@dataclass(frozen=True, slots=True)
class Reprompt:
    """A message after a prompt, in the place of the beginning of the answer."""

    chat: ChatFormat
    context_length: int

    def __call__(self, call: Transition, text: str) -> Transition | None:
        """The call with feedback at the end of its prompt; None where the prompt does not end as the chat template
        ends one, or the context is too short."""
        asked: list[Message] = [{"role": "user", "content": "?"}]
        before = self.chat.render(asked, add_generation_prompt=False)
        begin = tuple(self.chat.encode(self.chat.render(asked)[len(before) :]))
        after = self.chat.render([*asked, {"role": "user", "content": self.chat.escape(text)}])
        prompt = call.prompt_token_ids
        if not begin or prompt[-len(begin) :] != begin or not after.startswith(before):
            return None
        prompt = (*prompt[: -len(begin)], *self.chat.encode(after[len(before) :]))
        if len(prompt) + len(call.response_token_ids) > self.context_length:
            return None
        return replace(call, prompt_token_ids=prompt)


def feedback_of(
    group: Sequence[Trajectory], setting: Feedback, chat: ChatFormat, weights: RewardWeights = None
) -> dict[CallId, str]:
    """The feedback of each call of a group that has some."""
    rewards = {each.rollout_id: team_score(each, weights) for each in group}
    known = [each for each in group if rewards[each.rollout_id] is not None]
    best = max(known, key=lambda each: rewards[each.rollout_id] or 0.0, default=None)
    found: dict[CallId, str] = {}
    for trajectory in group:
        solution = ""
        if setting.siblings and best is not None and _is_better(best, trajectory, rewards, setting.success):
            solution = f"This attempt at the same task was better:\n\n{_answers(best, chat)}\n\n"
        errors = _errors(trajectory) if setting.errors else {}
        for call in trajectory.transitions:
            error = errors.get(call.span_id, "")
            text = solution + (f"Your answer led to this error:\n\n{error}\n\n" if error else "")
            if text:
                found[call.call_id] = f"{text}Now answer correctly."
    return found


def _is_better(best: Trajectory, own: Trajectory, rewards: Mapping[str, float | None], success: float | None) -> bool:
    reward, mine = rewards[best.rollout_id], rewards[own.rollout_id]
    if reward is None or mine is None or reward <= mine:
        return False
    return success is None or reward >= success > mine


def _answers(trajectory: Trajectory, chat: ChatFormat) -> str:
    return "\n\n".join(
        chat.decode(call.response_token_ids, skip_special_tokens=True) for call in trajectory.transitions
    )


def _errors(trajectory: Trajectory) -> dict[str, str]:
    """By span_id of a call, the errors between it and the next one."""
    found: dict[str, str] = {}
    for step in trajectory.steps:
        before = [call for call in trajectory.transitions if call.sequence_id < step.sequence_id]
        if step.error and before:
            last = max(before, key=lambda call: call.sequence_id).span_id
            found[last] = "\n".join(filter(None, (found.get(last), f"{step.name}: {step.error}")))
    return found


def reprompted(
    group: Sequence[Trajectory],
    texts: Mapping[CallId, str],
    reprompt: Reprompt,
    target_agent: str | None,
    trains: Trains,
) -> tuple[dict[str | None, list[Trajectory]], int]:
    """The rollouts of a group with feedback in their prompts, by the adapter that their calls train (None: the policy
    itself), and the number of calls it could not be given to. Calls that train nothing need none."""
    found: dict[str | None, list[Trajectory]] = {}
    left_out = 0
    for trajectory in group:
        own: dict[str | None, list[Transition]] = {}
        for call in trajectory.transitions:
            text, name = texts.get(call.call_id), trains(call)
            if text is None or name is None or not is_target(call.agent, target_agent):
                continue
            if (changed := reprompt(call, text)) is None:
                left_out += 1
            else:
                own.setdefault(name or None, []).append(changed)
        for adapter, calls in own.items():
            found.setdefault(adapter, []).append(replace(trajectory, transitions=tuple(calls)))
    return found, left_out


def _unrewarded(group: Sequence[Trajectory], adapter: str | None) -> TrainingSample:
    import numpy as np

    tree = token_tree(group)
    zeros = [np.zeros(len(node.token_ids), np.float32) for node in tree.nodes]
    return TrainingSample(tree, columns={ADVANTAGES: zeros, WEIGHTS: zeros}, adapter=adapter, share=0.0)


def _with_columns(sample: TrainingSample, calls: Mapping[CallId, Any]) -> TrainingSample:
    """The sample with `teacher_logprobs`, and with weights of the reference stream for the calls that have feedback."""
    import numpy as np  # Here, because a machine that only serves or runs agents need not have it.

    weights = by_node(sample.tree, {call: np.ones(len(values), np.float32) for call, values in calls.items()})
    columns = {
        **sample.columns,
        TEACHER_LOGPROBS: by_node(sample.tree, calls),
        STREAM_WEIGHTS["reference_kl"]: weights,
    }
    return replace(sample, columns=columns, share=sample.share)
