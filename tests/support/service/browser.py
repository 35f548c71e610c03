"""A headless Chromium that is installed already, and pages in it that note every error. Downloads nothing."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.waiting import TIMEOUT_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
DESKTOP, PHONE = (1280, 800), (360, 740)


class Tabs:
    """Pages of one browser. `errors`: what their consoles said and what no script caught, since the last `clear`."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self._contexts: list[Any] = []

    def open(self, url: str, size: tuple[int, int] = DESKTOP) -> Any:
        """A page of a person of its own: nothing is shared with the other pages."""
        shown = {"width": size[0], "height": size[1]}
        context = self._browser.new_context(viewport=shown, color_scheme="light")
        self._contexts.append(context)
        context.set_default_timeout(TIMEOUT_S * 1000)
        page = context.new_page()
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.goto(url)
        return page

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def answer_with(page: Any, *deltas: dict[str, Any]) -> None:
    """From now on, what is said on this page is answered with these, and then the engine is gone."""
    failure = {"error": {"message": "the engine is gone", "type": "server_error", "code": "engine_failed"}}
    events = [*({"session_id": "s", "turn": 1, "delta": delta} for delta in deltas), failure]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/chat", lambda route: route.fulfill(headers={"Content-Type": "text/event-stream"}, body=body))


def say(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser. Skips the test where none is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(NAMES)} on the PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
