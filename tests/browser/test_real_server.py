"""The real dashboard over a run that was really written: every page, and three questions."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, Response, expect

from headrace.infra import local
from headrace.schemas.events import (
    ActionRequested,
    EpisodeStarted,
    Event,
    InstanceStateEntered,
    TaskSubmitted,
)
from headrace.schemas.topics import TASKS
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Position
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.browser.conftest import pages
from tests.browser.page_server import PAGE, ROUTES, answer
from tests.integration.test_dashboard import RECIPE, Browser, dashboard
from tests.integration.test_waits import env, inference
from tests.written_run import ENVIRONMENT, RunWriter, Size

BROKEN = 3
SIZE = Size(tasks=8, samples=8, broken=BROKEN)
TASK = 2 * BROKEN - 1
"""A task of the broken version."""
OTHER = "-b"
"""What the name of the second run has more than that of the first one."""
WHY_WAITING = "no env worker runs: the last one, env-a-2, reported"
MAPS = frozenset(
    {"metrics", "endings", "discarded", "lags", "labels", "series", "services", "versions",
     "served", "advantages", "pass", "tools", "headers", "event", "means", "excluded",
     "trained_in", "dropped", "failures", "rewards", "sampling"}
)  # fmt: skip
"""Objects whose keys are names that a run has."""


def test_every_page_shows_a_real_run_and_answers_three_questions(
    browser: Chromium, tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    stack = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)
    apart(write(stack, namespace, SIZE))
    apart(write(stack, namespace + OTHER, Size(tasks=2)))
    with dashboard(local_stack, namespace, tmp_path) as (asked, _):
        asked.until("/api/run", lambda tree: tree["index"]["caught_up"])
        asked.until_answered("/api/waits")
        with pages(browser, asked.url) as opened:
            page = opened("#/run")
            refused = list[str]()
            page.on("response", lambda one: note(one, refused))
            for link in links(asked, namespace + OTHER):
                check_page(page, link)
            assert refused == []
            why_did_the_reward_fall(page)
            which_tool_fails_most(page)
            what_does_the_run_wait_for(page)
        assert different_keys(asked, namespace + OTHER) == {}


def apart(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` in a thread: the loop of Playwright runs in this one."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


async def write(cluster: ClusterConfig, namespace: str, size: Size) -> None:
    """Writes a run whose tool breaks. Then its env worker dies."""
    async with connect(cluster, "test") as connection:
        log = await connection.writing_log(topics_of(RECIPE, namespace))
        await apply(log, RECIPE)
        weights = cluster.open_blobs(None).put(b"weights")
        await RunWriter(log.send, size, weights=weights).write()
        task = TaskMaker(RECIPE, "test").make(Item("item-x"), "last")
        number = (await log.send(task)).offset
        for event in last_events(task, number):
            await log.send(event)
        (record,) = await log.broker.fetch([Position(log.topics.partition(TASKS), 0)])
        await log.dead_letter(record, "it can't be read")


def last_events(task: TaskSubmitted, number: int) -> tuple[Event, ...]:
    """An episode that has asked for something, and what its workers reported before they died."""
    begun: dict[str, Any] = {"task": number, "sample": 0}
    deadline = int(1000 * (now() + 3_600))
    alive: dict[str, Any] = {"worker": "env-a-2", "number": 0, "state": "ready", "host": "a"}
    return (
        InstanceStateEntered(
            instance="env-a-2", kind="worker", service="env", every_ms=60_000, **alive
        ),
        InstanceStateEntered(instance="box-1", kind="sandbox", **alive),
        inference(0),
        env(0),
        EpisodeStarted(submitted=task, seed=0, deadline=deadline, **begun),
        ActionRequested(
            call="1", index=0, kind="step", environment=ENVIRONMENT, expires_at=deadline,
            digest=bytes(16), **begun,
        ),
    )  # fmt: skip


def links(asked: Browser, other: str) -> list[str]:
    """A link to each page, and to each tab of an episode. No page of app.js is left out."""
    record = asked.get("/api/records?topic=tasks&limit=1")["items"][0]["location"]
    tabs = ("transcript", "tokens", "timeline", "calls", "details")
    found = [
        "#/run", f"#/version/default/{BROKEN}", "#/episodes", f"#/group/{TASK}",
        *(f"#/episode/{TASK}/1?tab={tab}" for tab in tabs), "#/tools", "#/discarded", "#/waits",
        "#/workers", "#/topics", "#/topic/tasks", f"#/record?at={record}", "#/dead-letters",
        "#/dead-letter/0", f"#/compare?first={BROKEN - 1}&second={BROKEN}",
        f"#/compare?run={other}", "#/jobs",
    ]  # fmt: skip
    pages = re.findall(r'^  "?([\w-]+)"?: \[\w+Page,', (PAGE / "app.js").read_text(), re.MULTILINE)
    assert {re.split("[/?]", link)[1] for link in found} == set(pages)
    return found


def note(response: Response, refused: list[str]) -> None:
    if response.status >= 400:
        refused.append(f"{response.status} {response.url}")


def check_page(page: Page, link: str) -> None:
    """The page has what it asked for, and shows no error and no value that is not there."""
    page.evaluate("link => { location.hash = link; }", link)
    expect(page.locator("main section").first).to_be_visible()
    expect(page.locator(".skeleton")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    text = page.locator("main").inner_text().partition("live")[2]
    assert len(text) > 20, (link, text)
    assert re.search(r"NaN|undefined|\[object|Infinity", text) is None, (link, text)


def why_did_the_reward_fall(page: Page) -> None:
    """From the row of the version in which it fell to the tool that failed since."""
    page.get_by_role("link", name="Run", exact=True).click()
    rows = page.locator("[data-name=versions] tbody tr")
    expect(rows).to_have_count(5)
    rewards = [float(one) for one in rows.locator("td:nth-child(4)").all_inner_texts()[:-1]]
    falls = [after - before for after, before in pairwise(rewards)]
    assert falls.index(min(falls)) == 4 - BROKEN  # the newest version is the first row
    rows.get_by_role("link", name=str(BROKEN), exact=True).click()
    page.get_by_role("link", name=f"Compare with version {BROKEN - 1}").click()
    tools = page.get_by_role("region", name="Share of failed tool calls").locator("tbody tr")
    expect(tools.first).to_contain_text("search")
    expect(tools.first.locator("td:nth-child(3)")).to_have_text("100 %")
    expect(tools.nth(1).locator("td:nth-child(3)")).to_have_text("0 %")


def which_tool_fails_most(page: Page) -> None:
    """The first of the tools, and what it said when it failed."""
    page.get_by_role("link", name="Tools", exact=True).click()
    rows = page.locator("[data-name=tools] tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("search")
    expect(rows.nth(1).locator("td").last).to_have_text("\u2013")
    rows.first.locator("td").last.get_by_role("link").click()
    failed = page.get_by_role("tabpanel", name="Calls").locator("details.bad").first
    expect(failed).to_contain_text("Error: not found")


def what_does_the_run_wait_for(page: Page) -> None:
    """The oldest cause, and the command that helps."""
    page.get_by_role("link", name="Waits").first.click()
    root = page.locator("[data-name=roots] li").first
    expect(root).to_contain_text(WHY_WAITING)
    expect(root.locator(".copy code")).to_have_text("headrace serve env RECIPE")


def different_keys(asked: Browser, other: str) -> dict[str, list[str]]:
    """The objects whose keys differ between the hand-made answers and the real ones."""
    record = asked.get("/api/records?topic=tasks&limit=1")["items"][0]["location"]
    names = "reward,staleness,tokens_per_s,wait_s,step_s,dropped,samples"
    made = {
        f"versions/default/{BROKEN}": "versions/default/40", f"groups/{TASK}": "groups/17",
        f"episodes/{TASK}/1": "episodes/17/2", f"episodes/{TASK}/1/tokens": "episodes/17/2/tokens",
        "dead-letters/0": "dead-letters/0",
    }  # fmt: skip
    queries = {
        "series": [{"names": names}], "records": [{"topic": "tasks"}], "record": [{"at": record}],
        "compare": [{"first": "2", "second": "3"}, {"run": other}],
    }  # fmt: skip
    patterns = [pattern for pattern, _ in ROUTES if "(" not in pattern and pattern != "text"]
    found = dict[str, list[str]]()
    for path in [*patterns, *made]:
        for query in queries.get(path, [{}]):
            real = asked.get(f"/api/{path}?{urlencode(query)}")
            hand = answer(made.get(path, path), query)
            ours, theirs = dict(shapes(hand, path)), dict(shapes(real, path))
            for place in ours.keys() & theirs.keys():
                if differ := ours[place] ^ theirs[place]:
                    found[place] = sorted(differ)
    return found


def shapes(tree: object, place: str) -> dict[str, set[str]]:
    """The keys of each object in a JSON value, by where it is. Items of a list are one place."""
    found = defaultdict[str, set[str]](set)
    ahead = [(tree, place)]
    while ahead:
        value, at = ahead.pop()
        if isinstance(value, list):
            ahead += [(one, f"{at}[]") for one in value]
        elif isinstance(value, dict) and at.rpartition(".")[2] in MAPS:
            ahead += [(one, f"{at}[]") for one in value.values()]
        elif isinstance(value, dict):
            found[at] |= value.keys()
            ahead += [(one, f"{at}.{name}") for name, one in value.items()]
    return found
