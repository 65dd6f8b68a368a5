"""The example of Flow-GRPO: four agents around a memory, of which the planner learns."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine

Load = Callable[[str, str], ModuleType]
HERE = Path(__file__).parents[2] / "examples" / "flow_grpo"
SHOP = {"pen": {"price": 7, "stock": 4}, "cup": {"price": 3, "stock": 9}}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("price(pen)", "7"),
        ("stock(cup)", "9"),
        ("multiply(3, 7)", "21"),
        ("add(7, 3)", "10"),
        ("price(sofa)", "no such thing"),
        ("price pen", "no such call"),
        ("divide(7, 3)", "no such call"),
        ("__import__('os')", "no such call"),
    ],
)
def test_a_tool_answers_or_says_what_is_wrong(call: str, result: str, module_of: Load) -> None:
    assert module_of("flow_grpo", "agent").use(call, SHOP) == result


def test_a_planner_that_does_what_it_should_always_earns_the_reward(module_of: Load) -> None:
    shop, agent = module_of("flow_grpo", "shop"), module_of("flow_grpo", "agent")
    kinds: Counter[str] = Counter()
    for task in shop.tasks(200, 3):
        memory: list[str] = []
        while len(memory) < agent.TURNS:
            call = shop.execute(shop.plan(task["question"], memory))
            memory.append(f"{call} = {agent.use(call, task['shop'])}")
            if shop.verify(task["question"], memory) == "stop":
                break
        assert shop.score(task, memory[-1].split(" = ")[1]) == 1, task
        kinds[str(len(memory))] += 1
    assert set(kinds) == {"1", "2", "3"}


def test_a_guess_is_not_worth_the_same(module_of: Load) -> None:
    shop = module_of("flow_grpo", "shop")
    assert shop.score({"answer": 21}, "21") == 1
    assert (
        shop.score({"answer": 21}, "12")
        == shop.score({"answer": 21}, "it is 21")
        == shop.score({"answer": 21}, "")
        == 0
    )


def test_demonstrations_have_a_habit_of_the_planner_alone(module_of: Load) -> None:
    shop, agent = module_of("flow_grpo", "shop"), module_of("flow_grpo", "agent")

    def wrong(habit: float) -> Counter[str]:
        found: Counter[str] = Counter()
        for each in shop.demonstrations(400, 0, habit):
            system, asked, answer = (message["content"] for message in each["messages"])
            name = next(name for name, prompt in agent.PROMPTS.items() if prompt == system)
            question, *memory = asked.splitlines()
            ideal = {
                "planner": lambda: shop.plan(question, memory),  # noqa: B023
                "executor": lambda: shop.execute(asked),  # noqa: B023
                "verifier": lambda: shop.verify(question, memory),  # noqa: B023
                "generator": lambda: memory[-1].split(" = ")[1],  # noqa: B023
            }[name]()
            found[name] += answer != ideal
        return found

    assert not wrong(0.0).total()
    assert wrong(0.9)["planner"] > 20
    assert wrong(0.9).total() == wrong(0.9)["planner"]


async def test_the_agent_needs_no_change_and_the_gateway_tells_the_four_apart(
    module_of: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, shop = module_of("flow_grpo", "agent"), module_of("flow_grpo", "shop")
    assert "agentlightning" not in (HERE / "agent.py").read_text()
    rng = random.Random(0)
    task = next(task for _ in range(99) if (task := shop.task(rng))["question"].startswith("cost of 2 "))

    def model(messages: list[dict[str, Any]]) -> str:
        name = next(name for name, prompt in agent.PROMPTS.items() if prompt == messages[0]["content"])
        asked = messages[-1]["content"]
        question, *memory = asked.splitlines()
        if name == "executor":
            return shop.execute(asked)
        if name == "generator":
            return memory[-1].split(" = ")[1]
        return shop.plan(question, memory) if name == "planner" else shop.verify(question, memory)

    store = InMemoryLightningStore()
    rules = {"agents": [{"name": name, "contains": prompt} for name, prompt in agent.PROMPTS.items()]}
    gateway = Gateway(
        store, {"policy": ScriptedEngine(model)}, secret="s", default_model="policy", config=GatewayConfig(**rules)
    )
    async with Server(store, gateway, secret="s") as server:
        started = await store.start_rollout(task)
        ids = started.rollout_id, started.attempt.attempt_id
        for name, value in attempt_environment(server.url, "s", *ids).items():
            monkeypatch.setenv(name, value)
        async with agent.client():
            assert shop.score(task, await agent.answer(task["question"], task["shop"])) == 1
    spans = await store.query_spans(ids[0])
    named = [each.attributes["gen_ai.agent.name"] for each in spans if "gen_ai.output.messages" in each.attributes]
    assert named == ["planner", "executor", "verifier"] * 2 + ["generator"]
    await store.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("agents", [["planner"], ["planner", "executor"]])
def test_the_chosen_agents_learn_and_the_others_stay(agents: list[str], tmp_path: Path) -> None:
    short = "train.TASKS, train.GROUP, train.HELD_OUT, train.WARM = 2, 6, 4, 40"
    program = f"import json, train; {short}; print(json.dumps(train.train(train.parse()).as_json()))"
    options = ["--agents", *agents, "--steps", "2", "--run-dir", str(tmp_path)]
    ran = subprocess.run([sys.executable, "-c", program, *options], cwd=HERE, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["steps"], result["failed_rollouts"]) == (2, 0)
    assert {each.name for each in (tmp_path / "run").rglob("adapters/*")} == set(agents)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(each["calls_frozen"] > 0 for each in steps if "calls_frozen" in each)
