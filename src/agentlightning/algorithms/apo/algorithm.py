"""APO: optimises the prompts of an agent, and other texts it is steered by, while its model stays as it is.

A critic reads rollouts that earned too little, an editor changes the texts, and a search decides which change stays:
"reflective" (the default), "gepa" or "beam"; each is described in its file. What is optimised are the run's
`PromptTemplate` resources, several at once: prompts, tool descriptions, playbooks. The result is chosen on the
validation tasks, and its gain measured by the trainer on held-out tasks, which no search sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, Self

from pydantic import BaseModel

from agentlightning.algorithms.apo.beam import BeamSearch
from agentlightning.algorithms.apo.config import APOConfig, BeamSearchConfig, PromptModel, announcement, check_budget
from agentlightning.algorithms.apo.gepa import GepaSearch
from agentlightning.algorithms.apo.reflective import ReflectiveSearch
from agentlightning.algorithms.apo.search import LanguageModel, ModelError, Search, open_model
from agentlightning.algorithms.apo.text import placeholders
from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.training import Collected, Training
from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate, prompts_in

SEARCHES: Mapping[str, type[Search]] = {"reflective": ReflectiveSearch, "gepa": GepaSearch, "beam": BeamSearch}
BEAM = tuple(BeamSearchConfig.model_fields)
"""Settings of search "beam", which Agent Lightning 0.x took as arguments of APO."""


GONE: Final = {
    "rollout_batch_timeout": "each attempt has its own limit, runner.timeout_seconds",
    "_poml_trace": "prompts of critic and editor are no POML; leave it out",
}
"""Arguments of 0.x without a place here, and why."""


def _changed(section: Any, changes: Mapping[str, Any]) -> Any:
    """A section of settings with other values. What is no section is left to the check of all settings."""
    known = section.model_dump() if isinstance(section, BaseModel) else section or {}
    return {**known, **changes} if isinstance(known, Mapping) else known


class APO(Algorithm[APOConfig]):
    """Prompt optimisation.

    `settings` are the fields of `APOConfig`; they replace those of `config`. `async_openai_client`: an
    `openai.AsyncOpenAI`, or an object like it, that calls critic and editor instead of their `base_url`.
    `gradient_model`, `apply_edit_model` and `diversity_temperature` are the models of critic and editor and the
    temperature of both, as Agent Lightning 0.x named them; its settings of the beam select search "beam" unless another
    is named. Raises ConfigError for settings that cannot work.

        >>> agl.APO(critic={"model": "gpt-5-mini"}, budget={"calls": 200}).config.search
        'reflective'
        >>> agl.APO(gradient_model="gpt-5-mini", beam_width=2).config.search
        'beam'
    """

    name = "apo"
    config_class = APOConfig
    learns_weights = False
    selects_result = True

    def __init__(
        self,
        async_openai_client: Any = None,
        config: APOConfig | None = None,
        *,
        gradient_model: str | None = None,
        apply_edit_model: str | None = None,
        diversity_temperature: float | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(async_openai_client, APOConfig):
            async_openai_client, config = None, async_openai_client
        given: dict[str, Any] = dict(settings)
        for name in given.keys() & GONE.keys():
            raise ConfigError(f"{name} is no setting here: {GONE[name]}")
        for part, model in (("critic", gradient_model), ("editor", apply_edit_model)):
            own: Any = given.get(part, getattr(config, part, None))
            changes: dict[str, Any] = {} if model is None else {"model": model}
            if diversity_temperature is not None and (part == "critic" or changes or own is not None):
                changes["temperature"] = diversity_temperature
            if changes:
                given[part] = _changed(own, changes)
        if beam := {name: given.pop(name) for name in BEAM if name in given}:
            given = {"search": "beam", **given, "beam": _changed(given.get("beam"), beam)}
        super().__init__(config, **given)
        self.client = async_openai_client
        self._search: Search | None = None
        self._learned: Mapping[str, Any] = {}
        self.on_favourite: Callable[[Mapping[str, str], int], object] | None = None
        """Called with the texts, by name, that would be the result if the search ended now, and the evaluations so far,
        whenever they may have changed."""

    def __class_getitem__(cls, task: Any) -> type[Self]:
        """`APO[Task]`, for annotations."""
        return cls

    @property
    def total_steps(self) -> int:
        return self.config.rounds

    @property
    def restorable(self) -> bool:
        return super().restorable and self.client is None

    def state_dict(self) -> Mapping[str, Any]:
        return self._learned if self._search is None else self._search.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._learned = state

    def get_best_prompt(self) -> PromptTemplate:
        """The first template of the result, as Agent Lightning 0.x gave it. Raises ConfigError before a run."""
        if self._search is None:
            raise ConfigError(
                "no prompt was optimised yet; run the algorithm: Trainer(algorithm=...).fit(agent, tasks)"
            )
        return next(iter(self._search.templates(self._search.favourite).values()))

    @property
    def _models(self) -> dict[str, PromptModel]:
        """Critic and editor, where it is another; gepa has its critic write."""
        config = self.config
        editor = {} if config.editor is None or config.search == "gepa" else {"editor": config.editor}
        return {"critic": config.critic, **editor}

    async def prepare(self, training: Training) -> Mapping[str, str]:
        """A short call of critic and editor, where they are behind an endpoint, shows that it knows model and key."""
        start = self._templates(training)
        found = {"templates": f"the search changes {', '.join(start)}"}
        search = self._make_search(training, start, {})
        if not self._learned:
            check_budget(self.config.budget, search.smallest_budget, self.config.search)
        async with AsyncExitStack() as stack:
            for part, settings in self._models.items():
                if settings.path is not None:  # It takes time and memory to open.
                    continue
                model = await open_model(settings, self.client, stack, part)
                if self.client is not None:
                    continue
                try:
                    await model.complete([{"role": "user", "content": "Reply with the word ready."}])
                except ModelError as error:  # It may be better later; a search skips such replies.
                    training.note(f"{part}: {error}")
                else:
                    found[part] = f"{settings.model} answers"
        return found

    async def run(self, training: Training) -> None:
        start = self._templates(training)
        async with AsyncExitStack() as stack:
            models = {
                part: await open_model(settings, self.client, stack, part) for part, settings in self._models.items()
            }
            search = self._make_search(training, start, models)
            if self._learned:
                search.load_state_dict(self._learned)
            else:
                training.note(announcement(self.config.budget, search.reserved, training.held_out_tasks))
            self._search = search
            while search.ended is None and training.step < self.total_steps:
                await search.step()
                if search.ended is None and training.step + 1 >= self.total_steps:
                    await search.end(f"its {self.total_steps} rounds are done", budget=True)
                await self._finish_step(training, search)
            self._report(training, search)

    def _make_search(
        self, training: Training, start: Mapping[str, PromptTemplate], models: Mapping[str, LanguageModel]
    ) -> Search:
        search = SEARCHES[self.config.search](self.config, start, training, models)
        search.on_favourite = self.on_favourite
        return search

    async def _finish_step(self, training: Training, search: Search) -> None:
        await training.publish(dict(search.templates(search.favourite)))
        spent = search.spending
        counts = {f"apo_{name}": float(count) for name, count in {**search.counts, **search.skips}.items()}
        metrics = {"apo_evaluations": spent.calls, "apo_model_calls": spent.model_calls, "apo_tokens": spent.tokens}
        await training.finish_step(Collected(()), {**metrics, "apo_money": spent.money, **counts})

    def _report(self, training: Training, search: Search) -> None:
        """Say why the search ended, and what of critic and editor could not be used."""
        text = f"the search ended because {search.ended or 'all rounds are done'}"
        if search.ended_for_budget:
            training.warn(
                "apo_budget",
                f"{text}; more might be found: resume it with a larger algorithm.budget, or algorithm.rounds",
            )
        else:
            training.note(text)
        for reason, count in search.skips.items():
            first = f"; the first: {search.first[reason]}" if reason in search.first else ""
            shown = reason.replace("_", " ")
            training.warn(f"apo_{reason}", f"{count} replies of critic and editor could not be used ({shown}){first}")

    def _templates(self, training: Training) -> dict[str, PromptTemplate]:
        """The templates to optimise. Raises ConfigError where there are none, or an engine cannot read one."""
        found = prompts_in(training.resources)
        names = self.config.resources or tuple(found)
        missing = [name for name in (*names, *self.config.playbooks) if name not in found]
        if missing or not names:
            there = ", ".join(found) or "none"
            asked = f"no prompt template is called {', '.join(missing)}" if missing else "there is no prompt template"
            raise ConfigError(
                f"{asked}; the run was given {there}. Give them as initial_resources={{'prompt': PromptTemplate(...)}},"
                " or in the settings as prompts.NAME"
            )
        for name in names:
            try:
                placeholders(found[name])
            except ValueError as error:
                raise ConfigError(f"the prompt template {name!r} cannot be read: {error}") from error
        return {name: found[name] for name in names}
