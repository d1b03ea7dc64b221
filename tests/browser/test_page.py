"""All pages in a real Chromium: both sizes, light and dark, keyboard alone, a server that goes."""

from __future__ import annotations

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser import recorded_run
from tests.browser.conftest import WIDE, Open
from tests.browser.page_server import PAGE, PIXEL, Recorded, recorded_server

NARROW = (820, 700)
ROUTES = {
    "#/run": "versions",
    "#/version/default/40": "samples",
    "#/episodes": "episodes",
    "#/group/17": "samples",
    "#/episode/17/2": "tree",
    "#/episode/17/1?tab=tokens&at=90&colour=difference": "strip",
    "#/episode/17/2?tab=timeline": "tree",
    "#/episode/17/2?tab=calls": "tree",
    "#/episode/17/2?tab=details": "tree",
    "#/tools": "tools",
    "#/discarded": "items",
    "#/waits": "graph",
    "#/workers": "sandboxes",
    "#/topics": "topics",
    "#/topic/tasks": "records",
    "#/record?at=search-agent.tasks.v1/0@5": "record",
    "#/dead-letters": "letters",
    "#/dead-letter/1": "",
    "#/compare?first=39&second=40": "items",
    "#/compare?run=other": "changes",
    "#/jobs": "",
}
"""Each link, and a panel that is there when the page has its answers."""
ERRORS = {
    401: "This browser may not read the run",
    404: "There is no such thing",
    500: "The server refused",
    503: "Not there yet",
}
SINKS = r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySet|document\.write|eval\(|Function\("


def show(page: Page, link: str) -> None:
    """Follows a link inside the page and waits for its answers."""
    page.evaluate("link => { location.hash = link; }", link)
    name = ROUTES[link]
    wanted = page.locator(f"[data-name={name}]" if name else "main section").first
    expect(wanted).to_be_visible()
    expect(page.locator(".skeleton")).to_have_count(0)


@pytest.mark.parametrize(
    ("size", "scheme", "links"),
    [(WIDE, "light", [*ROUTES][::2]), (NARROW, "dark", [*ROUTES][1::2])],
)
def test_pages_are_accessible(
    open_page: Open, recorded: Recorded, size: tuple[int, int], scheme: str, links: list[str]
) -> None:
    recorded.most_items = 4
    page = open_page(size=size, scheme=scheme)
    page.evaluate(Axe().axe_script)
    found = []
    for link in links:
        show(page, link)
        answer = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        for each in answer["violations"]:
            if each["impact"] in ("serious", "critical"):
                found.append((link, each["id"], each["nodes"][0]["html"][:200]))
    assert found == []


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "dark"), (NARROW, "light")])
def test_all_pages_fit_and_nothing_moves(
    open_page: Open, size: tuple[int, int], scheme: str
) -> None:
    page = open_page(size=size, scheme=scheme)
    page.evaluate("""() => {
        window.shifts = [];
        new PerformanceObserver((list) => list.getEntries().forEach((one) => shifts.push(
            [one.value, one.sources.map((each) => each.node?.outerHTML?.slice(0, 80))]
        ))).observe({type: "layout-shift", buffered: true});
    }""")
    wide = []
    for link in ROUTES:
        show(page, link)
        page.wait_for_timeout(60)
        main = "document.querySelector('main')"
        if page.evaluate(f"{main}.scrollWidth > {main}.clientWidth"):
            wide.append(link)
    assert wide == []
    moved = [one for one in page.evaluate("shifts") if one[0] > 0.005]
    assert moved == [], "\n".join(map(str, moved))


