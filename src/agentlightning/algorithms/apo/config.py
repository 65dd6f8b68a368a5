"""The settings of prompt optimisation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentlightning.util.settings import Section

SearchName = Literal["reflective", "gepa", "beam"]


class PromptModel(Section):
    """A model that writes: the critic, or the editor. Any OpenAI-compatible endpoint, or a local model.

    >>> agl.PromptModel(model="gpt-5-mini").api_key_env
    'OPENAI_API_KEY'
    """

    model: str = ""
    """The name of the model at its endpoint."""
    base_url: str | None = None
    """The endpoint, like http://127.0.0.1:8000/v1. None: the environment's OPENAI_BASE_URL, else api.openai.com."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key."""
    path: str | None = None
    """A local model instead of an endpoint, named as in `PolicyConfig.model`. Needs the extra `train`."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature: variety among the edits."""
    max_tokens: int = Field(default=2048, ge=1)
    """Tokens that a reply may have."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """A reply that takes longer is given up, counted, and asked for again later."""
    input_price: float = Field(default=0.0, ge=0)
    """The price of a million tokens read, for `budget.money`."""
    output_price: float = Field(default=0.0, ge=0)
    """The price of a million tokens written, for `budget.money`."""


class SearchBudget(Section):
    """What the search may spend; the first limit reached ends it. None: no limit.

    >>> agl.SearchBudget(calls=100).calls
    100
    """

    calls: int | None = Field(default=400, ge=1)
    """Evaluations: rollouts of the agent, those of the validation tasks included."""
    tokens: int | None = Field(default=None, ge=1)
    """Tokens, read and written, of the critic, the editor, and the agent's recorded calls."""
    money: float | None = Field(default=None, gt=0)
    """Cost of critic and editor by their prices (`input_price`, `output_price`), and of the agent's recorded calls by
    those of `gateway.providers` and `gateway.routes`, in US dollars, or by `agent_*` where these have none."""
    seconds: float | None = Field(default=None, gt=0)
    """Time since the search began, interruptions excluded."""
    agent_input_price: float = Field(default=0.0, ge=0)
    """The price of a million tokens that the agent's model reads, where the gateway has none."""
    agent_output_price: float = Field(default=0.0, ge=0)
    """The price of a million tokens that the agent's model writes, where the gateway has none."""


class BeamSearchConfig(Section):
    """Search "beam": textual gradients with a beam of prompts (ProTeGi, arXiv:2305.03495).

    >>> agl.BeamSearchConfig(beam_width=2).branch_factor
    4
    """

    beam_width: int = Field(default=4, ge=1)
    """Prompts that survive a round."""
    branch_factor: int = Field(default=4, ge=1)
    """Children of each prompt of the beam."""
    beam_rounds: int = Field(default=3, ge=1)
    """Rounds."""
    gradient_batch_size: int = Field(default=4, ge=1)
    """Rollouts that the critic reads for each child."""
    val_batch_size: int = Field(default=16, ge=1)
    """Validation tasks that each round's prompts are scored on."""
    run_initial_validation: bool = True
    """Whether the starting prompt is scored before the first round."""


class GepaSearchConfig(Section):
    """Search "gepa": the package `gepa` (GEPA, arXiv:2507.19457), which the extra of that name installs.

    >>> agl.GepaSearchConfig().minibatch
    3
    """

    minibatch: int = Field(default=3, ge=1)
    """Tasks that a child and its parent are compared on."""
    validation_tasks: int | None = Field(default=20, ge=1)
    """Validation tasks that every accepted child runs on. None: all."""
    candidate_selection: Literal["pareto", "current_best", "epsilon_greedy"] = "pareto"
    """How a parent is chosen."""
    use_merge: bool = False
    """Whether candidates are also merged."""


class APOConfig(Section):
    """The settings of APO.

    >>> agl.APOConfig(search="beam").beam.beam_width
    4
    """

    type: Literal["apo"] = "apo"
    """Which algorithm this is."""
    search: SearchName = "reflective"
    """reflective: edits are tried on the failures they were written for; gepa: the package `gepa`; beam: textual
    gradients with a beam, as in Agent Lightning 0.x."""
    resources: tuple[str, ...] = ()
    """The prompt templates to optimise, by name. Empty: all that the run was given."""
    playbooks: tuple[str, ...] = ()
    """Those among them whose lines are items of a playbook or skill document: each has counts of how often it helped
    and harmed, the editor sees these, and items that harm more than they help are deleted."""
    critic: PromptModel = Field(default_factory=PromptModel)
    """The model that reads failures and says what to change."""
    editor: PromptModel | None = None
    """The model that writes the change. None: the critic."""
    budget: SearchBudget = Field(default_factory=SearchBudget)
    """What the search may spend."""
    rounds: int = Field(default=1000, ge=1)
    """The most edits that are proposed; the budget ends most searches earlier."""
    patience: int = Field(default=60, ge=1)
    """reflective: the search ends after so many proposals in a row of which none was accepted."""
    success: float = Field(default=1.0, allow_inf_nan=False)
    """A rollout with a lower reward is a failure, which the critic reads."""
    reflection_size: int = Field(default=2, ge=1)
    """reflective: failures that the critic reads, and that its child first runs on."""
    guards: int = Field(default=2, ge=0)
    """reflective: recorded successes of the parent that a child must keep."""
    pool: int = Field(default=4, ge=1)
    """reflective: candidates that are kept to go on from."""
    finalists: int = Field(default=2, ge=1)
    """reflective: candidates that the validation tasks decide between."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """reflective: the error probability of that decision."""
    max_edits: int = Field(default=3, ge=1)
    """Edits of one proposal; further ones are left out and counted."""
    max_edit_chars: int = Field(default=2000, ge=1)
    """Characters of one edit; a longer one is rejected and counted."""
    max_transcript_chars: int = Field(default=4000, ge=100)
    """Characters that the critic is shown of each rollout."""
    beam: BeamSearchConfig = Field(default_factory=BeamSearchConfig)
    """Settings of search "beam"."""
    gepa: GepaSearchConfig = Field(default_factory=GepaSearchConfig)
    """Settings of search "gepa"."""
    reward_weights: dict[str, float] | None = None
    """Weights of the named dimensions of a reward."""
    seed: int = 0
    """The seed of the search's choices."""

    @model_validator(mode="after")
    def _check_playbooks(self) -> Self:
        unknown = sorted(set(self.playbooks) - set(self.resources)) if self.resources else []
        if unknown:
            raise ValueError(f"playbooks names {', '.join(unknown)}, which resources does not; add it there")
        return self
