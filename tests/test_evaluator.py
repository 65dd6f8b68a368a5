"""`agl.evaluate`: an agent is run on tasks, with a model or without, and its rewards are counted."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.support.scripted_policy import ScriptedPolicy

import agentlightning as agl
from agentlightning.config import RunnerConfig
from agentlightning.errors import ConfigError, DatasetError, RewardError
from agentlightning.evaluator import evaluate
from agentlightning.policy import open as opening
from agentlightning.training import agent_runner

pytestmark = pytest.mark.integration


def pry(task: str) -> float:
    """1.0 where the server that runs it lets it read what is not its own."""
    origin = os.environ["AGL_EVENT_URL"].partition("/rollout/")[0]
    return float(httpx.get(f"{origin}/v1/agl/{task}", trust_env=False).status_code != 401)


def test_an_agent_that_is_evaluated_cannot_read_the_store():
    assert evaluate(pry, ["rollouts", "spans", "resources"]).rewards == (0.0, 0.0, 0.0)


def ask(task, llm):
    """The number that the model answers."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": task}], **llm.sampling_parameters}
    reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, trust_env=False)
    return float(reply.json()["choices"][0]["message"]["content"])


def test_a_model_answers_at_the_temperature_of_the_mode(monkeypatch, tmp_path):
    policy = ScriptedPolicy(lambda messages, updates: "0.25")

    async def open_policy(config):
        return policy

    monkeypatch.setattr(opening, "open_policy", open_policy)
    monkeypatch.setattr(agent_runner, "import_module", lambda name: None)
    assert evaluate(agl.llm_rollout(ask), ["a", "b"], model=tmp_path, mode="sampled") == 0.25
    assert {params.temperature for _, params in policy.calls} == {1.0}
    assert policy.closed