def test_the_keyboard_alone_reaches_everything(open_page: Open, recorded: Recorded) -> None:
    page = open_page("#/run")
    expect(page.locator("[data-name=versions] table")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()

    chart = page.get_by_role("slider", name="Reward")
    while not chart.evaluate("node => node === document.activeElement"):
        page.keyboard.press("Tab")
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-valuetext", re.compile("^version 40: 0.3"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Version 40")).to_be_visible()

    page.get_by_role("button", name="Evaluate").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Evaluate")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Evaluate")).to_be_hidden()
    assert recorded.posted == []
    page.keyboard.press("]")
    expect(page.get_by_role("heading", name="Version 41")).to_be_visible()

    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("river")
    page.keyboard.press("Enter")
    expect(page.locator("[data-name=episodes]")).to_contain_text("… river")
    assert "text=river" in page.url


def test_tables_sort_and_tabs_move_by_keys(open_page: Open) -> None:
    page = open_page("#/run")
    versions = page.locator("[data-name=versions]")
    versions.get_by_role("button", name="Reward").focus()
    page.keyboard.press("Enter")
    expect(versions.get_by_role("columnheader", name="Reward")).to_have_attribute(
        "aria-sort", "descending"
    )
    texts = versions.locator("tbody td:nth-child(4)").all_inner_texts()
    assert len(texts) == 50
    assert texts == sorted(texts, key=float, reverse=True)
    page.keyboard.press("Enter")
    assert versions.locator("tbody td:nth-child(4)").first.inner_text() == texts[-1]

    page.goto(page.url.split("#")[0] + "#/episode/17/2")
    page.get_by_role("tab", name="Transcript").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Tokens")).to_be_focused()
    assert "tab=tokens" in page.url


def test_links_show_the_same_again(open_page: Open, recorded: Recorded) -> None:
    first = open_page("#/episodes?tool_failed=1&order=-tokens")
    expect(first.get_by_label("a tool failed")).to_be_checked()
    rows = first.locator("[data-name=episodes] tbody tr")
    expect(rows).to_have_count(80)
    first.get_by_role("button", name="Turns", exact=True).click()
    expect(first.get_by_role("columnheader", name="Turns")).to_have_attribute(
        "aria-sort", "descending"
    )
    second = open_page(first.url.removeprefix(f"{recorded.url}/"))
    expect(second.locator("[data-name=episodes] tbody tr")).to_have_count(80)
    newest = [each.first.locator("a").first for each in (rows, second.locator("tbody tr"))]
    assert newest[0].inner_text() == newest[1].inner_text()


def test_a_list_is_read_page_by_page(open_page: Open) -> None:
    page = open_page("#/episodes")
    rows = page.locator("[data-name=episodes] tbody tr")
    expect(rows).to_have_count(100)
    newest = rows.first.locator("a").first.inner_text()
    page.get_by_role("button", name="Next page").click()
    expect(rows.first.locator("a").first).not_to_have_text(newest)
    page.go_back()
    expect(rows.first.locator("a").first).to_have_text(newest)


def test_a_server_that_is_gone_is_shown_and_found_again(open_page: Open) -> None:
    page = open_page("#/run")
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    expect(page.locator("[data-name=versions] tbody tr")).to_have_count(50)
    page.context.set_offline(True)
    expect(page.get_by_text("The server has not answered since")).to_be_visible()
    expect(page.locator("[data-name=versions] tbody tr")).to_have_count(50)
    page.context.set_offline(False)
    # The page may find it by itself before the click, and then has no button any more.
    page.get_by_role("button", name="Try now").evaluate_all("found => found[0]?.click()")
    expect(page.get_by_text("The server has not answered since")).to_have_count(0)
    delays = page.evaluate("""async () => {
        const { nextDelay } = await import("/page/lib/api.js");
        return [0, 1, 2, 3, 5, 6, 20].map((failures) => nextDelay(3000, failures));
    }""")
    assert delays == [3000, 1000, 2000, 4000, 16000, 30000, 30000]


@pytest.mark.parametrize("status", ERRORS)
def test_an_error_says_what_happened(open_page: Open, recorded: Recorded, status: int) -> None:
    recorded.replaced["tools"] = (status, {"error": "Read <b>this</b>."})
    page = open_page("#/tools")
    expect(page.get_by_role("alert")).to_contain_text(ERRORS[status])
    if status in (404, 500, 503):
        expect(page.get_by_role("alert")).to_contain_text("Read <b>this</b>.")


