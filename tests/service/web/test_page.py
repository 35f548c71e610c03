"""The chat page in a headless browser, against a real server: what a person sees, types and never has to fear."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvstore.service.api.health import health_reasons
from kvstore.service.api.page import HEADERS, WEB
from tests.support.faults import before_each, before_each_step
from tests.support.redis_server import RedisServer
from tests.support.service.browser import DESKTOP, PHONE, Tabs, answer_with, say
from tests.support.service.serving import Serving, serving
from tests.support.waiting import TIMEOUT_S, wait_until

KEY = "key-of-the-page-test"
MARKUP = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script>'
LONG_WORD = "w" * 300
ENDLESS = {"ignore_eos": True, "max_tokens": 400}
SHORT = {"max_tokens": 8}


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    tiers = {"hbm": "8MiB", "cpu": "64MiB", "disk": "64MiB", "path": tmp_path_factory.mktemp("store")}
    with serving(engine={"cache_tiers": tiers}) as running:
        yield running


def send(page: Any, text: str) -> Any:
    """Types, presses Enter and waits for the answer's end. The last turn."""
    number = page.locator(".turn").count() + 1
    say(page, text)
    turn = page.locator(f".turn:nth-child({number})")
    turn.locator(".meter").wait_for()
    page.locator("#send").wait_for()
    return turn


def fits(page: Any) -> bool:
    """Nothing reaches beyond the window's right edge."""
    parts = ("document.documentElement", "document.body", "document.querySelector('#scroller')")
    return all(page.evaluate(f"{part}.scrollWidth <= {part}.clientWidth") for part in parts)


# -- a conversation --------------------------------------------------------------------------------------------------
def test_two_turns_show_what_the_service_stored_of_them_also_after_a_reload(server: Serving, page: Any) -> None:
    first = send(page, "My dog is called Biscuit. I live in Lisbon, and my door code is 4719.")
    assert first.locator(".answer .text").inner_text().strip()
    second = send(page, "What is my dog called?")
    label = second.locator(".bar").get_attribute("aria-label")
    assert re.search(r"\d+ from HBM, .* computed. First token after", label)
    assert second.locator(".bar .part.hbm").count() == 1
    assert "TTFT" in second.locator(".headline").inner_text()

    shown = [turn.inner_text() for turn in page.locator(".turn .text").all()]
    bars = [bar.get_attribute("aria-label") for bar in page.locator(".turn .bar").all()]
    address = page.url
    assert re.search(r"#[A-Za-z0-9_-]+$", address)
    page.reload()
    page.locator(".turn:nth-child(2) .meter").wait_for()
    assert page.url == address
    assert [turn.inner_text() for turn in page.locator(".turn .text").all()] == shown
    assert [bar.get_attribute("aria-label") for bar in page.locator(".turn .bar").all()] == bars
    page.locator("#sessions [aria-current]").wait_for()

    session = server.get(f"/sessions/{page.url.partition('#')[2]}").json()
    stored, turn = session["turns_data"][1], page.locator(".turn:nth-child(2)")
    assert turn.locator(".answer .text").inner_text().strip() == stored["messages"][-1]["content"].strip()
    details = stored["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", label.partition(". First")[0])]
    prompt = stored["usage"]["prompt_tokens"]
    by_tier = [details[tier] for tier in ("hbm", "cpu", "disk", "reencoded")]
    assert numbers == [prompt, *by_tier, prompt - sum(by_tier)]


def test_shift_enter_starts_a_line_and_enter_sends(page: Any) -> None:
    page.fill("#message", "one")
    page.press("#message", "Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#message") == "one\ntwo"
    assert page.locator(".turn").count() == 0
    page.press("#message", "Enter")
    page.locator(".meter").wait_for()
    assert page.locator(".question .text").inner_text() == "one\ntwo"


def test_markup_stays_text(page: Any) -> None:
    send(page, MARKUP)
    for _ in range(2):
        assert page.locator(".question .text").inner_text() == MARKUP
        assert page.locator("#log img, #log script, #sessions img").count() == 0
        assert page.evaluate("window.ran === undefined")
        page.reload()
        page.locator(".meter").wait_for()
    page.locator("#sessions .name", has_text="<img src=x").first.wait_for()


