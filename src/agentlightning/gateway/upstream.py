"""Which engine serves a model name."""

from __future__ import annotations

from collections.abc import Mapping

from agentlightning.errors import ConfigError
from agentlightning.gateway.problems import Problem, bad
from agentlightning.policy.base import Engine


class Upstream:
    """Model names and their engines.

    `default_model` serves requests that name no model and, with `accept_any_model`, those that name an unknown one;
    a single engine is its own default. Raises ConfigError where the default is not among the engines.
    """

    def __init__(
        self, engines: Mapping[str, Engine], default_model: str | None = None, accept_any_model: bool = False
    ) -> None:
        if default_model is not None and default_model not in engines:
            raise ConfigError(f"default_model={default_model!r} is not served; use one of {', '.join(sorted(engines))}")
        if default_model is None and len(engines) == 1:
            default_model = next(iter(engines))
        if accept_any_model and default_model is None:
            raise ConfigError("accept_any_model=True needs a default_model to serve unknown names")
        self._engines = dict(engines)
        self._default = default_model
        self._accept_any = accept_any_model

    @property
    def models(self) -> list[str]:
        return list(self._engines)

    def resolve(self, model: str | None) -> tuple[str, Engine]:
        """(the name it is served under, the engine). Raises Problem 400 without a name, 404 for an unknown one."""
        if model in self._engines:
            return model, self._engines[model]
        if self._default is not None and (self._accept_any or model is None):
            return self._default, self._engines[self._default]
        known = ", ".join(sorted(self._engines)) or "none, start the server with one: agl serve --model DIR"
        if model is None:
            raise bad("model", f"the request names no model; this server has: {known}")
        raise Problem(
            404, f"the model {model!r} is not served here; known: {known}", code="model_not_found", param="model"
        )
