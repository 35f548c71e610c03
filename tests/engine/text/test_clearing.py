"""What is cleared from a history: in steps that depend on the history alone, that pay, and that keep what is asked."""

import random
from dataclasses import replace

import pytest
import transformers

from kvstore.engine.builtin import MODEL_DIR
from kvstore.engine.outputs import AppliedEdit, Facts
from kvstore.engine.sessions.misses import common_prefix
from kvstore.engine.text.chat_template import ChatTemplate
from kvstore.engine.text.clearing import (
    CLEARED,
    THINKING,
    TOOL_USES,
    ContextEdit,
    ContextManagement,
    EditAmount,
    cleared,
)
from kvstore.errors import RequestError
from tests.support.thinking import THINKING as HIDES

FACTS = Facts("none", 100_000, 100_000, 16, 1, 2000, b"", b"", {}, 64)
SHOWS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def template_of(chat_template=None):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    return ChatTemplate(tokenizer), tokenizer


TEMPLATE = template_of()


def uses(keep=1, trigger=("input_tokens", 0), **more):
    """An edit that clears results."""
    return ContextEdit(TOOL_USES, EditAmount(*trigger), EditAmount("tool_uses", keep), **more)


def clear(messages, *edits, facts=FACTS, template=TEMPLATE, reuse=None, **more):
    return cleared(messages, ContextManagement(list(edits), reuse), *template, facts, **more)


