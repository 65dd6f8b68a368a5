"""The dry run: everything short of training, with a few real rollouts, and what they say of the setup."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Literal

from agentlightning import span as names
from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.training import RolloutReport
from agentlightning.assemble import calls, has_failed, has_tokens, is_call, model_of, steps, transcript_of
from agentlightning.chat.base import ChatFormat
from agentlightning.config import TrackingConfig, TrainConfig
from agentlightning.errors import AgentError, AgentLightningError, ConfigError
from agentlightning.runner import Runner
from agentlightning.span import Span
from agentlightning.task import load_dataset
from agentlightning.training.agent_runner import run_beside
from agentlightning.training.health.step_record import LEAK_SHARE, answers_in_prompts
from agentlightning.training.persistence.checkpoints import has_random_weights
from agentlightning.training.persistence.run_dir import Tasks
from agentlightning.training.run import TrainingRun
from agentlightning.training.sources.collector import run_trials
from agentlightning.training.tracking import check_installed
from agentlightning.util.json_values import recorded_objects

# -- observation -----------------------------------------------------------------------------------------------------

# What a dry run has seen of one rollout: its calls, their tokens, its tools, its reward.

TOOL_ERROR = re.compile(r"^\W*(error|exception|traceback|an error occurred)\b", re.IGNORECASE)
"""How frameworks begin the result of a tool that raised; the model is given it in place of a result."""
MOST_TEXT = 300
"""Characters of an error that are shown."""


@dataclass(frozen=True, slots=True)
class DryRunRollout:
    """One rollout of a dry run."""

    rollout_id: str
    task: Any
    status: str
    """That of its attempt: succeeded, failed, timeout ..."""
    seconds: float
    output: Any = None
    """What the agent returned."""
    reward: float | None = None
    """None: it has failed, or has no usable reward."""
    failure: str | None = None
    """The traceback of the agent; None where it ended well."""
    rejection: str | None = None
    """Why nothing can be learned from it although it ended well."""
    reason: str | None = None
    """The short name of that."""
    policy_calls: int = 0
    """Calls that the policy answered."""
    other_models: tuple[str, ...] = ()
    """Models of others that answered calls."""
    failed_calls: tuple[str, ...] = ()
    """Errors of the calls that were not answered."""
    without_tokens: int = 0
    """Calls whose tokens are not known."""
    sampled_tokens: int = 0
    truncated: int = 0
    """Answers that were cut off at their token limit."""
    offered_tools: tuple[str, ...] = ()
    """Tools that the policy was offered."""
    tool_errors: tuple[str, ...] = ()
    """`NAME: error` of each tool that raised."""
    transcript: tuple[Mapping[str, Any], ...] = ()
    """The messages of its last call, and the answer."""


def observe(task: Any, report: RolloutReport, reason: str | None, model: str | None) -> DryRunRollout:
    """`reason`: why it was rejected; `model`: the name of the policy; None: any counts."""
    spans, attempt, answered = report.spans, report.attempt, calls(report.spans)
    own = [span for span in answered if model is None or model_of(span) in (None, model)]
    tools = (tool for span in own for tool in recorded_objects(span.attributes.get(names.TOOL_DEFINITIONS)))
    offered = {str(tool.get("name") or (tool.get("function") or {}).get("name")) for tool in tools}
    ended = attempt is not None and attempt.status == "succeeded"
    return DryRunRollout(
        report.rollout_id,
        task,
        "failed" if attempt is None else attempt.status,
        0.0 if attempt is None else (attempt.end_time or attempt.start_time) - attempt.start_time,
        report.output,
        report.score,
        failure=None if ended else report.failure,
        rejection=None if reason is None else report.failure,
        reason=reason,
        policy_calls=len(own),
        other_models=tuple(sorted({model_of(span) or "?" for span in answered if span not in own})),
        failed_calls=tuple(_error(span) for span in spans if is_call(span) and has_failed(span)),
        without_tokens=sum(not has_tokens(span.attributes) for span in own),
        sampled_tokens=sum(len(span.attributes.get(names.RESPONSE_TOKEN_IDS) or ()) for span in own),
        truncated=sum("length" in (span.attributes.get(names.FINISH_REASONS) or ()) for span in own),
        offered_tools=tuple(sorted(offered)),
        tool_errors=_tool_errors(spans),
        transcript=transcript_of(spans),
    )


def _error(span: Span) -> str:
    text = span.status_message or span.attributes.get(names.EXCEPTION_MESSAGE) or span.attributes.get(names.ERROR_TYPE)
    return str(text or "error")[:MOST_TEXT]


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (part for each in messages for part in each.get("parts") or () if isinstance(part, Mapping))


def _tool_errors(spans: Sequence[Span]) -> tuple[str, ...]:
    """Of recorded tool calls; and of the results that the model was given, which say it in words."""
    found = [f"{step.name}: {step.error}" for step in steps(spans) if step.kind == "tool" and step.error]
    if not found:
        named: dict[Any, Any] = {}
        for part in _parts(transcript_of(spans)):
            if part.get("type") == "tool_call":
                named[part.get("id")] = part.get("name")
            elif part.get("type") == "tool_call_response":
                text = str(part.get("response", part.get("result", part.get("content", "")))).strip()
                found += [f"{named.get(part.get('id'), 'tool')}: {text}"] if TOOL_ERROR.match(text) else []
    return tuple(each[:MOST_TEXT] for each in found)


# -- checks ----------------------------------------------------------------------------------------------------------

# What a dry run makes of the rollouts it saw: a sentence for each thing that training needs, and what to look for.

Outcome = Literal["ok", "warning", "failed"]

FEW_HELD_OUT = 40
"""Fewer held-out tasks give an interval that shows large gains only."""
IGNORED_ADDRESS = (
    "it ignores the address of the rollout. Look for base_url= or api_base= with a fixed address in its code or"
    " configuration, for a .env file that overrides OPENAI_BASE_URL, OPENAI_API_BASE or ANTHROPIC_BASE_URL, for a"
    " client that reads none of these (take the parameters base_url and api_key, and give it those), for answers from a"
    " cache, and for errors that the agent catches; docs/guides/frameworks.md says what each framework needs"
)


LONG_ANSWERS = (
    "without max_tokens an answer may go on to the end of the model's context, which may take minutes: set it in the"
    " agent"
)


@dataclass(frozen=True, slots=True)
class DryRunCheck:
    """One thing that training needs."""

    name: str
    outcome: Outcome
    """failed: training cannot work like this. warning: it may."""
    text: str
    """What was seen."""
    advice: str | None = None
    """What to look for."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a dry run has seen."""

    checks: tuple[DryRunCheck, ...]
    rollouts: tuple[DryRunRollout, ...] = ()
    seconds: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether training can begin: nothing failed."""
        return all(each.outcome != "failed" for each in self.checks)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {"ready": self.is_ready, **asdict(self), "seconds": round(self.seconds, 2)}


def checks_of(rollouts: Sequence[DryRunRollout], *, trains: bool, random_weights: bool) -> Iterator[DryRunCheck]:
    """`trains`: whether the calls of a policy are learned from; `random_weights`: whether it knows nothing yet."""
    failed = [each for each in rollouts if each.failure is not None]
    ended = [each for each in rollouts if each.failure is None]
    of = f"of {len(rollouts)}"
    if failed:
        hung = sum(each.status == "timeout" for each in failed)
        times = f", {hung} of them because they took longer than runner.timeout_seconds" if hung else ""
        text = f"{len(failed)} {of} failed{times}. The first, {failed[0].rollout_id}:\n{failed[0].failure}"
        alone = f"run the agent on this task by itself: {_short(failed[0].task)}"
        advice = f"{LONG_ANSWERS}. Or {alone}" if any(map(_waits, failed)) else alone
        yield DryRunCheck("rollouts", "failed" if len(failed) * 2 > len(rollouts) else "warning", text, advice)
    else:
        slowest = max(each.seconds for each in rollouts)
        yield DryRunCheck("rollouts", "ok", f"{len(rollouts)} {of} ended well, the slowest in {slowest:.1f} s")
    if trains:
        yield check_calls(rollouts)
    elif ended:  # Where all failed, a call that is missing says nothing of the set-up.
        yield check_recorded_calls(rollouts)
    if trains and any(each.policy_calls for each in rollouts):
        yield check_tokens(rollouts, random_weights)
    share = answers_in_prompts(
        [(each.task, json.dumps(_asked(each), ensure_ascii=False, default=str)) for each in rollouts]
    )
    if share is not None and share >= LEAK_SHARE:
        text = f"the answer of the task is in the prompt of {share:.0%} of the tasks: the policy may learn to copy it"
        advice = "do not give the agent the field of the task that the reward compares with"
        yield DryRunCheck("prompts", "warning", text, advice)
    if (unused := check_tool_use(rollouts)) is not None and not random_weights:
        yield unused
    if errors := [error for each in rollouts for error in each.tool_errors]:
        counts = Counter(error.partition(":")[0] for error in errors)
        named = ", ".join(f"{name} {count} times" for name, count in counts.most_common())
        advice = (
            "where the model's arguments are at fault, it can learn; where the tool is (a key, a file), mend it first"
        )
        yield DryRunCheck("tools", "warning", f"tools raised: {named}. The first: {errors[0]}", advice)
    if ended:
        yield check_reward(ended, random_weights, trains)


def _waits(rollout: DryRunRollout) -> bool:
    """Whether it was stopped before any answer arrived."""
    return rollout.status == "timeout" and not rollout.policy_calls


def check_tool_use(rollouts: Sequence[DryRunRollout]) -> DryRunCheck | None:
    """A warning where the policy is offered tools, and never calls one."""
    tools = sorted({name for each in rollouts for name in each.offered_tools})
    if not tools or any(part.get("type") == "tool_call" for each in rollouts for part in _parts(each.transcript)):
        return None
    text = f"the model is offered {', '.join(tools)}, and no answer calls a tool: what never happens is never rewarded"
    advice = "name the tool in the system prompt, or show its use once, in demonstrations (warm_start.dataset)"
    return DryRunCheck("tools", "warning", text, advice)


def check_recorded_calls(rollouts: Sequence[DryRunRollout]) -> DryRunCheck:
    """Whether what the agent asks a model is recorded, where none is trained: a critic reads it."""
    calls = [each.policy_calls for each in rollouts]
    if recorded := sum(map(bool, calls)):
        text = f"{sum(calls)} calls of models were recorded, in {recorded} of {len(calls)} rollouts"
        return DryRunCheck("calls", "ok", text)
    return DryRunCheck(
        "calls",
        "warning",
        "no model call was recorded: a critic sees tasks and rewards alone, and no tokens are counted",
        "if the agent calls a model: set OPENAI_BASE_URL and OPENAI_API_KEY (or [gateway]), which the agent has to read"
        " from its environment, or report calls with agl.emit_prompt",
    )


def check_calls(rollouts: Sequence[DryRunRollout]) -> DryRunCheck:
    """Whether the agent calls the model that is to learn."""
    calls = [each.policy_calls for each in rollouts]
    silent = sum(not each for each in calls)
    errors = [error for each in rollouts for error in each.failed_calls]
    others = ", ".join(sorted({model for each in rollouts for model in each.other_models}))
    text, outcome, advice = f"{sum(calls)} calls of the model in {len(calls)} rollouts", "failed", None
    if silent < len(calls):
        outcome = "warning" if errors or silent else "ok"
        if errors:
            text += f", and {len(errors)} that were refused: {errors[0]}"
        elif silent:
            waiting = sum(map(_waits, rollouts))
            text += f"; {waiting} rollouts were stopped before an answer" if waiting else ""
            text += f"; {silent - waiting} rollouts made none" if silent > waiting else ""
            advice = "nothing is learned from those; see whether the agent skips the call, or catches an error"
            advice = LONG_ANSWERS if waiting else advice
        elif others:
            text += f"; also answered: {others}"
    elif others:
        text = f"no call was answered by the model that is to learn; {others} answered"
        advice = "change the routes of [gateway], or the name of the model in the agent"
    elif errors:
        text, advice = f"all {len(errors)} calls were refused: {errors[0]}", "mend what it says"
    else:
        text, advice = "the agent made no call to the model that is to learn", IGNORED_ADDRESS
        if all(each.failure for each in rollouts):  # Its error may be why, or what a wrong address leads to.
            text, advice = f"{text} before it failed", f"see the error above first. Or: {IGNORED_ADDRESS}"
            if any(map(_waits, rollouts)):
                advice = f"{LONG_ANSWERS}. Or: {IGNORED_ADDRESS}"
            elif all("agentlightning.errors." in (each.failure or "") for each in rollouts):
                advice = "mend the error above"
    return DryRunCheck("calls", outcome, text, advice)


def check_tokens(rollouts: Sequence[DryRunRollout], random_weights: bool) -> DryRunCheck:
    """Whether the sampled tokens arrive with their log-probabilities."""
    calls, unknown, tokens, truncated = (
        sum(getattr(each, name) for each in rollouts)
        for name in ("policy_calls", "without_tokens", "sampled_tokens", "truncated")
    )
    unusable = [each for each in rollouts if each.reason and "reward" not in each.reason]
    if unknown:
        advice = "the server that answers must report token ids and log-probabilities (docs/guides/operations/vllm.md)"
        return DryRunCheck("tokens", "failed", f"the tokens of {unknown} of {calls} calls are not known", advice)
    if unusable:
        text = f"{len(unusable)} rollouts cannot be learned from: {unusable[0].rejection}"
        return DryRunCheck("tokens", "failed", text)
    text = f"{tokens} sampled tokens with their log-probabilities, {tokens / max(1, calls):.0f} an answer"
    if truncated * 2 <= calls or random_weights:
        return DryRunCheck("tokens", "ok", text)
    advice = "raise max_tokens in the agent, unless answers are meant to be cut off"
    text += f"; {truncated} of {calls} answers were cut off at their limit"
    return DryRunCheck("tokens", "warning", text, advice)


def _asked(rollout: DryRunRollout) -> list[Any]:
    """The messages before the first answer."""
    return list(takewhile(lambda message: message.get("role") != "assistant", rollout.transcript))


def check_reward(ended: Sequence[DryRunRollout], random_weights: bool, trains: bool) -> DryRunCheck:
    """Whether the rollouts that ended well have rewards, and these differ."""
    rewards = [each.reward for each in ended if each.reward is not None]
    missing = [each for each in ended if each.reward is None]
    if missing:
        why = missing[0].rejection or "the agent returned no number, and no reward function is set"
        text = f"{len(missing)} of {len(ended)} rollouts have none: {why}"
        advice = "return a number from the agent, set a reward function (--reward), or call agl.emit_reward"
        return DryRunCheck("reward", "warning" if len(missing) * 2 < len(ended) else "failed", text, advice)
    low, high = min(rewards), max(rewards)
    if low < high:
        return DryRunCheck("reward", "ok", f"{sum(rewards) / len(rewards):.3f} on average, from {low:g} to {high:g}")
    why = ": rollouts that do not differ teach nothing" if trains else ""
    advice = (
        "see whether the reward reads its parameter output (others are filled from the task), in the form that the"
        " agent gives it, and what it gives a right and a wrong one"
    )
    if random_weights:
        advice = (
            "the model has random weights here, and its answers are noise: see what the reward gives a right answer"
        )
    elif trains:
        advice += "; else take tasks that the model solves sometimes"
    return DryRunCheck(
        "reward",
        "warning",
        f"all {len(rewards)} rewards are {low:g}{why}. The first output was {_short(ended[0].output)} for the task"
        f" {_short(ended[0].task)}",
        advice,
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


# -- rehearsal -------------------------------------------------------------------------------------------------------

# Runs the rollouts of a dry run: a few tasks, each several times, as a step of training would; nothing is learned.

TASKS = 4
REPEATS = 2
"""Rollouts of each task: whether rewards differ shows in several."""


def settings_of(config: TrainConfig) -> TrainConfig:
    """Those of a dry run: no second attempts, and failures are counted only. Raises ConfigError where runners elsewhere
    have the agent, or a tracker is not installed."""
    if config.is_recorded:
        raise ConfigError("a dry run runs an agent, and this run learns from recorded data, without one")
    if not config.runner.hosts:
        raise ConfigError("a dry run runs the agent here, and runner.hosts=0 leaves it to runners elsewhere")
    check_installed(config.tracking)
    config = config.with_section("runner", max_attempts=1, max_failed_share=1.0)
    config = config.with_section("run", gateways=())  # Its store is its own.
    return config.model_copy(update={"tracking": TrackingConfig(transcripts=0)})


async def dry_run(
    config: TrainConfig,
    algorithm: Algorithm[Any],
    tasks: Tasks,
    wired: Callable[[], AbstractAsyncContextManager[tuple[Runner | None, TrainingRun]]],
) -> DryRun:
    """Check tasks, agent, reward and model, then a few rollouts, after the warm start, if there is one. `config`: the
    settings of the run that is to follow.
    Raises ConfigError for settings that cannot work."""
    started, trains = time.monotonic(), algorithm.learns_weights
    checks, rollouts = [check_tasks(config, tasks)], tuple[DryRunRollout, ...]()
    try:
        async with wired() as (runner, run):
            reward = "the number that it returns" if config.reward is None else config.reward
            loaded = f"{config.agent or 'the given object'} is loaded; its reward: {reward}"
            checks.append(DryRunCheck("agent", "ok", loaded))
            if run.learner is not None:
                checks += [check_model(config), *check_tool_format(run.learner.chat)]
            checks += [DryRunCheck(name, "ok", text) for name, text in run.prepared.items()]
            rollouts = await run_beside(runner, rehearse(run))
        checks += checks_of(rollouts, trains=trains, random_weights=trains and has_random_weights(config))
    except ConfigError:
        raise
    except AgentLightningError as error:
        name = "agent" if isinstance(error, AgentError) else "model"
        checks.append(DryRunCheck(name, "failed", f"{type(error).__name__}: {error}"))
    return DryRun(tuple(checks), rollouts, time.monotonic() - started)


def check_tool_format(chat: ChatFormat) -> list[DryRunCheck]:
    """Where tools stand, if it is not where the chat template has them."""
    if not chat.tools_in_messages:
        return []
    text = (
        "the chat template has no place for tools: those that the agent offers stand in its messages, in Hermes' format"
    )
    return [DryRunCheck("tool format", "ok", text)]


def check_model(config: TrainConfig) -> DryRunCheck:
    """What answered."""
    if has_random_weights(config):
        advice = "it learns next to nothing from rewards alone: give a model, or demonstrations (warm_start.dataset)"
        return DryRunCheck("model", "warning", "tiny, with random weights", advice)
    warmed_up = "" if config.warm_start.dataset is None else " after its warm start"
    return DryRunCheck("model", "ok", f"{config.policy.model} answers{warmed_up}")


def check_tasks(config: TrainConfig, tasks: Tasks) -> DryRunCheck:
    """The numbers of tasks. Raises DatasetError where demonstrations cannot be read."""
    counts = f"{len(tasks.train)} to learn from, {len(tasks.validation)} for validation, {len(tasks.held_out)} held out"
    if config.warm_start.dataset is not None:
        counts += f"; {len(load_dataset(config.warm_start.dataset))} demonstrations"
    if shared := tasks.shared():
        return DryRunCheck("tasks", "warning", f"{counts}; {shared[0]}", "give each task to one part")
    if len(tasks.held_out) < FEW_HELD_OUT:
        advice = f"with {FEW_HELD_OUT} or more held-out tasks (data.held_out, data.held_out_share=0.5) the interval of"
        advice += " the gain is narrow enough to show one"
        return DryRunCheck("tasks", "warning", counts, advice)
    return DryRunCheck("tasks", "ok", counts)


async def rehearse(run: TrainingRun) -> tuple[DryRunRollout, ...]:
    """Run the rollouts. None of them stops it."""
    collector, progress, label = run.collector, run.progress, f"{run.state.run_id}-dry-run"
    temperature = float(getattr(getattr(run.algorithm, "config", None), "temperature", 1.0))
    resources_id = await run.checkpoints.publisher.write(label, {"temperature": temperature})
    tasks = {f"{i}-{j}": task for i, task in enumerate(run.train_tasks[:TASKS]) for j in range(REPEATS)}
    progress.phase("rollouts", len(tasks))
    collected, reports = await run_trials(collector, label, tasks, resources_id, on_progress=progress.update)
    reasons = {each.rollout_id: each.reason for each in collected.rejected}
    return tuple(
        observe(task, report, reasons.get(report.rollout_id), collector.reader.model)
        for task, report in zip(tasks.values(), reports, strict=True)
    )
