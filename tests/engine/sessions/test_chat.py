"""Conversations: exact ids from turn to turn, truncation at turn boundaries, streams that are left early."""

from dataclasses import replace

import pytest

from kvstore import Engine, SamplingParams
from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.errors import ConfigError, RequestError, SessionBusyError, SessionNotFoundError
from tests.support.by_hand import ending_at_once
from tests.support.engines import bare_copy, greedy

MODEL = {"tokenizer": True}
PARAMS = greedy(10)


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, seed=1) as engine:
        yield engine
        engine.check_integrity()


def test_the_second_turn_computes_only_what_is_new(engine):
    chat = engine.chat("one", system="Be brief.")
    first = chat.send("Hello, my name is Anna and I like long walks by the sea.", PARAMS)
    second = chat.send("What is my name?", PARAMS)
    known = len(first.prompt_token_ids) + len(first.token_ids)
    assert second.prompt_token_ids[:known] == first.prompt_token_ids + first.token_ids
    assert second.usage.cached_tokens == (known - 1) // 16 * 16
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[2]["content"] == first.text and chat.last is second


def test_text_that_spells_a_control_token_stays_text(engine):
    special = engine.tokenizer.eos_token
    end = engine.tokenizer.convert_tokens_to_ids(special)
    chat = engine.chat("three", system=f"never say {special}")
    one = chat.send(f"what is {special} for?", PARAMS)
    assert one.prompt_token_ids.count(end) == 2  # of the system prompt and of the message, not of their texts
    two = chat.send(f"{special}{special}", PARAMS)
    assert two.prompt_token_ids[len(one.prompt_token_ids) + len(one.token_ids) :].count(end) == 2
    assert special in engine.tokenizer.decode(two.prompt_token_ids, skip_special_tokens=True)


def test_an_end_token_is_not_doubled(engine):
    end = engine.tokenizer.eos_token_id
    chat = engine.chat("four")
    params = SamplingParams(temperature=0, max_tokens=10, min_tokens=3, logit_bias={end: 100.0})
    first = chat.send("Hi", params)
    assert first.finish_reason == "stop" and first.token_ids[-1] == end
    second = chat.send("Bye", params)
    known = first.prompt_token_ids + first.token_ids
    assert second.prompt_token_ids[: len(known)] == known and second.prompt_token_ids[len(known)] != end


def test_an_answer_cut_by_a_stop_string_continues_from_its_text(engine):
    free = engine.chat("five").send("Tell me more", PARAMS)
    stop = free.text[4:7]
    chat = engine.chat("six")
    cut = chat.send("Tell me more", greedy(10, stop=[stop]))
    assert cut.finish_reason == "stop" and stop not in cut.text
    said = chat.token_ids[len(cut.prompt_token_ids) :]
    assert engine.tokenizer.decode(said) == cut.text == chat.messages[-1]["content"]