def turn(number, words=200, tool="read", thought=""):
    """An answer with a call, and its result."""
    function = {"name": tool, "arguments": f'{{"path": "a file with a long name, number {number}"}}'}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "function": function}]}
    answer |= {"reasoning_content": thought} if thought else {}
    return [answer, {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number} " + "word " * words}]


def talk(num_turns, **more):
    return [{"role": "user", "content": "Read them."}, *(m for n in range(num_turns) for m in turn(n, **more))]


def shown(messages, changed):
    return [changed.get(index, message) for index, message in enumerate(messages)]


def gone(messages, changed):
    """The numbers of the turns whose results are cleared."""
    found = [m["tool_call_id"] for m in shown(messages, changed) if m.get("content") == CLEARED]
    return [int(name[1:]) for name in found]


# -- what goes ---------------------------------------------------------------------------------------------------------
def test_old_results_go_and_what_was_done_is_told():
    messages = talk(16)
    template = TEMPLATE[0]
    changed, applied = clear(messages, uses(keep=3))
    there = shown(messages, changed)
    assert gone(messages, changed) == list(range(len(changed))) and 0 < len(changed) <= 13
    assert [m for i, m in enumerate(there) if i not in changed] == [
        m for i, m in enumerate(messages) if i not in changed
    ]
    (one,) = applied
    saved = len(template.prompt_ids(messages)) - len(template.prompt_ids(there))
    assert one == AppliedEdit(TOOL_USES, saved, cleared_tool_uses=len(changed))


@pytest.mark.parametrize("keep", [0, 1])
def test_what_no_answer_has_seen_stays(keep):
    first, second = turn(20), turn(21)
    both = [{**first[0], "tool_calls": first[0]["tool_calls"] + second[0]["tool_calls"]}, first[1], second[1]]
    messages = [*talk(20), *both]
    changed, _ = clear(messages, uses(keep=keep), facts=replace(FACTS, compute_price=1.0))
    assert gone(messages, changed) == list(range(20))


def test_excluded_tools_stay_and_count_as_kept():
    messages = [*talk(8), *turn(8, tool="ask"), *turn(9), *turn(10, tool="ask")]
    free = replace(FACTS, compute_price=1.0)
    assert gone(messages, clear(messages, uses(keep=2), facts=free)[0]) == list(range(9))
    assert gone(messages, clear(messages, uses(keep=2, exclude_tools=["ask"]), facts=free)[0]) == list(range(8))


@pytest.mark.parametrize("inputs", [True, ["read"], ["ask"], False, None])
def test_inputs_go_where_that_is_asked(inputs):
    messages, template = [*talk(8), *turn(8, tool="ask"), *turn(9), *turn(10)], TEMPLATE[0]
    free = replace(FACTS, compute_price=1.0)
    changed, (one,) = clear(messages, uses(clear_tool_inputs=inputs), facts=free)
    there = shown(messages, changed)
    bare = {
        m["tool_calls"][0]["id"]
        for m in there
        if m.get("tool_calls") and m["tool_calls"][0]["function"]["arguments"] == "{}"
    }
    named = {True: range(10), "read": [*range(8), 9], "ask": [8]}.get(
        inputs[0] if isinstance(inputs, list) else inputs, []
    )
    assert bare == {f"c{number}" for number in named}
    saved = len(template.prompt_ids(messages)) - len(template.prompt_ids(there))
    assert one.cleared_tool_uses == 10 and abs(one.cleared_input_tokens - saved) <= 10  # tokens may join
    assert messages[1]["tool_calls"][0]["function"]["arguments"] != "{}", "what the client sent is not changed"


def test_parallel_calls_are_uses_of_their_own():
    first, second = turn(0), turn(1)
    both = [{**first[0], "tool_calls": first[0]["tool_calls"] + second[0]["tool_calls"]}, first[1], second[1]]
    messages = [{"role": "user", "content": "Read them."}, *both, *turn(2)]
    changed, _ = clear(messages, uses(keep=2, clear_tool_inputs=True), facts=replace(FACTS, compute_price=1.0))
    assert gone(messages, changed) == [0]
    assert [call["function"]["arguments"] == "{}" for call in shown(messages, changed)[1]["tool_calls"]] == [
        True,
        False,
    ]


def test_results_that_are_shorter_than_what_would_stand_there_stay():
    messages = [{"role": "user", "content": "Go."}, *(m for n in range(9) for m in turn(n, words=0))]
    assert clear(messages, uses(), facts=replace(FACTS, compute_price=1.0)) == ({}, [])


# -- when --------------------------------------------------------------------------------------------------------------
def test_triggers():
    messages, free = talk(6), replace(FACTS, compute_price=1.0)
    total = len(TEMPLATE[0].prompt_ids(messages))
    assert gone(messages, clear(messages, uses(trigger=("input_tokens", total * 3 // 2)), facts=free)[0]) == []
    assert gone(messages, clear(messages, uses(trigger=("input_tokens", total * 3 // 4)), facts=free)[0]) == [*range(4)]
    for value, number in ((6, 0), (5, 5), (4, 4)):
        assert len(clear(messages, uses(trigger=("tool_uses", value)), facts=free)[0]) == number
    plain = ContextEdit(TOOL_USES)  # three stay, and half of the window
    assert gone(messages, clear(messages, plain, facts=free)[0]) == []
    small = replace(free, max_request_tokens=total)
    assert gone(messages, clear(messages, plain, facts=small)[0]) == [0, 1, 2]


def test_clear_at_least():
    messages, free = talk(6), replace(FACTS, compute_price=1.0)
    _, (whole,) = clear(messages, uses(trigger=("tool_uses", 5)), facts=free)
    for value, number in ((whole.cleared_input_tokens, 5), (whole.cleared_input_tokens + 1, 0)):
        edit = uses(trigger=("tool_uses", 5), clear_at_least=EditAmount("input_tokens", value))
        assert len(clear(messages, edit, facts=free)[0]) == number


def test_small_results_before_a_large_one_stay_unless_the_window_is_full():
    messages = [*talk(2, words=30), *turn(2, words=900), *turn(3, words=0)]
    assert clear(messages, uses(keep=2)) == ({}, [])
    total = len(TEMPLATE[0].prompt_ids(messages))
    assert clear(messages, uses(keep=2), facts=replace(FACTS, max_request_tokens=total * 5 // 4)) == ({}, [])
    assert gone(messages, clear(messages, uses(keep=2), facts=replace(FACTS, max_request_tokens=total))[0]) == [0, 1]


def cost_of(edit, facts):
    """Of 40 turns, in loads of a token: each computes what its prompt does not share with the one before."""
    history, before, cost = [{"role": "user", "content": "Go."}], [], 0.0
    for number in range(40):
        there = TEMPLATE[0].prompt_ids(shown(history, clear(history, edit, facts=facts)[0]))
        same = common_prefix(before, there)
        cost += same + FACTS.compute_price * (len(there) - same)
        before = there
        history += turn(number, words=300)
    return cost


def test_it_costs_less_than_never_to_clear_and_than_always():
    often, never = uses(keep=3, trigger=("tool_uses", 3)), uses(keep=3, trigger=("input_tokens", 10**6))
    assert cost_of(often, FACTS) < 0.8 * min(cost_of(never, FACTS), cost_of(often, replace(FACTS, compute_price=1.0)))


def test_the_price_is_that_of_computing_what_is_behind():
    pays = FACTS.clearing_pays
    assert pays(701, 100) and not pays(700, 100) and pays(101, 0, 100) and not pays(100, 0, 100)
    assert replace(FACTS, compute_price=1.0).clearing_pays(1, 10**6) and not pays(0, 0)


@pytest.mark.parametrize(("words", "reuse", "number"), [(200, "exact", 0), (200, "reencode", 1), (1200, "reencode", 0)])
def test_a_session_that_reencodes_computes_up_to_its_last_change_and_copies_the_rest(words, reuse, number):
    answered = [{"role": "assistant", "content": "word " * words}, {"role": "user", "content": "On."}]
    messages = [{"role": "user", "content": "Read."}, *turn(0, words=900), *answered]
    assert len(clear(messages, uses(keep=0), reuse=reuse, is_session=True)[0]) == number


# -- stable ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("more", [{}, {"clear_tool_inputs": True}, {"clear_at_least": EditAmount("input_tokens", 300)}])
def test_between_two_steps_the_prompt_only_grows(seed, more):
    """Each request brings all that was said. Steps are few, and the last one of each stands in all that follow."""
    chance, history, before, steps, turns = random.Random(seed), [{"role": "user", "content": "Go."}], [], 0, 60
    for number in range(turns):
        changed, _ = clear(history, uses(keep=3, trigger=("input_tokens", 600), **more), ContextEdit(THINKING))
        there = shown(history, changed)
        steps += there[: len(before)] != before
        before = there
        history += turn(number, words=chance.randrange(150), tool=chance.choice(["read", "ask"]))
        if chance.random() < 0.2:
            history += [{"role": "assistant", "content": "So it is."}, {"role": "user", "content": "And then?"}]
    assert 1 <= steps <= 20 and gone(history, clear(history, uses(keep=3, trigger=("input_tokens", 600)))[0])


def test_a_session_takes_one_step_for_its_next_prompt():
    """What all prompts before have loaded counts, and what was cleared is not cleared again."""
    messages = talk(21)
    whole, session = (gone(messages, clear(messages, uses(keep=2), is_session=one)[0]) for one in (False, True))
    assert whole == [*range(len(whole))] and 0 < len(whole) < 19 == len(session)
    there = shown(messages, clear(messages, uses(keep=2), is_session=True)[0])
    assert clear(there, uses(keep=2), is_session=True) == ({}, [])
    assert clear(talk(4), uses(keep=2), is_session=True) == ({}, [])


# -- thinking ----------------------------------------------------------------------------------------------------------
def thoughtful(num_turns):
    said = []
    for number in range(num_turns):
        said += [{"role": "user", "content": f"Question {number}"}, *turn(number, thought="hmm " * 80)]
        said += [{"role": "assistant", "content": "So it is.", "reasoning_content": "well " * 80}]
    return [*said, {"role": "user", "content": "And now?"}]


def thinking(messages, changed):
    """The messages that still have their thinking."""
    return [index for index, message in enumerate(shown(messages, changed)) if message.get("reasoning_content")]


@pytest.mark.parametrize(
    ("keep", "left"), [(None, 2), (EditAmount("thinking_turns", 1), 2), (EditAmount("thinking_turns", 3), 6)]
)
def test_thinking_of_all_but_the_last_turns_goes(keep, left):
    messages, template = thoughtful(6), template_of(SHOWS)
    changed, (one,) = clear(
        messages, ContextEdit(THINKING, keep=keep), template=template, facts=replace(FACTS, compute_price=1.0)
    )
    kept = thinking(messages, changed)
    assert kept == thinking(messages, {})[-left:] and one.cleared_thinking_turns == 6 - left // 2
    assert all(m | {"reasoning_content": ""} == messages[i] | {"reasoning_content": ""} for i, m in changed.items())
    saved = len(template[0].prompt_ids(messages)) - len(template[0].prompt_ids(shown(messages, changed)))
    assert one.type == THINKING and abs(one.cleared_input_tokens - saved) <= 10 * len(
        changed
    )  # and the marks around it


def test_thinking_that_the_template_does_not_show_is_not_cleared():
    messages, free = thoughtful(6), replace(FACTS, compute_price=1.0)
    assert clear(messages, ContextEdit(THINKING), template=template_of(HIDES), facts=free) == ({}, [])
    changed, _ = clear(messages, ContextEdit(THINKING), template=template_of(HIDES), facts=free, is_session=True)
    assert len(thinking(messages, changed)) == 2, "a session has kept it"


@pytest.mark.parametrize("keep", ["all", EditAmount("all")])
def test_all_thinking_stays_where_that_is_asked(keep):
    messages, free = thoughtful(6), replace(FACTS, compute_price=1.0)
    assert clear(messages, ContextEdit(THINKING, keep=keep), template=template_of(SHOWS), facts=free) == ({}, [])


def test_both_at_once_are_one_step():
    messages, free = thoughtful(6), replace(FACTS, compute_price=1.0)
    changed, applied = clear(messages, ContextEdit(THINKING), uses(), template=template_of(SHOWS), facts=free)
    assert [one.type for one in applied] == [TOOL_USES, THINKING]
    assert gone(messages, changed) == [0, 1, 2, 3, 4] and len(thinking(messages, changed)) == 2


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("edits", "param"),
    [
        ([ContextEdit("compact_20260112")], "edits[0].type"),
        ([uses(), uses()], "edits[1].type"),
        ([uses(trigger=("thinking_turns", 5))], "edits[0].trigger.type"),
        ([uses(), ContextEdit(THINKING, keep=EditAmount("tool_uses", 1))], "edits[1].keep.type"),
        ([ContextEdit(THINKING, keep=EditAmount("thinking_turns", 0))], "edits[0].keep.value"),
        ([ContextEdit(THINKING, keep="some")], "edits[0].keep"),
        ([ContextEdit(TOOL_USES, keep="all")], "edits[0].keep"),
        ([ContextEdit(TOOL_USES, keep=EditAmount("all"))], "edits[0].keep.type"),
        ([ContextEdit(TOOL_USES, clear_at_least=EditAmount("tool_uses", 1))], "edits[0].clear_at_least.type"),
        ([ContextEdit(THINKING, trigger=EditAmount("input_tokens", 1))], "edits[0].trigger"),
        ([ContextEdit(THINKING, exclude_tools=[])], "edits[0].exclude_tools"),
    ],
)
def test_what_is_wrong_is_named(edits, param):
    with pytest.raises(RequestError) as told:
        ContextManagement(edits).check(is_session=True)
    assert told.value.param == f"context_management.{param}" and told.value.param in str(told.value)


def test_only_sessions_reencode_and_nothing_is_forgotten():
    ContextManagement(reuse="reencode").check(is_session=True)
    for reuse, is_session in (("reencode", False), ("forget", True), ("", True)):
        with pytest.raises(RequestError, match=r"context_management\.reuse is"):
            ContextManagement(reuse=reuse).check(is_session)
