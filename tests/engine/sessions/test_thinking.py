"""Reasoning of earlier answers in a session: kept in the context, or dropped, with what follows it re-encoded."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore import AnswerOptions, Engine, RequestError, SamplingParams, StructuredOutputsParams
from kvstore.engine.text.clearing import THINKING as CLEAR_THINKING
from kvstore.engine.text.clearing import ContextEdit, ContextManagement, EditAmount
from tests.support.conversations import num_stored
from tests.support.engines import counters, evict_hbm, settle
from tests.support.thinking import HEAD, OPENING, THINKING, as_asked

LONG = "Tell me about the sea, and how far it is from here."
SHOWING = (
    "{{ '<|' + m.role + '|>' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
)
TEMPLATES = {
    "opened": THINKING,
    "not opened": THINKING.replace("{{ '<think>' }}", ""),
    "shown": f"{HEAD}{{% for m in messages %}}{SHOWING}<|end|>{{% endfor %}}{OPENING}",
}


@contextmanager
def opened(template: str, path: Path, **options):
    tiers = {"hbm": "8MiB", "cpu": "16MiB", "disk": "64MiB", "path": path}
    with Engine(device="cpu", chat_template=TEMPLATES[template], cache_tiers=tiers, **options) as engine:
        yield engine
        settle(engine)
        engine.check_integrity()


@pytest.fixture
def engine(request, tmp_path):
    """Whose template opens the reasoning; `BOTH`: and one whose template leaves that to the model."""
    with opened(getattr(request, "param", "opened"), tmp_path) as found:
        yield found


BOTH = pytest.mark.parametrize("engine", ["opened", "not opened"], indirect=True)


def think(chat, said, thinking=None, regex="[a-d]{24}</think>(yes|no)[a-d]{18}", options=()):
    """A turn whose answer reasons. Its prompt as text, and its usage."""
    is_opened = "<think>" in chat.chats.language.template.opening
    wanted = StructuredOutputsParams(regex=regex if is_opened else f"<think>{regex}")
    with as_asked():
        output = chat.send(
            said, SamplingParams(temperature=0, max_tokens=120, structured_outputs=wanted), options, thinking
        )
    assert output.reasoning and output.finish_reason == "stop"
    tokenizer = chat.chats.language.tokenizer
    return tokenizer.decode(output.prompt_token_ids), output.usage


def shown(chat) -> str:
    """What the template makes of the transcript."""
    return "<|bos|>" + "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in chat.messages)


@BOTH
def test_a_session_keeps_its_thinking(engine):
    chat = engine.chat("ada")
    _, usage = think(chat, LONG)
    assert usage.thinking is None
    before = list(chat.token_ids)
    _, usage = think(chat, "And now?")
    assert chat.token_ids[: len(before)] == before and usage.thinking == "kept"
    assert usage.cached_tokens_details.total == (len(before) - 1) // 16 * 16 and usage.miss is None
    assert usage.cached_tokens_details.reencoded == 0


@BOTH
def test_thinking_is_dropped_and_what_follows_is_reencoded(engine):
    chat, opening = engine.chat("ada", system="Be brief."), engine.chats.language.template.opening
    think(chat, LONG)
    for turn in (2, 3, 4):
        expected = shown(chat) + f"<|user|>{LONG}<|end|>{opening}"
        prompt, usage = think(chat, LONG, "drop")
        assert prompt == expected and usage.thinking == "dropped" and chat.num_turns == turn
        assert (
            usage.cached_tokens_details.reencoded >= 16 * (turn - 1) and usage.prompt_tokens - usage.cached_tokens < 64
        )
        assert usage.miss is None or (usage.miss.cause, usage.miss.message) == ("thinking", 2 * turn - 2)
        assert counters(engine)["spliced"] <= 2, "the first turn that drops copies what follows, later ones compute it"
    expected = shown(chat)
    prompt, usage = think(chat, LONG)
    assert prompt.count(chat.messages[-3]["reasoning_content"]) == 1, "that of the last answer"
    assert prompt.startswith(expected.rpartition("<|assistant|>")[0]) and usage.thinking == "kept"
    engine.admin.delete_session("ada")
    assert num_stored(engine) <= 1, "the system prompt's block"


def test_a_dropped_turn_outlives_a_restart(tmp_path):
    with opened("opened", tmp_path) as engine:
        chat = engine.chat("ada")
        think(chat, LONG)
        think(chat, LONG, "drop")
        known, lineage = list(chat.token_ids), chat.window.lineage
    with opened("opened", tmp_path) as engine:
        chat = engine.chat("ada")
        assert (chat.token_ids, chat.window.lineage) == (known, lineage)
        expected = shown(chat) + f"<|user|>{LONG}<|end|>{engine.chats.language.template.opening}"
        prompt, usage = think(chat, LONG, "drop")
        assert prompt == expected and usage.thinking == "dropped"
        assert engine.sessions.turn(chat.key, 3).usage["thinking_dropped"] == 1


def test_several_answers_behind_an_earlier_splice(engine):
    """Everything from that splice on is copied, and is what it says when it comes back from CPU."""
    chat, opening = engine.chat("ada", system="Be brief."), engine.chats.language.template.opening
    for thinking in (None, "drop", None, None):
        think(chat, LONG, thinking)
    first, expected = chat.window.lineage, shown(chat) + f"<|user|>{LONG}<|end|>{opening}"
    prompt, usage = think(chat, LONG, "drop")
    second = chat.window.lineage
    assert prompt == expected and second.splice_index == first.splice_index and second.splice_end > first.splice_end + 2
    assert usage.cached_tokens_details.reencoded >= (second.splice_end - second.splice_index) * 16
    known = len(chat.token_ids)
    evict_hbm(engine)
    _, usage = think(chat, LONG)
    assert usage.cached_tokens == (known - 1) // 16 * 16 and usage.miss is None
    assert counters(engine)["given_up_splices"] == 0


def test_a_truncation_and_dropped_thinking_are_one_splice(tmp_path):
    with opened("not opened", tmp_path, max_model_len=384) as engine:
        chat = engine.chat("ada", system="Be brief.")
        while not chat.truncated_tokens:
            prompt, usage = think(chat, LONG, "drop")
        assert "a</think>" not in prompt.replace(engine.chats.language.template.opening, "")
        assert usage.thinking == "dropped" and usage.cached_tokens_details.reencoded > usage.prompt_tokens / 2
        assert counters(engine)["given_up_splices"] == 0
        engine.admin.delete_session("ada")
        assert num_stored(engine) <= 1, "the system prompt's block"


def test_with_exact_reuse_what_follows_is_computed(engine):
    chat = engine.chat("ada", truncation_reuse="exact")
    think(chat, LONG, regex="[a-d]{24}</think>(yes|no)[a-d]{60}")  # more than a block stands behind the thinking
    _, usage = think(chat, LONG, "drop")
    assert usage.thinking == "dropped" and usage.cached_tokens_details.reencoded == 0
    assert usage.miss is not None and usage.miss.cause == "thinking" and usage.miss.role == "assistant"


def test_a_template_that_shows_thinking_keeps_it(tmp_path):
    with opened("shown", tmp_path) as engine:
        chat = engine.chat("ada")
        think(chat, LONG)
        before = list(chat.token_ids)
        _, usage = think(chat, LONG, "drop")
        assert usage.thinking == "kept" and chat.token_ids[: len(before)] == before


@BOTH
def test_an_answer_that_ended_within_its_thinking(engine):
    chat = engine.chat("ada")
    is_opened = "<think>" in engine.chats.language.template.opening
    wanted = StructuredOutputsParams(regex="[a-d]{60}" if is_opened else "<think>[a-d]{60}")
    with as_asked():
        output = chat.send(LONG, SamplingParams(temperature=0, max_tokens=20, structured_outputs=wanted))
    assert (output.finish_reason, output.content) == ("length", "") and output.reasoning
    expected = shown(chat)
    prompt, usage = think(chat, "Go on.", "drop")
    assert prompt.startswith(f"{expected}<|user|>Go on.") and usage.thinking == "dropped"


@pytest.mark.parametrize("template", ["not opened", "shown"])
def test_an_answer_that_is_given_another_content_has_no_thinking(template, tmp_path):
    with opened(template, tmp_path) as engine:
        chat = engine.chat("ada")
        for said in (LONG, "And the moon?", LONG):
            think(chat, said)
        edit = {"type": "replace", "index": 3, "content": "It is very far."}
        assert chat.edit([edit], "reencode").num_reencoded_tokens > 0
        prompt, _ = think(chat, "And now?")
        assert "<|user|>And the moon?<|end|><|assistant|>It is very far.<|end|><|user|>" in prompt
        assert prompt.removesuffix("<think>").count("<think>") == 2


def test_an_unknown_way_is_named(engine):
    with pytest.raises(RequestError, match="thinking is 'forget'; give keep or drop") as raised:
        engine.chat("ada").send("Hello", thinking="forget")
    assert raised.value.param == "thinking"


# -- thinking that a client wants cleared ------------------------------------------------------------------------------
@pytest.mark.parametrize(("template", "reuse"), [("opened", "reencode"), ("shown", "exact")])
def test_thinking_is_cleared_in_steps_that_pay(tmp_path, template, reuse):
    """It goes from the ids and the transcript, and what is left has the same ids."""
    wanted = ContextManagement([ContextEdit(CLEAR_THINKING, keep=EditAmount("thinking_turns", 1))], reuse)
    options, cleared = AnswerOptions(context_management=wanted), []
    with opened(template, tmp_path, max_model_len=1024) as engine:
        chat = engine.chat("ada", system="Be brief.")
        for _ in range(8):
            text = "" if not chat.num_turns else engine.tokenizer.decode(chat.token_ids)
            thoughts = [one["reasoning_content"] for one in chat.messages if "reasoning_content" in one]
            prompt, usage = think(chat, "Hi", regex="[a-d]{80}</think>(yes|no)", options=options)
            cleared.append(chat.last.applied_edits)
            if cleared[-1]:
                assert cleared[-1][0].cleared_thinking_turns == len(thoughts) - 1
                for thought in thoughts[:-1]:
                    text = re.sub(rf"(<think>)?{re.escape(thought)}</think>", "", text, count=1)
                reencoded = usage.cached_tokens_details.reencoded
                assert (reencoded > 0) == (reuse == "reencode")
                assert usage.miss is None or usage.miss.cause == "edit"
            assert prompt.startswith(text)
        assert 1 <= sum(map(bool, cleared)) <= (4 if reuse == "reencode" else 2)
        messages = engine.sessions.load(chat.key).messages
        assert (
            messages == chat.messages and "reasoning_content" not in messages[2] and "reasoning_content" in messages[-1]
        )
