"""A real Chromium, and pages of it that look at recorded answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser import recorded_run
from tests.browser.chromium import FLAGS, find_chromium, why_not
from tests.browser.page_server import Recorded, recorded_server

WIDE = (1440, 900)
WAIT_MS = 30_000
"""How long anything may take to appear on a machine with much else to do."""

expect.set_options(timeout=WAIT_MS)
Open = Callable[..., Page]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium."""
    if reason := why_not():
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    found = find_chromium(Path(shared) / "chromium")
    with sync_playwright() as playwright:
        loop = asyncio.get_running_loop()
        yield playwright.chromium.launch(
            executable_path=found.path, args=FLAGS, env={**os.environ, **found.environment}
        )
        asyncio._set_running_loop(loop)


@pytest.fixture(autouse=True)
def loop_of_browser(browser: Browser) -> Iterator[None]:
    """Hides Playwright's event loop, which never ends, from the other tests of this process."""
    asyncio._set_running_loop(browser._loop)
    yield
    asyncio._set_running_loop(None)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """A server of the recorded answers, which are of the last minutes."""
    recorded_run.set_now(time.time())
    with recorded_server() as server:
        yield server


@contextmanager
def pages(browser: Browser, url: str) -> Iterator[Open]:
    """Opens links of a server, each in a window of its own. An error in the page fails the test."""
    opened: list[Any] = []
    problems: list[str] = []

    def go(link: str = "#/run", size: tuple[int, int] = WIDE, scheme: str = "light") -> Page:
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url.split("/?")[0])
        context.set_default_timeout(WAIT_MS)
        opened.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"{error}"))
        page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
        page.on("console", lambda said: _note(said.type, said.text, problems))
        page.goto(f"{url}{link}")
        return page

    yield go
    for context in opened:
        context.close()
    assert problems == []


@pytest.fixture
def open_page(browser: Browser, recorded: Recorded) -> Iterator[Open]:
    """Opens links of the recorded answers."""
    with pages(browser, recorded.url) as go:
        yield go


def _note(kind: str, text: str, problems: list[str]) -> None:
    # Chromium reports answers that the tests ask to fail, and a network that they cut.
    if kind == "error" and "Failed to load resource" not in text:
        problems.append(text)
