"""Conversations: what belongs together, when it was of use, and what the learner hears of it."""

import math

import pytest

from kvstore.policy.conversation import Conversation, Conversations


class Heard:
    """A learner that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def returned(self, conversation: Conversation, gap_s: float) -> None:
        self.calls.append(("returned", conversation.number, gap_s, conversation.turn, conversation.gap_s))

    def rested(self, conversation: Conversation, now_s: float) -> None:
        self.calls.append(("rested", conversation.number, now_s))

    def forgotten(self, conversation: Conversation) -> None:
        self.calls.append(("forgotten", conversation.number))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def known(heard) -> Conversations:
    return Conversations(heard)


def talk(known: Conversations, prompt: list, answer: list, arrive_s: float, leave_s: float) -> Conversation:
    conversation = known.arrive(prompt, arrive_s)
    known.end_request(conversation, [*prompt, *answer], leave_s)
    return conversation


def test_a_chain_that_extends_a_tip_continues_its_conversation(known):
    first = talk(known, ["a", "b"], ["c"], 0, 1)
    assert known.conversation_of(["a", "b", "c", "d"]) is first
    assert known.conversation_of(["a", "b", "x"]) is first, "another answer to the same prompt"
    assert known.conversation_of(["a", "x"]) is None
    assert known.conversation_of([]) is None
    assert talk(known, ["a", "b", "c", "d"], ["e"], 5, 6) is first
    assert known.conversation_of(["a", "b", "c"]) is None, "the tips have moved on"
    assert len(known) == 1


def test_another_chain_is_another_conversation(known):
    first, second = talk(known, ["a"], [], 0, 1), talk(known, ["b"], [], 2, 3)
    assert first is not second
    assert (first.number, second.number, len(known)) == (1, 2, 2)


def test_gaps_and_turns_are_counted_before_the_learner_hears_of_a_return(known, heard):
    conversation = talk(known, ["a"], ["b"], 0, 10)
    assert (conversation.turn, conversation.gap_s) == (1, None)
    talk(known, ["a", "b", "c"], ["d"], 17, 20)
    assert heard.calls == [("rested", 1, 10), ("returned", 1, 7, 2, 7), ("rested", 1, 20)]


def test_requests_side_by_side_are_no_return_and_the_last_one_rests(known, heard):
    one = talk(known, ["a"], [], -2, -1)
    heard.calls.clear()
    assert known.arrive(["a", "b"], 0) is known.arrive(["a", "c"], 1) is one
    assert (one.num_open, one.turn) == (2, 3)
    known.end_request(one, ["a", "b"], 2)
    assert [call[0] for call in heard.calls] == ["returned"]
    known.end_request(one, ["a", "c"], 3)
    assert heard.calls[1:] == [("rested", 1, 3)]
    with pytest.raises(AssertionError, match="conversation 1 was left once too often"):
        known.end_request(one, ["a"], 4)


def test_a_preempted_request_that_goes_on_is_no_return(known, heard):
    conversation = known.arrive(["a"], 0)
    known.end_request(conversation, ["a"], 1)
    assert known.arrive(["a"], 2, conversation) is conversation
    assert (conversation.turn, conversation.gap_s) == (1, None)
    assert heard.calls == [("rested", 1, 1), ("forgotten", 1)]


@pytest.mark.parametrize("answer", [[], ["c"]])
def test_another_answer_to_the_prompt_of_a_request_that_was_preempted_is_its_conversations(known, answer):
    conversation = known.arrive(["a", "b"], 0)
    known.end_request(conversation, ["a", "b", *answer], 1)
    known.arrive(["a", "b", *answer], 1, conversation)
    known.end_request(conversation, ["a", "b", "c", "d"], 2)
    assert known.conversation_of(["a", "b", "x"]) is known.conversation_of(["a", "b", "c", "d", "e"]) is conversation


def test_every_use_is_newer_than_all_before(known):
    first, second = known.arrive(["a"], 0), known.arrive(["b"], 0)
    assert first.use < second.use
    known.end_request(first, ["a"], 0)
    assert first.use > second.use
    assert first.used_s == 0


def test_what_has_no_block_cannot_return_and_is_not_kept(known, heard):
    conversation = known.arrive([], 0)
    known.end_request(conversation, [], 1)
    assert (len(known), heard.calls) == (0, [])


def test_a_splice_moves_the_tip(known):
    conversation = talk(known, ["a"], ["b"], 0, 1)
    known.move(conversation, ["s"])
    assert known.conversation_of(["s", "t"]) is conversation
    assert known.conversation_of(["a", "b"]) is conversation, "its prompt still leads to it"
    known.move(conversation, [])
    assert known.conversation_of(["s"]) is conversation


def adopted(known: Conversations, block_id: str, used_s: float) -> tuple[str, Conversation]:
    return block_id, known.make(used_s, block_id)


def test_what_is_found_in_a_store_may_return(known, heard):
    pairs = [adopted(known, "a", 100.0), adopted(known, "b", 200.0)]
    known.adopt(pairs, 1000.0)
    assert sorted(heard.calls) == [("rested", 1, 1000.0), ("rested", 2, 1000.0)]
    heard.calls.clear()
    conversation = known.arrive(["a", "x"], 1100.0)
    assert conversation is pairs[0][1]
    assert heard.calls == [("returned", 1, 1000.0, 2, 1000.0)], "it has had a request before"


def test_what_is_found_does_not_replace_what_is_known(known):
    conversation = talk(known, ["a"], ["b"], 0, 1)
    known.adopt([adopted(known, "b", 0.0)], 2)
    assert known.conversation_of(["b"]) is conversation
    assert len(known) == 1


def test_the_least_recently_used_are_forgotten(heard):
    known = Conversations(heard, 3)
    first = talk(known, ["a"], [], 100, 101)
    known.adopt([adopted(known, "old", 5.0), adopted(known, "older", 4.0), adopted(known, "oldest", 3.0)], 102)
    assert len(known) == 3
    assert known.conversation_of(["oldest"]) is None
    talk(known, ["b"], [], 103, 104)
    talk(known, ["c"], [], 105, 106)
    found = [known.conversation_of([name]) is not None for name in ("a", "b", "c", "old", "older")]
    assert found == [True] * 3 + [False] * 2
    assert known.conversation_of(["a"]) is first
    assert [call[1] for call in heard.calls if call[0] == "forgotten"] == [4, 3, 2]


def test_roots_are_the_same_in_every_process(known):
    roots = [known.make(0.0, name).root for name in (b"\1" + bytes(31), b"\2", "a", 7, None)]
    assert roots == [1, 2, 97, 7, 5]
    assert known.make(0.0, b"\3" * 8 + b"x" * 24).root == known.make(0.0, b"\3" * 8 + b"y" * 24).root


def test_behind_a_shared_head_newcomers_are_not_taken_for_the_one_who_came_last(known):
    first = known.arrive(["s", "a"], 0)
    known.end_request(first, ["s", "a", "b"], 1)
    short = known.arrive(["s"], 2, is_stored=True)  # its first message does not fill a block
    known.end_request(short, ["s"], 3)
    other = known.arrive(["s", "c"], 4)
    assert len({first, short, other}) == 3
    known.end_request(short := known.arrive(["s"], 5, is_stored=True), ["s", "d"], 6)
    assert known.conversation_of(["s", "d", "e"]) is short, "its answer is its own"


def test_deleted_conversations_are_forgotten(known, heard):
    one = talk(known, ["a"], ["b"], 0, 1)
    known.forget(["unknown", "b"])
    assert known.conversation_of(["a", "b"]) is None and len(known) == 0
    assert heard.calls[-1] == ("forgotten", one.number)


def test_who_returns_has_not_expired(known):
    one = talk(known, ["a"], [], 0, 1)
    one.expires_s = 5.0
    known.arrive(["a", "b"], 9)
    assert one.expires_s == math.inf