def test_nothing_reaches_beyond_the_window_in_light_and_dark(page: Any) -> None:
    assert fits(page)
    send(page, f"{LONG_WORD} {MARKUP}")
    for width, height in (DESKTOP, PHONE):
        page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            background = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", background))) < 64) == (scheme == "dark")
            assert fits(page), (width, scheme)
        page.click("#show-tiers")
        page.locator(".card .gauge").first.wait_for()
        assert fits(page), (width, "tiers")
        page.click("#show-chat")


def test_on_a_phone_the_list_is_a_drawer(server: Serving, tabs: Tabs) -> None:
    page = tabs.open(server.url, PHONE)
    send(page, "A conversation for the drawer.")
    assert not page.locator("#sidebar").is_visible()
    page.click("#open-sidebar")
    page.locator("#new-chat").wait_for()
    page.keyboard.press("Escape")
    page.locator("#sidebar").wait_for(state="hidden")
    page.click("#open-sidebar")
    page.click("#new-chat")
    page.locator("#sidebar").wait_for(state="hidden")
    assert page.locator(".turn").count() == 0


def test_the_view_follows_the_answer_until_the_person_scrolls_up(server: Serving, tabs: Tabs) -> None:
    page = tabs.open(server.url, (800, 400))
    frame = "await new Promise(requestAnimationFrame);"
    to_end = f"async s => {{ {frame} {frame} return Math.round(s.scrollHeight - s.scrollTop - s.clientHeight) }}"
    scroller = page.locator("#scroller")
    for number in range(3):
        send(page, f"Number {number}. " + "The bus was late again. " * 8)
        wait_until(lambda: scroller.evaluate(to_end) <= 1)
    scroller.evaluate("s => s.scrollTop = 0")
    page.locator("#to-end").click()
    wait_until(lambda: scroller.evaluate(to_end) <= 1)
    page.set_viewport_size({"width": 500, "height": 360})
    wait_until(lambda: scroller.evaluate(to_end) <= 1)
    page.locator("#to-end").wait_for(state="hidden")


@pytest.mark.parametrize("stop", [lambda page: page.click("#stop"), lambda page: page.keyboard.press("Escape")])
def test_stopping_keeps_what_was_said(server: Serving, stop: Callable[[Any], None], page: Any) -> None:
    stopped = threading.Event()

    def until_stop() -> None:
        """Two steps and then none, until the engine is told to end the answer: it cannot end by its length before."""
        if server.engine.loop.runner.times.num_steps >= held_from:
            stopped.wait(TIMEOUT_S)

    page.route("**/chat", lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | ENDLESS)))
    page.route("**/label", lambda route: None)  # what the page asks after an answer is still on its way when it is left
    held_from = server.engine.stats()["step"]["num_steps"] + 4
    with before_each_step(server.engine, until_stop), before_each(server.engine.core, "end", stopped.set):
        say(page, "Tell me a long story.")
        page.locator(".answer .text", has_text=re.compile(r"\S")).wait_for()
        stop(page)
        page.locator(".ending", has_text="You stopped this answer.").wait_for()
    said = page.locator(".answer .text").inner_text()
    assert said.strip()
    page.reload()
    page.locator(".ending", has_text="You stopped this answer.").wait_for()
    assert page.locator(".answer .text").inner_text() == said


def test_what_left_the_window_is_marked(tabs: Tabs) -> None:
    with serving(engine={"max_model_len": 128, "cache_tiers": {"hbm": "8MiB", "cpu": "64MiB"}}) as small:
        page = tabs.open(small.url)
        page.route("**/chat", lambda route: route.continue_(post_data=json.dumps(route.request.post_data_json | SHORT)))
        for number in range(4):
            send(page, f"Number {number}: " + "the shop was out of bread. " * 5)
        words = page.locator(".divider").first.inner_text()
        assert re.fullmatch(r"\d+ tokens of the oldest turns are no longer in the window", words)
        page.reload()
        page.locator(".turn:nth-child(4) .meter").wait_for()
        assert page.locator(".divider").first.inner_text() == words
        page.close()  # it asks for the server's health, which ends now


