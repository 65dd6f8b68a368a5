"""The result of a training run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.evaluation.intervals import Gain
from agentlightning.resources import PromptTemplate, prompts_in
from agentlightning.training.persistence.checkpoints import read_resources
from agentlightning.training.persistence.run_changes import settings_of_run
from agentlightning.training.report.cost import Cost
from agentlightning.training.report.stage_result import StageResult, gain_as_json
from agentlightning.util.event_loop import run_sync


def prompt_diff(before: Mapping[str, PromptTemplate], after: Mapping[str, PromptTemplate]) -> str:
    """What has changed in prompt templates, as a unified diff; empty where nothing has."""
    return "\n".join(
        line
        for name, template in after.items()
        for line in difflib.unified_diff(
            before[name].template.splitlines() if name in before else [],
            template.template.splitlines(),
            f"{name} before",
            f"{name} after",
            lineterm="",
        )
    )


def prompts_of(run_dir: Path, checkpoint: str | None) -> dict[str, Any]:
    """The prompt templates in a checkpoint of a run, and what has changed in them since it began, as JSON values."""
    found = prompts_in(read_resources(run_dir, checkpoint))
    try:
        start = settings_of_run(run_dir).prompts if found else {}
    except AgentLightningError:  # Those of another version: the templates are shown as they are.
        start = {}
    return {"prompts": {name: each.template for name, each in found.items()}, "prompt_diff": prompt_diff(start, found)}


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What improved, by how much, at what cost, and where the trained model is."""

    held_out: Mapping[str, Gain]
    """Held-out reward before and after by sampling mode (greedy, sampled), with the 95% interval of the paired gain.
    NaN if no task has a reward both before and after."""
    missing: Mapping[str, Mapping[str, int]]
    """Held-out tasks without a reward: their number by reason, by measurement (`before-greedy`, `after-greedy` ...)."""
    rollouts: int
    """Training rollouts, the failed ones included."""
    failed_rollouts: int
    rejected_rollouts: Mapping[str, int]
    """Training rollouts that succeeded and could not be learned from, by reason."""
    skipped_groups: int
    warnings: tuple[str, ...]
    """Signs that the run learned too little, with the way out: those shown while it ran, and those of its end."""
    warning_counts: Mapping[str, int]
    """The number of steps at which each kind of warning was found, by its name."""
    rollbacks: int
    """Returns to a healthy checkpoint after a collapse (`run.on_collapse`)."""
    gate_rejections: int
    """Versions that lost on the guard set and were not promoted (`gate`)."""
    steps: int
    best_step: int | None
    """The step whose weights are in `checkpoint`. None: the last one."""
    seconds: float
    checkpoint: Path
    """A directory that transformers loads. The run's prompts, and resources that the algorithm published, are in its
    `resources.json`."""
    curve: Path | None
    """The picture of the reward curve; None where matplotlib is not installed."""
    run_dir: Path
    start_prompts: Mapping[str, PromptTemplate] = field(default_factory=dict[str, PromptTemplate])
    """The prompt templates that the run began with, by name."""
    prompts: Mapping[str, PromptTemplate] = field(default_factory=dict[str, PromptTemplate])
    """Those it ended with."""
    stages: tuple[StageResult, ...] = ()
    """What each stage has gained, in a run of several algorithms (`agl.Sequential`)."""
    cost: Cost = field(default_factory=Cost)
    """Tokens, and money where prices are set."""

    tracker_failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of calls that failed, by experiment tracker; empty where all went well."""
    gateways: Mapping[str, Any] | None = None
    """What the gateways of `run.gateways` did since the run was last started: `urls`, `joins`, `calls`, `tokens`,
    `failed`, `held` (calls that waited for an update), `updates` and `held_seconds`, summed. None: the trainer's own
    process answered."""

    @property
    def best_prompt(self) -> PromptTemplate:
        """The prompt template of the result: the only one, else the first that was changed. Raises ConfigError for a
        run without prompt templates."""
        changed = [each for name, each in self.prompts.items() if each != self.start_prompts.get(name)]
        for each in (*changed, *self.prompts.values()):
            return each
        raise ConfigError("the run had no prompt template; give some: Trainer(initial_resources={'prompt': ...})")

    def diff(self) -> str:
        """What the run changed in its prompt templates, as a unified diff; empty where nothing changed."""
        return prompt_diff(self.start_prompts, self.prompts)

    def report(
        self, *, format: Literal["markdown", "html"] = "markdown", examples: int = 3, store: Any | None = None
    ) -> str:
        """The result as text: held-out reward before and after with its interval, the gain of each stage where there
        are several, tasks won and lost, what it cost in tokens and, where prices are set, in money, and transcripts of
        `examples` tasks of either kind before and after. `store`: that of the run, where it was given
        one. Raises ConfigError for another format."""
        from agentlightning.training.report.run_report import as_html, markdown_report

        if format not in ("markdown", "html"):
            raise ConfigError(f"format={format!r} is not one of markdown, html")
        text = run_sync(markdown_report(self.run_dir, examples, store))
        return as_html(text) if format == "html" else text

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values, as `--json` prints it."""
        return {
            "held_out": {
                mode: {
                    **gain_as_json(gain),
                    "reasons_before": dict(self.missing.get(f"before-{mode}", {})),
                    "reasons_after": dict(self.missing.get(f"after-{mode}", {})),
                }
                for mode, gain in self.held_out.items()
            },
            "rollouts": self.rollouts,
            "failed_rollouts": self.failed_rollouts,
            "rejected_rollouts": dict(self.rejected_rollouts),
            "skipped_groups": self.skipped_groups,
            "warnings": list(self.warnings),
            "warning_counts": dict(self.warning_counts),
            "rollbacks": self.rollbacks,
            "gate_rejections": self.gate_rejections,
            "steps": self.steps,
            "best_step": self.best_step,
            "seconds": round(self.seconds, 2),
            "checkpoint": str(self.checkpoint),
            "curve": None if self.curve is None else str(self.curve),
            "run_dir": str(self.run_dir),
            "prompts": {name: each.template for name, each in self.prompts.items()},
            "prompt_diff": self.diff(),
            "stages": [each.as_json() for each in self.stages],
            "cost": self.cost.as_json(),
            "tracker_failures": dict(self.tracker_failures),
            "gateways": None if self.gateways is None else dict(self.gateways),
        }
