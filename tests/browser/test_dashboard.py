"""The dashboard in a real browser: its contents through a gateway's restart and a worker's kill, on
a phone, and by keyboard."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import LIMIT_MS, live
from tests.e2e.deployment import Deployment

expect.set_options(timeout=LIMIT_MS)
HTML_ID = "<img src=x onerror=alert(1)>"


def complete(deployment: Deployment, num_tokens: int, request_id: str = "") -> None:
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    body |= {"request_id": request_id} if request_id else {}
    answer = httpx.post(f"{deployment.http}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text


@contextmanager
def load(deployment: Deployment, num_requests: int, num_tokens: int) -> Iterator[None]:
    running = [
        threading.Thread(target=complete, args=(deployment, num_tokens, f"load-{number}"))
        for number in range(num_requests)
    ]
    for thread in running:
        thread.start()
    yield
    for thread in running:
        thread.join()


def test_overview_shows_pool_workers_and_requests(page: Page, deployment: Deployment) -> None:
    expect(page.locator(".worker:not(.gone)")).to_have_count(3)
    with load(deployment, 8, 400):  # more than the pool holds
        expect(page.locator(".row .p-decode").first).to_be_visible()
        expect(page.locator("canvas.map")).to_be_visible()
        held = page.locator(".legend li", has_text="held").locator("b")
        expect(held).not_to_have_text("0")
    expect(page.locator(".row.ended", has_text="load-1").first).to_be_visible()
    expect(page.locator('#ttft rect:not([height="0"])').first).to_be_visible()
    expect(page.locator(".row .p-preempted").first).to_be_attached()


def test_block_tells_its_facts_by_pointer_and_by_keyboard(
    page: Page, deployment: Deployment
) -> None:
    complete(deployment, 40)
    page.locator("canvas.map").hover(position={"x": 6, "y": 6})
    expect(page.locator("#tip")).to_contain_text("block 0")
    expect(page.locator("#tip")).to_contain_text("prefix hash")
    page.locator("canvas.map").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("block 1")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


def test_colours_can_show_age_and_holder(page: Page) -> None:
    for mode, told in (("age", "changed now"), ("holder", "each holder"), ("state", "cached")):
        page.locator(".choice", has_text=mode).click()
        expect(page.locator(".pools .legend")).to_contain_text(told)


def test_ages_below_a_second_are_now(page: Page) -> None:
    """A figure such as `0.0 ms ago` says nothing: ages are counted in whole seconds."""
    ages = page.evaluate("import('/dashboard/dom.js').then(({ago}) => [0, 0.4, 7].map(ago))")
    assert ages == ["just now", "just now", "7.0 s ago"]


def test_text_of_clients_stays_text(page: Page, deployment: Deployment) -> None:
    complete(deployment, 4, HTML_ID)
    row = page.locator(".row", has_text="<img")
    expect(row).to_be_visible()
    assert page.locator(".row img").count() == 0


def test_playground_times_tokens_and_shows_alternatives(page: Page) -> None:
    page.get_by_role("button", name="Playground").click()
    page.get_by_label("Message").fill("What happens when a worker crashes?")
    page.get_by_label("Max tokens").fill("12")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn .muted")).to_contain_text("finish:")
    tokens = page.locator(".token")
    assert 2 <= tokens.count() <= 12
    tokens.nth(1).hover()
    expect(page.locator("#tip")).to_contain_text("probability")
    assert page.locator("#tip").inner_text().count("%") >= 6
    page.get_by_label("Temperature").fill("1.5")
    page.locator("select[name=mode]").select_option("text")
    page.get_by_label("Message").fill("Once upon a time")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn")).to_have_count(4)
    expect(page.locator(".turn").nth(3).locator(".muted")).to_contain_text("finish:")


def test_playground_reports_a_refused_request(page: Page) -> None:
    page.get_by_role("button", name="Playground").click()
    page.get_by_label("Message").fill("word " * 20_000)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn .bad")).to_contain_text("tokens")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_has_no_overflow_and_text_has_contrast(
    browser: Browser, deployment: Deployment, scheme: str
) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 844},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(deployment.http)
    live(page)
    for view in ("Overview", "Playground"):
        page.get_by_role("button", name=view).click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    contrast = page.evaluate(CONTRAST)
    assert min(contrast.values()) >= 4.5, contrast
    context.close()


CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const luminance = (name) => {
    const hex = style.getPropertyValue(name).trim().slice(1);
    const full = hex.length === 3 ? [...hex].map((c) => c + c).join("") : hex;
    const [r, g, b] = [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16) / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const inks = ["--text", "--muted", "--good", "--warn", "--bad", "--accent"];
  return Object.fromEntries(inks.map((ink) => [ink, ratio(ink, "--panel")]));
}"""


def test_killed_worker_is_shown_as_gone_and_its_successor_serves(
    page: Page, deployment: Deployment
) -> None:
    expect(page.locator(".worker .ok")).to_have_count(3)
    os.kill(deployment.running("--role=decode")[0], signal.SIGKILL)
    expect(page.locator(".worker.gone")).to_contain_text("decode-")
    expect(page.locator(".worker .ok")).to_have_count(3)


def test_killed_gateway_is_noticed_and_found_again(page: Page, deployment: Deployment) -> None:
    before = page.locator("#model").inner_text()
    os.kill(deployment.running("services.gateway")[0], signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("No connection")
    expect(page.locator("#overview.stale")).to_be_visible()
    live(page)
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#overview.stale")).to_have_count(0)
    expect(page.locator("#model")).not_to_have_text(before)


def test_killed_block_manager_is_named_and_requests_go_on(
    page: Page, deployment: Deployment
) -> None:
    os.kill(deployment.running("services.block_manager")[0], signal.SIGKILL)
    expect(page.locator("#notice")).to_contain_text("block manager does not answer")
    complete(deployment, 4)
    expect(page.locator("#notice")).to_be_hidden()
