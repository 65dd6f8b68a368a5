"""The page in a real Chromium: every page of a finished run, from a curve to a token in three clicks, keys, actions."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import orjson
import pytest
from tests.dashboard.browsing import GRPO, TOKEN, Served, Window, a_group, groups, pages

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (400, "light")])
def test_every_page_opens_without_an_error_fits_its_window_and_can_be_read(browser, served, width, theme):
    window = Window(browser, served, width=width, theme=theme)
    for path in pages(window):
        page = window.open(path)
        assert page.locator(".notice.bad").count() == 0, path
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than its window"
        assert page.evaluate(FAINT) == [], path
    assert window.problems == []


FAINT = """() => {
  const rgb = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return {c: n.slice(0, 3), a: n[3] ?? 1}; };
  const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = getComputedStyle(e).backgroundColor;
      if (found.startsWith("rgb") && rgb(found).a === 1) return rgb(found).c;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const style = getComputedStyle(element);
    if (!own || element.disabled || !element.getClientRects().length || element.closest("svg, .skip")) continue;
    const [a, b] = [light(rgb(style.color).c), light(ground(element))].sort((x, y) => y - x);
    const weak = style.color.startsWith("rgb") && (a + 0.05) / (b + 0.05) < 4.5;
    if (weak) faint.push(`${element.className} ${element.textContent.slice(0, 30)} ${style.color}`);
  }
  return faint.slice(0, 5);
}"""
"""The texts whose contrast with their ground is below 4.5 (WCAG 2.2 AA)."""


def test_three_clicks_lead_from_a_curve_to_the_tokens_of_the_turn_with_a_tool_error(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}", ".u-over")
    over = page.locator(".u-over").first
    box = over.bounding_box()
    over.click(position={"x": box["width"] * 8 / 23, "y": box["height"] / 2})
    page.wait_for_url("**/steps/*")
    page.wait_for_selector("tbody a")
    row = page.locator("tbody tr").filter(has=page.locator("td .error-text")).first
    row.locator("a").first.click()
    page.wait_for_url("**/group")
    page.wait_for_selector(".t.differs")
    assert page.locator(".t.differs").count() in (1, 2)
    assert page.locator(".t.p1, .t.p2, .t.p3").count() > 0
    assert page.locator(".t.n1, .t.n2, .t.n3").count() > 0
    page.locator(".t.differs").last.click()
    assert "advantage −" in page.locator(".inspector").inner_text()
    assert window.problems == []


@pytest.mark.parametrize(
    ("name", "path", "shown", "height"),
    [
        ("run", "", ".u-over", 1000),
        ("group", "/rollouts/{rollout}/group", ".t.differs", 760),
        ("ratio", "/rollouts/{rollout}/group?by=ratio", ".t.differs", 760),
        ("tokens", "/rollouts/{rollout}/tokens?by=rank", ".t.z", 660),
    ],
)
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (400, "light")])
def test_the_pictures_of_the_guide_are_those_of_the_demo(
    browser, demo, tmp_path, name, path, shown, height, width, theme
):
    """AGL_PICTURES=docs/images writes them anew."""
    window = Window(browser, demo, width=width, theme=theme)
    window.page.set_viewport_size({"width": width, "height": height})
    group = groups(window, "messages", 9)[0]
    rollout = group["worst" if name == "tokens" else "best"]
    page = window.open(f"/runs/messages{path.format(rollout=rollout)}", shown)
    if name == "tokens":
        page.locator(".t.n1, .t.n2, .t.n3").first.click()
    page.wait_for_timeout(500)
    suffix = "" if (width, theme) == (1400, "light") else f"-{width}-{theme}"
    folder = tmp_path if suffix else Path(os.environ.get("AGL_PICTURES") or tmp_path)
    page.screenshot(path=folder / f"dashboard-{name}{suffix}.png")
    assert window.problems == []


def test_the_pages_of_a_run_are_four_and_its_server_and_old_addresses_lead_to_them(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}", "nav.tabs")
    assert page.locator("nav.tabs a").all_inner_texts() == ["Overview", "Rollouts", "Tasks", "Compare", "Server"]
    for old, new in (("validation", "tasks"), ("live", "server"), ("workers", "server"), ("queues", "server")):
        page = window.open(f"/runs/{GRPO}/{old}", "nav.tabs a[aria-current]")
        assert page.url.endswith(f"/runs/{GRPO}/{new}")
    assert page.locator("nav.tabs").nth(1).locator("a").all_inner_texts() == [
        "Now", "Failures", "Prompts and models", "Weights"
    ]  # fmt: skip
    page.get_by_role("link", name="Compare", exact=True).click()
    page.get_by_label("calculator-rloo").check()
    page.locator(".u-over").first.wait_for()
    assert "Held-out reward" in page.locator("thead").first.inner_text()
    assert window.problems == []


def test_the_seeds_of_a_configuration_are_one_line_of_the_list_that_opens(browser, copied):
    other = Path(shutil.copytree(copied / GRPO, copied / "again")) / "config.toml"
    other.write_text(re.sub(r"^seed = \d+$", "seed = 77", other.read_text(), flags=re.MULTILINE))
    with Served(roots=[copied]) as served:
        window = Window(browser, served)
        page = window.open("", "tbody tr")
        rows = page.locator("tbody tr")
        assert rows.count() == 2
        line = rows.filter(has_text="and 1 more")
        assert "mean of 2" in line.inner_text()
        assert "48 / 48" in line.inner_text(), "the steps of both"
        line.get_by_role("button").click()
        assert rows.count() == 4
        assert {each.inner_text() for each in page.locator("tbody a b").all()} == {GRPO, "again", "calculator-rloo"}
        line.get_by_role("checkbox").check()
        assert page.locator("tbody input:checked").count() == 3
        page.get_by_role("button", name="Compare 2").click()
        page.locator("td", has_text="over 2 seeds").wait_for()
        assert window.problems == []


def test_task_output_and_reward_stand_on_top_of_a_rollout_and_the_next_of_the_table_is_one_click_away(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}/rollouts?mode=train&step=9&sort=reward_number&order=desc", "tbody a.mono")
    ids = [each.get_attribute("title") for each in page.locator("tbody a.mono").all()]
    page.locator("tbody a.mono").first.click()
    page.locator("h1.mono", has_text=ids[0]).wait_for()
    task = page.get_by_role("group", name="Task")
    output = page.get_by_role("group", name="Output").or_(page.get_by_role("group", name="Last answer"))
    assert "question" in task.inner_text() or task.inner_text()
    assert output.inner_text()
    assert page.locator("dt", has_text="Reward").first.locator("+ dd").inner_text() == "1"
    assert output.bounding_box()["y"] < 500, "above what happened"
    for number in (1, 2):
        page.get_by_role("link", name="Next").click()
        page.locator("h1.mono", has_text=ids[number]).wait_for()
    page.keyboard.press("p")
    page.locator("h1.mono", has_text=ids[1]).wait_for()
    assert page.get_by_text(f"2 of {len(ids)}").count() == 1
    alone = Window(browser, served)
    page = alone.open(f"/runs/{GRPO}/rollouts/{ids[1]}", "a[rel=next]")
    assert page.locator("a[rel=prev]").count() == 1, "without a table, those created before and after it"
    assert window.problems == alone.problems == []


def test_a_rollout_is_searched_and_its_texts_are_copied(browser, served):
    window = Window(browser, served)
    window.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = window.open(f"/runs/{GRPO}/rollouts?tools=failed&mode=train", "tbody a.mono")
    page.locator("tbody a.mono").first.click()
    page.wait_for_selector(".message")
    page.get_by_role("button", name="Copy the task").click()
    page.get_by_text("Copied", exact=True).wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.get_by_role("group", name="Task").inner_text()
    page.get_by_role("searchbox", name="Search in this rollout").fill("INVALID SYNTAX")
    status = page.get_by_role("search").get_by_role("status")
    page.wait_for_timeout(200)
    found = int(status.inner_text().split()[0])
    assert found > 0
    page.keyboard.press("Enter")
    assert status.inner_text() == f"1 of {found}"
    assert page.evaluate("[CSS.highlights.get('found').size, CSS.highlights.get('here').size]") == [found, 1]
    page.get_by_role("searchbox").fill("nothing has this")
    page.get_by_text("not found").wait_for()
    assert window.problems == []


def test_the_gain_is_read_at_400_px_without_scrolling_and_constant_charts_are_folded_by_name(browser, demo):
    window = Window(browser, demo, width=400)
    page = window.open("/runs/messages", "b.gain")
    for gain in page.locator("td:has(b.gain)").all():
        box = gain.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
        assert gain.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth")
    folded = page.locator("summary", has_text="The same at every step")
    assert "(" in folded.inner_text(), "each with its value"
    drawn = page.locator(".u-over").count()
    folded.click()
    page.wait_for_timeout(300)
    assert page.locator(".u-over").count() > drawn
    assert window.problems == []


def test_a_step_is_reached_by_keyboard(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}", ".u-over")
    page.locator(".plot").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/steps/3")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("u")
    page.wait_for_url(f"**/runs/{GRPO}")


def test_the_page_shows_nothing_without_the_token(browser, served):
    window = Window(browser, served, token="")
    page = window.open("", "input[type=password]")
    assert "calculator" not in page.content()
    page.fill("input[type=password]", "wrong")
    page.click("button[type=submit]")
    page.wait_for_selector("input[type=password]")
    assert "calculator" not in page.content()
    page.fill("input[type=password]", TOKEN)
    page.click("button[type=submit]")
    page.wait_for_selector("tbody a")
    assert GRPO in page.content()


def test_rollouts_are_filtered_annotated_and_exported(browser, served, tmp_path):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}/rollouts", "tbody tr")
    page.select_option("select[name=state]", "failed")
    page.wait_for_url("**state=failed**")
    page.locator("tbody .pill", has_text="succeeded").first.wait_for(state="detached")
    page.locator("tbody input[type=checkbox]").first.check()
    page.fill("input[aria-label=Label]", "a label")
    page.get_by_text("Annotate", exact=True).click()
    page.get_by_text("annotate: 1 of 1 done").wait_for()
    page.get_by_text("a label", exact=True).first.wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="JSONL").click()
    download.value.save_as(tmp_path / "export.jsonl")
    kinds = [orjson.loads(line)["type"] for line in (tmp_path / "export.jsonl").read_bytes().splitlines()]
    assert kinds == ["header", "rollout", "end"]
    page = window.open(f"/runs/{GRPO}/rollouts?mode=train&step=9", "tbody tr")
    with page.expect_download() as download:
        page.get_by_role("button", name="DPO").click()
    download.value.save_as(tmp_path / "pairs.jsonl")
    pairs = [orjson.loads(line) for line in (tmp_path / "pairs.jsonl").read_bytes().splitlines()]
    assert all({"prompt", "chosen", "rejected"} <= set(pair) for pair in pairs)
    page.get_by_text(f"exported {len(pairs)} records").wait_for()


def test_tokens_are_coloured_by_the_ratio_of_new_to_old_and_what_is_clipped_is_marked(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}/rollouts/{a_group(window)}/tokens?by=ratio", ".t.n1, .t.n2, .t.n3")
    page.locator(".t.n1, .t.n2, .t.n3").first.click()
    assert "ratio 0." in page.locator(".inspector").inner_text(), "a token of a bad answer becomes less likely"
    page = window.open(f"/runs/{GRPO}/rollouts?mode=val", "tbody a")
    page.locator("tbody a").first.click()
    page.locator("a.button", has_text="Tokens").click()
    button = page.get_by_role("button", name="Ratio of new to old")
    button.wait_for()
    assert button.is_disabled(), "nothing is learned from a validation"
    assert "run.token_ratios=true" in button.get_attribute("title")
    assert window.problems == []


def test_the_likeliest_tokens_at_the_place_of_a_sampled_one_are_shown_with_their_probabilities(browser, served):
    window = Window(browser, served)
    page = window.open(f"/runs/{GRPO}/rollouts/{a_group(window)}/tokens?by=rank", ".t.z")
    assert page.locator(".t.n1, .t.n2, .t.n3").count() > 0, "some token was not the likeliest"
    page.locator(".t.z").first.click()
    shown = page.get_by_label("Likeliest tokens here").locator("li")
    assert shown.count() > 1
    assert shown.first.get_attribute("class") == "sampled"
    assert "%" in shown.first.inner_text()
    assert window.problems == []
