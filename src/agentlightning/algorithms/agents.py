"""What the calls of each agent train: an adapter of its own, what all shared agents train together, or nothing."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import AfterValidator

from agentlightning.assemble import OTHER_MODELS, UNTRAINABLE_CALLS
from agentlightning.credit import OWN, is_target, names_of, unrewarded
from agentlightning.credit.rejection import NO_POLICY_CALLS, NO_TARGET_CALLS, UNKNOWN_TOKENS, Rejection
from agentlightning.errors import ConfigError
from agentlightning.policy.config import BASE, AgentSetting, Lora, adapters_of
from agentlightning.trajectory import Trajectory, Transition


def _checked_pattern(target: str | None) -> str | None:
    try:
        re.compile(target or "")
    except re.error as error:
        raise ValueError(f"{target!r} is no regular expression: {error}") from error
    return target


AgentPattern = Annotated[str | None, AfterValidator(_checked_pattern)]
"""A regular expression for names of agents, or None for all."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentRoles:
    """The setting `agents`. Without any, all agents train the policy itself."""

    agents: Mapping[str, AgentSetting] = field(default_factory=dict[str, AgentSetting])
    _named: set[str] = field(default_factory=set[str])
    """Agents that are not listed and were named in a warning."""

    def check(self, target: str | None) -> None:
        """Raises ConfigError where nothing would be trained, or nothing that `target` selects."""
        if not self.agents:
            return
        adapters_of(None, self.agents)
        learning = sorted(name for name, setting in self.agents.items() if setting != "frozen")
        if not any(is_target(name, target) for name in learning):
            raise ConfigError(f"target_agent={target!r} selects none of the agents that learn: {', '.join(learning)}")

    def check_answers(self, rule: str) -> None:
        """Raises ConfigError for a rule that compares p(answer) from one call to the next, where calls have different
        weights: the difference would be that of the weights."""
        own = sorted(name for name, setting in self.agents.items() if isinstance(setting, Lora))
        if own:
            raise ConfigError(
                f'credit="{rule}" compares the probability of the answer from one call to the next, which needs the '
                f"same weights for all calls, and agents gives an adapter of its own to {', '.join(map(repr, own))}; "
                'use agents with "shared" and "frozen" only, or another credit rule'
            )

    def trains(self, call: Transition, target: str | None = None) -> str | None:
        """What a call trains: an adapter, `OWN`, or None for nothing, as one of an agent that `target` does not select.
        The weights that answered decide; where they are not known, the agent does."""
        if not is_target(call.agent, target):
            return None
        if not self.agents:
            return OWN
        answered = _adapter(call)
        if answered == BASE:
            return None
        name = answered if isinstance(self.agents.get(answered), Lora) else call.agent or ""
        setting = self.agents.get(name)
        if isinstance(setting, Lora):
            return name
        return OWN if setting == "shared" else None

    def check_seen(self, trajectories: Sequence[Trajectory], target: str | None) -> None:
        """Raises ConfigError for an agent with an adapter that made none of the calls."""
        calls = [call for trajectory in trajectories for call in trajectory.transitions]
        seen = {name for call in calls for name in (call.agent, _adapter(call)) if name in self.agents}
        missing = sorted(
            name
            for name, setting in self.agents.items()
            if isinstance(setting, Lora) and name not in seen and is_target(name, target)
        )
        if missing and calls:
            raise ConfigError(
                f"agents gives an adapter to {', '.join(map(repr, missing))}, and no call of the first "
                f"{len(trajectories)} rollouts is of that name; there are {names_of(call.agent for call in calls)}."
                " Rename it in agents, or name the agent with agl.track_agent"
            )

    def counts(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """How many calls train nothing because of this setting: of frozen agents, and of agents that it does not list,
        which are named once."""
        if not self.agents:
            return {}
        calls = [call for trajectory in trajectories for call in trajectory.transitions if self.trains(call) is None]
        unlisted = Counter(call.agent or "" for call in calls if call.agent not in self.agents)
        if new := sorted(unlisted.keys() - self._named):
            self._named.update(new)
            logger.warning(
                "calls of %s train nothing, because agents does not list them; they are answered as frozen agents are",
                ", ".join(repr(name) if name else "agents without a name" for name in new),
            )
        return {"calls_frozen": float(len(calls) - unlisted.total()), "calls_unlisted": float(unlisted.total())}


def _adapter(call: Transition) -> str:
    """The adapter that answered, as the model's name says; "" for the policy itself."""
    policy, _, adapter = (call.model or "").rpartition(":")
    return adapter if policy else ""


def without_calls(trajectories: Sequence[Trajectory]) -> list[Rejection]:
    """Rejects rollouts that hold no call of the policy: another model answered, or no model was called."""
    metadata = [trajectory.metadata for trajectory in trajectories]
    unknown, others = (sum(counts.get(name, 0) for counts in metadata) for name in (UNTRAINABLE_CALLS, OTHER_MODELS))
    if unknown + others:
        reason = UNKNOWN_TOKENS
        message = (
            f"none of the {unknown + others} model calls of these rollouts can be learned from: {others} were answered"
            f" by other models than the policy, and of {unknown} the tokens are not known. LightningRL learns from the"
            " tokens of the policy: have the agent ask for the policy's name, or change the route that leads its model"
            " elsewhere ([gateway] routes); text alone is enough for SFT"
        )
    else:
        reason = NO_POLICY_CALLS
        message = (
            f"none of these {len(trajectories)} rollouts called the policy: no model call reached the gateway. The"
            " agent must send its model calls to the address in OPENAI_BASE_URL, OPENAI_API_BASE or ANTHROPIC_BASE_URL"
            " (or the injected base_url), which are in the environment of each attempt. Look for an address in its code"
            " or configuration (base_url=, api_base=, a .env file that overrides the environment), for a client that"
            " reads none of these variables (Codex takes its address on the command line), for a cache of answers, and"
            " for errors that the agent catches; docs/guides/frameworks.md says what each framework needs"
        )
    return [Rejection(trajectory.rollout_id, reason, message) for trajectory in trajectories]


def unusable(trajectories: Sequence[Trajectory], target: str | None) -> list[Rejection]:
    """Rejects rollouts without a reward that is a number, or without a call of the agents to train."""
    found = unrewarded(trajectories, "it has no reward: call agl.emit_reward")
    refused = {each.rollout_id for each in found}
    others = (each for each in trajectories if each.rollout_id not in refused)
    return found + [
        Rejection(each.rollout_id, NO_TARGET_CALLS, f"no call is of an agent {target!r}")
        for each in others
        if not any(is_target(call.agent, target) for call in each.transitions)
    ]


def of_target(trajectory: Trajectory, target: str | None) -> Trajectory:
    """The trajectory with the calls of the target agent alone."""
    return replace(trajectory, transitions=tuple(t for t in trajectory.transitions if is_target(t.agent, target)))


def without_target(trajectories: Sequence[Trajectory], target: str, agents: AbstractSet[str | None]) -> list[Rejection]:
    """Rejects rollouts that hold no call of the agents to train."""
    message = (
        f"no call of these {len(trajectories)} rollouts is of an agent called {target!r}; there are {names_of(agents)}."
        " Change target_agent (or trained_agents), or name the agent with agl.track_agent"
    )
    return [Rejection(trajectory.rollout_id, NO_TARGET_CALLS, message) for trajectory in trajectories]
