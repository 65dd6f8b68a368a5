"""Plays episodes in lockstep: the calls that all running episodes make next are answered together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentlightning.trajectory import Trajectory, Transition
from tasks.base import Call, Environment, Episode, Task
from tasks.word_policy import WordPolicy

Answerer = Callable[[Sequence[tuple[Task, Call]]], Sequence[str]]


@dataclass
class _Running:
    task: Task
    group: str
    name: str
    episode: Episode
    call: Call
    transitions: list[Transition] = field(default_factory=list)
    reward: float | None = None

    def answer(self, text: str) -> None:
        try:
            self.call = self.episode.send(text)
        except StopIteration as ended:
            self.reward = float(ended.value)


def _begin(environment: Environment, task: Task, group: str, name: str) -> _Running:
    episode = environment.episode(task)
    return _Running(task, group, name, episode, next(episode))


def play(
    environment: Environment,
    policy: WordPolicy,
    tasks: Sequence[Task],
    group_size: int = 1,
    *,
    batch: int = 0,
    greedy: bool = False,
) -> list[Trajectory]:
    """`group_size` episodes of each task, as trajectories; those of one task are a group. `batch` is part of the
    rollouts' names. The group of a task is named after the task, so that rules that remember tasks can."""
    started = [
        _begin(environment, task, _group(task), f"{batch}-{place}-{member}")
        for place, task in enumerate(tasks)
        for member in range(group_size)
    ]
    running = started
    while running:
        answers = policy.answers([each.call for each in running], greedy=greedy)
        for each, (ids, logprobs) in zip(running, answers, strict=True):
            number = len(each.transitions)
            each.transitions.append(
                Transition(
                    rollout_id=each.name,
                    attempt_id=each.name,
                    span_id=f"{each.name}-{number}",
                    sequence_id=number,
                    prompt_token_ids=tuple(policy.encode(each.call.prompt)),
                    response_token_ids=ids,
                    logprobs=logprobs,
                    policy_version=policy.local.policy_version,
                    agent=each.call.agent,
                )
            )
            each.answer(policy.text(ids))
        running = [each for each in running if each.reward is None]
    return [Trajectory(e.name, e.name, tuple(e.transitions), e.reward, e.group) for e in started]


def _group(task: Task) -> str:
    return "/".join(str(value) for value in task.values())


def mean_reward(environment: Environment, tasks: Sequence[Task], answer: Callable[[Task, Call], str]) -> float:
    """The mean reward of whoever answers, one episode of each task."""
    rewards = []
    for task in tasks:
        running = _begin(environment, task, "", "")
        while running.reward is None:
            running.answer(answer(task, running.call))
        rewards.append(running.reward)
    return sum(rewards) / len(rewards)
