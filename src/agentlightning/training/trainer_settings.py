"""The configuration of a run, from the arguments of a trainer: settings, an algorithm object, a directory to resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from agentlightning.algorithms.apo.config import APOConfig
from agentlightning.algorithms.base import ALGORITHMS, Algorithm, class_name, make_algorithm
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.algorithms.sequential import SequentialConfig
from agentlightning.config import RunConfig, RunnerConfig, TrainConfig
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.open import check_model
from agentlightning.resources import NamedResources, PromptTemplate, prompts_in
from agentlightning.util.settings import chosen, settings_from


def with_arguments(
    config: TrainConfig,
    algorithm: Algorithm[Any] | None,
    model: str | Path | None = None,
    n_runners: int | None = None,
    seed: int | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainConfig:
    """The configuration with the arguments of a trainer in it. Raises ConfigError where they do not go together."""
    changes: dict[str, Any] = {}
    settings = getattr(algorithm, "config", None)
    if algorithm is not None and (algorithm.restorable or getattr(settings, "type", "") in ALGORITHMS):
        changes["algorithm"] = settings
    model = _model_of(model, algorithm)
    if model is not None:
        changes["policy"] = settings_from(PolicyConfig, {"model": str(model)}, base=config.policy)
    if n_runners is not None:
        values = {"hosts": n_runners}
        changes["runner"] = settings_from(RunnerConfig, values, base=config.runner, source="given as n_runners")
    run: dict[str, Any] = {} if seed is None else {"seed": seed}
    if callbacks:
        run["callbacks"] = (*config.run.callbacks, *callbacks)
    if run:
        changes["run"] = settings_from(RunConfig, run, base=config.run, source="given to Trainer")
    found = config.model_copy(update=changes)
    run_by = algorithm or make_algorithm(found.algorithm)
    for stage in getattr(run_by, "stages", (run_by,)):
        found = with_lora(found, getattr(stage, "config", None))
    if run_by.selects_result and not run_by.learns_weights and "modes" not in found.evaluation.model_fields_set:
        # Without a policy there is no temperature to set: both modes would measure the same twice.
        once = found.evaluation.model_copy(update={"modes": ("sampled",)})
        found = found.model_copy(update={"evaluation": once})
    found.check_sections()
    return found


def with_lora(config: TrainConfig, settings: object) -> TrainConfig:
    """The configuration with the adapter that settings of an algorithm ask for."""
    lora, policy = getattr(settings, "lora", None), config.policy
    if lora is None:
        return config
    if policy.lora not in (None, lora):
        raise ConfigError("lora was given to the algorithm and, another one, as policy.lora; give one of them")
    return config.model_copy(update={"policy": policy.model_copy(update={"lora": lora})})


def check_prices(algorithm: Algorithm[Any], config: TrainConfig) -> None:
    """Raises ConfigError for a prompt search with a budget in money, of whose calls none has a price."""
    gateway = config.gateway
    if any(each.price for each in (*gateway.providers, *gateway.routes)):
        return
    for stage in getattr(algorithm, "stages", (algorithm,)):
        settings = getattr(stage, "config", None)
        if isinstance(settings, APOConfig) and settings.budget.money and not settings.has_prices:
            raise ConfigError(
                f"budget.money={settings.budget.money:g} limits nothing, as no call has a price: set input_price and"
                " output_price of the critic (and the editor), and agent_input_price and agent_output_price of the"
                " budget, or the price of a provider ([[gateway.providers]])"
            )


def split_prompts(resources: NamedResources) -> tuple[dict[str, PromptTemplate], NamedResources]:
    """The prompt templates among resources, which the configuration keeps, and the others."""
    prompts = prompts_in(resources)
    return prompts, {name: each for name, each in resources.items() if name not in prompts}


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The same configuration, so that a run can be resumed from any directory. Raises ConfigError where its model
    servers cannot be had."""
    servers = config.policy.servers.with_absolute_paths()
    if config.policy.engine != "local":
        servers.check(config.policy.engine)
    changes: dict[str, Any] = {
        "runner": config.runner.model_copy(update={"cwd": str(Path(config.runner.cwd or ".").resolve())}),
        "policy": _absolute(config.policy, "model").model_copy(update={"servers": servers}),
        "algorithm": _with_absolute_models(config.algorithm),
        "data": _absolute(config.data, "sessions"),
        "gate": config.gate and _absolute(config.gate, "tasks"),
        "warm_start": _absolute(config.warm_start, "dataset"),
    }
    return config.model_copy(update=changes)


C = TypeVar("C", bound=BaseModel)


def _with_absolute_models(settings: C) -> C:
    """The settings of an algorithm, and of its stages."""
    if isinstance(settings, SequentialConfig):
        return settings.model_copy(update={"stages": tuple(map(_with_absolute_models, settings.stages))})
    found = _absolute(settings, "reference", "teacher", "dataset", "validation", "data")
    output = getattr(settings, "output", None)
    return found.model_copy(update={"output": str(Path(output).resolve())} if output else {})


def _absolute(section: C, *names: str) -> C:
    """A section of settings whose paths, where there is something, are absolute."""
    given = {name: path for name in names if (path := getattr(section, name, None)) and Path(path).exists()}
    return section.model_copy(update={name: str(Path(path).resolve()) for name, path in given.items()})


def check_algorithm(algorithm: object) -> Algorithm[Any]:
    """An algorithm, or that of a class or a name. Raises ConfigError for anything else."""
    if isinstance(algorithm, Algorithm):
        return algorithm  # pyright: ignore[reportUnknownVariableType]
    return make_algorithm(chosen(algorithm, ALGORITHMS))


def algorithm_to_record(algorithm: Algorithm[Any] | None) -> str | None:
    """`module:Class` of an algorithm object that the configuration cannot bring back; None where it can."""
    return None if algorithm is None or algorithm.restorable else class_name(algorithm)


def algorithm_of_run(
    given: Algorithm[Any] | None, config: TrainConfig, recorded: str | None, run_dir: Path
) -> Algorithm[Any]:
    """The given object, or the algorithm that the configuration names. Raises ResumeError where a resumed run had
    another one, which its directory cannot bring back."""
    if given is None and recorded is None:
        return make_algorithm(config.algorithm)
    name = None if given is None else class_name(given)
    if given is None or name != (recorded or class_name(make_algorithm(config.algorithm))):
        raise ResumeError(
            f"{run_dir} is trained by {recorded or 'an algorithm made from its settings'}, not by"
            f" {name or 'one made from settings'}; give it the algorithm it had:"
            f" Trainer.resume({str(run_dir)!r}, algorithm=...)"
        )
    return given


def trained_agents(agent: Any) -> str | None:
    """The agents to train, where the agent is an object that declares them."""
    target = getattr(agent, "trained_agents", None)
    return settings_from(LightningRLConfig, {"target_agent": target}, source="trained_agents of the agent").target_agent


def _model_of(model: object, algorithm: Algorithm[Any] | None) -> str | Path | None:
    """The model to train, named by the trainer's argument or by the algorithm."""
    own = None if algorithm is None else algorithm.model
    for given in (model, own):
        if given is not None:
            check_model(given)
    if model is not None and own is not None and str(model) != str(own):
        raise ConfigError(f"model={str(model)!r} was given to the trainer and {str(own)!r} to the algorithm; give one")
    found = model if model is not None else own
    return found if isinstance(found, str | Path) else None
