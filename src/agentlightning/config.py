"""The configuration of a training run: every setting, its default and its meaning.

`agl train --config FILE.toml section.key=value ...` fills it; `--print-config` prints it. Unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_validator,
    model_validator,
)

from agentlightning.algorithms.apo.config import (
    APOConfig,
    BeamSearchConfig,
    GepaSearchConfig,
    PromptModel,
    SearchBudget,
)
from agentlightning.algorithms.base import ALGORITHMS, AlgorithmConfig
from agentlightning.algorithms.lightning_rl import LightningRLConfig, check_value_head
from agentlightning.algorithms.preference import DPOConfig
from agentlightning.algorithms.sequential import SequentialConfig
from agentlightning.algorithms.sft import RejectionSamplingConfig, SFTConfig
from agentlightning.errors import ConfigError
from agentlightning.gateway.config import GatewayConfig
from agentlightning.policy.config import Lora, OptimizerConfig, PolicyConfig, TinkerConfig, WeightsConfig, check_fed
from agentlightning.resources import PromptTemplate
from agentlightning.task import DATASETS, dataset_kind
from agentlightning.tracing.air import check_rules
from agentlightning.util.plugins import Registry
from agentlightning.util.settings import (
    AtLeastOne,
    Chosen,
    OpenShare,
    PositiveShare,
    Section,
    Share,
    ShareBelowOne,
    Weight,
)

__all__ = [
    "APOConfig",
    "AlgorithmConfig",
    "BeamSearchConfig",
    "Branching",
    "CurriculumConfig",
    "DPOConfig",
    "DataConfig",
    "EvaluationConfig",
    "GateConfig",
    "GatewayConfig",
    "GepaSearchConfig",
    "LightningRLConfig",
    "Lora",
    "OptimizerConfig",
    "PolicyConfig",
    "PromptModel",
    "RejectionSamplingConfig",
    "RewardGuard",
    "RunConfig",
    "RunnerConfig",
    "SFTConfig",
    "SearchBudget",
    "SequentialConfig",
    "TinkerConfig",
    "TrackingConfig",
    "TrainConfig",
    "TurnLimit",
    "WarmStartConfig",
    "WeightsConfig",
]

TRACKERS_HOME = "agentlightning.training.tracking"
TRACKERS = Registry(
    "trackers",
    "tracker",
    f"{TRACKERS_HOME}:Tracker",
    {
        "tensorboard": f"{TRACKERS_HOME}:TensorBoardTracker",
        "wandb": f"{TRACKERS_HOME}:WandbTracker",
        "mlflow": f"{TRACKERS_HOME}:MlflowTracker",
        "trackio": f"{TRACKERS_HOME}:TrackioTracker",
    },
)
HOOKS = Registry("hooks", "hook", "agentlightning.compat.runner:Hook")
CALLBACKS = Registry("callbacks", "callback", "agentlightning.training.callbacks:Callback")

Method = Literal["auto", "importance", "awr", "rejection"]
"""How LightningRL learns from recorded sessions."""


class DataConfig(Section):
    """Where tasks come from.

    >>> agl.config.DataConfig(train="train.jsonl").train
    'train.jsonl'
    """

    train: str | None = None
    """Tasks to learn from: a JSONL, JSON, CSV or Parquet file, a saved `datasets` directory, or the address of an
    environment, as in reasoning_gym:chain_sum?size=500&seed=1."""
    validation: str | None = None
    """Tasks that choose the best checkpoint; without a file, a share of the training tasks."""
    held_out: str | None = None
    """Tasks to measure the gain on; without a file, a share of the training tasks."""
    sessions: str | None = None
    """A store of recorded sessions to learn from in place of rollouts: a SQLite file, postgresql://... or the URL of
    `agl serve`. The agent, where there is one, then only measures, on the tasks of `held_out`."""
    method: Method = "auto"
    """How LightningRL learns from recorded sessions: importance, awr or rejection; auto: as the data allows."""
    success_threshold: FiniteFloat = 0.5
    """The reward from which on a session is imitated, by method "rejection" and by supervised learning."""
    follow: bool = False
    """Learn from each session once, as they arrive, and wait for those to come."""
    follow_timeout: NonNegativeFloat | None = None
    """Seconds without a new session after which following ends. None: it waits on."""
    validation_share: ShareBelowOne = 0.1
    """Share of the training tasks that is split off for validation if there is no file."""
    held_out_share: ShareBelowOne = 0.2
    """Share of the training tasks that is split off for the final measurement if there is no file."""

    @field_validator("train", "validation", "held_out", mode="before")
    @classmethod
    def _check_file(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError(
                "should be a file of tasks; how many are used is evaluation.tasks and evaluation.held_out_tasks, and"
                " the share split off from the training tasks data.validation_share and data.held_out_share"
            )
        return value


class TurnLimit(Section):
    """A limit on the policy's answers in a training rollout that grows with the steps (ScalingInter-RL, Xi et al. 2025,
    AgentGym-RL, arXiv:2509.08755): short rollouts first, long ones once the policy is good at those.

    >>> limit = agl.config.TurnLimit(start=3, grow=2, every=10, max=6)
    >>> [limit.at(step) for step in (0, 9, 10, 20)]
    [3, 3, 5, 6]
    """

    start: AtLeastOne
    """Answers that a rollout of the first step is given. The next call is refused, and the rollout ends there."""
    grow: NonNegativeInt = 1
    """What is added to the limit each time."""
    every: AtLeastOne = 10
    """Steps after which the limit grows."""
    max: AtLeastOne | None = None
    """The limit grows no further. None: it always does."""
    reward: FiniteFloat = 0.0
    """The reward of a rollout that ended at the limit without one of its own."""

    def at(self, step: int) -> int:
        """The limit in a step, counted from 0."""
        limit = self.start + self.grow * (step // self.every)
        return limit if self.max is None else min(limit, self.max)

    @model_validator(mode="after")
    def _check_max(self) -> Self:
        if self.max is not None and self.max < self.start:
            raise ValueError(f"max={self.max} is less than start={self.start}; use at least {self.start}")
        return self


class Branching(Section):
    """Rollouts that branch off others of their group, where the policy is unsure after a tool's result (ARPO, Dong et
    al. 2025, arXiv:2507.19849). The agent runs anew; the gateway gives it the recorded answers up to the branch.

    >>> agl.config.Branching(share=0.25).threshold
    0.2
    """

    share: OpenShare = 0.5
    """The share of each group's rollouts that branch off the others, once these have ended."""
    threshold: FiniteFloat = 0.2
    """A rollout may branch where its uncertainty is this much higher than at its first call, in nats a token."""
    tokens: AtLeastOne = 16
    """The number of first tokens of an answer whose mean -log p is its uncertainty."""
    after: Literal["tool", "any"] = "tool"
    """At which calls: those after a message of a tool, or, for agents that tell results in other messages, any."""

    def check_group_size(self, group_size: int) -> None:
        """Raises ConfigError where the share of a group is no rollout, or all of them."""
        if not 0 < round(self.share * group_size) < group_size:
            raise ConfigError(
                f"curriculum.branching.share={self.share:g} of algorithm.group_size={group_size} is"
                f" {round(self.share * group_size)} rollouts; some must branch, and some must be there to branch off"
            )


