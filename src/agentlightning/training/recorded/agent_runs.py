"""Runs an agent on tasks while a policy of this process answers its calls: to measure it, or to record sessions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from agentlightning.algorithms.training import Collected
from agentlightning.config import RunnerConfig
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.policy.base import Policy
from agentlightning.resources import LLM
from agentlightning.server.serve import serve
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.agent_runner import credentials, load_agent, make_runner, rollout_config
from agentlightning.training.evaluate_tasks import TEMPERATURES, evaluate_tasks
from agentlightning.training.sources.collector import EVALUATION_ADVICE, RolloutCollector, RolloutPlan
from agentlightning.training.sources.reader import TrajectoryReader

Mode = Literal["greedy", "sampled"]


@dataclass(slots=True)
class AgentRuns:
    """An agent whose runners wait for tasks."""

    collector: RolloutCollector
    url: str
    policy: Policy
    max_calls: int | None = None
    """Answers of the policy that a rollout may be given."""
    _measured: int = field(default=0, init=False)

    async def _resources(self, temperature: float) -> str:
        sampling = {"temperature": temperature}
        llm = LLM(endpoint=self.url, model=self.policy.model, sampling_parameters=sampling, max_calls=self.max_calls)
        return (await self.collector.store.add_resources({"llm": llm})).resources_id

    async def measure(self, tasks: Sequence[Any], mode: Mode) -> Evaluation:
        """The reward of each task under the present weights, one rollout each."""
        self._measured += 1
        resources_id = await self._resources(TEMPERATURES[mode])
        name = f"measurement-{self._measured}"
        return await evaluate_tasks(self.collector, tasks, name=name, resources_id=resources_id, require_reward=True)

    async def record(self, tasks: Sequence[Any], sessions: int) -> Collected:
        """`sessions` rollouts of each task at temperature 1, kept in the store."""
        plans = [
            RolloutPlan(f"session-{index:05d}-{number}", task, f"task-{index:05d}")
            for index, task in enumerate(tasks)
            for number in range(sessions)
        ]
        return await self.collector.collect(plans, resources_id=await self._resources(1.0), max_rejected_share=1.0)


@asynccontextmanager
async def agent_runs(
    policy: Policy, store: LightningStoreBase, agent: Any, reward: Any | None, config: RunnerConfig
) -> AsyncGenerator[AgentRuns]:
    """Starts the agent's runners and a server of the policy, and stops them."""
    token, secret = credentials()
    async with AsyncExitStack() as stack:
        runner = make_runner(config, store, agent, reward, secret)
        listener = await load_agent(runner, stack, policy=True)
        serving = serve(store, {policy.model: policy}, secret=secret, token=token, listener=listener)
        server = await stack.enter_async_context(serving)
        await runner.start(server.url)
        stack.push_async_callback(runner.stop)
        reader = TrajectoryReader(store, policy.model)
        collector = RolloutCollector(
            reader,
            rollout_config(config),
            max_failed_share=config.max_failed_share,
            advice=EVALUATION_ADVICE,
        )
        yield AgentRuns(collector, server.url, policy, config.max_calls)
