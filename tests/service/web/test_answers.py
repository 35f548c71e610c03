"""Answers in the chat page: imported histories, Markdown as it should look, and Markdown that means harm."""

import json
from hashlib import sha256
from typing import Any

from kvstore.service.api.page import WEB
from tests.support.service.browser import PHONE, Tabs, answer_with, say
from tests.support.service.serving import Serving
from tests.support.waiting import wait_until

VENDOR = WEB / "vendor"
LICENCES = {  # what each says
    "MIT": "Permission is hereby granted", "Apache-2.0": "Apache License",
    "BSD-3-Clause": "Redistribution and use in source and binary forms",
}  # fmt: skip
FENCE = "```"
RICH = f"""## Steps

Some **bold** words, `inline code`, <b>no HTML</b> and a [link](https://example.org/a?b=c).
A second line.

1. first
   - nested
2. second

- [x] done

| Tier | Size |
|:-----|-----:|
| HBM  | 80 GiB |
| disk | {"w" * 90} |

{FENCE}python
def a(b: int) -> None:  # {"long " * 30}
    print("<b>")
{FENCE}

> quoted

The end, after ![a picture](https://example.org/a.png).
"""
HOSTILE = f"""<script>window.ran = 1</script> <img src=x onerror="window.ran = 2">
[a](javascript:window.ran=3) [b](data:text/html,<script>window.ran=4</script>) [c]( JaVaScRiPt:alert(1))
[d](//evil.example) [e](/admin/stats) [f](&#106;avascript:window.ran=5) <javascript:window.ran=6>
[h](https://ok.example "x\\" onclick=\\"y")

<style>body {{ display: none }}</style>

<form action="/admin/flush"><input name="key"></form>

<iframe src="x"></iframe> <svg onload="window.ran=7"><math><mtext><a href="javascript:x">

![i](https://evil.example/i.png) ![j](data:image/svg+xml;base64,AA) ![" onerror="window.ran=8](x)

{FENCE}x" onmouseover="window.ran=9
</code></pre><script>window.ran = 10</script>
{FENCE}

| <img src=x onerror=window.ran=11> | <b style="color:red">b</b> |
|---|---|
| x | [l](javascript:window.ran=13) |
"""
ELEMENTS = "script, img, style, form, input, iframe, svg:not(button svg), math, [style], [onclick], [onerror], [onload]"


def imported(server: Serving, *said: str) -> str:
    """The address of a session that began with a history: a person and a model in turns, a person at the end."""
    roles = ("user", "assistant")
    history = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    reply = server.post("/chat", {"messages": history, "system": "Be kind.", "max_tokens": 4})
    assert reply.status == 200, reply.body
    return f"{server.url}/#{reply.json()['session_id']}"


def opened(tabs: Tabs, url: str, **size: Any) -> Any:
    page = tabs.open(url, **size)
    page.locator(".meter").wait_for()
    return page


# -- imported histories ----------------------------------------------------------------------------------------------
def test_a_history_that_was_brought_along_is_shown_message_by_message(server: Serving, tabs: Tabs) -> None:
    said = ("My name is Ada.", "Hello Ada.", "I like tea.", "So do I.", "What is my name?")
    page = opened(tabs, imported(server, *said))
    assert page.locator(".system").inner_text().endswith("Be kind.")
    assert page.locator(".question .text").all_inner_texts() == ["My name is Ada.", "I like tea.", "What is my name?"]
    answers = page.locator(".answer .text").all_inner_texts()
    assert answers[:2] == ["Hello Ada.", "So do I."] and len(answers) == 3 and answers[2].strip()
    assert page.locator(".turn .meter").count() == 1
    assert page.get_by_role("button", name="Fork").count() == 1
    say(page, "And what do I like?")
    page.locator(".turn:nth-of-type(5) .meter").wait_for()
    assert page.locator(".question .text").last.inner_text() == "And what do I like?"


# -- Markdown --------------------------------------------------------------------------------------------------------
def test_an_answer_s_markdown_is_rendered_and_its_code_coloured(server: Serving, tabs: Tabs) -> None:
    page = opened(tabs, imported(server, "Show me.", RICH, "Thanks."))
    answer = page.locator(".turn .answer .text").first
    assert answer.locator("h4").inner_text() == "Steps"
    assert answer.locator("ol > li").count() == 2 and answer.locator("ol ul li").inner_text() == "nested"
    assert answer.locator("th").all_inner_texts() == ["Tier", "Size"]
    assert answer.locator("td").nth(1).evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    assert answer.locator("pre code").inner_text().startswith("def a(b: int) -> None:")
    assert answer.locator(".code-head span").inner_text() == "python"
    assert "<b>no HTML</b>" in answer.inner_text() and "☑ done" in answer.inner_text()
    link = answer.locator("a").first
    assert (link.get_attribute("href"), link.get_attribute("target")) == ("https://example.org/a?b=c", "_blank")
    assert "noopener" in link.get_attribute("rel")
    assert answer.locator("a").last.inner_text() == "a picture"  # which nobody fetches
    assert answer.locator("blockquote").inner_text() == "quoted"
    code = answer.locator("pre code")
    assert code.locator(".hljs-keyword").first.inner_text() == "def"
    assert code.locator(".hljs-string").all_inner_texts() == ['"<b>"']