def test_empty_answers_are_said_in_words(open_page: Open, recorded: Recorded) -> None:
    empty = {"items": [], "total": 0, "next": None}
    recorded.replaced["tools"] = (200, empty)
    recorded.replaced["waits"] = (200, {"at": 0.0, "waits": []})
    page = open_page("#/tools")
    expect(page.get_by_text("No episode has called a tool.")).to_be_visible()
    page.get_by_role("link", name="Waits").click()
    expect(page.get_by_text("Nothing waits.")).to_be_visible()


def test_a_page_of_a_busy_machine_says_as_of_when_it_is(
    open_page: Open, recorded: Recorded
) -> None:
    run = recorded_run.run()
    run["index"]["as_of"] = run["now"] - 2.0
    recorded.replaced["run"] = (200, run)
    page = open_page("#/run")
    expect(page.locator("header.top")).to_contain_text("live")
    expect(page.get_by_text("the machine is busy")).to_have_count(0)
    run["index"]["as_of"] = run["now"] - 20.0
    expect(page.get_by_role("status").get_by_text("the machine is busy")).to_be_visible()


def test_an_action_sends_its_token_after_a_question(open_page: Open, recorded: Recorded) -> None:
    page = open_page("#/dead-letters")
    page.get_by_label("Choose dead letter 0").check()
    page.get_by_role("button", name="Send again").click()
    page.get_by_role("dialog").get_by_role("button", name="Send again").click()
    expect(page.get_by_text("0 chosen")).to_be_visible()
    assert recorded.posted == [("/api/actions/redrive", "t", {"numbers": [0]})]


def test_two_runs_are_compared(open_page: Open) -> None:
    page = open_page("#/compare?run=other")
    charts = page.locator("figure.chart")
    expect(charts).to_have_count(2)
    expect(charts.first).to_contain_text("other")
    changes = page.locator("[data-name=changes]")
    expect(changes).to_contain_text("weights: differ from version 1 on")
    expect(changes).to_contain_text('tasks.use: "<b>a</b>" -> "other"')
    expect(changes.locator("b")).to_have_count(0)


def test_our_files_use_no_markup_from_text() -> None:
    files = [path for path in PAGE.rglob("*.js") if path.parent.name != "vendor"]
    assert len(files) > 15
    assert [path.name for path in files if re.search(SINKS, path.read_text())] == []
    index = (PAGE / "index.html").read_text()
    assert " style=" not in index
    assert re.findall(r"<script(?![^>]* src=)", index) == []


def test_the_token_goes_to_this_server_alone_and_not_in_a_cookie(
    open_page: Open, recorded: Recorded
) -> None:
    page = open_page("?token=secret#/group/17")
    expect(page.locator("[data-name=samples]")).to_be_visible()
    assert page.url == f"{recorded.url}/#/group/17"
    other_tab = page.context.new_page()
    other_tab.goto(f"{recorded.url}/#/episode/17/2?tab=details")
    drawn = "image => image.complete && image.naturalWidth === 1"
    picture = other_tab.locator(".artifact img").first
    expect(picture).to_have_attribute("src", re.compile("^blob:"))
    other_tab.wait_for_function(f"({drawn})(document.querySelector('.artifact img'))")
    with other_tab.expect_download() as saved:
        other_tab.locator("a.artifact").first.click()
    assert saved.value.path().read_bytes() == PIXEL
    facts = [one for one in recorded.asked if one[0].startswith("/api/")]
    assert any("/api/artifacts/" in path for path, *_ in facts)
    assert {one[1:] for one in facts} == {("Bearer secret", None)}
    with recorded_server() as other_port:
        other_tab.goto(f"{other_port.url}/#/run")
        expect(other_tab.locator("main")).to_be_visible()
        assert {one[1:] for one in other_port.asked} <= {(None, None), ("Bearer", None)}
    assert page.context.cookies() == []