# -- when something fails --------------------------------------------------------------------------------------------
def test_a_message_that_fails_stays_in_the_box_and_can_be_sent_again(tabs: Tabs, page: Any) -> None:
    lost = re.compile("/(chat|sessions.*)$")
    page.route(lost, lambda route: route.abort())
    say(page, "Please keep this text.")
    page.locator("#notice", has_text="cannot be reached").wait_for()
    assert page.input_value("#message") == "Please keep this text."
    assert page.locator(".turn").count() == 0
    page.unroute(lost)
    page.click("#retry")
    page.locator(".meter").wait_for()
    assert page.input_value("#message") == ""
    assert not page.locator("#notice").is_visible()
    tabs.errors.clear()


NEVER = {"x-should-retry": "false"}
REFUSALS = (  # status, code, headers, what is said, and whether the same message may pass when it is sent again
    (409, "session_busy", NEVER, "answering somewhere else", True),
    (429, "rate_limit_exceeded", {"Retry-After": "7"}, "Try again in 7 s", True),
    (503, "overloaded", {}, "all it can take", True),
    (500, "internal_error", {}, "The answer failed", True),
    (503, "store_lost", NEVER, "The answer failed. The server's own words", False),
    (409, "session_damaged", NEVER, "This conversation is damaged. The server's own words", False),
    (400, "context_length_exceeded", {}, "The server's own words", False),
    (409, "session_exists", NEVER, "The server refused the message", False),
    (413, "body_too_large", {}, "too long", False),
    (403, "origin_not_allowed", {}, "does not know this address", False),
)


def refuse(answer: dict[str, Any], route: Any) -> None:
    route.fulfill(**answer)


def test_refusals_are_put_in_plain_words_and_retry_is_offered_where_it_may_help(tabs: Tabs, page: Any) -> None:
    for status, code, headers, words, may_pass in REFUSALS:
        error = {"message": "the server's own words", "type": "invalid_request_error", "param": None, "code": code}
        answer = {"status": status, "headers": headers, "body": json.dumps({"error": error})}
        page.route("**/chat", partial(refuse, answer))
        say(page, "text")
        page.locator("#notice", has_text=words).wait_for()
        assert page.locator("#retry").count() == may_pass, (status, code)
        assert page.input_value("#message") == "text"
        page.unroute("**/chat")
    tabs.errors.clear()


def test_an_answer_that_breaks_off_is_marked_and_its_question_kept(page: Any) -> None:
    answer_with(page, {"content": "Half an ans"})
    say(page, "A question")
    page.locator("#notice", has_text="The engine is gone.").wait_for()
    assert "Half an ans" in page.locator(".turn.failed").inner_text()
    assert page.input_value("#message") == "A question"
    page.unroute("**/chat")
    page.click("#retry")
    page.locator(".meter").wait_for()
    assert page.locator(".turn").count() == 1


def test_a_conversation_that_is_gone_says_so(server: Serving, tabs: Tabs) -> None:
    page = tabs.open(f"{server.url}/#no-such-session")
    page.locator("#notice", has_text="no longer exists").wait_for()
    page.locator("#notice").get_by_role("button", name="New chat").click()
    assert "#" not in page.url
    tabs.errors.clear()


def test_a_server_with_keys_asks_for_one_and_the_page_stores_it_nowhere(tabs: Tabs) -> None:
    with serving(api_key=KEY) as guarded:
        page = tabs.open(guarded.url)
        page.fill("#key", "a-wrong-key")
        page.press("#key", "Enter")
        page.locator("#key-problem", has_text="did not accept").wait_for()
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.locator("#key-dialog").wait_for(state="hidden")
        send(page, "Hello")
        places = "localStorage, sessionStorage, document.cookie, location.href, history.state"
        kept = page.evaluate(f"JSON.stringify([{places}])")
        assert KEY not in kept
        assert KEY not in page.content()
        assert page.context.cookies() == []
        page.close()  # it asks for the server's health, which ends now
        tabs.errors.clear()


