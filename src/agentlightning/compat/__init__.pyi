"""The names of 0.x, as editors and type checkers see them; `__init__.py` loads them when they are used."""

from agentlightning.compat.adapters import TracerTraceToTriplet as TracerTraceToTriplet
from agentlightning.compat.adapters import TraceToMessages as TraceToMessages
from agentlightning.compat.adapters import Triplet as Triplet
from agentlightning.compat.algorithm import FunctionalAlgorithm as FunctionalAlgorithm
from agentlightning.compat.algorithm import algo as algo
from agentlightning.compat.logging import setup_logging as setup_logging
from agentlightning.compat.runner import AgentOpsTracer as AgentOpsTracer
from agentlightning.compat.runner import Hook as Hook
from agentlightning.compat.runner import LitAgentRunner as LitAgentRunner
from agentlightning.compat.runner import OtelTracer as OtelTracer
from agentlightning.compat.store_server import LightningStoreServer as LightningStoreServer
from agentlightning.resources import ProxyLLM as ProxyLLM
from agentlightning.resources import ResourcesUpdate as ResourcesUpdate
from agentlightning.rollouts import AttemptedRollout as AttemptedRollout
from agentlightning.rollouts import EnqueueRolloutRequest as EnqueueRolloutRequest
from agentlightning.rollouts import RolloutConfig as RolloutConfig
from agentlightning.runner.agents.litagent import FunctionAgent as FunctionAgent
from agentlightning.span import SpanEvent as SpanEvent
from agentlightning.store.types import Worker as Worker
from agentlightning.tracing.rewards import find_reward_spans as find_reward_spans
from agentlightning.tracing.rewards import get_reward_value as get_reward_value
