"""The dashboard of a deployment with TLS and API keys: it asks for an operator's key."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from quire.certificates import write_certificates
from quire.connections import Tls
from tests.api_keys import ALICE, OPERATOR, text_of
from tests.browser.conftest import LIMIT_MS, live
from tests.e2e.deployment import Deployment, serving

expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="module")
def guarded(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory: Path = tmp_path_factory.mktemp("guarded")
    tls, keys = directory / "tls", directory / "keys.json"
    write_certificates(tls, hosts=["127.0.0.1"])
    keys.write_text(text_of())
    keys.chmod(0o600)
    flags = ["--tls-cert", f"{tls}/gateway.crt", "--tls-key", f"{tls}/gateway.key"]
    flags += ["--api-keys", str(keys), "--pool-memory", "3MiB"]
    with serving("demo", directory, *flags, tls=Tls(tls / "ca.crt")) as deployment:
        yield deployment


@pytest.fixture
def page(browser: Browser, guarded: Deployment) -> Iterator[Page]:
    """The page before a key is given. The browser does not know its private CA."""
    context = browser.new_context(ignore_https_errors=True)
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    page.goto(guarded.http)
    yield page
    context.close()


def give(page: Page, key: str) -> None:
    page.get_by_label("Operator's API key").fill(key)
    page.locator("#key").get_by_role("button").click()


def test_nothing_is_shown_without_an_operators_key(page: Page) -> None:
    expect(page.locator("#key")).to_be_visible()
    assert page.locator(".figure, .worker, .row").count() == 0
    for other in ("main", "#notice", "#why"):
        expect(page.locator(other).first).to_be_hidden()
    for key in ("qk-" + "x" * 40, ALICE):
        with page.expect_response("**/dashboard/feed") as answered:
            give(page, key)
        assert answered.value.status in (401, 403)
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator("#why")).not_to_be_empty()
    assert page.locator(".figure, .worker, .row").count() == 0


def test_an_operators_key_opens_it_until_the_tab_is_closed(page: Page) -> None:
    give(page, OPERATOR)
    live(page)
    expect(page.locator("#key")).to_be_hidden()
    expect(page.locator(".worker")).to_have_count(2)
    with page.expect_response("**/dashboard/audit") as answered:
        page.get_by_role("button", name="Audit now").click()
    assert answered.value.status == 200
    page.reload()
    live(page)
    page.get_by_role("button", name="Playground").click()
    page.get_by_label("Message").fill("Why is the sky blue?")
    page.get_by_label("Max tokens").fill("8")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn .muted")).to_contain_text("finish:")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("#key")).to_be_visible()
