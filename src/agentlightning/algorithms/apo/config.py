"""The settings of prompt optimisation."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from agentlightning.algorithms.base import AlgorithmConfig
from agentlightning.errors import ConfigError
from agentlightning.util.settings import AtLeastOne, OpenShare, Section

SearchName = Literal["reflective", "gepa", "beam"]


class PromptModel(Section):
    """A model that writes: the critic, or the editor. Any OpenAI-compatible endpoint, or a local model.

    >>> agl.config.PromptModel(model="gpt-5-mini").api_key_env
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
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature: variety among the edits."""
    max_tokens: AtLeastOne = 2048
    """Tokens that a reply may have."""
    timeout_seconds: PositiveFloat = 120.0
    """A reply that takes longer is given up, counted, and asked for again later."""
    input_price: NonNegativeFloat = 0.0
    """The price of a million tokens read, for `budget.money`."""
    output_price: NonNegativeFloat = 0.0
    """The price of a million tokens written, for `budget.money`."""


class SearchBudget(Section):
    """What the search may spend; the first limit reached ends it. None: no limit.

    >>> agl.config.SearchBudget(calls=100).calls
    100
    """

    calls: AtLeastOne | None = 400
    """Evaluations: rollouts of the agent, those of the validation tasks included."""
    tokens: AtLeastOne | None = None
    """Tokens, read and written, of the critic, the editor, and the agent's recorded calls."""
    money: PositiveFloat | None = None
    """Cost of critic and editor by their prices (`input_price`, `output_price`), and of the agent's recorded calls by
    those of `gateway.providers` and `gateway.routes`, in US dollars, or by `agent_*` where these have none."""
    seconds: PositiveFloat | None = None
    """Time since the search began, interruptions excluded."""
    agent_input_price: NonNegativeFloat = 0.0
    """The price of a million tokens that the agent's model reads, where the gateway has none."""
    agent_output_price: NonNegativeFloat = 0.0
    """The price of a million tokens that the agent's model writes, where the gateway has none."""


class BeamSearchConfig(Section):
    """Search "beam": textual gradients with a beam of prompts (ProTeGi, arXiv:2305.03495).

    >>> agl.config.BeamSearchConfig(beam_width=2).branch_factor
    4
    """

    beam_width: AtLeastOne = 4
    """Prompts that survive a round."""
    branch_factor: AtLeastOne = 4
    """Children of each prompt of the beam."""
    beam_rounds: AtLeastOne = 3
    """Rounds."""
    gradient_batch_size: AtLeastOne = 4
    """Rollouts that the critic reads for each child."""
    val_batch_size: AtLeastOne = 16
    """Validation tasks that each round's prompts are scored on."""
    run_initial_validation: bool = True
    """Whether the starting prompt is scored before the first round."""


class GepaSearchConfig(Section):
    """Search "gepa": the package `gepa` (GEPA, arXiv:2507.19457), which the extra of that name installs.

    >>> agl.config.GepaSearchConfig().minibatch
    3
    """

    minibatch: AtLeastOne = 3
    """Tasks that a child and its parent are compared on."""
    validation_tasks: AtLeastOne | None = 20
    """Validation tasks that every accepted child runs on. None: all."""


class APOConfig(AlgorithmConfig):
    """The settings of APO.

    >>> agl.config.APOConfig(search="beam").beam.beam_width
    4
    """

    type: str = "apo"
    """Which algorithm this is."""
    search: SearchName = "reflective"
    """reflective: edits are tried on the failures they were written for; gepa: the package `gepa`; beam: textual
    gradients with a beam, as in Agent Lightning 0.x."""
    resources: tuple[str, ...] = ()
    """The prompt templates to optimise, by name. Empty: all that the run was given."""
    playbooks: tuple[str, ...] = ()
    """Those among them whose lines are items of a playbook or skill document: each has counts of how often it helped
    and harmed, the editor sees these, and items that harm more than they help are deleted."""
    critic: PromptModel = PromptModel()
    """The model that reads failures and says what to change."""
    editor: PromptModel | None = None
    """The model that writes the change. None: the critic."""
    budget: SearchBudget = SearchBudget()
    """What the search may spend."""
    rounds: AtLeastOne = 1000
    """The most edits that are proposed; the budget ends most searches earlier."""
    patience: AtLeastOne = 60
    """reflective: the search ends after so many proposals in a row of which none was accepted."""
    success: FiniteFloat = 1.0
    """A rollout with a lower reward is a failure, which the critic reads."""
    reflection_size: AtLeastOne = 2
    """reflective: failures that the critic reads, and that its child first runs on."""
    guards: NonNegativeInt = 2
    """reflective: recorded successes of the parent that a child must keep."""
    pool: AtLeastOne = 4
    """reflective: candidates that are kept to go on from."""
    finalists: AtLeastOne = 2
    """reflective: candidates that the validation tasks decide between."""
    alpha: OpenShare = 0.05
    """reflective: the error probability of that decision."""
    max_edits: AtLeastOne = 3
    """Edits of one proposal; further ones are left out and counted."""
    max_edit_chars: AtLeastOne = 2000
    """Characters of one edit; a longer one is rejected and counted."""
    max_transcript_chars: int = Field(default=4000, ge=100)
    """Characters that the critic is shown of each rollout."""
    beam: BeamSearchConfig = BeamSearchConfig()
    """Settings of search "beam"."""
    gepa: GepaSearchConfig = GepaSearchConfig()
    """Settings of search "gepa"."""
    reward_weights: dict[str, float] | None = None
    """Weights of the named dimensions of a reward."""
    seed: int = 0
    """The seed of the search's choices."""

    @property
    def has_prices(self) -> bool:
        """Whether a price is set for any call."""
        models, budget = (self.critic, self.editor or self.critic), self.budget
        agent = budget.agent_input_price + budget.agent_output_price
        return agent + sum(each.input_price + each.output_price for each in models) > 0

    @model_validator(mode="after")
    def _check_playbooks(self) -> Self:
        unknown = sorted(set(self.playbooks) - set(self.resources)) if self.resources else []
        if unknown:
            raise ValueError(f"playbooks names {', '.join(unknown)}, which resources does not; add it there")
        return self