class CurriculumConfig(Section):
    """Which tasks rollouts are run on, and how long they may be.

    >>> agl.config.CurriculumConfig(tasks="learnability").staleness_share
    0.1
    """

    tasks: Literal["epochs", "learnability"] = "epochs"
    """epochs: every task once an epoch; learnability: tasks whose rollouts differ in reward, or that the policy has
    forgotten, more often than those it always or never solves."""
    untried_share: Share = 0.5
    """learnability: the share of each step's tasks that nobody has tried yet, as long as there are such."""
    staleness_share: Share = 0.1
    """learnability: the share of tasks that are drawn by the time since they were drawn last, so that all come back."""
    turns: TurnLimit | None = None
    """A limit on the policy's answers in each training rollout: a table with `start`, `grow`, `every`, `max`. None: no
    limit."""
    branching: Branching | None = None
    """Rollouts that branch off others of their group: a table with `share`, `threshold`, `tokens`, `after`. None: all
    rollouts are independent."""


class WarmStartConfig(Section):
    """Supervised learning on demonstrations before the reinforcement learning.

    >>> agl.config.WarmStartConfig(dataset="good.jsonl").dataset
    'good.jsonl'
    """

    dataset: str | None = None
    """Conversations: a JSONL file with `messages` and, where tools are used, `tools`. None: no warm start."""
    steps: AtLeastOne | None = None
    """Updates. None: one pass through the data."""
    batch_size: AtLeastOne = 16
    """Conversations in each update."""
    shuffle: bool = True
    """False keeps the order of the file."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How weights are updated."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.steps is not None:
            self.optimizer.check_warmup(self.steps)
        return self


class RunnerConfig(Section):
    """How agents are run.

    >>> agl.config.RunnerConfig(concurrency=4).hosts
    1
    """

    concurrency: AtLeastOne = 64
    """Rollouts that each host runs at the same time."""
    hosts: NonNegativeInt = 1
    """Processes that run Python agents. 0: none here; `agl runner` runs the agent on the store's server."""
    limit_by_load: bool = True
    """Fewer groups of rollouts run at the same time while the key-value cache of the engine that samples is more than
    0.8 full, and more again below 0.6 (docs/concepts/updates.md). false: as many as `run.max_staleness` allows."""
    queue: str | None = None
    """The queue of the rollouts. None: with runners elsewhere that of their mode, train or val; with a runner here and
    a store that others use too, a private queue of the run."""
    fresh_process: bool = False
    """Run each attempt on the main thread of its own process, forked from one that has imported the agent; `hosts` is
    then ignored. Begins by itself where attempts cannot share a process (docs/guides/your-own-agent.md)."""
    timeout_seconds: PositiveFloat = 120.0
    """An attempt that takes longer is stopped."""
    max_attempts: AtLeastOne = 2
    """The number of attempts that a rollout may have."""
    max_calls: AtLeastOne | None = None
    """Answers of the policy that an attempt may be given, in training and in evaluations; the next call is refused.
    None: any number."""
    max_failed_share: Share = 0.5
    """Training stops if a larger share of a step's rollouts has failed in all attempts."""
    cwd: str | None = None
    """The working directory of agents. None: the one that training was started in."""
    env: dict[str, str] = Field(default={})
    """Environment variable -> key of the task, for agents that read their task from the environment."""
    hooks: tuple[Annotated[str, BeforeValidator(HOOKS.named)], ...] = ()
    """Code around each attempt of a Python agent: subclasses of `agl.Hook`, as `module:Class`."""
    hide: tuple[str, ...] = ()
    """Keys of the task that only the reward function sees, such as the correct answer."""


