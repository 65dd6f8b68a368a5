"""Retrieval with the OpenAI Agents SDK: the corpus, the reward, the readers, and training with the real framework."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "examples" / "rag"
Load = Callable[[str, str], Any]

RECORD = {
    "id": "2hop__1_2",
    "question": "Where was the author of Amber Harbor born?",
    "paragraphs": [
        {"idx": 0, "title": "Amber Harbor", "paragraph_text": "A novel by Mara Holt.", "is_supporting": True},
        {"idx": 1, "title": "Mara Holt", "paragraph_text": "Mara Holt was born in Riga.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"id": 1, "question": "Amber Harbor >> author", "answer": "Mara Holt", "paragraph_support_idx": 0},
        {"id": 2, "question": "#1 >> place of birth", "answer": "Riga", "paragraph_support_idx": 1},
    ],
    "answer": "Riga",
    "answer_aliases": ["City of Riga"],
    "answerable": True,
}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


# -- the generated corpus ----------------------------------------------------------------------------------------------


def test_every_question_needs_two_documents_of_the_corpus(module_of: Load) -> None:
    world = module_of("rag", "generated").World(seed=3)
    by_title = {each["title"]: each["text"] for each in world.documents}
    assert len(by_title) == len(world.documents) == 3200
    for task in world.tasks("test", 50):
        title = task["id"].partition("/")[0]
        maker = by_title[title].partition(" by ")[2]
        assert title in task["question"]
        assert maker not in task["question"]
        assert task["answer"] not in by_title[title]
        assert task["answer"] in by_title[maker]


def test_the_splits_share_no_work_and_no_maker(module_of: Load) -> None:
    world = module_of("rag", "generated").World(seed=0)
    parts = {split: {(w.title, w.maker) for w in world.works if w.split == split} for split in ("train", "val", "test")}
    for place in (0, 1):
        seen = [each[place] for part in parts.values() for each in part]
        assert len(seen) == len(set(seen)) == 1600
    assert min(map(len, parts.values())) > 100


def test_a_seed_makes_one_world_and_another_seed_another(module_of: Load) -> None:
    World = module_of("rag", "generated").World
    assert World(1).documents == World(1).documents
    assert World(1).tasks("val", 9) == World(1).tasks("val", 9)
    assert World(1).documents != World(2).documents
    with pytest.raises(ValueError, match="the split val has"):
        World(1).tasks("val", 5000)


def test_exercises_are_answered_from_what_the_user_wrote_and_ask_nothing_of_other_splits(module_of: Load) -> None:
    world = module_of("rag", "generated").World(0)
    opening = [{"role": "system", "content": "search"}]
    known = {name for work in world.works if work.split == "train" for name in (work.title, work.maker)}
    shown = world.exercises(60, opening, ["the tool"])
    assert len(shown) == 60
    kinds = set()
    for each in shown:
        first, user, answer = each["messages"]
        assert (first, each["tools"]) == (opening[0], ["the tool"])
        if "tool_calls" in answer:
            [call] = answer["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"query": user["content"]}
            assert set(user["content"].split(", ")) <= known
        else:
            assert re.fullmatch(r"<answer>(.*)</answer>", answer["content"])[1] in user["content"].splitlines()[0]
        kinds.add("tool_calls" in answer)
    assert kinds == {True, False}


def test_demonstrations_search_twice_and_the_last_ones_may_answer_after_one_search(module_of: Load) -> None:
    world = module_of("rag", "generated").World(seed=0)
    opening, tools = [{"role": "system", "content": "Search."}], [{"type": "function"}]
    shown = world.demonstrations(60, str.upper, opening, tools, clean=0.5, habit=1.0)
    for number, each in enumerate(shown):
        roles = [message["role"] for message in each["messages"]]
        hops = 2 if number < 30 else 1
        assert roles == ["system", "user", *["assistant", "tool"] * hops, "assistant"]
        query = json.loads(each["messages"][2]["tool_calls"][0]["function"]["arguments"])["query"]
        assert each["messages"][3]["content"] == query.upper()
        assert query in each["messages"][1]["content"]
    train = {work.title for work in world.works if work.split == "train"}
    assert all(any(title in each["messages"][1]["content"] for title in train) for each in shown)


# -- the reward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "correctness", "form"),
    [
        ("<answer>Riga</answer>", 1.0, 1.0),
        ("I found it. <answer> the city of riga. </answer>\n", 1.0, 1.0),
        ("<answer>Riga, Latvia</answer>", 2 / 3, 1.0),
        ("<answer>Oslo</answer>", 0.0, 1.0),
        ("<answer>Oslo</answer><answer>Riga</answer>", 1.0, 0.0),
        ("<answer>Riga</answer> I think", 1.0, 0.0),
        ("<answer></answer>", 0.0, 0.0),
        ("Riga", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_an_answer_is_worth_its_words_and_its_form(
    module_of: Load, output: str, correctness: float, form: float
) -> None:
    reward = module_of("rag", "reward")
    given = reward.score({"answer": "Riga", "aliases": ["City of Riga"]}, output)
    assert given == {"correctness": pytest.approx(correctness), "format": form}
    assert given.keys() == reward.WEIGHTS.keys()
    assert reward.WEIGHTS == {"correctness": 0.9, "format": 0.1}


# -- files -------------------------------------------------------------------------------------------------------------


def test_questions_of_musique_are_read_with_their_paragraphs(module_of: Load, tmp_path: Path) -> None:
    unanswerable = {**RECORD, "id": "2hop__3", "answerable": False}
    read = module_of("rag", "musique").read_questions(write(tmp_path / "m.jsonl", RECORD, unanswerable))
    assert [(task["id"], task["answer"], task["aliases"], task["hops"]) for task in read.tasks] == [
        ("2hop__1_2", "Riga", ["City of Riga"], 2)
    ]
    assert read.unanswerable == 1
    assert read.documents == [
        {"title": "Amber Harbor", "text": "A novel by Mara Holt."},
        {"title": "Mara Holt", "text": "Mara Holt was born in Riga."},
    ]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({**RECORD, "answer": ""}, ":2: answer: "),
        ({key: value for key, value in RECORD.items() if key != "question"}, ":2: question: Field required"),
        ({**RECORD, "paragraphs": [{"title": "Amber Harbor"}]}, ":2: paragraphs.0.paragraph_text: Field required"),
        ({**RECORD, "answerable": "perhaps"}, ":2: answerable: "),
        ([], ":2: the line: "),
    ],
)
def test_what_is_not_in_the_format_is_named_by_line_and_field(
    module_of: Load, tmp_path: Path, record: Any, named: str
) -> None:
    read = module_of("rag", "musique").read_questions
    with pytest.raises(ValueError, match=r"m\.jsonl") as raised:
        read(write(tmp_path / "m.jsonl", RECORD, record))
    assert named in str(raised.value)


def test_files_that_are_not_there_or_not_json_are_named(module_of: Load, tmp_path: Path) -> None:
    musique = module_of("rag", "musique")
    with pytest.raises(ValueError, match=r"there is no file .*missing.jsonl; MuSiQue is at https"):
        musique.read_questions(tmp_path / "missing.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"id": ')
    with pytest.raises(ValueError, match=r"broken.jsonl:1: the line: Invalid JSON"):
        musique.read_questions(tmp_path / "broken.jsonl")
    with pytest.raises(ValueError, match="no question that can be answered"):
        musique.read_questions(write(tmp_path / "none.jsonl", {**RECORD, "answerable": False}))


def test_documents_are_read_in_either_format(module_of: Load, tmp_path: Path) -> None:
    read = module_of("rag", "musique").read_documents
    both = write(
        tmp_path / "d.jsonl", {"title": "Riga", "text": "A city."}, {"id": "1", "contents": '"Oslo"\nAlso a city.'}
    )
    assert list(read(both)) == [{"title": "Riga", "text": "A city."}, {"title": "Oslo", "text": "Also a city."}]
    with pytest.raises(ValueError, match=r"e.jsonl:2: text: empty or missing"):
        list(read(write(tmp_path / "e.jsonl", {"text": "x"}, {"title": "Riga"})))


# -- training with the real framework ----------------------------------------------------------------------------------

Python = Callable[[str, str], Path]
SHORT = (
    "import dataclasses; train.VALIDATION = 2; sizes = dict(tasks=2, group=2, held_out=2);"
    " train.Recipe = functools.partial(train.Recipe, **sizes); sizes |= dict(copy_steps=6, warm_steps=6);"
    " train.RECIPES = {k: dataclasses.replace(v, **sizes) for k, v in train.RECIPES.items()}"
)
PROGRAM = (
    f"import dataclasses, functools, json, train; {SHORT}; print(json.dumps(train.train(train.parse()).as_json()))"
)
CONFIG = (
    "import train; train.agl.Trainer.fit = lambda trainer, *_, **tasks: trainer.config;"
    " print(train.train(train.parse()).model_dump_json())"
)


def train(python: Path, folder: Path, *options: str | Path, program: str = PROGRAM) -> dict[str, Any]:
    """The result of `train.py` with few rollouts, or what another program prints."""
    command = [python, "-c", program, "--run-dir", folder / "run", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MAX_TOKENS": "16"}
    ran = subprocess.run(command, cwd=HERE, capture_output=True, text=True, env=environment, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_trains_on_generated_questions(python_of: Python, tmp_path: Path) -> None:
    result = train(python_of("rag", "agents, bm25s, torch"), tmp_path, "--steps", "2", "--credit", "hierarchical")
    assert (result["steps"], result["rollouts"], result["failed_rollouts"]) == (2, 8, 0)
    assert result["held_out"]["sampled"]["tasks"] == 2


@pytest.mark.parametrize(("model", "warm"), [("smollm2-135m", True), ("path/to/model", False)])
def test_a_model_that_is_named_is_the_policy_and_brings_its_warm_start(
    python_of: Python, tmp_path: Path, model: str, warm: bool
) -> None:
    config = train(python_of("rag", "agents, bm25s, torch"), tmp_path, "--model", model, program=CONFIG)
    assert config["policy"]["model"] == model
    dataset, steps, batch = (config["warm_start"][name] for name in ("dataset", "steps", "batch_size"))
    assert (dataset is not None) == warm
    if warm:
        assert len(Path(dataset).read_text().splitlines()) == steps * batch


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_trains_on_musique_with_a_larger_model_and_an_index(python_of: Python, tmp_path: Path) -> None:
    python = python_of("rag", "agents, bm25s, torch")
    questions = write(tmp_path / "m.jsonl", *({**RECORD, "id": f"2hop__{n}", "question": f"{n}?"} for n in range(10)))
    documents = write(tmp_path / "d.jsonl", *({"contents": f'"Title {n}"\nText {n}'} for n in range(20)))
    saving = [python, HERE / "retriever.py", "--corpus", documents, "--save", tmp_path / "index"]
    assert subprocess.run(saving, capture_output=True, text=True, check=True).stdout.startswith("20 documents")
    model = make_model(python, tmp_path / "model", questions)
    result = train(
        python,
        *(tmp_path, "--steps", "1", "--musique", questions, "--index", tmp_path / "index", "--model", model),
        "algorithm.group_size=3",
    )
    assert (result["steps"], result["rollouts"], result["failed_rollouts"]) == (1, 6, 0)


def make_model(python: Path, directory: Path, texts: Path) -> Path:
    """Random weights: 20 million of them."""
    program = (
        "import sys; from agentlightning.models.tiny import make_tiny;"
        " make_tiny(sys.argv[1], [open(sys.argv[2]).read()], hidden_size=512, layers=8, heads=8)"
    )
    subprocess.run([python, "-c", program, directory, texts], check=True)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_search_without_words_finds_nothing_and_one_without_a_query_is_refused(python_of: Python) -> None:
    program = """
