"""The store of rollouts, attempts, spans and resources, through which all parts communicate."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentlightning.store.base import LightningStore, LightningStoreBase
from agentlightning.store.types import UNSET, Unset, Worker

if TYPE_CHECKING:
    from agentlightning.store.http.client import LightningStoreClient
    from agentlightning.store.memory import InMemoryLightningStore

__all__ = [
    "UNSET",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreBase",
    "LightningStoreClient",
    "Unset",
    "Worker",
]

_HOMES = {"InMemoryLightningStore": "memory", "LightningStoreClient": "http.client"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentlightning.store' has no attribute {name!r}")
    return getattr(import_module(f"agentlightning.store.{_HOMES[name]}"), name)
