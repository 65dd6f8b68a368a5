"""Agent Lightning: train any AI agent, with almost no change to its code.

Agents: rollout (makes a function an agent), llm_rollout (of (task, llm)), prompt_rollout (of (task,
    prompt_template)), LitAgent (an agent as a class), Runner (runs an agent on the rollouts of a store), Level (an
    agent as the environment of the agent above it).
Training: Trainer (trains an agent), TrainConfig (its settings), TrainingResult (what came of it), Lora (an adapter in
    place of all weights), Dataset (tasks), LightningRL (reinforcement learning), SFTAlgorithm (supervised learning),
    RejectionSampling (imitates rollouts that succeeded), DPO (learning from preferences), APO (prompt optimisation),
    Sequential (several algorithms in one run), Algorithm (the base of your own), Training (the run, as an algorithm
    sees it), Want (rollouts of one task), BranchPoint (or off another rollout), Callback (code of your own at points
    of a run), evaluate (scores an agent), Evaluation (the scores, with an interval), rescore (a new reward for stored
    rollouts).
Rewards: RemoteReward (a reward function behind an HTTP endpoint), LLMJudge (a model that scores), RankingJudge (a model
    that ranks a group of rollouts).
What an agent says: emit_reward, emit_prompt, emit_response, emit_completion (its model calls), emit_tool_call,
    emit_step, emit_message, emit_object, emit_exception, emit_annotation, operation (a recorded step), track_agent
    (who is speaking), find_final_reward.
Recording: track_session (a rollout made by your own code), carry_session (into a bare thread), track_critical_path
    (records only what is marked), track_all (also what other packages instrument), configure_recording (sampling,
    redaction, retention), flush_recording (writes now), recording_status (what was recorded and lost), feedback_link
    (for people).
The store: LightningStore (opens one, and is what all of them are), InMemoryLightningStore (gone with the process),
    LightningStoreClient (one behind a server), Retention (what is deleted when).
Data: Rollout, Attempt, Span, LLM, PromptTemplate, NamedResources, Trajectory, Transition.

The rest is in `agl.errors` (all of them AgentLightningError), `agl.config` (the settings of a run, section by section),
`agl.compat` (names of 0.x, which `agl.NAME` finds, too), and in the modules that the reference lists.

A first agent, and its score:

    >>> import agentlightning as agl
    >>> @agl.rollout
    ... def agent(task):
    ...     return 1.0 if task["question"].endswith("?") else 0.0
    >>> agl.evaluate(agent, [{"question": "Why?"}, {"question": "So."}]).mean
    0.5

`help(agl.NAME)` says more of each. Names are loaded when first used, so that importing the package is fast and imports
no torch.
"""

from importlib import import_module

from agentlightning.util.stubs import stub_names

_PLACES = stub_names(__name__)
"""Name -> the module that has it; those of 0.x among them, and three modules, which this package has."""

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, module in _PLACES.items() if module not in (__name__, "agentlightning.compat")
)

import_module("agentlightning.compat.modules").install()


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("agentlightning")
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module 'agentlightning' has no attribute {name!r}")
    if place == __name__:
        return import_module(f"{place}.{name}")
    value = globals()[name] = getattr(import_module(place), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "compat", "config", "errors"]
