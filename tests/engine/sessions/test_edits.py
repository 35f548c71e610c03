"""Messages of a session that are taken back or changed: what is computed again, what is kept, and what is left."""

import pytest

from kvstore import RequestError, SamplingParams
from kvstore.blocks.ids import token_bytes
from kvstore.engine.sessions.edits import Directive
from kvstore.engine.sessions.recall import Keys, Recall
from kvstore.errors import SessionBusyError, SessionNotFoundError, StoreError
from kvstore.sessions.record import MessageEdit, SessionKey, TurnRecord
from tests.support.conversations import (
    LONG,
    PARAMS,
    check_gone,
    check_there,
    failing_to_store,
    fill,
    fill_over,
    kv_of,
    nothing_is_left,
    num_stored,
    talk,
)
from tests.support.engines import cached, chain_of, counters, greedy, open_engine, settle
from tests.support.tools import CLOCK

MODEL = {"tokenizer": True, "max_position_embeddings": 512}
REMOVE = [{"type": "remove", "index": 3}, {"type": "remove", "index": 4}]  # the second turn, behind a system prompt
REPLACE = [{"type": "replace", "index": 3, "content": "This is another message, of the same talk, about the sea."}]
ANSWER = [{"type": "replace", "id": "2.1", "content": "I have said something else."}]
LAST = [{"type": "remove", "index": 7}, {"type": "remove", "index": 8}]
BOTH = [{"type": "remove", "index": 1}, {"type": "remove", "index": 2}, *REPLACE]


def begun(engine, name="one", num_turns=4, word="talk"):
    chat = engine.chat(name, system="Be brief.")
    talk(chat, num_turns, word)
    return chat


def changed(messages, edits):
    """The plain way."""
    said = list(messages)
    for one in edits:
        index = one.get("index", 4)
        said[index] = None if one["type"] == "remove" else said[index] | {"content": one["content"]}
    return [message for message in said if message is not None]


def rendered(engine, messages):
    """As the template shows it, ready for the next answer."""
    return engine.tokenizer.decode(engine.chats.language.template.prompt_ids(messages))


