"""axe finds nothing serious on any page, light, dark and narrow.

Needs axe-core, which is no dependency: `npm install axe-core` in the repository (node_modules is ignored), or AGL_AXE
with the path of its axe.min.js. Skipped without, by name.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.dashboard.browsing import Served, Window, pages
from tests.dashboard.test_open_rollouts import Hub, call

from agentlightning.store import LightningStore

pytestmark = pytest.mark.slow
PLACES = (os.environ.get("AGL_AXE", ""), str(Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"))
RUN_AXE = """async () => {
  const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
  const found = await axe.run(document, { runOnly: { type: "tag", values: tags }, resultTypes: ["violations"] });
  return found.violations.map((each) => [each.impact, each.id, each.nodes.length, each.nodes[0].html.slice(0, 160),
    (each.nodes[0].any[0] || each.nodes[0].all[0] || each.nodes[0].none[0] || {}).message || each.help]);
}"""


@pytest.fixture(scope="module")
def axe() -> str:
    for place in PLACES:
        if place and Path(place).is_file():
            return Path(place).read_text()
    pytest.skip("axe-core is not installed: npm install axe-core, or set AGL_AXE to its axe.min.js")


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path / "hub.db")


@pytest.fixture
def long_attempt(hub: Hub) -> str:
    """A rollout that runs, with more spans than a page shows."""
    ids = hub.start()
    hub.write(lambda store: store.add_many_spans([each for n in range(200) for each in call(ids, n)]))
    return ids[0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (400, "light")])
def test_axe_finds_nothing_on_any_page(browser, served, axe, width, theme):
    window = Window(browser, served, width=width, theme=theme)
    found = []
    for path in pages(window):
        page = window.open(path)
        page.evaluate(axe)
        found += [(path, *each) for each in page.evaluate(RUN_AXE)]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (400, "light")])
def test_axe_finds_nothing_on_the_pages_of_a_long_attempt_that_runs(browser, hub, long_attempt, axe, width, theme):
    store = LightningStore(hub.path)
    found = []
    with Served(store=store) as served:
        window = Window(browser, served, width=width, theme=theme)
        own = f"/runs/store/rollouts/{long_attempt}"
        for path in (own, f"{own}?tab=spans", f"{own}/tokens?call=100", f"{own}/group", "/runs/store/server"):
            page = window.open(path)
            page.evaluate(axe)
            found += [(path, *each) for each in page.evaluate(RUN_AXE)]
        assert window.problems == []
    hub.run(store.close)
    assert not found, "\n".join(map(str, found))