def test_truncation_drops_whole_turns_and_keeps_the_system_prompt(engine):
    chat = engine.chat("seven", system="Be kind.")
    sizes, dropped = [], []
    for turn in range(25):
        before = chat.truncated_tokens
        out = chat.send(f"This is message number {turn} of a long talk.", PARAMS)
        sizes.append(out.usage.prompt_tokens)
        if chat.truncated_tokens > before:
            dropped.append(turn)
            assert out.usage.prompt_tokens <= 128
        assert out.usage.prompt_tokens + 10 <= 256
        assert chat.messages[0] == {"role": "system", "content": "Be kind."}
        assert [m["role"] for m in chat.messages[1:]] == ["user", "assistant"] * ((len(chat.messages) - 1) // 2)
    assert len(dropped) >= 2 and len(chat.messages) == 1 + 2 * 25  # the transcript stays whole
    assert max(sizes) > 200  # the window is used before anything goes


def test_leaving_a_stream_keeps_what_was_said(engine):
    chat = engine.chat("nine")
    stream = chat.stream("Hi", greedy(100))
    said = "".join(next(stream).text for _ in range(5))
    stream.close()
    assert chat.last.finish_reason == "abort" and chat.messages[-1]["content"].startswith(said)
    assert not engine.has_work
    follow = chat.send("Go on", PARAMS)
    assert follow.prompt_token_ids[: len(chat.last.prompt_token_ids)] == chat.last.prompt_token_ids


def test_sessions_are_found_again_per_tenant(engine):
    chat = engine.chat("same")
    assert engine.chat("same") is chat and engine.chat("same", tenant="other") is not chat
    engine.prefetch("same")
    with pytest.raises(RequestError, match="no session"):
        engine.prefetch("unknown")
    for bad in ("", "a/b", "x" * 129, "ü"):
        with pytest.raises(RequestError, match="session id"):
            engine.chat(bad)


def test_a_template_that_rewrites_history_falls_back_to_rendering_all(engine):
    tokenizer = engine.tokenizer
    original, language = tokenizer.chat_template, engine.chats.language
    rewriting = (
        "{% for m in messages %}{{ '<|' + m.role + '|> ' + (m.content if loop.last else m.content[:3]) + '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    try:
        tokenizer.chat_template = rewriting
        template = ChatTemplate.of(tokenizer)
        messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
        assert template.next_ids([1, 2, 3], messages, "hello") is None
        chat = engine.chat("eleven")
        engine.chats.language = replace(language, template=template)
        chat.send("Hello there", PARAMS)
        out = chat.send("And again", PARAMS)
        assert tokenizer.decode(out.prompt_token_ids).startswith("<|user|> Hel<|end|><|assistant|> ")
    finally:
        tokenizer.chat_template, engine.chats.language = original, language


def test_a_model_without_a_template_says_so(tmp_path):
    path = bare_copy(tmp_path / "bare", "chat_template.jinja")
    with Engine(path) as engine, pytest.raises(RequestError, match=r"no chat template; give .*chat_template="):
        engine.chat("any")


def test_a_template_may_be_given(tmp_path):
    path, template = bare_copy(tmp_path / "bare", "chat_template.jinja"), MODEL_DIR / "chat_template.jinja"
    with Engine() as known, Engine(path, chat_template=str(template)) as engine:
        want, got = (one.chat("a").send("My dog is called Rex.", PARAMS) for one in (known, engine))
        assert (got.prompt_token_ids, got.text) == (want.prompt_token_ids, want.text)
    for wrong in ("{% for m in messages %}", "{{ nothing.at.all }}", str(tmp_path / "missing.jinja")):
        with pytest.raises(ConfigError, match=r"chat.template .*(cannot be used|cannot be read)") as caught:
            Engine(path, chat_template=wrong)
        assert "\n" not in str(caught.value)


def test_a_pool_smaller_than_the_window_is_what_a_conversation_is_truncated_to(model):
    with pytest.warns(UserWarning, match="HBM pool"):
        engine = Engine(model, cache_tiers={"hbm": 10 * 12288})
    with engine:
        chat = engine.chat("small")
        for turn in range(12):
            out = chat.send(f"This is message number {turn} of a long talk.", PARAMS)
            assert out.usage.prompt_tokens + 10 <= 160
        assert chat.truncated_tokens > 0


def test_a_turn_that_is_ended_before_its_first_token_is_not_the_one_before(engine):
    chat = engine.chat("thirteen")
    first = chat.send("Hi", PARAMS)
    with ending_at_once(engine):
        list(chat.stream("Hello again", PARAMS))
    assert chat.last is not first and chat.last.finish_reason == "abort" and len(chat.messages) == 2
    assert chat.send("And now?", PARAMS).finish_reason == "length"


def test_bad_messages_are_refused_before_anything_runs(engine):
    chat = engine.chat("fourteen")
    for text, params in (("\ud800", PARAMS), (5, PARAMS), ("hi", {"max_tokens": 3})):
        with pytest.raises(RequestError):
            chat.send(text, params)
    for system in (5, "\ud800"):
        with pytest.raises(RequestError, match="system"):
            engine.chat("fifteen", system=system)
    assert chat.messages == []


@pytest.mark.parametrize("reuse", ["exact", "reencode"])
def test_keeping_the_last_turns_keeps_their_ids_and_is_stored(engine, reuse):
    chat = engine.chat(f"kept-{reuse}", system="Be brief.", truncation_reuse=reuse)
    outs = [chat.send(f"Question number {number}, about the sea and about the sky.", PARAMS) for number in range(4)]
    starts, known, messages = list(chat.window.turn_starts), list(chat.token_ids), list(chat.messages)
    record = chat.keep_last(2)
    assert (record.number, record.messages, record.base) == (5, (), "rebase") and chat.num_turns == 5
    kept = known[: starts[0]] + known[starts[2] :]
    assert chat.token_ids == kept and record.truncated_tokens == len(known) - len(kept) == chat.truncated_tokens
    assert chat.messages == messages and chat.window.shown == [messages[0], *messages[5:]]
    assert chat.keep_last(2) is None and chat.keep_last(9) is None
    del chat
    again = engine.chat(f"kept-{reuse}", truncation_reuse=reuse)
    assert (again.token_ids, again.messages, again.num_turns) == (kept, messages, 5)
    out = again.send("And what was the first question?", PARAMS)
    assert out.prompt_token_ids[: len(kept)] == kept and len(outs) == 4
    assert again.num_turns == 6 and again.token_ids[: len(out.prompt_token_ids)] == out.prompt_token_ids
    assert again.keep_last(0).token_ids == () and again.window.shown == [messages[0]]
    fresh = engine.chat(f"fresh-{reuse}", system="Be brief.").send("Hello", PARAMS)
    assert again.send("Hello", PARAMS).prompt_token_ids == fresh.prompt_token_ids


@pytest.mark.parametrize("wrong", [-1, "x"])
def test_turns_that_are_none_are_refused(engine, wrong):
    chat = engine.chat(f"turns-{wrong}")
    chat.send("Hello", PARAMS)
    for change in (chat.keep_last, lambda turn: chat.fork("other", turn)):
        with pytest.raises(RequestError, match="turn"):
            change(wrong)
    assert chat.num_turns == 1


def test_keeping_the_last_turns_of_a_busy_or_deleted_session_is_refused(engine):
    chat = engine.chat("busy")
    with pytest.raises(SessionNotFoundError):
        chat.keep_last(1)  # it has no turn yet
    chat.send("Hello", PARAMS)
    for _ in chat.stream("Hello", PARAMS):
        with pytest.raises(SessionBusyError):
            chat.keep_last(0)
        break
    engine.admin.delete_session("busy")
    with pytest.raises(SessionNotFoundError):
        chat.keep_last(0)
