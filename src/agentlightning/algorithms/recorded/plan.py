"""What a run without an agent learns from: recorded sessions, or the algorithm's own data, in the tokens of its model.

`plan` has a function for each kind of algorithm; others learn from whole sessions.

LightningRL learns from sessions of another policy by one of three methods, and other algorithms from the same forms:

    importance   the policy gradient, each token weighed by a clipped importance ratio without gradient (CISPO,
                 arXiv:2506.13585, equations 4 and 5): needs the log-probability each token was sampled with
    awr          advantage-weighted regression (arXiv:1910.00177, equation 3): needs rewards that differ
    rejection    rejection sampling fine-tuning (arXiv:2308.01825): imitates the successful sessions, and needs some

The clip of PPO is for data of the present policy: beyond its bounds a token has no gradient, so that sessions of
another policy would soon teach nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any, Final, Literal, TypeAlias

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.preference import DPO, load_preferences, to_preferences
from agentlightning.algorithms.recorded.sessions import (
    NO_LOGPROBS,
    PART,
    Session,
    TokenizedSession,
    Tokenizer,
    describe_notes,
    successful,
    without_probabilities,
)
from agentlightning.algorithms.sft import RejectionSampling, SFTAlgorithm
from agentlightning.credit import group_trajectories, is_target
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.credit.rejection import Rejection, count_reasons, describe_reasons
from agentlightning.errors import DatasetError
from agentlightning.policy.losses import SAMPLED_LOGPROBS, AWRLoss, CISPOLoss, PPOLoss
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import task_key
from agentlightning.trajectory import Trajectory

Method: TypeAlias = Literal["importance", "awr", "rejection"]
MethodSetting: TypeAlias = Literal["auto", "importance", "awr", "rejection"]
Form: TypeAlias = Literal["importance", "awr", "rejection", "whole", "recorded"]
"""The form of sessions: that of a method, whole sessions of whatever policy, or what was recorded as it is."""
NAMES: Final = {
    "importance": "importance-weighted policy gradient",
    "awr": "advantage-weighted regression",
    "rejection": "rejection sampling fine-tuning",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is learned, and how."""

    algorithm: Algorithm[Any]
    examples: Sequence[TokenizedSession] = ()
    """Empty for an algorithm that reads its data itself."""
    rejected: Sequence[Rejection] = ()
    notes: Sequence[str] = ()
    sessions: int = 0
    """What is learned from. 0: the algorithm counts it."""
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """Sessions that were not chosen, by reason."""
    method: Method | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        return [each.trajectory for each in self.examples]