# -- exact and re-encoded ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("reuse", "edits"),
    [
        *(("exact", edits) for edits in (REMOVE, LAST, BOTH)),
        *(("reencode", edits) for edits in (REMOVE, REPLACE, ANSWER, LAST, BOTH)),
        *(("forget", edits) for edits in (REPLACE, LAST, BOTH)),
    ],
)
def test_the_next_turn_reads_the_changed_conversation(opened, plain, reuse, edits):
    engine = opened()
    chat = begun(engine)
    messages, known, chain = list(chat.messages), list(chat.token_ids), list(chat.window.chain)
    done = chat.edit(edits, reuse)
    assert chat.messages == changed(messages, edits)
    assert (done.turn, chat.num_turns, done.num_tokens) == (5, 5, len(chat.token_ids))
    state = engine.sessions.load(SessionKey("", "one"))
    assert (state.messages, state.token_ids) == (chat.messages, chat.token_ids)
    assert (state.chain == chain_of(engine, state.token_ids)) == (done.reuse != "reencode")
    settle(engine)
    engine = opened()
    chat = engine.chat("one")
    assert (chat.messages, chat.num_turns) == (state.messages, 5)
    asked = {"role": "user", "content": "And what was that?"}
    assert engine.tokenizer.decode(chat.token_ids) in rendered(engine, [*chat.messages, asked])
    out = chat.send(asked["content"], PARAMS)
    assert out.prompt_token_ids[: done.num_tokens] == chat.token_ids[: done.num_tokens]
    assert engine.tokenizer.decode(out.prompt_token_ids) == rendered(engine, [*chat.messages[:-1]])
    same = next(i for i, (a, b) in enumerate(zip(known, out.prompt_token_ids, strict=False)) if a != b)
    if done.reuse == "reencode":
        assert reuse == "reencode" and cached(out)[3] == done.num_reencoded_tokens > 0
        assert out.usage.prompt_tokens - out.usage.cached_tokens < 64
    else:
        assert (sum(cached(out)), cached(out)[3]) == (same // 16 * 16, 0)
        assert out.token_ids == plain(out.prompt_token_ids, 10)
        miss = out.usage.miss
        assert (edits is LAST) == (miss is None) and (miss is None or (miss.cause, miss.token) == ("edit", same))
    assert done.reuse == reuse or (reuse, edits) == ("reencode", LAST)
    assert chat.window.chain[: same // 16] == chain[: same // 16]


@pytest.mark.parametrize("reuse", ["exact", "reencode"])
def test_a_long_question_before_a_changed_answer_does_not_hide_what_is_kept_behind_it(engine, reuse):
    chat = engine.chat("one", system="Be brief.")
    chat.send("This is a long message, of this talk and of no other one, about the sea. " * 6, PARAMS)
    talk(chat, 3)
    done = chat.edit([{"type": "replace", "index": 2, "content": "Hm."}], reuse)
    assert done.reuse == reuse and (done.num_reencoded_tokens > 0) == (reuse == "reencode")
    assert chat.window.miss.cause == "edit"


def test_what_an_edit_brings_nobody_had(engine):
    chat, long = begun(engine), "This is said about the sea, and about the rivers that end there. " * 3
    for text in (long, long + long):
        chat.edit([{"type": "replace", "index": 8, "content": text}])
        assert chat.window.miss.tokens == 0
    fork, brought = chat.fork("two"), len(chat.token_ids) - chat.window.miss.token
    assert chat.send("Hi", PARAMS).usage.miss is None
    fork.edit([{"type": "replace", "index": 3, "content": "Hm."}])
    out = fork.send("Hi", PARAMS)
    miss = out.usage.miss
    assert miss.cause == "edit" and 0 < miss.tokens < len(fork.token_ids) - miss.token - brought


@pytest.mark.parametrize("how", ["truncated", "other tools"])
def test_the_miss_of_an_edit_is_that_of_the_next_prompt(opened, how):
    engine = opened()
    chat = engine.chat("one", system="Be brief.", truncation_reuse="exact")
    fill(chat) if how == "truncated" else talk(chat, 4)
    index = len(chat.messages) - 4
    chat.edit([{"type": "replace", "index": index, "content": "Hm."}])
    if how == "truncated":
        out = chat.send(LONG * 3, PARAMS)
        assert chat.truncated_tokens and out.usage.miss.cause == "truncation"
    else:
        out = chat.send("Hi", PARAMS, [CLOCK])
        assert out.usage.miss.cause == "tools"
    miss = out.usage.miss
    assert miss.token < 32 and miss.tokens <= out.usage.prompt_tokens - miss.token


def test_an_edit_is_a_record_and_a_fork_goes_on_without_it(engine, plain):
    chat = begun(engine)
    messages, known = list(chat.messages), list(chat.token_ids)
    chat.edit(REMOVE)
    fork = chat.fork("two", 4)
    assert (fork.messages, fork.token_ids) == (messages, known)
    assert fork.send("Hi", PARAMS).usage.cached_tokens == (len(known) - 1) // 16 * 16
    later = chat.fork("three")
    assert later.messages == chat.messages == changed(messages, REMOVE)
    assert later.edit([{"type": "remove", "id": "3.0"}, {"type": "remove", "id": "3.1"}]).turn == 6
    assert later.messages == [*messages[:3], *messages[7:]] and len(chat.messages) == 7
    out = later.send("And now?", PARAMS)
    assert out.token_ids == plain(out.prompt_token_ids, 10)


@pytest.mark.parametrize("reuse", ["exact", "reencode"])
def test_what_is_not_in_the_window_any_more_changes_nothing_of_it(engine, reuse):
    chat = begun(engine, num_turns=2)
    fill_over(chat)
    before, shown, num_dropped = list(chat.token_ids), chat.window.shown, chat.window.num_dropped
    chat.edit([{"type": "remove", "index": 1}, {"type": "replace", "index": 2, "content": "No."}], reuse)
    assert (chat.token_ids, chat.window.shown, chat.window.num_dropped) == (before, shown, num_dropped - 1)
    assert chat.messages[1] == {"role": "assistant", "content": "No."}
    assert talk(chat, 1)[0].usage.cached_tokens == (len(before) - 1) // 16 * 16


def test_invariant_1_the_same_edit_gives_the_same_tokens_in_every_run(model, tmp_path):
    outs = []
    for name in ("a", "b"):
        with open_engine(model, tmp_path / name) as engine:
            chat = begun(engine)
            chat.edit(BOTH, "reencode")
            if name == "b":
                engine.loop.pool.evict_all()
            outs.append(talk(chat, 1)[0].token_ids)
            engine.check_integrity()
    assert outs[0] == outs[1]


@pytest.mark.parametrize(("why", "edits"), [("states", REPLACE), ("no tier below HBM", REMOVE)])
def test_where_nothing_can_be_kept_the_next_turn_computes_and_says_so(saved_model, tmp_path, why, edits):
    model = saved_model("Qwen3_5Text" if why == "states" else "Llama", **MODEL)
    with open_engine(model, tmp_path if why == "states" else None, hbm="4MiB", disk="64MiB") as engine:
        chat = begun(engine)
        before = engine.stats()["requests"]
        assert chat.edit(edits, "reencode").reuse == "exact"
        assert engine.stats()["requests"] == before
        out = chat.send("Hi", PARAMS)
        assert out.usage.cached_tokens_details.reencoded == 0 and out.usage.miss.cause == "edit"


# The system prompt stands in the first user message.
FOLDING = (
    "{% set s = messages[0].content + '\n' if messages[0].role == 'system' else '' %}<|bos|>"
    "{% for m in messages[1 if s else 0:] %}{{ '<|' + m.role + '|>' + (s if loop.first else '') + m.content }}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_an_answer_that_comes_first_is_shown_as_the_template_does(opened):
    engine = opened(chat_template=FOLDING)
    chat = begun(engine, num_turns=2)
    chat.edit([{"type": "remove", "index": 1}, {"type": "remove", "index": 3}])
    out = chat.send("And now?", PARAMS)
    assert engine.tokenizer.decode(out.prompt_token_ids) == rendered(engine, chat.messages[:-1])


# -- forgetting --------------------------------------------------------------------------------------------------------
def all_there_is(engine, chat):
    """What to look for of the turns from the second on: KV, ids, texts."""
    first = chat.window.turn_starts[1] // 16
    needles = [part for parts in kv_of(engine, chat.window.chain[first:]).values() for part in parts]
    ids = chat.token_ids[16 * first :]
    return [*needles, *(token_bytes(ids[i : i + 16]) for i in range(0, len(ids) - 16, 16))]


@pytest.mark.parametrize(
    ("before", "edits"),
    [("nothing", REMOVE), ("replaced", REPLACE), ("truncated", REPLACE), ("re-encoded", REMOVE)],
)
def test_what_is_forgotten_is_nowhere_any_more(opened, tmp_path, before, edits):
    engine = opened()
    chat = engine.chat("one", system="Be brief.")
    talk(chat, 1)
    chat.send("This is a secret matter, and a long one, as secret matters are.", PARAMS)
    talk(chat, 2)
    if before == "replaced":  # by something that must be forgotten, too
        chat.edit([{"type": "replace", "index": 3, "content": "This is a secret matter of another kind."}])
        talk(chat, 1)
    settle(engine)
    head = [part for parts in kv_of(engine, chat.window.chain[:1]).values() for part in parts]
    needles = [*all_there_is(engine, chat), b"secret matter"]
    if before == "truncated":
        chat.keep_last(2)
        talk(chat, 1)
        settle(engine)
        needles += [part for parts in kv_of(engine, chat.window.chain[2:]).values() for part in parts]
    if before == "re-encoded":  # what is kept behind it has read the secret
        assert chat.edit(REPLACE, "reencode").reuse == "reencode"
        talk(chat, 1)
        settle(engine)
        kept = chat.window.chain[chat.window.lineage.splice_index :]
        needles = [part for parts in kv_of(engine, kept).values() for part in parts]
    check_there(engine, tmp_path / "store", needles)
    assert chat.edit(edits, "forget").reuse == "forget"
    assert list(engine.sessions.pending_deletions()) == [] and chat.last is None
    check_gone(engine, tmp_path / "store", needles)
    check_there(engine, tmp_path / "store", head)
    assert engine.admin.verify()["sessions"]["problems"] == ()
    assert "secret" not in str([chat.messages, engine.sessions.turns(SessionKey("", "one"), 0, 99)])
    fork = chat.fork("two", 3)
    assert fork.messages == chat.messages[: len(fork.messages)] and fork.token_ids == []
    talk(chat, 1)
    talk(fork, 1)


def test_what_was_removed_before_can_be_forgotten_later(opened, tmp_path):
    engine = opened()
    chat = engine.chat("one", system="Be brief.")
    chat.send("A secret matter, in the first words of it.", PARAMS)
    talk(chat, 3)
    settle(engine)
    needles = [part for parts in kv_of(engine, chat.window.chain[1:]).values() for part in parts]
    chat.edit([{"type": "remove", "index": 1}, {"type": "remove", "index": 2}], "reencode")
    talk(chat, 1)
    settle(engine)
    assert chat.window.lineage.splice_index is not None
    needles += [part for parts in kv_of(engine, chat.window.chain[1:]).values() for part in parts]
    check_there(engine, tmp_path / "store", [*needles, b"secret matter"])
    assert engine.sessions.head(SessionKey("", "one")).title.startswith("A secret")
    chat.edit([{"type": "remove", "id": "1.1"}, {"type": "remove", "id": "1.2"}], "forget")
    check_gone(engine, tmp_path / "store", [*needles, b"secret matter"])
    assert engine.sessions.head(SessionKey("", "one")).title == chat.messages[1]["content"]
    assert chat.window.lineage.splice_index is None
    # Places have moved: what another edit has said of a message behind stays with it.
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 4]


def test_places_behind_a_forgotten_message_move(engine):
    chat = engine.chat("one")
    said = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
    chat.send([*said, {"role": "user", "content": "Three."}], PARAMS)
    chat.edit([{"type": "replace", "id": "1.2", "content": "Four."}])
    chat.edit([{"type": "remove", "index": 0}, {"type": "remove", "index": 1}], "forget")
    assert chat.messages[0] == {"role": "user", "content": "Four."}
    assert engine.sessions.load(SessionKey("", "one")).messages == chat.messages


def test_answers_of_it_are_not_recognised_any_more(engine):
    chat, recall = begun(engine), Recall(engine.chats)
    recall.note("", "", chat.messages[:-1], chat.last, session_id="one")
    keys = Keys(engine.facts.root(""), "")
    group = [keys.histories(keys.marks(chat.messages))[-1]]
    assert engine.answers.find_ids([group]) != [None]
    chat.edit(REMOVE, "forget")
    assert engine.answers.find_ids([group]) == [None]


def test_a_fork_keeps_what_it_shares_when_the_other_forgets(engine):
    chat = begun(engine)
    fork, known = chat.fork("two"), len(chat.token_ids)
    chat.edit(REMOVE, "forget")
    assert fork.send("Hi", PARAMS).usage.cached_tokens == (known - 1) // 16 * 16


def test_a_crash_between_forgetting_and_its_deletion_is_carried_out_at_the_next_start(opened, tmp_path):
    engine = opened()
    chat = begun(engine, word="secret matter")
    settle(engine)
    needles = all_there_is(engine, chat)
    edits = [MessageEdit(turn, index) for turn in (2, 3, 4) for index in (0, 1)]
    after = TurnRecord(5, (), (), (), "rebase")
    engine.sessions.commit_turn(chat.key, after, session_number=chat.number, forgotten=edits).wait()
    assert len(engine.sessions.pending_deletions()) == 1
    blocks = tmp_path / "store" / "blocks" / "data.mdb"
    assert any(needle in blocks.read_bytes() for needle in needles)
    engine = opened()
    assert list(engine.sessions.pending_deletions()) == []
    check_gone(engine, tmp_path / "store", needles)
    assert len(engine.chat("one").messages) == 3


def test_an_edit_that_cannot_be_stored_changes_nothing(engine):
    chat = begun(engine)
    for reuse in ("exact", "reencode", "forget"):
        before = (list(chat.messages), list(chat.token_ids), list(chat.window.chain), chat.num_turns)
        with failing_to_store(engine), pytest.raises(StoreError, match="injected"):
            chat.edit(REMOVE, reuse)
        assert (chat.messages, chat.token_ids, chat.window.chain, chat.num_turns) == before
    assert talk(chat, 1)[0].usage.cached_tokens > 100


def test_what_an_edit_that_cannot_be_stored_has_computed_is_gone_with_its_session(engine):
    chat = engine.chat("one")
    talk(chat, 4)
    before = num_stored(engine)
    with failing_to_store(engine), pytest.raises(StoreError, match="injected"):
        chat.edit([{"type": "replace", "index": 0, "content": "A secret matter, and a long one. " * 4}], "reencode")
    assert num_stored(engine) == before
    engine.admin.delete_session("one")
    assert nothing_is_left(engine)


# -- what is refused ---------------------------------------------------------------------------------------------------
REFUSED = [
    ([], "edits"), ("remove", "edits"), ([{"type": "move", "index": 1}], "edits[0].type"),
    (7, "edits"), ([Directive("drop", index=1)], "edits[0].type"), ([Directive("remove", index="1")], "edits"),
    ([{"type": "remove"}], "edits[0]"), ([{"type": "remove", "index": 1, "id": "1.0"}], "edits[0]"),
    ([{"type": "remove", "index": 9}], "edits[0].index"), ([{"type": "remove", "index": -1}], "edits"),
    ([{"type": "remove", "id": "9.0"}], "edits[0].id"), ([{"type": "remove", "id": "01.1"}], "edits[0].id"),
    ([{"type": "replace", "tool_call_id": "call_0", "content": "a"}], "edits[0].tool_call_id"),
    ([{"type": "replace", "index": 1}], "edits[0].content"),
    ([{"type": "remove", "index": 1, "content": "a"}], "edits[0].content"),
    ([{"type": "replace", "index": 1, "content": "\ud800"}], "edits[0].content"),
    ([{"type": "remove", "index": 0}], "edits[0]"), ([*REMOVE, {"type": "remove", "id": "2.0"}], "edits[2]"),
    ([{"type": "remove", "index": 8}], "edits"),
]  # fmt: skip


def test_what_cannot_be_done_is_named_and_changes_nothing(engine):
    chat = begun(engine)
    before = (list(chat.messages), list(chat.token_ids), chat.num_turns)
    for edits, param in REFUSED:
        with pytest.raises(RequestError) as raised:
            chat.edit(edits)
        assert raised.value.param == param, edits
    with pytest.raises(RequestError, match="reuse"):
        chat.edit(REMOVE, "all")
    with pytest.raises(RequestError, match=r"^edits\[0\]\.type is 'move'; give remove or replace$"):
        chat.edit([{"type": "move"}])
    assert (chat.messages, chat.token_ids, chat.num_turns) == before


CALLS = [{"id": f"call_{n}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for n in (1, 2)]
TOOL_TALK = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "A secret."},
    {"role": "tool", "tool_call_id": "call_2", "content": "Nothing."},
    {"role": "assistant", "content": "I have looked."},
]


@pytest.fixture
def looked(engine):
    """A session with calls, as it comes from elsewhere."""
    parts = (TOOL_TALK[:2], TOOL_TALK[2:])
    for number, messages in enumerate(parts, 1):
        engine.sessions.commit_turn(SessionKey("", "tools"), TurnRecord(number, messages, (), ())).wait()
    return engine.chat("tools")


@pytest.mark.parametrize(("indices", "match"), [((2,), "lost its result"), ((1,), "lost its call"), ((4,), "must be")])
def test_calls_and_results_stay_together(looked, indices, match):
    with pytest.raises(RequestError, match=match):
        looked.edit([{"type": "remove", "index": index} for index in indices])
    assert looked.messages == TOOL_TALK


def test_a_result_is_named_by_its_call(looked):
    looked.edit([Directive("replace", tool_call_id="call_1", content="[cleared]")], "forget")
    assert looked.messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "[cleared]"}
    looked.edit([{"type": "remove", "index": index} for index in (1, 2, 3, 4, 0)])
    assert looked.messages == []
    looked.send("Hello", PARAMS)
    assert len(looked.messages) == 2


def test_whoever_comes_too_late_is_told(engine):
    chat = begun(engine, num_turns=2)
    with pytest.raises(SessionBusyError, match="has 2 turns, not 1"):
        chat.edit(REMOVE, expected_turn=1)
    for _ in chat.stream("Hello", greedy(20)):
        with pytest.raises(SessionBusyError):
            chat.edit(REMOVE)
        break
    assert chat.edit(REMOVE, expected_turn=chat.num_turns).turn == 4
    engine.admin.delete_session("one")
    with pytest.raises(SessionNotFoundError):
        chat.edit(REMOVE)
    with pytest.raises(SessionNotFoundError):
        engine.chat("new").edit(REMOVE)


@pytest.mark.parametrize("reuse", ["exact", "reencode", "forget"])
def test_a_message_that_is_replaced_by_itself_changes_nothing(opened, reuse):
    engine = opened()
    chat = begun(engine, num_turns=2)
    messages, known = list(chat.messages), len(chat.token_ids)
    chat.edit([{"type": "replace", "index": 4, "content": messages[4]["content"]}], reuse)
    assert chat.messages == messages
    assert talk(chat, 1)[0].usage.cached_tokens <= known


def test_a_truncation_of_a_turn_that_is_exact_splices_nothing(opened):
    engine = opened()
    chat = engine.chat("one", system="Be brief.")
    fill(chat)
    before = counters(engine)["spliced"]
    out = chat.send(LONG, SamplingParams(max_tokens=10, temperature=0, kv_exact=True))
    assert chat.truncated_tokens > 0 and cached(out)[3] == 0 and counters(engine)["spliced"] == before