def test_wide_code_and_tables_scroll_by_themselves(server: Serving, tabs: Tabs) -> None:
    page = opened(tabs, imported(server, "Show me.", RICH, "Thanks."), size=PHONE)
    for part in (".code pre", ".table"):
        assert page.locator(part).first.evaluate("e => e.scrollWidth > e.clientWidth"), part
    assert page.locator("#scroller").evaluate("s => s.scrollWidth <= s.clientWidth")


def test_code_and_answers_are_copied_as_they_were_written(server: Serving, tabs: Tabs) -> None:
    page = opened(tabs, imported(server, "Show me.", RICH, "Thanks."))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn = page.locator(".turn").first
    turn.locator(".code").get_by_role("button", name="Copy").click()
    turn.locator(".code button", has_text="Copied").wait_for()
    code = page.evaluate("navigator.clipboard.readText()")
    assert code.startswith("def a(b") and code.endswith('print("<b>")\n')
    turn.locator(".tools").get_by_role("button", name="Copy").click()
    turn.locator(".tools button", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == RICH


def check_harmless(page: Any) -> None:
    assert page.evaluate("window.ran === undefined")
    assert page.locator("#log .answer").locator(ELEMENTS).count() == 0
    addresses = [link.get_attribute("href") for link in page.locator("#log a[href]").all()]
    assert addresses and all(address.startswith("https://") for address in addresses), addresses
    for link in page.locator("#log a[href]").all():
        assert link.get_attribute("target") == "_blank" and "noopener" in link.get_attribute("rel")
    attributes = "[...document.querySelectorAll('#log .answer .text *')].flatMap(e => e.getAttributeNames())"
    known = {"href", "rel", "target", "title", "class", "align", "type", "aria-hidden", "tabindex"}
    assert set(page.evaluate(attributes)) <= known


def test_markdown_that_means_harm_does_none(server: Serving, tabs: Tabs) -> None:
    page = opened(tabs, imported(server, "Hello", HOSTILE, "Thanks."))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    check_harmless(page)
    assert "<script>window.ran = 1</script>" in page.locator(".answer .text").first.inner_text()
    assert all(url.startswith(server.url) for url in asked)


def test_nor_while_it_streams(page: Any) -> None:
    pieces = [HOSTILE[start : start + 7] for start in range(0, len(HOSTILE), 7)]
    answer_with(page, *({"content": piece} for piece in pieces))
    say(page, "Go")
    page.locator(".turn.failed").wait_for()
    check_harmless(page)
    page.evaluate(STREAM, [pieces, 1])  # each of its beginnings drawn, too
    check_harmless(page)


# -- while it streams ------------------------------------------------------------------------------------------------
# Draws pieces into a new element, `each` of them between two frames. Gives what was seen.
STREAM = """async ([pieces, each]) => {
  const { LiveMarkdown } = await import("/web/markdown.js");
  const element = document.createElement("div");
  element.className = "text";
  document.querySelector("#log .answer, #log").append(element);
  let numDraws = 0, numNodes = 0;
  new MutationObserver((changes) => {
    for (const change of changes) numNodes += change.addedNodes.length;
  }).observe(element, { childList: true });
  let seen = null;
  const live = new LiveMarkdown(element, () => { numDraws += 1; seen?.(); });
  let first = null;
  for (let from = 0; from < pieces.length; from += each) {
    const drawn = new Promise((resolve) => (seen = resolve));
    for (const piece of pieces.slice(from, from + each)) live.add(piece);
    await drawn;
    if (live.numDone > 0) first ??= element.firstElementChild;
  }
  const drawn = element.innerHTML;
  const isFirstKept = first === null || first === element.firstElementChild;
  live.set(pieces.join(""));
  const whole = document.createElement("div");
  new LiveMarkdown(whole).set(pieces.join(""));
  return { numDraws, numNodes, isFirstKept, drawn, ended: element.innerHTML, whole: whole.innerHTML };
}"""


def test_a_text_that_came_in_pieces_looks_as_if_it_had_come_at_once(page: Any) -> None:
    for size in (1, 3, 50):
        pieces = [RICH[start : start + size] for start in range(0, len(RICH), size)]
        found = page.evaluate(STREAM, [pieces, max(1, 8 // size)])
        assert found["ended"] == found["whole"], size
        assert found["drawn"].strip() == found["whole"].strip(), size  # before the end, too: nothing jumps
        assert found["isFirstKept"], size


def test_a_long_answer_is_drawn_block_by_block_and_once_a_frame(page: Any) -> None:
    pieces = [f"Paragraph {number} of them.\n\n" for number in range(80)]
    found = page.evaluate(STREAM, [pieces, 1])
    assert found["isFirstKept"]
    assert found["numNodes"] < 6 * len(pieces)  # with the whole text drawn each time it would be 40 times as many
    assert page.evaluate(STREAM, [pieces, len(pieces)])["numDraws"] == 1


# -- code, formulas, thinking, tools -----------------------------------------------------------------------------------
FORMULAS = r"""Inline $e^{i\pi}+1=0$ and \(a_1 \le b\), which costs $5 and $6.

$$
\sqrt{1+x} = \sum_{k=1}^n \binom{n}{k} x_k
= \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
$$

Above \[ x^2 \] below, `$code$`, and broken: $\frac{1$.
"""
EVIL_FORMULAS = r"""$\href{javascript:window.ran=1}{x}$ $\url{javascript:window.ran=2}$
$\includegraphics{https://evil.example/i.png}$ $\htmlStyle{background:url(https://evil.example)}{x}$
$$\def\a{\a\a}\a$$ $\text{<img src=x onerror=window.ran=3>}$ $\rule{9999em}{9999em}$
"""


def test_formulas_are_drawn_and_prices_are_not(server: Serving, tabs: Tabs) -> None:
    page = opened(tabs, imported(server, "Show me.", FORMULAS, "Thanks."))
    answer = page.locator(".answer .text").first
    assert answer.locator(".formula .katex-html").count() == 4
    assert answer.locator(".formula.wide").count() == 2
    text = answer.inner_text()
    assert "which costs $5 and $6." in text and "broken: $\\frac{1$." in text
    assert answer.locator("code").all_inner_texts() == ["$code$"]
    wait_until(lambda: page.evaluate("document.fonts.check('16px KaTeX_Main')"))
    assert fonts_of(page, server)


def fonts_of(page: Any, server: Serving) -> list[str]:
    """The fonts that the page has fetched; all of them are the server's own."""
    names = page.evaluate("performance.getEntriesByType('resource').map(({ name }) => name)")
    assert all(name.startswith(server.url) for name in names)
    return [name for name in names if name.endswith(".woff2")]


def test_formulas_that_mean_harm_do_none(server: Serving, tabs: Tabs) -> None:
    page = opened(tabs, imported(server, "Show me.", EVIL_FORMULAS, "Thanks."))
    answer = page.locator(".answer .text").first
    assert page.evaluate("window.ran === undefined")
    assert answer.locator("a, img, script").count() == 0
    assert answer.bounding_box()["height"] < 5000
    fonts_of(page, server)


WEATHER = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Lisbon"}'}}


def test_thinking_and_tools_are_folded(server: Serving, tabs: Tabs) -> None:
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [WEATHER], "reasoning_content": "Let me <b>see</b>."},
        {"role": "tool", "tool_call_id": "c1", "content": '{"sun": true}'},
    ]
    session_id = server.post("/chat", {"messages": history, "max_tokens": 4}).json()["session_id"]
    page = opened(tabs, f"{server.url}/#{session_id}")
    folds = {
        ".thinking:not([hidden])": "Let me <b>see</b>.",
        ".calls .card-of-tool": '"city": "Lisbon"',
        ".asked .card-of-tool": '"sun": true',
    }
    for place, text in folds.items():
        fold = page.locator(place)
        assert text not in fold.inner_text()
        fold.locator("summary").click()
        assert text in fold.inner_text()
    assert page.locator(".calls summary").inner_text() == "Calls weather"
    assert page.locator(".edit, .again").count() == 0  # its tools are not the page's


def test_thinking_and_calls_are_shown_as_they_come(page: Any) -> None:
    answer_with(
        page, {"reasoning_content": "Let me "}, {"reasoning_content": "see."},
        {"tool_calls": [{"index": 0, **WEATHER}]}, {"content": "It is sunny."},
    )  # fmt: skip
    say(page, "Go")
    turn = page.locator(".turn.failed")
    turn.wait_for()
    turn.locator(".thinking summary").click()
    assert turn.locator(".thought").inner_text() == "Let me see."
    assert turn.locator(".calls summary").inner_text() == "Calls weather"
    assert turn.locator(".answer > .text").inner_text() == "It is sunny."


# -- what others wrote -----------------------------------------------------------------------------------------------
def test_libraries_are_those_of_the_manifest_with_their_licences() -> None:
    packages = json.loads((VENDOR / "manifest.json").read_text())
    known = {"manifest.json"}
    for package, one in packages.items():
        for name, file in one["files"].items():
            content = (VENDOR / name).read_bytes()
            assert sha256(content).hexdigest() == file["sha256"], f"{name} is not {package} {one['version']}"
            assert name.endswith(".woff2") or one["version"].encode() in content
        assert LICENCES[one["licence"]] in (VENDOR / one["licence_file"]).read_text()
        known |= {*one["files"], one["licence_file"]}
    assert {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()} == known