@dataclass(frozen=True, slots=True)
class RecordedSessions:
    """The sessions of a run without an agent, and the settings of how they are learned from."""

    sessions: Sequence[Session]
    tokenizer: Tokenizer
    method: MethodSetting
    success_threshold: float
    follow: bool
    given: Collection[str]
    """The settings of the algorithm that were set, even if to their default."""
    query: Mapping[str, Any]
    """Which sessions are demonstrations, as `TrajectoryQuery`, where the algorithm does not say."""

    def prepare(self, form: Form, weights: Any) -> tuple[list[TokenizedSession], list[Rejection]]:
        """Those that can be learned from in a form, and the others. Raises DatasetError where none can."""
        found, rejected = prepare(self.sessions, self.tokenizer, form, weights)
        if not found:
            raise DatasetError(
                f"no session has a reward and tokens to learn from; the last one: {rejected[-1].message}"
            )
        return found, rejected

    def plan(self, algorithm: Algorithm[Any], form: Form, refused: Sequence[Rejection] = ()) -> Plan:
        """An algorithm learns from the sessions in a form, but not from those that it has `refused`."""
        found, rejected = self.prepare(form, algorithm.reward_weights)
        left_out = {each.rollout_id for each in refused}
        found = [each for each in found if each.trajectory.rollout_id not in left_out]
        rejected += refused
        notes = [f"{algorithm.name}: {len(found)} sessions"]
        if form != "whole" and (several := sum(bool(each.rewards) for each in self.sessions)):
            notes.append(f"{several} sessions hold several rewards; each belongs to the calls since the one before it")
        if foreign := sum(each.foreign for each in found):
            notes.append(f"{foreign} calls have tokens of another tokenizer; their text is rendered anew")
        return Plan(algorithm, found, rejected, [*notes, *describe_notes(self.tokenizer.counts)], len(found))

    def choose(self, found: Sequence[TokenizedSession], known: int, weights: Any) -> tuple[Method, list[str]]:
        """The method that the data has what it needs for, and why: of the sessions that were `found`, `known` have
        log-probabilities. Raises DatasetError, saying what is missing."""
        trajectories = [each.trajectory for each in found]
        groups = [[team_score(each, weights) or 0.0 for each in group] for group in group_trajectories(trajectories)]
        singles = [group[0] for group in groups if len(group) == 1]
        varied = any(spread(group) > SMALLEST_SPREAD for group in (*groups, singles) if group)
        ids = {each.rollout_id for each in trajectories}
        own = [each for each in self.sessions if each.rollout.rollout_id in ids]
        parts = [part for each in own for part in divided(each, "rejection", self.tokenizer.target)]
        rewards = [reward for part in parts if (reward := part.reward(weights)) is not None]
        wins = sum(reward >= self.success_threshold for reward in rewards)
        method = self._method(len(found), len(groups), known, wins, varied=varied)
        notes = [
            f"LightningRL learns by {NAMES[method]}: {len(found)} sessions of {len(groups)} tasks, {known} of them"
            f" with log-probabilities, {wins} with a reward of {self.success_threshold:g} or more"
        ]
        if singles:
            notes.append(f"{len(singles)} tasks have one session each; their baseline is the mean of such sessions")
        return method, notes

    def _method(self, sessions: int, tasks: int, known: int, wins: int, *, varied: bool) -> Method:
        setting, varied = self.method, varied or self.follow
        if setting == "importance" and not known:
            raise DatasetError(
                f'method="importance" needs log-probabilities of the sampler, and none of {sessions} sessions has'
                ' them in tokens of this model: record through the gateway with this model, or use method="awr"'
            )
        if setting in ("importance", "awr") and not varied:
            raise DatasetError(
                f'method="{setting}" learns from differences in reward, and the sessions of each of {tasks} tasks'
                ' have the same one; record more of the same task, or use method="rejection"'
            )
        if setting == "auto" and varied:
            return "importance" if known * 2 >= sessions else "awr"
        if setting != "auto" and (setting != "rejection" or wins):
            return setting
        if wins:
            return "rejection"
        raise DatasetError(
            f"the sessions of each of {tasks} tasks have the same reward, and none of {sessions} has"
            f" {self.success_threshold:g} or more: there is nothing to prefer. Record sessions that differ, or lower"
            " success_threshold"
        )


def prepare(
    sessions: Sequence[Session], tokenizer: Tokenizer, form: Form, weights: Any
) -> tuple[list[TokenizedSession], list[Rejection]]:
    """The sessions that have a reward, or parts of them, in the form that is learned from, and those that cannot be."""
    found: list[TokenizedSession] = []
    rejected: list[Rejection] = []
    for session in (part for each in sessions for part in divided(each, form, tokenizer.target)):
        made = tokenizer(session)
        if not isinstance(made, Rejection):
            score = session.score(weights)
            made = score if isinstance(score, Rejection) else _in_form(made, form)
        (rejected if isinstance(made, Rejection) else found).append(made)  # pyright: ignore[reportArgumentType]
    return found, rejected


def _in_form(made: TokenizedSession, form: Form) -> TokenizedSession | Rejection:
    if form == "importance" and not made.logprobs:
        message = 'of its calls no log-probabilities in tokens of this model are known; method="awr" learns from it'
        return Rejection(made.trajectory.rollout_id, NO_LOGPROBS, message)
    if form in ("importance", "recorded"):
        return made
    return replace(made, trajectory=without_probabilities(made.trajectory))


def divided(session: Session, form: Form, target: str | None) -> list[Session]:
    """A session, or its parts of the agents to train where it holds several rewards. A conversation is one episode,
    whose credit rule says what each reward is due to, unless it is imitated."""
    if not session.rewards or not (form == "rejection" or (form == "awr" and session.has_independent_parts)):
        return [session]
    parts = [part for part in session.parts() if any(is_target(call.agent, target) for call in part.calls)]
    return parts or [session]


# -- by algorithm ----------------------------------------------------------------------------------------------------


