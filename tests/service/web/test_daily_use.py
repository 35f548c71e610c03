"""The chat page for daily use: versions of a turn, settings, titles, files, programs' sessions, the keyboard."""

import json
from pathlib import Path
from typing import Any

from tests.support.service.browser import PHONE, Tabs, say
from tests.support.service.serving import Serving
from tests.support.service.talking import chat, without_ids

SAID = ".question .text"


def said(page: Any, text: str, number: int = 1) -> Any:
    say(page, text)
    turn = page.locator(f".turn:nth-of-type({number})")
    turn.locator(".meter").wait_for()
    page.locator("#sessions [aria-current]").wait_for()
    page.locator(".conversation:not(.answering)").wait_for()
    return turn


def id_of(page: Any) -> str:
    return page.url.partition("#")[2]


def wait_for_another(page: Any, session_id: str) -> None:
    page.wait_for_url(lambda url: "#" in url and not url.endswith(session_id))
    page.locator(".conversation:not(.answering) .meter").first.wait_for()


def choose(page: Any, item: str) -> None:
    page.click("#open-menu")
    page.click(f"#menu-{item}")


# -- versions --------------------------------------------------------------------------------------------------------
def test_an_edited_message_is_another_version_and_both_stay(server: Serving, page: Any) -> None:
    said(page, "My dog is called Biscuit.")
    said(page, "What is my dog called?", 2)
    first = id_of(page)
    page.locator(".turn:nth-of-type(2) .edit").click()
    box = page.locator(".edit-box textarea")
    assert box.input_value() == "What is my dog called?"
    box.press("Escape")
    assert page.locator(SAID).all_inner_texts() == ["My dog is called Biscuit.", "What is my dog called?"]
    page.locator(".turn:nth-of-type(2) .edit").click()
    box.fill("Do I have a dog?")
    box.press("Enter")
    wait_for_another(page, first)
    assert page.locator(SAID).all_inner_texts() == ["My dog is called Biscuit.", "Do I have a dog?"]
    bar = page.locator(".turn:nth-of-type(2) .bar").get_attribute("aria-label")
    assert " 0 from HBM" not in bar, "what came before the message was kept"
    second = id_of(page)
    assert server.get(f"/sessions/{second}").json()["parent"] == {"session_id": first, "turn": 1, "version": True}

    choice = page.locator(".versions")
    assert choice.inner_text() == "2 / 2"
    assert page.locator(f'#sessions [data-id="{second}"] .quiet').inner_text().endswith("2 versions")
    assert page.locator(f'#sessions [data-id="{first}"]').count() == 0, "they are one row"
    choice.get_by_role("button", name="Earlier version").click()
    page.wait_for_url(f"**/#{first}")
    page.locator(".versions", has_text="1 / 2").wait_for()
    assert page.locator(SAID).last.inner_text() == "What is my dog called?"
    page.reload()
    page.locator(".versions", has_text="1 / 2").wait_for()

    page.locator(f'#sessions [data-id="{second}"]').get_by_role("button", name="Delete").click()
    page.locator("#delete-name", has_text="all 2 versions").wait_for()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator(".empty").wait_for()
    assert [server.get(f"/sessions/{one}").status for one in (first, second)] == [404, 404]


def test_a_first_answer_is_given_again_and_again(page: Any) -> None:
    said(page, "Hello there!")
    for number in (2, 3):
        before = id_of(page)
        page.locator(".turn .again").click()
        wait_for_another(page, before)
        page.locator(".versions", has_text=f"{number} / {number}").wait_for()
        assert page.locator(SAID).all_inner_texts() == ["Hello there!"]
    said(page, "And goodbye.", 2)
    assert page.locator(".versions").count() == 1  # of the first turn, which this one is a part of
    assert page.locator("#subtitle").inner_text().startswith("2 turns")


def test_a_version_that_fails_is_no_session_and_can_be_sent_again(tabs: Tabs, page: Any) -> None:
    said(page, "Hello.")
    first = id_of(page)
    page.route("**/chat", lambda route: route.abort())
    page.locator(".turn .again").click()
    page.locator("#notice", has_text="cannot be reached").wait_for()
    assert page.input_value("#message") == "Hello." and page.locator(".turn").count() == 0
    page.unroute("**/chat")
    page.click("#retry")
    wait_for_another(page, first)
    page.locator(".versions", has_text="2 / 2").wait_for()
    tabs.errors.clear()


def test_a_turn_with_a_history_is_given_again_with_it(server: Serving, tabs: Tabs) -> None:
    history = ["My cat is called Mia.", "Got it.", "What is my cat called?"]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, history, strict=True)]
    session_id = server.post("/chat", {"messages": messages, "max_tokens": 8}).json()["session_id"]
    page = tabs.open(f"{server.url}/#{session_id}")
    page.locator(".again").click()
    wait_for_another(page, session_id)
    assert page.locator(SAID).all_inner_texts() == history[::2]
    again = server.get(f"/sessions/{id_of(page)}").json()
    assert without_ids(again["messages"][:3]) == messages and again["personal"] is True