def test_tiny_is_a_new_model_here_too(monkeypatch):
    policy, opened = ScriptedPolicy(lambda messages, updates: "0.5"), []

    async def open_policy(config):
        opened.append((Path(config.model) / "config.json").is_file())
        return policy

    monkeypatch.setattr(opening, "open_policy", open_policy)
    monkeypatch.setattr(agent_runner, "import_module", lambda name: None)
    assert evaluate(agl.llm_rollout(ask), ["a"], model="tiny") == 0.5
    assert opened == [True]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"mode": "best"}, "mode='best' is not one of greedy, sampled"),
        ({"limit": 0}, "limit=0 leaves no task"),
        ({"limit": -1}, "limit=-1 leaves no task"),
        ({"repeats": 0}, "repeats=0 runs nothing"),
        ({"concurrency": 0}, "concurrency=0 runs nothing"),
        ({"failed": "highest"}, "failed='highest' is not 'lowest'"),
        ({"slices": ["level"]}, "no task has a field 'level' to slice by; their fields are n"),
        ({"compare": "missing.json"}, "no evaluation can be read from missing.json"),
        ({"model": object()}, "model is a object object"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        agl.evaluate(lambda task: 1.0, [{"n": 1}], **arguments)


@pytest.mark.slow
def test_an_evaluation_without_any_reward_is_an_error_that_says_why():
    with pytest.raises(RewardError, match=r"none of 2 tasks has a reward \(2 missing reward\).*emit_reward"):
        agl.evaluate(lambda task: None, [{"n": 0}, {"n": 1}])
    with pytest.raises(
        RewardError, match=r"none of 1 tasks .*agl eval\|sft\|dpo\|export ... --reward-weights '{\"a\": 1.0}'"
    ):
        agl.evaluate(lambda task: {"a": 1.0}, [{"n": 0}])
    assert agl.evaluate(lambda task: {"a": 1.0}, [{"n": 0}], reward_weights={"a": 0.5}) == 0.5


@pytest.mark.slow
def test_rollouts_that_fail_are_part_of_the_result():
    def agent(task):
        if task["n"] < 4:
            raise ValueError("no luck")
        return 1.0

    evaluation = agl.evaluate(agent, [{"n": n} for n in range(10)], runner=RunnerConfig(max_attempts=1))
    assert (evaluation.mean, evaluation.failed) == (1.0, 4)
    assert evaluation == 0.6


def test_an_agent_without_a_model_is_measured():
    def agent(task):
        return 1.0 if task["n"] % 2 else 0.0

    evaluation = agl.evaluate(agent, [{"n": n} for n in range(4)])
    assert evaluation == 0.5
    assert evaluation.rewards == (0.0, 1.0, 0.0, 1.0)


LEVELS = [{"n": n, "level": "easy" if n < 4 else "hard"} for n in range(8)]


def count_runs(task):
    """1.0 for the even ones; fails for the ones that say so. Every run leaves a line in a file."""
    with open(task["log"], "a") as log:
        log.write(f"{task['n']}\n")
    if task.get("fails"):
        raise ValueError("no luck")
    return float(task["n"] % 2 == 0)


def logged(tmp_path, tasks):
    log = tmp_path / "runs.log"
    return log, [{**task, "log": str(log)} for task in tasks]


def test_repeats_slices_and_concurrency_arrive(tmp_path):
    log, tasks = logged(tmp_path, LEVELS)
    evaluation = agl.evaluate(count_runs, tasks, repeats=2, slices="level", concurrency=2)
    assert len(log.read_text().splitlines()) == 16
    assert (evaluation, evaluation.repeats, evaluation.cached) == (0.5, 2, 0)
    assert evaluation.pass_at_k(2) == evaluation.pass_hat_k(2) == 0.5
    assert {value: part.tasks for value, part in evaluation.slices["level"].items()} == {
        "easy": evaluation.tasks[:4],
        "hard": evaluation.tasks[4:],
    }


def test_the_limit_on_concurrency_is_kept(tmp_path):
    async def agent(task):
        import asyncio

        running = tmp_path / task["n"]
        running.touch()
        await asyncio.sleep(0.02)
        seen = len(list(tmp_path.iterdir()))
        running.unlink()
        return float(seen)

    evaluation = agl.evaluate(agent, [{"n": str(n)} for n in range(8)], concurrency=1)
    assert set(evaluation.rewards) == {1.0}


def test_an_evaluation_is_compared_with_an_earlier_one_or_its_file(tmp_path):
    tasks = [{"n": n} for n in range(20)]
    before = agl.evaluate(lambda task: 0.0, tasks)
    before.save(tmp_path / "before.json")
    after = agl.evaluate(lambda task: 1.0, tasks[::-1], compare=tmp_path / "before.json")
    assert after.beats(before)
    assert (after.comparison.gain, after.comparison.tasks) == (1.0, 20)
    with pytest.raises(DatasetError, match="none of these tasks"):
        agl.evaluate(lambda task: 1.0, [{"n": -1}], compare=before)
    with pytest.raises(DatasetError, match="has 2 tasks, and there are 1"):
        agl.evaluate(lambda task: 1.0, [{"n": 1}], compare=agl.Evaluation((1.0, 0.0)))


@pytest.mark.parametrize(("failed", "score"), [("lowest", 0.5), ("exclude", 1.0), (0.5, 0.75)])
def test_failed_rollouts_count_as_chosen(tmp_path, failed, score):
    _, tasks = logged(tmp_path, [{"n": 2 * n, "fails": n > 1} for n in range(4)])
    evaluation = agl.evaluate(count_runs, tasks, failed=failed, runner=RunnerConfig(max_attempts=1))
    assert (evaluation.score, evaluation.failed) == (score, 2)


def test_the_bounds_of_rewards_reach_the_interval():
    tasks = [{"n": n} for n in range(16)]
    evaluation = agl.evaluate(lambda task: 0.0, tasks, bounds=(0, 100))
    assert evaluation.interval[1] > 10 > agl.evaluate(lambda task: 0.0, tasks).interval[1]
    with pytest.raises(ConfigError, match=r"bounds=\(100, 0\) are not the lowest and the highest reward possible"):
        agl.evaluate(lambda task: 0.0, tasks, bounds=(100, 0))


def test_a_cache_runs_nothing_twice_and_what_failed_again(tmp_path):
    log, tasks = logged(tmp_path, [{"n": 0}, {"n": 1}, {"n": 2, "fails": True}])
    once = RunnerConfig(max_attempts=1)
    first = agl.evaluate(count_runs, tasks[:2], cache=tmp_path / "cache", runner=once)
    again = agl.evaluate(count_runs, tasks, cache=tmp_path / "cache", runner=once)
    assert (first.cached, again.cached, again.rewards) == (0, 2, (1.0, 0.0, None))
    assert sorted(log.read_text().split()) == ["0", "1", "2"]
    more = agl.evaluate(count_runs, tasks, cache=tmp_path / "cache", runner=once, repeats=2)
    assert more.cached == 2
    assert sorted(log.read_text().split()) == ["0", "0", "1", "1", "2", "2", "2"]
    other = agl.evaluate(lambda task: 0.25, tasks[:2], cache=tmp_path / "cache", runner=once)
    assert (other.cached, other) == (0, 0.25)


@pytest.mark.parametrize(("agent", "file"), [("agent.py:solve", "agent.py"), ("inner.agent:solve", "inner/agent.py")])
def test_a_cache_tells_an_agent_by_its_file_and_imports_nothing(tmp_path, monkeypatch, agent, file):
    """Not everything that an agent needs is there in the process that evaluates it."""
    (tmp_path / "inner").mkdir()
    for name in ("agent.py", "inner/__init__.py", "inner/agent.py"):
        guard = f"import os\nassert os.getpid() != {os.getpid()}\n"
        (tmp_path / name).write_text(guard + "def solve(task):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    cached = [agl.evaluate(agent, ["a"], cache="cache").cached for _ in range(2)]
    (tmp_path / file).write_text("def solve(task):\n    return 0.0\n")
    changed = agl.evaluate(agent, ["a"], cache="cache")
    assert (*cached, changed.cached, changed) == (0, 1, 0, 0.0)


def test_where_every_rollout_fails_the_error_names_the_first_failure():
    def fails(task):
        raise LookupError("no page 3")

    runner = RunnerConfig(max_attempts=1, max_failed_share=1.0)
    with pytest.raises(RewardError, match=r"(?s)no rollout has a reward \(2 failed\)\. The first one.*no page 3"):
        agl.evaluate(fails, ["a", "b"], runner=runner)


CLOSED_OVER_SETS = """
import sys
import agentlightning as agl

def make():
    known = {"first", "second", "third", "fourth"}
    def agent(task):
        return float(task in {"first", "third", "fifth", "seventh"} and task in known)
    return agent

if __name__ == "__main__":
    print(agl.evaluate(make(), ["first", "second"], cache=sys.argv[1]).cached)
"""


def test_the_order_of_sets_which_differs_between_processes_leaves_the_cache_valid(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CLOSED_OVER_SETS)
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    cached = [
        subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("1", "2", "3")
    ]
    assert [each.stdout.split() for each in cached] == [["0"], ["2"], ["2"]]


def test_what_an_agent_closes_over_tells_it_from_another(tmp_path):
    def allowing(*names):
        allowed = set(names)
        return lambda task: float(task in allowed)

    runs = [
        agl.evaluate(allowing(*names), ["a", "b"], cache=tmp_path / "cache") for names in (("a", "c"), ("c", "a"), "a")
    ]
    assert [each.cached for each in runs] == [0, 2, 0]


def test_tasks_that_were_trained_on_are_named():
    with pytest.raises(DatasetError, match=r"2 evaluation tasks are training tasks, too: rows 1 \(= 3\), 2 \(= 1\)"):
        agl.evaluate(lambda task: 1.0, [{"n": 3}, {"n": 1}, {"n": 9}], trained_on=[{"n": 1}, {"n": 2}, {"n": 3}])


def test_two_prompts_are_compared():
    def agent(task, prompt_template):
        return float("7" in prompt_template.format(task=task))

    first, second = (evaluate(agent, range(8), resources={"prompt": text}) for text in ("{task}?", "{task} of 7?"))
    assert (first.mean, second.mean) == (1 / 8, 1.0)
    assert second.beats(first)