@singledispatch
def plan(algorithm: Algorithm[Any], recorded: RecordedSessions) -> Plan:
    """What an algorithm learns from. Raises DatasetError where that is nothing, saying what is missing."""
    return recorded.plan(algorithm, "whole")


@plan.register
def _(algorithm: SFTAlgorithm, recorded: RecordedSessions) -> Plan:
    if not algorithm.reads_sessions:
        return Plan(algorithm.on(algorithm.dataset))
    query: Any = algorithm.dataset if algorithm.has_dataset else TrajectoryQuery(None, **recorded.query)
    found, left_out = successful(recorded.sessions, query)
    return Plan(algorithm.on(found), left_out=left_out)


@plan.register
def _(algorithm: RejectionSampling, recorded: RecordedSessions) -> Plan:
    made, bound = recorded.plan(algorithm, "rejection"), algorithm.config.success_threshold
    chosen = [each for each in made.examples if algorithm.is_success(each.trajectory)]
    if not chosen:
        raise DatasetError(
            f"none of {made.sessions} sessions has a reward of {bound:g} or more; lower success_threshold"
        )
    return replace(made, examples=chosen, sessions=len(chosen))


@plan.register
def _(algorithm: DPO, recorded: RecordedSessions) -> Plan:
    if algorithm.reads_sessions:
        made = recorded.plan(algorithm, "awr")
        examples = [replace(each, trajectory=_by_prompt(each.trajectory)) for each in made.examples]
        made = replace(made, examples=examples)
    else:
        made = _pairs(algorithm, recorded.tokenizer)
    algorithm.check_data(made.trajectories, algorithm.config.target_agent)
    return made


def _by_prompt(whole: Trajectory) -> Trajectory:
    """Parts of sessions are compared with those that answer the same prompt, and not with all of their task."""
    if PART not in whole.rollout_id:
        return whole
    return replace(whole, group=f"{whole.group} {task_key(list(whole.transitions[0].prompt_token_ids))}")


def _pairs(algorithm: DPO, tokenizer: Tokenizer) -> Plan:
    records = load_preferences(algorithm.data)
    found, rejected = to_preferences(records, tokenizer)
    if not found:
        raise DatasetError(
            f"none of {len(records)} preference pairs can be learned from"
            f" ({describe_reasons(count_reasons(rejected))}). The first: {rejected[0].rollout_id}:"
            f" {rejected[0].message}"
        )
    pairs = len(found) // 2
    notes = (f"{algorithm.name}: {pairs} preference pairs", *describe_notes(tokenizer.counts))
    return Plan(algorithm, [TokenizedSession(each) for each in found], rejected, notes, pairs)


@plan.register
def _(algorithm: LightningRL, recorded: RecordedSessions) -> Plan:
    config, weights = algorithm.config, algorithm.reward_weights
    recorded = replace(recorded, sessions=[recorded.tokenizer.read(each) for each in recorded.sessions])
    found, _ = recorded.prepare("recorded", weights)
    sampled = [each.trajectory for each in found if each.logprobs]
    refused = algorithm.rejections(sampled, config.target_agent) if sampled else []
    method, notes = recorded.choose(found, len(sampled) - len(refused), weights)
    if method == "rejection":
        names = ("steps", "tasks_per_step", "target_agent", "reward_weights", "optimizer")
        shared: dict[str, Any] = {name: getattr(config, name) for name in names}
        made = plan(RejectionSampling(group_size=1, success_threshold=recorded.success_threshold, **shared), recorded)
    else:
        by_ratio = method == "importance"
        made = recorded.plan(_by_method(algorithm, recorded.given, by_ratio), method, refused if by_ratio else ())
    return replace(made, method=method, notes=[*notes, *made.notes[1:]])


def _by_method(algorithm: LightningRL, given: Collection[str], by_ratio: bool) -> LightningRL:
    """What learns from sessions of another policy, with the loss of the method unless one that fits was set."""
    config = algorithm.config
    changes: dict[str, Any] = {} if by_ratio else {"mismatch": None}
    needs_sampler = any(SAMPLED_LOGPROBS in loss.needs for loss in config.losses)
    if needs_sampler != by_ratio or ("loss" not in given and config.loss == PPOLoss()):
        changes["loss"] = CISPOLoss() if by_ratio else AWRLoss()
    found = algorithm.with_settings(changes, "for the recorded sessions")
    found.objective = "reinforcement" if by_ratio else "supervised"
    return found
