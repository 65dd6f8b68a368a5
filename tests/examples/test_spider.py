"""The example of text-to-SQL: the files of Spider, execution accuracy, and an agent in LangGraph that learns."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.config import TrainConfig
from agentlightning.credit import is_target
from agentlightning.errors import DatasetError, MissingExtraError
from agentlightning.gateway.routing import AgentMatcher
from agentlightning.store import LightningStore
from agentlightning.util.settings import load_settings

Load = Callable[[str, str], ModuleType]
HERE = Path(__file__).parents[2] / "examples" / "spider"
RECORD = {
    "db_id": "concert_singer",
    "query": "SELECT name FROM singer ORDER BY age DESC",
    "query_toks": ["SELECT", "name", "FROM", "singer", "ORDER", "BY", "age", "DESC"],
    "query_toks_no_value": ["select", "name", "from", "singer", "order", "by", "age", "desc"],
    "question": "What are the names of all singers, oldest first?",
    "question_toks": ["What", "are", "the", "names", "of", "all", "singers", ",", "oldest", "first", "?"],
    "sql": {"from": {"table_units": [["table_unit", 1]], "conds": []}, "limit": None},
}
"""A question as the files of Spider hold it."""


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    """A folder as Spider is distributed, of one question."""
    folder = tmp_path / "spider"
    path = folder / "database" / "concert_singer" / "concert_singer.sqlite"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            """
            CREATE TABLE stadium (Stadium_ID int PRIMARY KEY, "Average Capacity" int);
            CREATE TABLE singer (id int PRIMARY KEY, name text, age int, home int REFERENCES stadium(Stadium_ID));
            INSERT INTO stadium VALUES (1, 500);
            INSERT INTO singer VALUES (1, 'Ada', 40, 1), (2, 'Ben', 60, 1), (3, 'Cleo', 20, 1);
            """
        )
        database.execute("INSERT INTO singer VALUES (4, CAST(x'ff41' AS TEXT), 10, NULL)")
        database.commit()
    (folder / "train_spider.json").write_text(json.dumps([RECORD]))
    return folder


@pytest.fixture
def task(spider: Path, module_of: Load) -> dict[str, Any]:
    return module_of("spider", "spider_files").read_spider(spider)[0]


# -- the files of Spider -----------------------------------------------------------------------------------------------


def test_a_task_is_a_question_its_database_and_its_query(spider: Path, task: dict[str, Any]) -> None:
    database = spider.resolve() / "database" / "concert_singer" / "concert_singer.sqlite"
    assert task == {"question": RECORD["question"], "query": RECORD["query"], "database": str(database)}


def test_databases_that_are_missing_are_named_before_anything_runs(spider: Path, module_of: Load) -> None:
    records = [RECORD, {**RECORD, "db_id": "pets_1"}, {**RECORD, "db_id": "car_1"}]
    (spider / "dev.json").write_text(json.dumps(records))
    with pytest.raises(
        DatasetError, match=r"dev\.json asks about 2 databases that are missing: car_1, pets_1; .*car_1"
    ):
        module_of("spider", "spider_files").read_spider(spider, "dev.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no .*train_spider\.json; give the folder of Spider"),
        ("[{", r"train_spider\.json is not JSON"),
        ("{}", r"train_spider\.json holds no list of questions"),
        ("[]", r"train_spider\.json holds no list of questions"),
        (json.dumps([RECORD, {**RECORD, "query": None}]), r"record 1 of .*train_spider\.json has no text 'query'"),
        ("[7]", r"record 0 of .* has no text 'db_id'"),
    ],
)
def test_files_that_are_not_of_spider_are_refused(
    content: str | None, message: str, spider: Path, module_of: Load
) -> None:
    path = spider / "train_spider.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DatasetError, match=message):
        module_of("spider", "spider_files").read_spider(spider)


def test_a_model_is_told_tables_columns_and_foreign_keys(task: dict[str, Any], module_of: Load) -> None:
    db = module_of("spider", "database")
    with closing(db.open_database(task["database"])) as database:
        assert db.describe(database).splitlines() == [
            'stadium: Stadium_ID "Average Capacity"',
            "singer: id name age home",
            "singer.home -> stadium.Stadium_ID",
        ]


# -- the reward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "wanted", "reward"),
    [
        ("SELECT name FROM singer ORDER BY age DESC", None, 1),
        ("SELECT name FROM singer ORDER BY -age", None, 1),
        ("SELECT name FROM singer ORDER BY age", None, 0),
        ("SELECT name FROM singer WHERE age > 10 ORDER BY age DESC", None, 0),
        ("SELECT name, age FROM singer ORDER BY age DESC", None, 0),
        ("SELECT name FROM singer ORDER BY age", "SELECT name FROM singer", 1),
        ("SELECT age, name FROM singer", "SELECT name, age FROM singer", 1),
        ("SELECT age, age FROM singer", "SELECT name, age FROM singer", 0),
        ("SELECT id, name, age FROM singer", "SELECT age, id, name FROM singer", 1),
        ("SELECT age FROM singer WHERE age > 99", "SELECT name FROM singer WHERE age > 98", 1),
        ("SELECT count(*) FROM singers", "SELECT count(*) FROM singer", 0),
        ("", "SELECT count(*) FROM singer", 0),
        ("SELECT '\0'", "SELECT count(*) FROM singer", 0),
        ("I do not know.", "SELECT count(*) FROM singer", 0),
        ("SELECT count(*) FROM singer; SELECT 1", "SELECT count(*) FROM singer", 0),
    ],
)
def test_the_reward_is_whether_a_query_gives_what_the_true_one_gives(
    query: str, wanted: str | None, reward: float, task: dict[str, Any], module_of: Load
) -> None:
    assert module_of("spider", "reward").score({**task, "query": wanted or task["query"]}, query) == reward


def test_a_true_query_that_fails_is_an_error_and_no_reward(task: dict[str, Any], module_of: Load) -> None:
    with pytest.raises(module_of("spider", "database").QueryError, match="no such table: band"):
        module_of("spider", "reward").score({**task, "query": "SELECT * FROM band"}, "SELECT 1")


def test_a_database_that_has_gone_is_named(task: dict[str, Any], module_of: Load) -> None:
    Path(task["database"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no database 'concert_singer': .*concert_singer\.sqlite"):
        module_of("spider", "reward").score(task, "SELECT 1")


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("DELETE FROM singer", "not authorized"),
        ("DROP TABLE singer", "not authorized"),
        ("ATTACH DATABASE '{folder}/new.sqlite' AS other", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("VACUUM INTO '{folder}/new.sqlite'", "authorization denied"),
        (ENDLESS, "it takes too long"),
        ("SELECT zeroblob(900000000)", "too big"),
        (ENDLESS.replace("count(*)", "i"), "it gives more than 10000 rows"),
    ],
)
def test_a_query_of_a_model_can_only_read_and_only_so_much(
    query: str, message: str, task: dict[str, Any], tmp_path: Path, module_of: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = module_of("spider", "database")
    monkeypatch.setattr(db, "MOST_STEPS", 2_000_000)
    with closing(db.open_database(task["database"])) as database:
        with pytest.raises(db.QueryError, match=message):
            db.execute(database, query.replace("{folder}", str(tmp_path)))
        assert db.execute(database, "SELECT count(*) FROM singer") == [(4,)], "the next query is not bound by it"
    assert not (tmp_path / "new.sqlite").exists()


# -- the small data set ------------------------------------------------------------------------------------------------


def test_the_small_data_set_is_in_the_files_of_spider_and_holds_out_schemas(tmp_path: Path, module_of: Load) -> None:
    generate, files, reward = (module_of("spider", name) for name in ("generate", "spider_files", "reward"))
    folder = generate.write_spider(tmp_path, train=40, dev=20)
    train, held_out = files.read_spider(folder), files.read_spider(folder, files.DEV)
    assert (len(train), len(held_out)) == (40, 20)
    assert not {each["database"] for each in train} & {each["database"] for each in held_out}
    tables = {
        entry["db_id"]: entry["table_names_original"] for entry in json.loads((folder / "tables.json").read_text())
    }
    for task in (*train, *held_out):
        assert generate.is_held_out(*tables[Path(task["database"]).stem]) == (task in held_out)
        assert reward.score(task, task["query"]) == 1
        assert reward.score(task, "SELECT count(*) FROM nothing") == 0


def test_the_small_data_set_has_joins_and_aggregates_and_follows_from_its_seed(tmp_path: Path, module_of: Load) -> None:
    generate = module_of("spider", "generate")
    folders = [
        generate.write_spider(tmp_path / name, seed=seed, train=60, dev=6) for name, seed in (("a", 1), ("b", 1))
    ]
    first, second = [(folder / "train_spider.json").read_text() for folder in folders]
    assert first == second
    assert first != (generate.write_spider(tmp_path / "c", seed=2, train=60) / "train_spider.json").read_text()
    for part in ("JOIN", "avg(", "max(", "count(*)", "GROUP BY", "ORDER BY", "WHERE"):
        assert part in first


def test_demonstrations_are_honest_first_and_have_habits_then(module_of: Load) -> None:
    generate, prompts = module_of("spider", "generate"), module_of("spider", "prompts")
    shown = [[message["content"] for message in each["messages"]] for each in generate.demonstrations(600)]
    honest, last = shown[:420], shown[420:]

    def guesses(part: list[list[str]]) -> float:
        written = [(schema, query) for agent, schema, query in part if agent == prompts.WRITER]
        tables = [{line.partition(":")[0] for line in schema.splitlines()} for schema, _ in written]
        named = [query.split("FROM ")[1].split()[0] for _, query in written]
        return sum(name not in known for name, known in zip(named, tables, strict=True)) / len(written)

    def repeats(part: list[list[str]]) -> float:
        rewritten = [(seen, query) for agent, seen, query in part if agent == prompts.REWRITER]
        return sum(query in seen.splitlines() for seen, query in rewritten) / len(rewritten)

    assert guesses(honest) == repeats(honest) == 0
    assert 0.5 < guesses(last) < 1
    assert 0.6 < repeats(last) < 1
    verdicts = {query for agent, _, query in shown if agent == prompts.CHECKER}
    assert verdicts == {prompts.OK, prompts.WRONG}


# -- the agent ---------------------------------------------------------------------------------------------------------


def test_the_agent_does_not_know_that_it_is_trained() -> None:
    for name in ("agent.py", "database.py", "prompts.py"):
        assert "agentlightning" not in (HERE / name).read_text()


def test_a_missing_framework_names_the_extra(module_of: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    train = module_of("spider", "train")
    monkeypatch.setattr(train, "find_spec", lambda name: None if name == "langgraph" else object())
    with pytest.raises(
        MissingExtraError, match=r"langgraph is not installed; run: pip install 'agentlightning\[examples\]'"
    ):
        train.main(["--run-dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("model", "warm"), [("tiny", True), ("smollm2-135m", True), ("path/to/model", False)])
def test_a_model_that_is_named_is_the_policy_and_brings_its_warm_start(
    model: str, warm: bool, module_of: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = module_of("spider", "train")
    monkeypatch.setenv("SQL_TOKENS", "16")
    monkeypatch.setattr(train, "find_spec", lambda name: name)
    monkeypatch.setattr(train.agl.Trainer, "fit", lambda trainer, *_, **tasks: trainer.config)
    config = train.main(["--model", model, "--run-dir", str(tmp_path), "warm_start.steps=12"])
    assert config.policy.model == model
    assert (config.warm_start.dataset is not None) == warm
    if warm:
        assert len(Path(config.warm_start.dataset).read_text().splitlines()) == 12 * config.warm_start.batch_size


@pytest.mark.parametrize("file", ["small.toml", "smollm2-135m.toml", "full.toml"])
def test_the_gateway_tells_the_agents_apart_and_the_checker_is_not_trained(file: str, module_of: Load) -> None:
    prompts, config = module_of("spider", "prompts"), load_settings(TrainConfig, toml=HERE / file)
    matcher = AgentMatcher(config.gateway.agents)
    systems = (prompts.WRITER, prompts.CHECKER, prompts.REWRITER)
    bodies = [{"messages": [{"role": "system", "content": text}]} for text in systems]
    names = [matcher.identify({}, body).name for body in bodies]
    assert names == ["writer", "checker", "rewriter"]
    assert isinstance(config.algorithm, LightningRLConfig)
    assert [is_target(name, config.algorithm.target_agent) for name in names] == [True, False, True]
    assert config.runner.hide == ("query",), "the agent does not see the true query"


@pytest.fixture
def framework() -> None:
    missing = [name for name in ("langgraph", "langchain_openai") if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install 'agentlightning[examples]'")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("framework")
def test_the_agents_run_in_langgraph_as_they_are_and_their_calls_have_their_names(tmp_path: Path) -> None:
    small = ["algorithm.steps=1", "algorithm.tasks_per_step=2", "algorithm.optimizer.warmup_steps=0"]
    small += ["warm_start.steps=20", "evaluation.held_out_tasks=2", "evaluation.every=0"]
    command = [sys.executable, HERE / "train.py", "--run-dir", tmp_path / "run", *small]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    printed = r"greedy: \d\.\d\d -> \d\.\d\d, gain .*, 95% interval -?\d\.\d\d to \d\.\d\d\n"
    assert re.search(printed, ran.stdout), ran.stdout
    [step] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (step["failed"], step["rejected"]) == (0, 0), ran.stderr[-2000:]
    assert step["calls_per_rollout"] >= 2
    assert {"writer", "checker"} <= asyncio.run(agents_in(tmp_path / "run" / "store.db"))


async def agents_in(path: Path) -> set[Any]:
    """The agents of the calls in a store."""
    store = LightningStore(path)
    try:
        rollouts = await store.query_rollouts(limit=4)
        spans = [span for each in rollouts for span in await store.query_spans(each.rollout_id)]
    finally:
        await store.close()
    return {span.attributes.get("gen_ai.agent.name") for span in spans}
