"""The page in a real Chromium: every page of a finished run, from a curve to a token in three clicks, keys, actions."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest
from tests.dashboard.browsing import GRPO, TOKEN, Window, a_group, groups, pages

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
