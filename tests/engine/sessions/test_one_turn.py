"""One turn of a session, put together by hand: the window after it, its record, its blocks."""

from dataclasses import replace

import pytest

from kvstore.blocks.ids import Lineage, extend_chain
from kvstore.engine.client.requests import Handle
from kvstore.engine.outputs import CachedTokensDetails, Choice, RequestOutput, Timings, Usage
from kvstore.engine.sessions.stored import OneTurn, record_of_truncation
from kvstore.engine.sessions.window import NextTurn, Window

SIZE = 4
ROOT = Lineage(b"r" * 32)
SPLICED = Lineage(b"r" * 32, 1, b"p" * 32, 2)
SYSTEM = [{"role": "system", "content": "be brief"}]
SAID = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


def chain_of(token_ids, lineage=ROOT):
    chain = []
    extend_chain(chain, lineage.root, token_ids, SIZE)
    return chain


def window(token_ids, lineage=ROOT, turn_starts=(2,)):
    messages = [*SYSTEM, *SAID] if token_ids else list(SYSTEM)
    return Window(SYSTEM, messages, 0, list(token_ids), chain_of(token_ids), lineage, list(turn_starts))


def handle(prompt, answer, lineage=None, text="yes", **choice):
    usage = Usage(len(prompt), len(answer), CachedTokensDetails(hbm=1, cpu=2, disk=3, remote=4, reencoded=5))
    choices = [Choice(text, list(answer), **{"finish_reason": "length", **choice})]
    timings = Timings(queue_s=0.25, prefill_s=1e-6)
    output = RequestOutput("r", list(prompt), choices, usage, None, timings)
    return Handle("r", output, listener=lambda handles: None, lineage=lineage)


def turn(before, next_turn, handle):
    return OneTurn(before, "and now?", next_turn, handle, "a key")


def after_of(one):
    """No tokenizer and no template: the answer has no stop string."""
    return one.after(None, None, SIZE)


BEFORE = window(range(10))
NEXT = NextTurn(list(range(13)), BEFORE.chain, ROOT, 0, [2, 10])


def test_the_window_after_a_turn_is_prompt_and_answer():
    one = turn(BEFORE, NEXT, handle(range(13), [90, 91, 92, 93]))
    after = after_of(one)
    said = [{"role": "user", "content": "and now?"}, {"role": "assistant", "content": "yes"}]
    assert after.messages == [*SYSTEM, *SAID, *said] and BEFORE.messages == [*SYSTEM, *SAID]
    assert after.token_ids == [*range(13), 90, 91, 92, 93]
    assert after.chain == chain_of(after.token_ids) and after.chain[:2] == BEFORE.chain
    assert (after.system, after.num_dropped, after.lineage, after.turn_starts) == (SYSTEM, 0, ROOT, [2, 10])


def test_an_end_token_is_no_part_of_the_window():
    one = turn(BEFORE, NEXT, handle(range(13), [90, 2], finish_reason="stop", stop_reason=2))
    assert after_of(one).token_ids == [*range(13), 90]


def test_a_turn_that_goes_on_stores_what_it_adds():
    one = turn(BEFORE, NEXT, handle(range(13), [90, 91, 92, 93]))
    after = after_of(one)
    record = one.record(2, after)
    assert (record.number, record.base, record.messages) == (2, "append", tuple(after.messages[-2:]))
    assert (record.token_ids, record.chain) == (tuple(after.token_ids[10:]), tuple(after.chain[2:]))
    assert (record.first_reencoded, record.splice_parent, record.splice_end) == (None, b"", 0)
    assert (record.turn_starts, record.num_dropped_messages, record.truncated_tokens) == ((2, 10), 0, 0)
    assert (record.finish_reason, record.idempotency_key) == ("length", "a key")
    assert record.usage == {
        "queue_us": 250_000, "prefill_us": 1, "prompt_tokens": 13, "completion_tokens": 4, "cached_tokens": 15,
        "hbm": 1, "cpu": 2, "disk": 3, "remote": 4, "reencoded": 5,
    }  # fmt: skip


def test_a_first_turn_stores_the_whole_transcript():
    one = turn(window([]), NextTurn(list(range(6)), [], ROOT, 0, [2]), handle(range(6), [90], finish_reason=None))
    record = one.record(1, after_of(one))
    assert [message["role"] for message in record.messages] == ["system", "user", "assistant"]
    assert (record.token_ids, record.base, record.finish_reason) == ((0, 1, 2, 3, 4, 5, 90), "append", "")


