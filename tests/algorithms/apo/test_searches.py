"""The searches find what a simulated world hides, buy nothing twice, and go on from their state."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter

import pytest
from tests.support.prompt_worlds import HEAD, START, TAIL, InteractingWorld, PromptWorld

from agentlightning.algorithms.apo.beam import BeamSearch
from agentlightning.algorithms.apo.gepa import GepaSearch
from agentlightning.algorithms.apo.reflective import Node, ReflectiveSearch
from agentlightning.algorithms.apo.search import MAX_SKIPS, Trial
from agentlightning.algorithms.apo.text import Texts, digest
from agentlightning.errors import ResumeError


def prompt(*lines: str) -> Texts:
    return {"prompt": "\n".join([HEAD, *(f"- {line}" for line in lines), TAIL])}


async def run(search) -> Texts:
    while search.ended is None:
        await search.step()
    return search.favourite


def quality(world: PromptWorld, candidate: Texts) -> float:
    return world.quality(candidate["prompt"]) / world.optimum


@pytest.mark.parametrize(("kind", "calls"), [(PromptWorld, 420), (InteractingWorld, 1100)])
async def test_reflective_finds_the_hidden_instructions(made, kind, calls):
    found: list[float] = []
    for seed in range(5):
        world = kind(seed)
        search = made(ReflectiveSearch, world, budget={"calls": calls}, seed=seed)
        found.append(quality(world, await run(search)))
        assert search.spending.calls <= calls
    assert statistics.median(found) >= (0.95 if kind is PromptWorld else 0.9)
    assert min(found) > 0.75


async def test_a_result_of_a_parent_is_never_bought_twice(made):
    search = made(ReflectiveSearch, PromptWorld(0), budget={"calls": 300})
    await run(search)
    bought = Counter(search.training.asked)
    assert max(bought.values()) == 1


async def test_a_bad_edit_costs_only_the_failures_it_was_written_for(made):
    search = made(ReflectiveSearch, PromptWorld(0, insight=0.0, luck=0.0), budget={"calls": 200}, patience=8)
    await run(search)
    of_children = [text for text, _ in search.training.asked if text != START]
    assert search.counts["rejected_screen"] == search.counts["proposed"] > 3
    assert len(of_children) <= search.counts["proposed"] * search.config.reflection_size


async def test_no_validation_task_is_used_before_the_finals(made):
    search = made(ReflectiveSearch, PromptWorld(0), budget={"calls": 250})
    used: list[set[str]] = []
    while search.ended is None:
        used.append(search.training.splits)
        await search.step()
    assert all(each <= {"train"} for each in used)
    finals = [name for _, name in search.training.asked if "validation" in name]
    assert finals
    assert search.spending.calls - len(finals) <= 250 - search.reserved + 5


async def test_a_search_that_ends_for_its_rounds_has_its_finals(made):
    search = made(ReflectiveSearch, PromptWorld(0), budget={"calls": 400})
    while len(search.pool) < 2:
        await search.step()
    await search.end("its rounds are done")
    assert "validation" in search.training.splits
    assert search.favourite in [node.texts for node in search.pool]


async def test_a_search_that_ends_for_its_budget_says_so(made):
    search = made(ReflectiveSearch, PromptWorld(0), budget={"calls": 60})
    await run(search)
    assert search.ended_for_budget
    assert "60 evaluations" in str(search.ended)
    patient = made(ReflectiveSearch, PromptWorld(0, insight=0.0), budget={"calls": 500}, patience=3)
    await run(patient)
    assert not patient.ended_for_budget
    assert "none of the last 3 proposals" in str(patient.ended)


@pytest.mark.parametrize("kind", [ReflectiveSearch, BeamSearch])
async def test_a_search_goes_on_from_its_state(made, kind):
    settings = {"budget": {"calls": 200}, "beam": {"branch_factor": 1, "beam_width": 2, "val_batch_size": 8}}
    whole = made(kind, PromptWorld(2), **settings)
    broken = made(kind, PromptWorld(2), **settings)
    for _ in range(2):
        await whole.step()
        await broken.step()
    state = json.loads(json.dumps(broken.state_dict()))
    resumed = kind(broken.config, broken.start, broken.training, broken.models)
    resumed.load_state_dict(state)
    for _ in range(6):
        if whole.ended is None:
            await whole.step()
            await resumed.step()
    assert resumed.favourite == whole.favourite
    assert resumed.state_dict()["state"] == whole.state_dict()["state"]
    assert resumed.counts == whole.counts
    assert resumed.spending.calls == whole.spending.calls


async def test_a_child_that_loses_a_line_is_tried_on_what_that_line_turned(made):
    world = PromptWorld(0, follow=1.0, luck=0.0)
    search = made(ReflectiveSearch, world, budget={"calls": 2000})
    kept, lost = world.instructions[:2]
    parent = search.pool[0]
    parent.texts = prompt(kept, lost)
    child = parent.child(prompt(kept), 1)
    needing = [i for i in range(100) if world.needs(f"{i:04d}") == (1,)]
    search.credits[f"prompt: - {lost}"] = needing[:1]
    [outcome] = await search.run_trials(parent.texts, [Trial(needing[0])])
    parent.add(outcome)
    assert not await search.guards(child, parent)


@pytest.mark.parametrize("kind", [ReflectiveSearch, BeamSearch, GepaSearch])
async def test_each_candidate_is_tried_with_the_one_that_it_was_made_from(made, model, tmp_path, kind):
    name = kind.__name__.removesuffix("Search").lower()
    if kind is GepaSearch:
        pytest.importorskip("gepa")
    search = made(kind, PromptWorld(0), search=name, budget={"calls": 200})
    search.training.directory = tmp_path
    if kind is GepaSearch:
        search.models = {"critic": model(search.training.world.reflect)}
    await run(search)
    texts = {digest({"prompt": text}): text for text, _ in search.training.asked}
    parents = search.training.parents
    assert len(parents) > 4
    assert [texts[child] for child, parent in parents.items() if parent is None] == [START]
    order = [*parents]
    for child, parent in parents.items():
        if parent is not None:
            assert order.index(parent) < order.index(child)
            if kind is not GepaSearch:  # Its editor writes the whole text anew.
                new = set(texts[child].splitlines()) ^ set(texts[parent].splitlines())
                assert 0 < len(new) <= 2 * search.config.max_edits


# -- the other searches ----------------------------------------------------------------------------------------------


async def test_beam_scores_on_validation_and_improves(made):
    world = PromptWorld(0)
    beam = {"beam_width": 2, "branch_factor": 2, "beam_rounds": 4, "gradient_batch_size": 3, "val_batch_size": 10}
    search = made(BeamSearch, world, search="beam", beam=beam, budget={"calls": 600})
    best = await run(search)
    assert search.round == 4
    assert quality(world, best) > quality(world, {"prompt": START})
    assert len(search.beam) <= 2


async def test_gepa_searches_with_this_run_and_stops_at_its_budget(made, model, tmp_path):
    pytest.importorskip("gepa")
    world = PromptWorld(0)
    search = made(GepaSearch, world, search="gepa", budget={"calls": 300})
    search.models = {"critic": model(world.reflect)}
    search.training.directory = tmp_path
    best = await run(search)
    assert search.ended_for_budget
    assert search.spending.calls < 300 + 20
    assert search.counts["accepted"] > 0, "every mutation was skipped"
    assert quality(world, best) > quality(world, {"prompt": START})


async def test_a_gepa_search_goes_on_from_its_own_files_with_a_larger_budget(made, model, tmp_path):
    pytest.importorskip("gepa")

    def opened(calls: int) -> GepaSearch:
        search = made(GepaSearch, PromptWorld(0), search="gepa", budget={"calls": calls})
        search.models = {"critic": model(search.training.world.reflect)}
        search.training.directory = tmp_path
        return search

    first = opened(150)
    before = await run(first)
    again = opened(300)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.favourite == before
    await run(again)
    assert {text for text, _ in again.training.asked} - {START}
    assert len(again.training.asked) <= 300 - 150 + 20, "it began again"
    assert again.counts["accepted"] >= first.counts["accepted"]


async def test_a_gepa_candidate_that_breaks_its_template_is_not_run(made, model, tmp_path):
    pytest.importorskip("gepa")
    search = made(GepaSearch, PromptWorld(0), search="gepa", budget={"calls": 60})
    search.models = {"critic": model(lambda _: "```\nWrite something.\n```")}
    search.training.directory = tmp_path
    assert (await run(search)) == {"prompt": START}
    assert search.skips["schema_violations"] > 0
    assert {text for text, _ in search.training.asked} == {START}


async def test_a_useful_reply_in_gepa_starts_the_count_of_useless_ones_again(made, model, tmp_path):
    pytest.importorskip("gepa")
    search = made(GepaSearch, PromptWorld(0), search="gepa", budget={"calls": 300})
    useful, asked = search.training.world.reflect, itertools.count()
    search.models = {"critic": model(lambda text: useful(text) if next(asked) % 3 == 0 else "")}
    search.training.directory = tmp_path
    await run(search)
    assert search.skips["critic_empty"] > MAX_SKIPS
    assert search.ended_for_budget


# -- finals ----------------------------------------------------------------------------------------------------------


def finalists(search, *lines: list[str]) -> list[Texts]:
    search.pool = [Node(dict(prompt(*each))) for each in lines]
    return [node.texts for node in search.pool]


async def test_the_finals_find_the_better_of_two_early_and_buy_each_result_once(made):
    world = PromptWorld(0)
    search = made(ReflectiveSearch, world, budget={"calls": 500})
    _, good = finalists(search, [], world.instructions)
    await search.end("it is over")
    assert search.favourite == good
    assert len(search.training.asked) < 2 * 45, "the test of all pairs goes on after it is decided"
    assert max(Counter(search.training.asked).values()) == 1
    again = made(ReflectiveSearch, world)
    again.load_state_dict(json.loads(json.dumps(search.state_dict())))
    assert again.favourite == good
    assert again.ended == "it is over"


def test_the_state_of_another_version_is_refused_by_what_it_lacks(made):
    search = made(ReflectiveSearch, PromptWorld(0))
    state = search.state_dict()
    del state["state"]["winner"]
    with pytest.raises(ResumeError, match=r"another version.*'winner'.*start a new run"):
        search.load_state_dict(state)


async def test_a_search_that_ended_for_its_budget_goes_on_with_a_larger_one(made):
    search = made(ReflectiveSearch, PromptWorld(0), budget={"calls": 60})
    await run(search)
    state = json.loads(json.dumps(search.state_dict()))
    same, larger = (made(ReflectiveSearch, PromptWorld(0), budget={"calls": calls}) for calls in (60, 90))
    for each in (same, larger):
        each.load_state_dict(state)
        assert each.favourite == search.favourite
    assert same.ended == search.ended
    assert larger.ended is None
    await run(larger)
    assert 60 < larger.spending.calls <= 90


async def test_finals_without_the_budget_keep_the_favourite(made):
    search = made(ReflectiveSearch, PromptWorld(0), budget={"calls": 5})
    favourite, _ = finalists(search, [], ["more"])
    await search.end("it is over")
    assert not search.training.asked
    assert search.favourite == favourite
