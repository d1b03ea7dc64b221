"""Texts and tokens of episodes in a real Chromium, and the questions that users ask."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.conftest import Open
from tests.browser.recorded_run import BROKEN, LONG_TEXT, LONG_TOKENS

MOST_SPANS = 6_000
"""Tokens in the document at any time: some 50 rows."""


def test_hostile_text_is_harmless(open_page: Open) -> None:
    page = open_page("#/episode/17/2?branch=3&turn=2")
    for link in (
        "#/episode/17/2?branch=3&turn=2",
        "#/dead-letter/1",
        "#/record?at=search-agent.tasks.v1/0@5",
        "#/topic/tasks",
        "#/episodes?text=<img src=x>",
    ):
        page.evaluate("link => { location.hash = link; }", link)
        found = page.locator("main").get_by_text("<script>document.title='owned'</script>").first
        expect(found).to_be_visible()
        # A record is JSON, which spells them itself.
        escape = r"\u001b" if "record" in link else "⟨ESC⟩"
        expect(page.locator("main")).to_contain_text(f"{escape}[31mred")
        expect(page.locator("main")).to_contain_text("⟨U+202E⟩esrever")
    for link in ("#/<img src=x onerror=alert(1)>", "#/episode/<b>/%zz", "#/version/__proto__/1"):
        page.evaluate("link => { location.hash = link; }", link)
        page.wait_for_timeout(100)
    assert "owned" not in page.title()
    assert page.locator("img[src=x], main script, main b b").count() == 0
    raw = page.locator("body").inner_text()
    assert not set(raw) & set("\x00\x07\x1b\u202e")


def test_a_long_observation_is_cut_until_all_is_asked_for(open_page: Open) -> None:
    page = open_page("#/episode/17/2?tab=calls")
    page.locator(".calls details").nth(1).locator("summary").click()
    answer = page.get_by_role("group", name="Answer", exact=True).first
    expect(page.get_by_text("20K of 5.2M characters")).to_be_visible()
    assert answer.evaluate("node => node.textContent.length") < 40_000
    page.get_by_role("button", name="Show all").click()
    expect(page.get_by_role("button", name="Show all")).to_have_count(0)
    shown = answer.evaluate("node => node.textContent")
    assert len(shown) > LONG_TEXT
    assert shown.count("⟨ESC⟩[31mred") > LONG_TEXT // 400
    assert not re.search("[\x00-\x08\x0b-\x1f]", shown)
    # The page still answers.
    page.get_by_role("tab", name="Timeline").click()
    expect(page.get_by_text("12 hops in")).to_be_visible()


def test_a_strip_of_32000_tokens_keeps_few_in_the_document(open_page: Open) -> None:
    page = open_page("#/episode/17/2?tab=tokens")
    expect(page.locator("[data-name=strip] header")).to_contain_text(
        f"{LONG_TOKENS:,} of {LONG_TOKENS:,}"
    )
    tokens = page.get_by_role("group", name="Tokens. The arrow keys choose one.")
    most = tokens.evaluate("""async (node) => {
        let most = 0;
        for (let step = 0; step <= 60; step += 1) {
            node.scrollTop = (node.scrollHeight - node.clientHeight) * step / 60;
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            most = Math.max(most, node.querySelectorAll("span").length);
        }
        return most;
    }""")
    assert 100 < most < MOST_SPANS
    expect(page.locator(f"[data-token='{LONG_TOKENS - 1}']")).to_be_visible()
    tokens.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-token='1'].chosen")).to_be_visible()
    assert "at=1" in page.url
    page.get_by_label("Colour by").select_option("difference")
    expect(page.get_by_text("likelier for the trainer", exact=True)).to_be_visible()


def test_why_logprobs_of_the_trainer_are_unknown_is_said(open_page: Open) -> None:
    page = open_page("#/episode/17/1?tab=tokens&at=60&colour=difference")
    strip = page.locator("[data-name=strip]")
    chosen = strip.get_by_role("status")
    expect(strip.get_by_role("listitem")).to_contain_text("It was pruned")
    expect(chosen).to_contain_text(re.compile("Trainer logprob\\s*\u2013"))
    page.evaluate("location.hash = '#/episode/17/0?tab=tokens&at=60'")
    expect(strip.get_by_role("listitem")).to_have_count(0)
    expect(chosen).to_contain_text(re.compile("Trainer logprob\\s*[-\u2212]\\d"))


def test_a_branch_is_chosen_in_the_tree(open_page: Open) -> None:
    page = open_page("#/episode/17/2")
    expect(page.locator("#turn-5")).to_contain_text("The answer is 41.")
    assert page.locator("#turn-3").count() == 0
    page.locator("[data-name=tree]").get_by_role("link", name="turn 3").click()
    expect(page.locator("#turn-3")).to_contain_text("The answer is 42.")
    assert page.locator("#turn-5").count() == 0


def test_pure_parts_keep_their_promises(open_page: Open) -> None:
    page = open_page("#/jobs")
    problems = page.evaluate((Path(__file__).parent / "pure_parts.js").read_text())
    assert problems == []


def point_at(page: Page, chart: str, wanted: str) -> None:
    """Moves the mouse over a chart until its title names the wanted point, and clicks."""
    figure = page.locator("figure", has_text=chart).first
    plot = figure.locator(".u-over")
    box = plot.bounding_box()
    assert box is not None
    for share in range(40, 100):
        page.mouse.move(box["x"] + box["width"] * share / 100, box["y"] + box["height"] / 2)
        if wanted in figure.locator(".title").inner_text():
            page.mouse.click(box["x"] + box["width"] * share / 100, box["y"] + box["height"] / 2)
            return
    raise AssertionError(f"{chart} has no point {wanted}")


def test_why_did_the_reward_fall(open_page: Open) -> None:
    page = open_page("#/run")
    expect(page.locator("figure .u-over").first).to_be_visible()
    point_at(page, "Reward", f"version {BROKEN}")
    expect(page.get_by_role("heading", name=f"Version {BROKEN}")).to_be_visible()
    expect(page.locator("main")).to_contain_text("12 of 32 samples were left out")
    page.get_by_role("link", name=f"Compare with version {BROKEN - 1}").click()
    tools = page.locator(
        "section", has=page.get_by_role("heading", name="Share of failed tool calls")
    )
    expect(tools.locator("tbody tr").first).to_contain_text(re.compile(r"search\s*2.5 %\s*78 %"))
    failures = page.locator("section", has=page.get_by_role("heading", name="Failures", exact=True))
    expect(failures).to_contain_text("environment tool timeout")


def test_which_tool_call_fails_most(open_page: Open) -> None:
    page = open_page("#/run")
    page.get_by_role("link", name="Tools").click()
    row = page.locator("[data-name=tools] tbody tr").first
    expect(row).to_contain_text("search")
    expect(row).to_contain_text("12 %")
    row.get_by_role("link", name="17/2").click()
    failed = page.locator(".calls details[open]")
    expect(failed).to_have_count(1)
    expect(failed).to_contain_text("search: no answer within 5 s")
    expect(failed).to_contain_text("Traceback")


def test_what_is_the_run_waiting_for(open_page: Open) -> None:
    page = open_page("#/run")
    page.get_by_role("link", name=re.compile("^Waits")).first.click()
    root = page.locator("[data-name=roots] li").first
    expect(root).to_contain_text(re.compile(r"4 min \d+ s"))
    expect(root).to_contain_text("env-2 has not been seen for 4 min")
    root.get_by_role("button", name="Copy: headrace serve env --environment search").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == "headrace serve env --environment search"
    root.get_by_role("button", name="worker env-2", exact=True).click()
    on = page.locator("[data-name=graph] .node.on b").all_inner_texts()
    assert {"trainer of default", "batch of version 61", "worker env-2"} <= set(on)
    assert "worker inference-1" not in on
