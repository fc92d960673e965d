"""A real browser, for tests of the pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

WAIT_MS = 10_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Watched:
    """A page, with all its requests and errors."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def value(self, label: str) -> str:
        """The large value with this label beside a plot, or in the list of totals."""
        return self.page.locator(f"dt:text-is('{label}')").locator("xpath=following-sibling::dd[1]").first.inner_text()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds."""
        for _ in range(WAIT_MS // 50):
            if condition():
                return
            self.page.wait_for_timeout(50)
        pytest.fail(f"the page never showed it; it shows:\n{self.text('body')}")

    def wait_for_status(self, status: str) -> None:
        self.wait(lambda: self.text("#status") == status)

    def compare(self, sentences: list[str]) -> None:
        self.page.fill("#sentences", "\n".join(sentences))
        self.page.click("text=Compare")


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """`open_page(url, **options of the browser's context)`."""
    contexts = []

    def make(url: str, route: Callable[[Route], None] | None = None, **options: Any) -> Watched:
        contexts.append(browser.new_context(**options))
        watched = Watched(contexts[-1].new_page())
        if route:
            watched.page.route("**/metrics", route)
        watched.page.goto(url)
        return watched

    yield make
    for context in contexts:
        context.close()