# -- budget ----------------------------------------------------------------------------------------------------------

# The budget of a search: announced before it begins, kept while it runs.


@dataclass(slots=True)
class Spending:
    """What a search has spent."""

    budget: SearchBudget
    calls: int = 0
    """Evaluations."""
    model_calls: int = 0
    """Calls of critic and editor."""
    tokens: int = 0
    money: float = 0.0
    seconds: float = 0.0
    """In earlier sessions of the run."""
    _since: float = field(default_factory=time.monotonic)

    def add(self, tokens: int, money: float) -> None:
        self.tokens += tokens
        self.money += money

    @property
    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._since

    def exhausted(self, reserved: int = 0) -> str | None:
        """The limit that is reached, in words. `reserved`: evaluations that are put aside."""
        used = self.calls + reserved, self.tokens, self.money, self.elapsed
        for spent, (limit, shown) in zip(used, limits(self.budget), strict=True):
            if limit is not None and spent >= limit:
                aside = f", {reserved} of them for validation" if reserved and "evaluations" in shown else ""
                return f"its budget of {shown} is spent{aside}"
        return None

    def left(self, reserved: int = 0) -> int:
        """Evaluations that may still be made."""
        calls = self.budget.calls
        return 10**9 if calls is None else max(0, calls - self.calls - reserved)

    def state_dict(self) -> dict[str, Any]:
        counted = {name: getattr(self, name) for name in ("calls", "model_calls", "tokens", "money")}
        return {**counted, "seconds": self.elapsed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._since = time.monotonic()


def limits(budget: SearchBudget) -> list[tuple[float | None, str]]:
    """The limits of evaluations, tokens, money and seconds (None: there is none), each with its words."""
    given = {"evaluations": budget.calls, "tokens": budget.tokens, "in money": budget.money, "seconds": budget.seconds}
    return [(limit, f"{limit or 0:.12g} {unit}") for unit, limit in given.items()]


def price(read: float, written: float, input_price: float, output_price: float) -> float:
    """What tokens cost, by the prices of a million."""
    return (read * input_price + written * output_price) / 1e6


def detectable_gain(pairs: int) -> float:
    """The smallest mean paired difference that `pairs` pairs show in 80% of cases at a two-sided level of 5%: 2.8
    standard errors, for rewards with a standard deviation of 0.5."""
    return 1.4 * math.sqrt(2 / max(1, pairs))


def check_budget(budget: SearchBudget, smallest: int, search: str) -> None:
    """Raises ConfigError, before anything is spent, for a budget that cannot show anything."""
    if budget.calls is not None and budget.calls < smallest:
        raise ConfigError(
            f"budget.calls={budget.calls} is too small to show anything: search {search!r} needs about {smallest}"
            f" evaluations to try one edit and to validate it; use at least {smallest}, or fewer validation tasks"
        )


def announcement(budget: SearchBudget, reserved: int, held_out: int) -> str:
    """What the search is about to spend, and what that can show."""
    named = " or ".join(shown for limit, shown in limits(budget) if limit is not None) or "no limit at all"
    if budget.money and not (budget.agent_input_price or budget.agent_output_price):
        named += (
            " (the agent's calls count where gateway.providers has a price for them: budget.agent_input_price and"
            " budget.agent_output_price are not set)"
        )
    apart = detectable_gain(reserved // 2)
    aside = f" {reserved} are put aside for validation, enough to tell two finalists {apart:.2f} apart;"
    return (
        f"prompt search: at most {named};{aside if reserved > 1 else ''} the {held_out} held-out tasks, which the"
        f" search does not see, are enough to show a gain of {detectable_gain(held_out):.2f}"
    )