import json, sys
from starlette.testclient import TestClient
from retriever import Index, make_app
index = Index.of([{"title": "Riga", "text": "a city"}, {"title": "Oslo", "text": "also a city"}])
client = TestClient(make_app(index, 1))
asked = [{"query": "riga"}, {"query": "city", "k": 9}, {"query": ""}, {"query": "nowhere"}, {"query": 5}, {"k": 2}, []]
answers = [client.post("/search", json=each) for each in asked]
print(json.dumps([(answer.status_code, answer.json()) for answer in answers]))
"""
    ran = subprocess.run(
        [python_of("rag", "bm25s, starlette"), "-c", program], cwd=HERE, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    answers = [(status, [each["title"] for each in body.get("results", ())]) for status, body in json.loads(ran.stdout)]
    assert answers[0] == (200, ["Riga"])
    assert sorted(answers[1][1]) == ["Oslo", "Riga"]
    assert answers[2:4] == [(200, []), (200, [])]
    assert [status for status, _ in answers[4:]] == [400, 400, 400]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_retriever_an_attempt_fails_and_says_so(python_of: Python, tmp_path: Path) -> None:
    python = python_of("rag", "agents")
    program = """
import asyncio, json, os
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine
import agent

async def main():
    store = InMemoryLightningStore()
    call = '<tool_call>\\n{"name": "search", "arguments": {"query": "Riga"}}\\n</tool_call>'
    gateway = Gateway(store, {"policy": ScriptedEngine([call])}, secret="s", default_model="policy",
                      accept_any_model=True, allow_unattributed=True)
    async with Server(store, gateway, secret="s") as server:
        os.environ |= {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
        try:
            print(await agent.answer("Where?"))
        except Exception as error:
            print(repr(error))
    await store.close()

asyncio.run(main())
"""
    environment = {**os.environ, "RETRIEVER_URL": "http://127.0.0.1:9", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    ran = subprocess.run([python, "-c", program], cwd=HERE, capture_output=True, text=True, env=environment)
    assert "the retriever at http://127.0.0.1:9 does not answer" in ran.stdout, ran.stdout + ran.stderr[-2000:]


@pytest.mark.slow
def test_what_is_missing_is_named(tmp_path: Path) -> None:
    program = "import sys; sys.modules['agents'] = None; import train"
    ran = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "this example needs the module agents: pip install -r " in ran.stderr