# -- the list of conversations ---------------------------------------------------------------------------------------
def test_forking_and_deleting(server: Serving, page: Any) -> None:
    send(page, "The first turn.")
    send(page, "The second turn.")
    source = page.url.partition("#")[2]
    page.locator(".turn:nth-child(1)").hover()
    page.locator(".turn:nth-child(1)").get_by_role("button", name="Fork").click()
    page.wait_for_url(lambda url: "#" in url and not url.endswith(source))
    page.locator(".turn:nth-child(2)").wait_for(state="detached")
    page.locator(".meter").wait_for()
    assert page.locator(".turn").count() == 1
    fork = page.url.partition("#")[2]
    assert server.get(f"/sessions/{fork}").json()["parent"] is not None

    row = page.locator(f'[data-id="{fork}"]')
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep it").click()
    assert server.get(f"/sessions/{fork}").status == 200
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    row.wait_for(state="detached")
    assert server.get(f"/sessions/{fork}").status == 404
    assert server.get(f"/sessions/{source}").status == 200
    page.locator(".turn").wait_for(state="detached")


def test_pins_are_the_server_s(server: Serving, page: Any) -> None:
    send(page, "A conversation that is pinned.")
    session_id = page.url.partition("#")[2]
    pin = page.locator(f'[data-id="{session_id}"] .pin')
    pin.click()
    page.locator(f'[data-id="{session_id}"] .pin[aria-pressed="true"]').wait_for()
    page.reload()
    page.locator(f'[data-id="{session_id}"] .pin[aria-pressed="true"]').wait_for()
    assert "Pinned until" in pin.get_attribute("title")
    assert server.post(f"/sessions/{session_id}/pin", {"ttl": 0}).status == 200  # somebody else, at another place
    page.reload()
    page.locator(f'[data-id="{session_id}"] .pin[aria-pressed="false"]').wait_for()


def test_the_list_goes_on_page_by_page(server: Serving, tabs: Tabs) -> None:
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    for number in range(32):
        made = {"messages": history, "title": f"Number {number}", "personal": True}
        assert server.post("/sessions", made).status == 200
    page = tabs.open(server.url)
    rows = page.locator("#sessions li")
    page.locator("#more-sessions").wait_for()
    assert rows.count() == 30
    assert rows.first.locator(".name").inner_text() == "Number 31"
    page.click("#more-sessions")
    page.locator("#sessions li:nth-child(32)").wait_for()
    ids = [row.get_attribute("data-id") for row in rows.all()]
    assert len(set(ids)) == len(ids)


def test_typing_in_a_conversation_prefetches_it_once(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: "prefetch" in request.url and asked.append(request.url))
    page.fill("#message", "Nothing to fetch for a new chat")
    send(page, "Hello")
    assert asked == []
    with page.expect_response("**/prefetch") as answer:
        page.locator("#message").press_sequentially("I am typing")
    assert answer.value.ok
    assert len(asked) == 1


def test_a_draft_waits_for_its_conversation_and_the_welcome_stands_above_none(page: Any) -> None:
    page.locator(".empty").wait_for()
    send(page, "Hello")
    assert page.locator(".empty").count() == 0
    chosen = page.locator(f'[data-id="{page.url.partition("#")[2]}"] .choose')
    page.fill("#message", "not sent yet")
    page.click("#new-chat")
    page.locator(".empty").wait_for()
    assert page.input_value("#message") == ""
    chosen.click()
    page.locator(".meter").wait_for()
    assert page.input_value("#message") == "not sent yet"


# -- the tiers -------------------------------------------------------------------------------------------------------
def test_the_tiers_show_the_servers_own_numbers(server: Serving, page: Any) -> None:
    send(page, "Something to count.")
    page.click("#show-tiers")
    page.locator(".card .gauge").first.wait_for()
    limits = re.findall(r'kvstore:tier_limit_bytes\{tier="(\w+)"\} (\S+)', server.get("/metrics").body.decode())
    shown = [float(gauge.get_attribute("aria-valuemax")) for gauge in page.locator(".gauge").all()]
    assert shown == [float(limit) for _, limit in limits]
    assert len(shown) == 3
    page.locator(".state", has_text="All well").wait_for()
    page.locator(".chart", has_text="Hit rate").locator("svg").wait_for()


