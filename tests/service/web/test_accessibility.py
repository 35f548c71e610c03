"""What axe-core finds in each view of the chat page, light and dark, on a desktop and a phone: nothing."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.service.browser import DESKTOP, PHONE, Tabs, say
from tests.support.service.serving import Serving
from tests.support.waiting import wait_until

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
OF_COLOURS = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}
ANSWER = """Some *words*, a formula $x^2$ and code:

```python
def f(x):  # a comment
    return "a text", 42, None  # that is much wider than a phone, so that it scrolls by itself, as code does
```

| a | b |
|---|---|
| 1 | 2 |
"""
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lisbon"}'}}
HISTORY = [
    {"role": "user", "content": "Show me."},
    {"role": "assistant", "content": ANSWER, "reasoning_content": "Let me think."},
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"sun": true}'},
]


def findings(page: Any, rules: Any = RULES) -> list[str]:
    """Of axe-core: rule, what it means, and the elements."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page, options={"runOnly": rules}).response["violations"]
    return [f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes']]}" for one in found]


def conversation(page: Any, server: Serving) -> None:
    session_id = server.post("/chat", {"messages": HISTORY, "system": "Be kind.", "max_tokens": 4}).json()["session_id"]
    page.goto(f"{server.url}/#{session_id}")
    page.reload()
    page.locator(".meter").wait_for()
    for fold in page.locator("#log summary").all():
        if fold.is_visible():
            fold.click()


def versions(page: Any, server: Serving) -> None:
    say(page, "Hello.")
    page.locator(".again").click()
    page.locator(".versions").wait_for()
    page.locator(".edit").click()


def tiers(page: Any, server: Serving) -> None:
    server.post("/chat", {"message": "Hello", "max_tokens": 2})
    page.click("#show-tiers")
    page.locator(".chart svg").first.wait_for()


def settings(page: Any, server: Serving) -> None:
    page.click("#open-menu")
    page.click("#menu-settings")


def menu(page: Any, server: Serving) -> None:
    page.click("#open-menu")


def drawer(page: Any, server: Serving) -> None:
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    page.click("#open-sidebar")
    rest(page)


def rest(page: Any) -> None:
    """Nothing moves any more: colours that change have contrasts of their own."""
    wait_until(lambda: page.evaluate("document.getAnimations().length") == 0)


def empty(page: Any, server: Serving) -> None:
    page.locator(".examples").wait_for()


@pytest.mark.parametrize(
    "view", [empty, conversation, versions, tiers, settings, menu, drawer], ids=lambda v: v.__name__
)
def test_axe_finds_nothing(view: Callable[[Any, Serving], None], server: Serving, tabs: Tabs) -> None:
    page = tabs.open(server.url)
    view(page, server)
    for scheme, rules in (("light", RULES), ("dark", OF_COLOURS)):
        page.emulate_media(color_scheme=scheme)
        for width, height in [PHONE] if view is drawer else [DESKTOP, PHONE]:
            page.set_viewport_size({"width": width, "height": height})
            rest(page)
            assert findings(page, rules) == [], (scheme, width)


def test_axe_finds_what_is_wrong(server: Serving, tabs: Tabs) -> None:
    page = tabs.open(server.url)
    tiers(page, server)
    page.evaluate("document.querySelector('#tiers-view').removeAttribute('tabindex')")
    assert [found.partition(":")[0] for found in findings(page)] == ["scrollable-region-focusable"]