class EvaluationConfig(Section):
    """How the result is measured.

    >>> agl.config.EvaluationConfig(every=5).every
    5
    """

    every: NonNegativeInt = 10
    """Steps between validations. 0: none."""
    tasks: AtLeastOne | None = 64
    """Validation tasks used each time; None: all."""
    held_out_tasks: AtLeastOne | None = None
    """Held-out tasks used before and after; None: all."""
    modes: tuple[Literal["greedy", "sampled"], ...] = Field(default=("greedy", "sampled"), min_length=1)
    """greedy: temperature 0; sampled: temperature 1."""


class RewardGuard(Section):
    """What the rewards of a run must be like: a check of every batch before it is learned from
    (docs/guides/operations/governance.md).

    >>> agl.config.RewardGuard(low=0, high=1, on_violation="stop").max_missing
    0.1
    """

    low: FiniteFloat | None = None
    """The lowest reward possible. None: any."""
    high: FiniteFloat | None = None
    """The highest reward possible. None: any."""
    max_missing: Share = 0.1
    """The share of a batch's finished rollouts that may have no usable reward."""
    max_drift: Share = 0.5
    """How far the rewards of a batch may be from those of the five batches before: the Kolmogorov-Smirnov distance, the
    largest difference between the shares of rewards up to any value. 1: as far as they like."""
    agree: tuple[str, str] | None = None
    """Two named dimensions of the reward that should prefer the same rollouts. None: no such pair."""
    reward: str | None = None
    """A second reward function, `module:name` or `path/file.py:name`, that should prefer the same rollouts. It sees a
    sample of each batch, in the process of the trainer; nothing is learned from it. None: there is none."""
    sample: int = Field(default=64, ge=2)
    """The number of rollouts of a batch that the second reward function scores, in whole groups."""
    max_disagreement: Share = 0.4
    """The share of pairs of one group's rollouts that the two may order differently. Ties are not counted."""
    on_violation: Literal["warn", "stop"] = "warn"
    """stop: training ends before it has learned from the batch."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                f"low={self.low:g} is not below high={self.high:g}; give the lowest and the highest reward"
            )
        if self.agree is not None and self.agree[0] == self.agree[1]:
            raise ValueError(f"agree={self.agree} names one dimension twice; name two")
        return self


class GateConfig(Section):
    """Which versions of weights and prompts are promoted: those that do not lose on a guard set
    (docs/guides/operations/governance.md).

    >>> agl.config.GateConfig(every=5).on_loss
    'rollback'
    """

    every: AtLeastOne = 10
    """Steps between decisions. The last step is always judged."""
    tasks: str | None = None
    """The guard set: a file of tasks that are never trained on. None: the validation tasks."""
    limit: AtLeastOne | None = 64
    """Tasks of the guard set that are used; None: all."""
    reward: str | None = None
    """The reward function of the guard set, `module:name` or `path/file.py:name`: one that is not trained on catches a
    policy that exploits the reward it is trained on. None: the reward of the run."""
    margin: Weight = 0.0
    """The loss of mean reward that is tolerated."""
    confidence: OpenShare = 0.95
    """A version loses if the interval of its paired difference with this confidence lies below -margin."""
    mode: Literal["greedy", "sampled"] = "greedy"
    """greedy: temperature 0; sampled: temperature 1."""
    on_loss: Literal["rollback", "stop"] = "rollback"
    """rollback: the run returns to the promoted version and goes on from there; stop: it returns there and ends."""


class RunConfig(Section):
    """The run itself.

    >>> agl.config.RunConfig(seed=7).seed
    7
    """

    seed: int = 0
    """Seed of the data order, the splits and the sampling."""
    checkpoint_every: AtLeastOne | None = None
    """Steps between checkpoints: the work that a crash can cost. None: 1, or where one takes longer than a second to
    write, as many as keep that to a tenth of the time; on recorded data, where a step costs no rollouts, 20."""
    keep_checkpoints: AtLeastOne = 2
    """The number of newest checkpoints to keep, beside the best one."""
    max_staleness: NonNegativeInt = 0
    """Updates by which tokens may be older than the weights that learn from them. So many further steps' rollouts run
    while a step trains, and a step learns from the first groups to complete. 0: each step waits for its own."""
    on_collapse: Literal["warn", "stop", "rollback"] = "warn"
    """What happens when the policy collapses (docs/reference/health.md). stop: the run returns to the last healthy
    checkpoint and ends; rollback: it returns there and goes on with a lower learning rate."""
    max_rollbacks: NonNegativeInt = 2
    """Returns to a healthy checkpoint in the life of a run; at the next collapse it stops."""
    rollback_lr_factor: PositiveShare = 0.3
    """The factor of the learning rate at each return to a healthy checkpoint."""
    token_ratios: bool = False
    """Whether the tokens of each update are scored once more after it, for the dashboard's view of the ratio of new to
    old: one more forward pass, and about 8 bytes a token in `ratios/`."""
    callbacks: tuple[Annotated[str, BeforeValidator(CALLBACKS.named)], ...] = ()
    """Code of your own at the points of a run: subclasses of `agl.Callback`, as `module:Class`
    (docs/guides/extend.md)."""
    host: str = "127.0.0.1"
    """Address the gateway listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port the gateway listens on; 0: any free one."""
    public_url: str | None = None
    """The URL at which runners on other machines reach the gateway, like http://trainer.example:8000. None: host and
    port, or the first of `gateways`."""
    gateways: tuple[str, ...] = ()
    """Addresses of `agl serve` processes that answer the model calls of the run in place of the trainer's own process
    (docs/guides/operations/scaling.md#a-trainer-that-joins-a-server): all those behind `public_url`. They share the
    store and the token of the run, and reach `policy.servers.urls`. Empty: the trainer's process answers."""
    gateway_lease_seconds: float = Field(default=60.0, ge=1)
    """Gateways refuse the calls of a run whose trainer has been silent for so long. The trainer goes on without a
    gateway that it could not reach for so long, until that is back."""


class TrackingConfig(Section):
    """Experiment trackers that a run reports to (docs/guides/operations/trackers.md).

    >>> agl.config.TrackingConfig(trackers=["tensorboard"]).project
    'agentlightning'
    """

    trackers: tuple[Annotated[str, BeforeValidator(TRACKERS.named)], ...] = ()
    """tensorboard, wandb, mlflow, trackio: each needs the extra of its name; or one of your own. Metrics are in
    metrics.jsonl always."""
    project: str = Field(default="agentlightning", min_length=1)
    """The project (in MLflow: the experiment) that the run belongs to."""
    name: str | None = None
    """The name of the run there. None: that of its directory."""
    transcripts: NonNegativeInt = 8
    """Rollouts of each validation whose transcripts are kept in transcripts.jsonl and sent to trackers. 0: none."""
    wandb_mode: Literal["offline", "online"] | None = None
    """Whether Weights & Biases sends anything anywhere. None: as WANDB_MODE says, else offline."""
    mlflow_uri: str | None = None
    """The server or database of MLflow. None: as MLFLOW_TRACKING_URI says, else mlflow.db beside the run."""


class TrainConfig(Section):
    """A training run.

    >>> config = agl.TrainConfig(policy={"model": "path/to/model"}, run={"seed": 7})
    >>> config.policy.model, config.run.seed
    ('path/to/model', 7)
    """

    env: str | None = None
    """The address of an environment: its tasks, agent and reward are used where `data.train`, `agent` and `reward` are
    not set."""
    agent: str | None = None
    """`module:name`, `path/file.py:name`, or a command line in any language."""
    reward: str | None = None
    """`module:name` or `path/file.py:name` of a function (task, output) -> number or named numbers."""
    group_reward: str | None = None
    """`module:name` or `path/file.py:name` of a function of the rollouts of one group that returns a reward for each,
    such as an `agl.RankingJudge`. Training learns from these; evaluations use `reward`. None: training uses it too."""
    run: RunConfig = RunConfig()
    """The run itself."""
    data: DataConfig = DataConfig()
    """Where tasks come from."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which tasks rollouts are run on, and how long they may be."""
    policy: PolicyConfig = PolicyConfig()
    """The model that learns."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised learning first."""
    algorithm: Annotated[AlgorithmConfig, Chosen(ALGORITHMS)] = LightningRLConfig()
    """The algorithm: type "lightning_rl" (reinforcement learning), "dpo" (preferences), "rejection" (imitates what
    succeeded), "sft" (imitates demonstrations), "apo" (prompt optimisation), "sequential" (a list of these, one after
    the other), or one of your own."""
    prompts: dict[str, PromptTemplate] = Field(default={})
    """Prompt templates that the agent is given, by name: texts, or tables with `template` and `engine`."""
    runner: RunnerConfig = RunnerConfig()
    """How agents are run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How the result is measured."""
    guard: RewardGuard | None = None
    """What the rewards must be like: a table with `low`, `high`, `max_missing`, `max_drift`, `agree`, `reward` ...
    None: they are not checked."""
    gate: GateConfig | None = None
    """Which versions are promoted: a table with `every`, `tasks`, `reward`, `margin`, `on_loss` ... None: all."""
    tracking: TrackingConfig = TrackingConfig()
    """Experiment trackers."""
    gateway: GatewayConfig = GatewayConfig()
    """Routes of model calls to other models than the policy, and their budgets."""
    air: dict[str, float] = Field(default={})
    """Automatic intermediate rewards: rule -> weight. Rules: tool_succeeded, tool_raised, repeated_failure,
    output_parsed, retrieved_text_used, progress, and your own as `module:function`. Empty: none."""

    def with_section(self, name: str, **values: Any) -> Self:
        """A copy with other values in a section. They are not checked."""
        return self.model_copy(update={name: getattr(self, name).model_copy(update=values)})

    @property
    def is_recorded(self) -> bool:
        """Whether a run learns from what was recorded, and `agent`, where there is one, only measures."""
        own = any(getattr(self.algorithm, name, None) for name in ("dataset", "data"))
        return self.data.sessions is not None or (own and self.agent is None)

    @model_validator(mode="before")
    @classmethod
    def _use_environment(cls, values: Any) -> Any:
        """Fill what an environment brings and nobody has set."""
        address = values.get("env") if isinstance(values, dict) else None
        found = dataset_kind(str(address))
        if found is None:
            return values
        table: dict[str, Any] = dict(values)
        data = dict(table.get("data") or {})
        brought = {name: table.get(name) or getattr(found[1], name) for name in ("agent", "reward")}
        return {**table, **brought, "data": {**data, "train": data.get("train") or address}}

    def check_sections(self) -> None:
        """Raises ConfigError where settings of different sections do not go together."""
        if self.policy.kind == "tinker" and self.warm_start.dataset is not None:
            raise ConfigError(
                'warm_start trains on this machine, and policy.kind = "tinker" elsewhere; leave it out, and name a'
                " model that is warm"
            )
        if self.warm_start.dataset is not None:
            size = self.warm_start.batch_size
            check_fed(self.policy.processes, size, f"warm_start.batch_size={size}")
        for stage in getattr(self.algorithm, "stages", (self.algorithm,)):
            optimizer, steps = getattr(stage, "optimizer", None), getattr(stage, "steps", None)
            if optimizer is not None and steps is not None:
                optimizer.check_warmup(steps * getattr(stage, "minibatches", 1))
            if isinstance(stage, LightningRLConfig):
                tasks, parts = stage.tasks_per_step, stage.minibatches
                settings = f"tasks_per_step={tasks}, one tree for each, in minibatches={parts}"
                check_fed(self.policy.processes, max(1, tasks // parts), settings)
                check_value_head(stage.losses, self.policy.value_head)
                if self.curriculum.branching is not None:
                    self.curriculum.branching.check_group_size(stage.group_size)

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        self.check_sections()
        return self

    @field_validator("prompts", mode="before")
    @classmethod
    def _read_texts(cls, prompts: Any) -> Any:
        if not isinstance(prompts, dict):
            return prompts
        given = cast("dict[str, Any]", prompts)
        return {name: {"template": each} if isinstance(each, str) else each for name, each in given.items()}

    @field_validator("env")
    @classmethod
    def _check_environment(cls, env: str | None) -> str | None:
        if env is not None and dataset_kind(env) is None:
            raise ValueError(f"{env!r} is no address of an environment; known kinds: {', '.join(DATASETS.names())}")
        return env

    @field_validator("air")
    @classmethod
    def _check_rules(cls, air: dict[str, float]) -> dict[str, float]:
        check_rules(air)
        return air