def test_a_shared_tier_is_shown_where_there_is_one(redis: RedisServer, tabs: Tabs) -> None:
    with serving(engine={"cache_tiers": {"hbm": "8MiB", "cpu": "16MiB", "remote": redis.url}}) as shared:
        page = tabs.open(shared.url)
        send(page, "Something to share.")
        page.click("#show-tiers")
        card = page.locator(".card", has_text="Shared")
        card.locator("b", has_text="answers").wait_for()
        card.locator(".numbers", has_text="0 tokens found here").wait_for()
        redis.kill()
        page.click("#show-chat")
        send(page, "And to compute.")
        page.click("#show-tiers")
        card.locator("b", has_text="away").wait_for()
        page.locator(".state", has_text="The shared tier does not answer").wait_for()
        page.close()  # it asks for the server's health, which ends now


# -- modules ---------------------------------------------------------------------------------------------------------
EVENTS_OF_BYTES = """async (bytes) => {
  const { events } = await import("/web/api.js");
  const stream = new ReadableStream({ start(to) {
    for (const byte of bytes) to.enqueue(new Uint8Array([byte]));
    to.close();
  } });
  const found = [];
  try {
    for await (const event of events(new Response(stream))) found.push(event);
  } catch (error) {
    found.push(error.message);
  }
  return found;
}"""


def test_events_survive_any_cut(page: Any) -> None:
    sent = [{"delta": {"content": "Grüße, 日本語 🎉\n"}}, {"delta": {"content": "data: [DONE]\n\n"}}]
    for newline in ("\n", "\r\n"):
        lines = "".join(f"data: {json.dumps(event, ensure_ascii=False)}{newline}{newline}" for event in sent)
        whole = f": a comment{newline}{newline}{lines}data: [DONE]{newline}{newline}"
        assert page.evaluate(EVENTS_OF_BYTES, list(whole.encode())) == sent
        broken_off = page.evaluate(EVENTS_OF_BYTES, list(lines.encode()))
        assert broken_off == [*sent, "the connection ended in the middle of the answer"]


def test_metrics_are_read_as_prometheus_writes_them(page: Any) -> None:
    text = '# HELP a b\n# TYPE a counter\na_total{tier="c\\"p,u}",x="1"} 1.5e+09 1700000000\nb +Inf\nnot a sample\n'
    script = """async (text) => (await import("/web/metrics.js")).parseMetrics(text)
      .map(({ name, labels, value }) => [name, labels, String(value)])"""
    found = page.evaluate(script, text)
    assert found == [["a_total", {"tier": 'c"p,u}', "x": "1"}, "1500000000"], ["b", {}, "Infinity"]]


# -- the files -------------------------------------------------------------------------------------------------------
def test_the_files_need_nothing_that_the_content_policy_forbids() -> None:
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]
    html = (WEB / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:|https?://", html)
    for path in sorted(WEB.glob("*.js")):
        text = path.read_text()
        assert text.count("\n") <= 500
        assert text.startswith("// "), f"{path.name} does not say what it is"
        assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|\beval\(|Function\(", text), path.name
        is_settings = path.name == "settings.js"  # which has no key
        assert not re.search(r"sessionStorage|indexedDB|\.cookie" + "|localStorage" * (not is_settings), text), (
            path.name
        )
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name


def test_the_page_has_words_for_whatever_health_says() -> None:
    parts = ("degraded", "broken", "was_reset", "lost", "missing", "damaged", "failing")
    whole = {"error": "x", **{name: dict.fromkeys(parts, True) for name in ("disk", "sessions", "answers")}}
    codes = {*health_reasons(whole, True), *health_reasons({**whole, "lost": True}, True)}
    assert "store_lost" in codes and "sessions_file_lost" in codes
    words = (WEB / "tiers.js").read_text()
    assert [code for code in sorted(codes) if f"\n  {code}: " not in words] == []


def test_every_file_that_the_page_names_is_served(server: Serving) -> None:
    for path in (path for path in WEB.iterdir() if path.is_file()):
        for name in re.findall(r'(?:"/web/|from "\./)([\w./-]+)"', path.read_text()):
            reply = server.get(f"/web/{name}")
            assert reply.status == 200
            assert reply.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