# -- settings --------------------------------------------------------------------------------------------------------
def test_settings_go_with_messages_and_stay_in_this_browser(server: Serving, page: Any) -> None:
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda request: request.url.endswith("/chat") and bodies.append(request.post_data_json))
    choose(page, "settings")
    for field, value in (("system", "Be brief."), ("temperature", "0"), ("max-tokens", "5"), ("seed", "7")):
        page.fill(f"#{field}", value)
    page.get_by_role("button", name="Save").click()
    said(page, "Hello", 2)  # below the system prompt
    sampled = {"temperature": 0, "max_tokens": 5, "seed": 7}
    assert bodies[-1] == {"message": "Hello", "system": "Be brief.", **sampled, "stream": True}
    assert page.locator(".system").inner_text().endswith("Be brief.")
    page.reload()
    said(page, "And again", 3)
    assert bodies[-1] == {"message": "And again", "session_id": id_of(page), **sampled, "stream": True}
    choose(page, "settings")
    assert page.input_value("#system") == "Be brief." and not page.locator("#system").is_editable()
    assert page.input_value("#seed") == "7"
    page.fill("#temperature", "3")
    page.get_by_role("button", name="Save").click()
    assert page.locator("#settings-dialog").is_visible(), "the server would refuse it"
    page.get_by_role("button", name="Cancel").click()
    assert page.evaluate("JSON.stringify(localStorage)").count("Be brief") == 0


def test_the_theme_is_the_system_s_or_the_person_s(page: Any) -> None:
    def is_dark() -> bool:
        return page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"

    assert not is_dark()
    page.emulate_media(color_scheme="dark")
    assert is_dark()
    for theme, expected in (("light", False), ("auto", True), ("light", False)):
        choose(page, "settings")
        page.select_option("#theme", theme)
        page.get_by_role("button", name="Save").click()
        page.locator(f'html[data-theme="{theme}"]').wait_for()
        assert is_dark() == expected
    page.reload()
    page.locator('html[data-theme="light"]').wait_for()
    assert not is_dark()


# -- titles and files ------------------------------------------------------------------------------------------------
def test_a_conversation_is_renamed_and_found_by_its_title(server: Serving, page: Any) -> None:
    said(page, "A message about marmots.")
    choose(page, "rename")
    page.fill("#new-name", "Alpine animals")
    page.press("#new-name", "Enter")
    page.locator("#title", has_text="Alpine animals").wait_for()
    assert server.get(f"/sessions/{id_of(page)}").json()["title"] == "Alpine animals"
    rows = page.locator("#sessions li")
    page.fill("#search", "ALPINE")
    assert rows.locator(".name").all_inner_texts() == ["Alpine animals"]
    page.fill("#search", "no such words")
    assert rows.count() == 0 and page.locator("#no-sessions").inner_text() == "No title has these words."
    page.fill("#search", "")
    assert rows.count() > 0


def test_an_edited_conversation_is_shown_and_exported_as_it_is_now(server: Serving, tabs: Tabs, tmp_path: Path) -> None:
    session_id = chat(server, "My dog is Rex.")["session_id"]
    for text in ("My cat is Mia.", "I like tea.", "And milk."):
        chat(server, text, session_id)
    edits = [{"type": "remove", "index": index} for index in (0, 1, 3, 4)]
    edits.append({"type": "replace", "index": 6, "content": "And coffee."})
    assert server.post(f"/sessions/{session_id}/edit", {"edits": edits}).status == 200
    page = tabs.open(f"{server.url}/#{session_id}")
    page.locator(SAID, has_text="And coffee.").wait_for()
    assert page.locator(SAID).all_inner_texts() == ["My cat is Mia.", "And coffee."]
    assert page.locator(".divider").count() == 0
    stored = without_ids(server.get(f"/sessions/{session_id}").json()["messages"])
    shown = page.locator(".answer .text").all_inner_texts()
    assert [bool(text.strip()) for text in shown] == [False, True, True]  # the first question has lost its answer
    with page.expect_download() as download:
        choose(page, "export")
    download.value.save_as(tmp_path / "edited.json")
    assert json.loads((tmp_path / "edited.json").read_text())["messages"] == stored


def test_a_conversation_goes_into_a_file_and_comes_back(server: Serving, page: Any, tmp_path: Path) -> None:
    said(page, "My name is Ada.")
    first = id_of(page)
    with page.expect_download() as download:
        choose(page, "export")
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name == "My-name-is-Ada-.json"
    content = json.loads(path.read_text())
    stored = without_ids(server.get(f"/sessions/{first}").json()["messages"])
    assert content == {"title": "My name is Ada.", "messages": stored}
    content["messages"].append({"role": "user", "content": "What is my name?"})
    path.write_text(json.dumps(content))
    page.set_input_files("#import-file", path)
    page.wait_for_url(lambda url: "#" in url and not url.endswith(first))
    page.locator(".beside", has_text="imported history").wait_for()
    assert page.input_value("#message") == "What is my name?"  # it has no answer yet
    page.press("#message", "Enter")
    page.locator(".turn:nth-of-type(2) .meter").wait_for()
    assert server.get(f"/sessions/{id_of(page)}").json()["turns"] == 2


