"""A deployment and a browser: Debian's Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from bench.make_checkpoint import make_checkpoint
from tests.e2e.conftest import POOL_MEMORY
from tests.e2e.deployment import Deployment, serving

CHROMIUM = shutil.which("chromium")
LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. It does not live for the whole session: while Playwright runs, its event loop runs
    in this thread, and later asyncio tests of the process could not start theirs."""
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def deployment(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Random weights, which decode fast, and a pool that a few requests fill."""
    directory: Path = tmp_path_factory.mktemp("browser")
    model = make_checkpoint(directory / "tiny")
    options = ("--decode", "2", "--pool-memory", str(POOL_MEMORY))
    with serving(model, directory, *options) as deployment:
        yield deployment


@pytest.fixture
def page(browser: Browser, deployment: Deployment) -> Iterator[Page]:
    """The dashboard, live. The page must not violate its own security policy or raise an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: (
            faults.append(message.text)
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
    page.goto(deployment.http)
    live(page)
    yield page
    context.close()
    assert faults == []


def live(page: Page) -> None:
    page.wait_for_selector("#status[data-state=live]")
    page.wait_for_selector(".figure")