def test_a_truncated_turn_stores_all_that_is_left():
    chain = [b"h" * 32, b"s" * 32]
    truncated = NextTurn([0, 1, 7, 8, 9, 20, 21, 22], chain, SPLICED, 2, [2, 5], truncated_tokens=5, rebase=True)
    one = turn(BEFORE, truncated, handle(truncated.prompt, [90], SPLICED))
    record = one.record(2, after_of(one))
    assert (record.base, record.token_ids, record.chain) == ("rebase", (*truncated.prompt, 90), tuple(chain))
    assert (record.first_reencoded, record.splice_parent, record.splice_end) == (1, b"p" * 32, 2)
    assert (record.turn_starts, record.num_dropped_messages, record.truncated_tokens) == ((2, 5), 2, 5)


def test_a_splice_that_was_given_up_leaves_an_exact_chain():
    """The request says what its chain is built on, whatever was asked for."""
    prompt = [0, 1, 7, 8, 9, 20, 21, 22]
    one = turn(BEFORE, NextTurn(prompt, [b"h" * 32, b"s" * 32], SPLICED, 2, [2, 5]), handle(prompt, [90], ROOT))
    after = after_of(one)
    assert (after.chain, after.lineage) == (chain_of([*prompt, 90]), ROOT)
    before = replace(BEFORE, lineage=SPLICED)
    record = turn(before, one.next, one.handle).record(2, after)
    assert (record.base, record.token_ids) == ("rebase", (*prompt, 90)), "its ids do not continue those before"


def test_spliced_blocks_are_needed_while_the_session_is_built_on_them():
    chain = [b"h" * 32, b"s" * 32, b"t" * 32]
    one = turn(BEFORE, NextTurn(list(range(13)), chain, SPLICED, 2, [2]), handle(range(13), [90], SPLICED))
    assert one.unneeded_blocks(is_stored=True, is_deleted=False, block_size=SIZE) == ()
    assert one.unneeded_blocks(is_stored=False, is_deleted=False, block_size=SIZE) == chain[1:]
    given_up = replace(one, handle=handle(range(13), [90], ROOT))
    assert given_up.unneeded_blocks(is_stored=True, is_deleted=False, block_size=SIZE) == chain[1:]
    known = replace(one, before=replace(BEFORE, lineage=SPLICED))
    assert known.unneeded_blocks(is_stored=False, is_deleted=False, block_size=SIZE) == []


@pytest.mark.parametrize(("starts", "known", "own"), [
    ([2, 10], 2, 2),  # the system prompt and the turn before are others'
    ([9], 0, 2),  # a first turn: what begins before it is the system prompt's
    ([], 1, 1),
    ([2], 3, 3),
])  # fmt: skip
def test_a_deleted_session_takes_the_blocks_of_its_running_turn(starts, known, own):
    ids = list(range(17))
    before = replace(BEFORE, chain=chain_of(ids)[:known])
    one = turn(before, NextTurn(ids, before.chain, ROOT, 0, starts), handle(ids, []))
    one.handle.chain = chain_of(ids)
    assert one.unneeded_blocks(is_stored=False, is_deleted=True, block_size=SIZE) == chain_of(ids)[own:]
    assert one.unneeded_blocks(is_stored=False, is_deleted=False, block_size=SIZE) == []


def test_blocks_are_a_turns_own_from_where_its_chain_parts():
    one = turn(replace(BEFORE, chain=chain_of(range(12))), NEXT, handle(range(13), []))
    one.handle.chain = [*chain_of(range(4)), b"x" * 32, b"y" * 32]
    assert one.unneeded_blocks(False, True, SIZE) == [b"x" * 32, b"y" * 32]


class Template:
    def prompt_ids(self, messages):
        return range(3)


def test_turns_that_are_removed_without_a_new_one_are_a_record_without_messages():
    after = Window(SYSTEM, BEFORE.messages, 2, [0, 1, 8, 9], [b"s" * 32], SPLICED, [2])
    record = record_of_truncation(7, BEFORE, after, Template())
    assert (record.number, record.messages, record.base, record.finish_reason) == (7, (), "rebase", "truncated")
    assert (record.token_ids, record.chain, record.turn_starts) == ((0, 1, 8, 9), (b"s" * 32,), (2,))
    assert (record.first_reencoded, record.splice_parent, record.splice_end) == (1, b"p" * 32, 2)
    assert (record.num_dropped_messages, record.truncated_tokens) == (2, 6)
    unknown = Window(SYSTEM, BEFORE.messages, 2, [], [], ROOT)
    assert record_of_truncation(7, BEFORE, unknown, Template()).truncated_tokens == 7
    assert record_of_truncation(7, window([0, 1]), unknown, Template()).truncated_tokens == 0