def test_a_file_that_is_none_is_refused(tabs: Tabs, page: Any, tmp_path: Path) -> None:
    for number, (text, words) in enumerate((
        ("{", "It is not JSON."), ("{}", "It has no list of messages."), ("[]", "There is no answer in it."),
        ('[{"role": "assistant", "content": 5}]', "messages"),
    )):  # fmt: skip
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        page.set_input_files("#import-file", path)
        page.locator("#notice b", has_text=f"{number}.json was not imported.").wait_for()
        assert words in page.locator("#notice").inner_text()
    tabs.errors.clear()  # the answer 400


# -- whose -----------------------------------------------------------------------------------------------------------
def test_sessions_of_programs_stand_apart_until_a_person_talks_in_them(server: Serving, page: Any) -> None:
    said(page, "I am a person.")
    mine = id_of(page)
    programs = chat(server, "I am a program.")["session_id"]
    page.click("#show-programs")
    page.locator(f'#sessions [data-id="{programs}"]').wait_for()
    assert page.locator(f'#sessions [data-id="{mine}"]').count() == 0
    page.locator(f'#sessions [data-id="{programs}"] .choose').click()
    page.locator(".meter").wait_for()
    assert server.get(f"/sessions/{programs}").json()["personal"] is False, "looking changes nothing"
    page.click("#show-personal")
    page.locator(f'#sessions [data-id="{mine}"]').wait_for()
    said(page, "And I am a person.", 2)
    page.locator(f'#sessions [data-id="{programs}"]').wait_for()
    assert server.get(f"/sessions/{programs}").json()["personal"] is True


# -- words and keys --------------------------------------------------------------------------------------------------
def test_an_empty_page_says_which_model_answers_and_how_to_begin(page: Any, tabs: Tabs) -> None:
    page.locator(".about", has_text="built-in model").wait_for()
    assert "1,024 tokens" in page.locator(".about").inner_text()
    examples = page.locator(".examples button")
    assert examples.count() == 3
    text = examples.first.inner_text()
    examples.first.click()
    page.locator(".meter").wait_for()
    assert page.locator(SAID).inner_text() == text


def test_another_model_is_not_the_built_in_one(tabs: Tabs, server: Serving) -> None:
    page = tabs.open("about:blank")
    other = {"id": "our/model", "root": "our/model", "max_model_len": 4096}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [other]}))
    page.goto(server.url)
    page.locator(".about", has_text="You talk to our/model. Its window holds 4,096 tokens.").wait_for()


def test_words_explain_themselves_to_mouse_and_keyboard(page: Any) -> None:
    for name in ("hbm", "reencoded", "ttft"):
        help_text = page.locator(f"#help-{name}")
        button = page.locator(f'[aria-describedby="help-{name}"]')
        assert not help_text.is_visible()
        button.hover()
        assert help_text.is_visible()
        page.hover("#title")
        assert not help_text.is_visible()
        button.focus()
        assert help_text.is_visible() and len(help_text.inner_text()) > 40


def test_the_keyboard_finds_everything(page: Any) -> None:
    said(page, "Hello.")
    page.keyboard.press("ArrowUp")
    page.locator(".edit-box textarea").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.press("Control+Shift+O")
    page.locator(".empty").wait_for()
    for keys, dialog in (("Control+/", "keys"), ("Control+,", "settings")):
        page.keyboard.press(keys)
        page.locator(f"#{dialog}-dialog").wait_for()
        page.keyboard.press("Escape")
        page.locator(f"#{dialog}-dialog").wait_for(state="hidden")


def test_lines_are_of_a_readable_width(page: Any) -> None:
    page.set_viewport_size({"width": 2200, "height": 900})
    said(page, "Hello.")
    letters = "getComputedStyle(e).getPropertyValue('--line')"
    assert page.locator("#log").evaluate(f"e => {letters}") == "70ch"
    width, limit = page.locator(".answer").evaluate("""e => {
      const line = document.createElement("div");
      line.style.width = "70ch";
      e.append(line);
      return [e.clientWidth, line.clientWidth];
    }""")
    assert 0.9 * limit < width <= limit + 8


def test_on_a_phone_the_numbers_of_a_turn_are_folded(server: Serving, tabs: Tabs) -> None:
    page = tabs.open(server.url, PHONE)
    say(page, "Hello.")
    page.locator(".meter").wait_for()
    counts = page.locator(".meter .counts")
    assert page.locator(".meter .bar").is_visible() and not counts.is_visible()
    page.locator(".meter summary").click()
    assert counts.is_visible()


# -- the files -------------------------------------------------------------------------------------------------------
def test_a_file_that_the_browser_has_is_not_sent_again(server: Serving) -> None:
    for path in ("/", "/web/vendor/katex.js"):
        first = server.get(path)
        again = server.get(path, **{"If-None-Match": first.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
        assert server.get(path, **{"If-None-Match": '"another"'}).body == first.body
