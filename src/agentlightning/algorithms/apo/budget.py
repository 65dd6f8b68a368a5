"""The budget of a search: announced before it begins, kept while it runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from agentlightning.algorithms.apo.config import PromptModel, SearchBudget
from agentlightning.errors import ConfigError


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

    def count_evaluation(self, tokens: int, money: float) -> None:
        self.calls += 1
        self.tokens += tokens
        self.money += money

    def count_model(self, model: PromptModel, input_tokens: int, output_tokens: int) -> None:
        self.model_calls += 1
        self.tokens += input_tokens + output_tokens
        self.money += price(input_tokens, output_tokens, model.input_price, model.output_price)

    @property
    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._since

    def exhausted(self, reserved: int = 0) -> str | None:
        """The limit that is reached, in words. `reserved`: evaluations that are put aside."""
        budget = self.budget
        if budget.calls is not None and self.calls + reserved >= budget.calls:
            aside = f", {reserved} of them for validation" if reserved else ""
            return f"its budget of {budget.calls} evaluations is spent{aside}"
        if budget.tokens is not None and self.tokens >= budget.tokens:
            return f"its budget of {budget.tokens} tokens is spent"
        if budget.money is not None and self.money >= budget.money:
            return f"its budget of {budget.money:g} (money) is spent"
        if budget.seconds is not None and self.elapsed >= budget.seconds:
            return f"its budget of {budget.seconds:g} seconds is spent"
        return None

    def left(self, reserved: int = 0) -> int:
        """Evaluations that may still be made."""
        calls = self.budget.calls
        return 10**9 if calls is None else max(0, calls - self.calls - reserved)

    def state_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "model_calls": self.model_calls,
            "tokens": self.tokens,
            "money": self.money,
            "seconds": self.elapsed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._since = time.monotonic()


def price(read: float, written: float, input_price: float, output_price: float) -> float:
    """What tokens cost, by the prices of a million."""
    return (read * input_price + written * output_price) / 1e6


def detectable_gain(pairs: int, spread: float = 0.5) -> float:
    """The smallest mean paired difference that `pairs` pairs show in 80% of cases at a two-sided level of 5%: 2.8
    standard errors, for differences with a standard deviation of `spread` times sqrt(2)."""
    return 2.8 * spread * math.sqrt(2 / max(1, pairs))


def check_budget(budget: SearchBudget, smallest: int, search: str) -> None:
    """Raises ConfigError, before anything is spent, for a budget that cannot show anything."""
    if budget.calls is not None and budget.calls < smallest:
        raise ConfigError(
            f"budget.calls={budget.calls} is too small to show anything: search {search!r} needs about {smallest}"
            f" evaluations to try one edit and to validate it; use at least {smallest}, or fewer validation tasks"
        )


def announcement(budget: SearchBudget, reserved: int, held_out: int) -> str:
    """What the search is about to spend, and what that can show."""
    limits = {
        f"{budget.calls} evaluations": budget.calls is not None,
        f"{budget.tokens} tokens": budget.tokens is not None,
        f"{budget.money:g} in money" if budget.money else "": budget.money is not None,
        f"{budget.seconds:g} seconds" if budget.seconds else "": budget.seconds is not None,
    }
    named = " or ".join(text for text, given in limits.items() if given) or "no limit at all"
    if budget.money and not (budget.agent_input_price or budget.agent_output_price):
        named += (
            " (the agent's calls count where gateway.providers has a price for them: budget.agent_input_price and"
            " budget.agent_output_price are not set)"
        )
    pairs = reserved // 2
    aside = (
        f" {reserved} are put aside for validation, enough to tell two finalists {detectable_gain(pairs):.2f} apart;"
    )
    return (
        f"prompt search: at most {named};{aside if pairs else ''} the {held_out} held-out tasks, which the search does"
        f" not see, are enough to show a gain of {detectable_gain(held_out):.2f}"
    )
