"""Prompt optimisation through the doors that users have: Trainer, agl train, resume."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import httpx
import pytest
from tests.support.prompt_worlds import START, PromptWorld, PromptWorldServer, grade, report_tasks

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.util.progress import Progress

pytestmark = pytest.mark.integration

AGENT = (
    f"""
import json, os, re, urllib.request

{inspect.getsource(grade)}
"""
    + """

def ask(prompt):
    body = json.dumps({"model": "follower", "messages": [{"role": "user", "content": prompt}]}).encode()
    request = urllib.request.Request(os.environ["WORLD"] + "/chat/completions", body,
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]

def agent(task, resources):
    return ask(resources["prompt"].format(**task))

def reward(output):
    return grade(output)
"""
)


def write_report(task, resources):
    prompt = resources["prompt"].format(**task)
    body = json.dumps({"model": "follower", "messages": [{"role": "user", "content": prompt}]}).encode()
    request = urllib.request.Request(f"{os.environ['WORLD']}/chat/completions", body)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def reward(output):
    return grade(output)


@pytest.fixture
def server(monkeypatch):
    with PromptWorldServer(PromptWorld(0)) as running:
        monkeypatch.setenv("WORLD", running.url)
        yield running


def trainer(server, run_dir, *, prompts=None, **settings) -> agl.Trainer:
    models = {part: {"model": part, "base_url": server.url} for part in ("critic", "editor")}
    return agl.Trainer(
        algorithm=agl.APO(**{**models, "budget": {"calls": 120}, **settings}),
        initial_resources=prompts or {"prompt": agl.PromptTemplate(template=START)},
        reward=reward,
        run_dir=run_dir,
        progress=Progress(),
    )


def fit(made: agl.Trainer, train: int = 60, validation: int = 20, held_out: int = 40) -> agl.TrainingResult:
    return made.fit(
        write_report, report_tasks(train), report_tasks(validation, 1000), held_out_dataset=report_tasks(held_out, 2000)
    )


def test_the_result_has_the_prompt_its_diff_and_a_certified_gain(server, tmp_path, capfd):
    result = fit(trainer(server, tmp_path / "run"))
    gain = result.held_out["sampled"]
    assert list(result.held_out) == ["sampled"], "without a policy both modes are the same"
    assert gain.interval[0] > 0
    assert gain.tasks == 40
    assert result.best_prompt.template != START
    assert "+- " in result.diff()
    assert "-Write report" not in result.diff()
    assert result.as_json()["prompts"]["prompt"] == result.best_prompt.template
    assert json.loads((result.checkpoint / "resources.json").read_text())["prompt"]["template"] in (
        result.best_prompt.template
    )
    assert any("budget of 120 evaluations" in warning for warning in result.warnings)
    said = capfd.readouterr().err
    assert "at most 120 evaluations" in said
    assert "enough to show a gain of" in said
    assert server.calls["follower"] <= 120 + 2 * 40


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"critic": {"model": "nobody"}}, "answered 404.*set its model and base_url"),
        ({"editor": {"model": "nobody"}}, "answered 404.*set its model and base_url"),
        ({"resources": ("promt",)}, "no prompt template is called promt; the run was given prompt"),
        ({"budget": {"money": 5.0}}, "budget.money=5 limits nothing, as no call has a price"),
        ({"search": "gepa"}, "gepa is not installed"),
        ({"budget": {"calls": 3}}, "too small to show anything"),
    ],
)
def test_a_search_that_cannot_work_ends_before_a_rollout_is_paid_for(
    settings, complaint, server, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "gepa", None)
    for part in settings.keys() & {"critic", "editor"}:
        settings = settings | {part: settings[part] | {"base_url": server.url}}
    made = trainer(server, tmp_path / "run", **settings)
    for attempt in (made.dry_run, made.fit):
        with pytest.raises(ConfigError, match=complaint):
            attempt(write_report, report_tasks(20), report_tasks(8, 1000), held_out_dataset=report_tasks(8, 2000))
    assert server.calls["follower"] == 0
    assert not (tmp_path / "run").exists(), "it may be started again there"


def test_the_prices_of_any_call_are_enough_for_a_budget_in_money(server, tmp_path):
    budget = {"calls": 60, "money": 1.0, "agent_output_price": 1.0}
    assert fit(trainer(server, tmp_path / "run", budget=budget), 20, 8, 8).steps > 0


def test_a_dry_run_asks_critic_and_editor_and_judges_no_model_that_is_not_there(server, tmp_path):
    def hopeless(task, prompt_template):
        return 0.0

    def broken(task, resources):
        return resources["promt"]

    made, tasks = trainer(server, tmp_path / "run"), report_tasks(20)
    found = {each.name: each for each in made.dry_run(hopeless, tasks).checks}
    texts = [found[name].text for name in ("templates", "critic", "editor")]
    assert texts == ["the search changes prompt", "critic answers", "editor answers"]
    assert "all 8 rewards are 0. The first output" in found["reward"].text
    assert "random weights" not in found["reward"].advice
    assert found["calls"].outcome == "warning"
    failed = {each.name: each for each in made.dry_run(broken, tasks).checks}
    assert "this rollout has prompt" in failed["rollouts"].text
    assert "calls" not in failed, "an agent that failed before it called says nothing of the address"


def test_a_critic_that_is_away_for_the_moment_stops_nothing(server, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("agentlightning.algorithms.apo.search.BACKOFF_SECONDS", 0.01)
    server.models["critic"] = lambda text: 1 / 0
    made = trainer(server, tmp_path / "run")
    assert "critic" not in {each.name for each in made.dry_run(write_report, report_tasks(20)).checks}
    assert "critic: critic gave no reply" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_is_resumed_with_a_larger_budget_and_buys_nothing_again(server, tmp_path):
    first = fit(trainer(server, tmp_path / "run"))
    assert server.calls["follower"] <= 120 + 2 * 40
    resumed = agl.Trainer.resume(tmp_path / "run", reward=reward, changes={"algorithm.budget.calls": 200})
    result = resumed.fit(write_report)
    assert result.start_prompts["prompt"].template == START
    assert result.steps > first.steps
    assert server.calls["follower"] <= 200 + 3 * 40, "the start, the first result and the second were measured"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["apo_evaluations"] for line in lines]
    assert evaluations == sorted(evaluations)
    assert 120 < evaluations[-1] <= 200


@pytest.mark.slow
def test_an_interrupted_search_goes_on_where_it_was(server, tmp_path):
    class Crash(Exception):
        pass

    def crash(texts, evaluations):
        if evaluations > 50:
            raise Crash

    made = trainer(server, tmp_path / "run")
    made.algorithm.on_favourite = crash
    with pytest.raises(Crash):
        fit(made)
    spent = server.calls["follower"]
    result = agl.Trainer.resume(tmp_path / "run", reward=reward).fit(write_report)
    assert server.calls["follower"] - spent <= 120 - 40 + 40, "it began again"
    assert result.held_out["sampled"].interval[0] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))


@pytest.mark.slow
def test_several_texts_are_optimised_and_others_stay(server, tmp_path):
    prompts = {
        "prompt": agl.PromptTemplate(template=START),
        "skill": agl.PromptTemplate(template="- Be kind.", engine="plain"),
        "other": agl.PromptTemplate(template="untouched"),
    }
    server.models["editor"] = lambda text: json.dumps(
        {"edits": [{"op": "add", "resource": "skill", "text": "- Be quick."}]}
    )
    seen = []
    server.models["critic"] = lambda text: seen.append(text) or "Be quick next time."
    made = trainer(server, tmp_path / "run", prompts=prompts, resources=["prompt", "skill"], playbooks=["skill"])
    result = fit(made)
    assert result.prompts["other"].template == "untouched"
    assert result.prompts["prompt"].template == START
    assert seen[0] == "Reply with the word ready."
    assert "## skill\n[1] - Be kind." in seen[1]
    assert "untouched" not in seen[1]
    assert "The lines of skill are items" in seen[1]
    assert "Output: report" in seen[1]


@pytest.mark.slow
def test_an_edit_that_drops_a_placeholder_is_rejected_and_named(server, tmp_path):
    server.models["editor"] = lambda text: json.dumps({"edits": [{"op": "delete", "line": 2}]})
    result = fit(trainer(server, tmp_path / "run", patience=3))
    assert result.best_prompt.template == START
    named = ("3 replies of critic and editor could not be used (schema violations)", "drops the placeholder task")
    assert any(all(each in text for each in named) for text in result.warnings)


@pytest.mark.slow
def test_a_critic_that_answers_nonsense_stops_the_run_in_words(server, tmp_path):
    server.models["critic"] = lambda text: "?"
    with pytest.raises(agl.errors.TrainingStopped, match=r"critic_nonsense.*Use another model"):
        fit(trainer(server, tmp_path / "run"))


def test_overlapping_splits_are_refused_with_their_rows(server, tmp_path):
    with pytest.raises(agl.errors.DatasetError, match=r"4 held_out tasks are train tasks, too: rows 1 \(= 3\)"):
        trainer(server, tmp_path / "run").fit(
            write_report, report_tasks(10), report_tasks(5, 100), held_out_dataset=report_tasks(4, 2)
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "prompts", "named"),
    [
        ({"resources": ["system"]}, None, "no prompt template is called system; the run was given prompt"),
        ({}, {"prompt": agl.PromptTemplate(template="Report {% if", engine="jinja")}, "'prompt' cannot be read"),
        ({}, {"llm": agl.LLM(endpoint="http://x", model="m")}, "there is no prompt template"),
    ],
)
def test_templates_that_cannot_be_optimised_are_refused(server, tmp_path, settings, prompts, named):
    made = trainer(server, tmp_path / "run", prompts=prompts, **settings)
    made.reward = lambda output: 0.0
    with pytest.raises(agl.errors.ConfigError, match=named):
        made.fit(lambda task: "x", report_tasks(10), report_tasks(5, 100), held_out_dataset=report_tasks(4, 200))


@pytest.mark.slow
def test_names_of_0x_work(server, tmp_path):
    openai = pytest.importorskip("openai")
    closing = httpx.AsyncClient(headers={"connection": "close"})
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", http_client=closing)
    algorithm = agl.APO(
        client,
        gradient_model="critic",
        apply_edit_model="editor",
        diversity_temperature=0.7,
        beam_width=2,
        branch_factor=1,
        beam_rounds=1,
        gradient_batch_size=3,
        val_batch_size=5,
        run_initial_validation=False,
    )
    config = algorithm.config
    assert config.search == "beam"
    assert (config.critic.model, config.editor.model, config.critic.temperature) == ("critic", "editor", 0.7)
    assert (config.beam.beam_rounds, config.beam.run_initial_validation) == (1, False)
    prompt = agl.PromptTemplate(template=START)
    made = agl.Trainer(
        algorithm=algorithm, initial_resources={"prompt": prompt}, reward=reward, run_dir=tmp_path / "run"
    )
    result = fit(made)
    assert server.calls["critic"] == server.calls["editor"] == 1
    assert algorithm.get_best_prompt() == result.best_prompt
    with pytest.raises(agl.errors.ConfigError, match=r"runner\.timeout_seconds"):
        agl.APO(rollout_batch_timeout=10)


@pytest.mark.slow
def test_agl_train_optimises_prompts_from_a_toml_file(server, tmp_path):
    (tmp_path / "task_agent.py").write_text(AGENT)
    for name, tasks in (("train", report_tasks(40)), ("test", report_tasks(20, 500))):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "run.toml").write_text(
        f"""
        agent = "task_agent.py:agent"
        reward = "task_agent.py:reward"
        [prompts]
        prompt = {json.dumps(START)}
        [data]
        train = "train.jsonl"
        held_out = "test.jsonl"
        [algorithm]
        type = "apo"
        critic = {{ model = "critic", base_url = "{server.url}" }}
        editor = {{ model = "editor", base_url = "{server.url}" }}
        budget.calls = 60
        """
    )
    command = [str(Path(sys.executable).with_name("agl")), "train", "--config", "run.toml", "--json", "--run", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["held_out"]["sampled"]["tasks"] == 20
    assert "prompt" in result["prompts"]
    assert "at most 60 evaluations" in done.stderr
    again = agl.Trainer.resume(tmp_path / "run")
    assert again.initial_resources["prompt"].template == START
