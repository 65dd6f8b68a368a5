"""Opens policies from their settings: the one that is trained, and models that are only served."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from agentlightning.engine.base import Engine
from agentlightning.engine.servers.config import ServedModel
from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.models.resolve import TINY
from agentlightning.policy.base import Policy
from agentlightning.policy.config import (
    BACKENDS,
    AgentSetting,
    LocalPolicyConfig,
    ModelSettings,
    Objective,
    OptimizerConfig,
    PolicyConfig,
    check_servable,
)
from agentlightning.util.plugins import calls_of
from agentlightning.util.settings import settings_from

TINY_CONTEXT = 4096
"""Tokens that a model named `tiny` has room for. Its tokens are bytes, and few answers end by themselves."""


async def directory_of(model: str, stack: AsyncExitStack) -> str:
    """The model, or for `tiny` the directory of a new one with random weights, which the stack removes: it answers
    calls with nonsense, to try an agent where there is no model."""
    if model != TINY:
        return model
    from agentlightning.models.tiny import make_tiny

    require_training()
    directory = stack.enter_context(TemporaryDirectory(prefix="agl-tiny-"))
    return str(await asyncio.to_thread(make_tiny, directory, (), context_length=TINY_CONTEXT))


PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def require_training() -> None:
    """Raises MissingExtraError if a package for sampling or training is not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, "train")


def follow_trainer(settings: ModelSettings) -> None:
    """Where torchrun has started this process as another rank than the first: train with that until it ends, and end
    this process."""
    if settings.kind == "fsdp" and os.environ.get("RANK", "0") != "0":
        from agentlightning.policy.fsdp.policy import follow

        follow(settings)


def check_trainable(model: object) -> None:
    """Raises ConfigError for anything but a path, a policy, a transformers model, or a pair of model and tokenizer."""
    if model is None or isinstance(model, str | PathLike) or hasattr(model, "chat"):
        return
    if isinstance(model, tuple):
        pair = cast("tuple[object, ...]", model)
        if len(pair) == 2 and hasattr(pair[0], "save_pretrained") and hasattr(pair[1], "apply_chat_template"):
            return
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise ConfigError(f"model=({kinds}) is no pair of a model and its tokenizer; give (model, tokenizer)")
    if not hasattr(model, "save_pretrained") or not hasattr(model, "parameters"):
        raise ConfigError(
            f"model is a {type(model).__name__} object; give a directory (save_pretrained writes one), a transformers"
            " model, or (model, tokenizer)"
        )


def check_model(model: object) -> None:
    """Raises ConfigError for anything but the name of a model."""
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model is a {type(model).__name__} object, and it is opened here by its name; give the directory of one"
            " that transformers loads (save_pretrained writes it), a GGUF file, or its hub name"
        )


def policy_config(
    settings: PolicyConfig,
    path: str,
    *,
    optimizer: OptimizerConfig | None = None,
    steps: int = 1,
    objective: Objective = "reinforcement",
    seed: int = 0,
    agents: Mapping[str, AgentSetting] | None = None,
) -> LocalPolicyConfig:
    """The configuration of a local policy for `steps` optimiser steps. Raises MissingExtraError, and ConfigError for
    adapters that servers cannot take, and for a warmup that is longer."""
    require_training()
    shared: dict[str, Any] = {name: getattr(settings, name) for name in ModelSettings.model_fields} | {"model": path}
    config = LocalPolicyConfig(
        **shared,
        seed=seed,
        agents=dict(agents or {}),
        served=settings.engine != "local",
        optimizer=settings_from(OptimizerConfig, {"total_steps": steps}, base=optimizer),
        objective=objective,
    )
    if settings.engine != "local":
        check_servable(config.adapters, settings.servers, settings.engine)
    if settings.kind == "tinker":  # Its server computes.
        return config
    from agentlightning.policy.model_loading import with_resources

    return with_resources(config, settings.dtype, settings.threads)


async def open_policy(config: LocalPolicyConfig) -> Policy:
    """Raises PolicyError for a model that cannot be loaded."""
    if config.kind == "fsdp":
        from agentlightning.policy.fsdp.policy import FsdpPolicy as Opened
    else:
        from agentlightning.policy.local import LocalPolicy as Opened

    return await asyncio.to_thread(Opened.open, config)


async def open_trained(settings: PolicyConfig, config: LocalPolicyConfig) -> Policy:
    """The policy that a run trains, as its `kind` says. Raises as `open_policy`, `Registry.find` and its `open`."""
    if settings.kind in ("local", "fsdp"):
        return await open_policy(config)
    backend = BACKENDS.find(settings.kind)
    with calls_of(backend, "backend"):
        return await backend.open(config, settings.tinker if settings.kind == "tinker" else settings.backend)


async def with_servers(policy: Policy, settings: PolicyConfig, folder: Path, dtype: str) -> Policy:
    """The policy, whose weights have this dtype, sampled from as the settings say; it owns `policy`. Servers started
    here write to `folder`. Raises as `ServedPolicy.open`."""
    if settings.engine == "local":
        return policy
    from agentlightning.policy.served import ServedPolicy

    try:
        return await ServedPolicy.open(policy, settings.servers, folder, kind=settings.engine, dtype=dtype)
    except BaseException:
        await policy.close()
        raise


async def open_frozen(name: str, path: str) -> Policy:
    """A model to serve and not to train. Raises PolicyError where there is none."""
    config = policy_config(PolicyConfig(), path)
    return await open_policy(config.model_copy(update={"name": name}))


async def open_models(
    models: Mapping[str, str | ServedModel], stack: AsyncExitStack, logs: Path = Path()
) -> dict[str, Engine]:
    """Models to serve and not to train, by name; the stack closes them. Servers write to files in `logs`."""
    opened: dict[str, Engine] = {}
    for name, given in models.items():
        if isinstance(given, str):
            policy = await open_frozen(name, given)
            stack.push_async_callback(policy.close)
            opened[name] = policy
        else:
            from agentlightning.engine.servers.pool import open_served_model

            opened |= await open_served_model(given, name, stack, logs / f"servers-{name}")
    return opened
