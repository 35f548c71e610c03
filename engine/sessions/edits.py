"""Edits of a session: which messages go or change, and what becomes of the ids and the KV in its window.

Turns that an edit does not touch keep their ids. Of a turn that it touches, what is said is rendered again, and an
answer keeps its ids unless it is the one that changes. Knows no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

import msgspec

from kvstore.blocks.ids import BlockId, extend_chain
from kvstore.engine.client.messages import Splice, Spliced
from kvstore.engine.client.requests import CoreClient
from kvstore.engine.outputs import Miss
from kvstore.engine.sessions.misses import common_prefix
from kvstore.engine.sessions.spans import compute
from kvstore.engine.sessions.window import Window, turn_begins
from kvstore.engine.text.chat_template import ChatTemplate, Message
from kvstore.engine.text.language import Language
from kvstore.engine.text.prompts import check_text
from kvstore.errors import RequestError
from kvstore.sessions.record import MessageEdit, TurnRecord, transcript

# The window after a change of a session, its record, and what to forget.
Changed = tuple[Window, TurnRecord, Sequence[MessageEdit]]
Place = tuple[int, int]  # of a message: its turn, and its index among what that turn has added
TYPES = ("remove", "replace")
REUSES = ("exact", "reencode", "forget")
MAX_EDITS = 4096
# Stand-ins for the turn before one that is rendered alone.
_BEFORE: list[Message] = [{"role": "user", "content": "kvstoreuser"}, {"role": "assistant", "content": "kvstoreanswer"}]


class Directive(msgspec.Struct, frozen=True):
    """Remove a message, or give it another content; an answer then has no calls and no reasoning.

    The message is named by one of these. index: in the transcript as it is now, from 0, with the system prompt. id: as
    the session shows it. tool_call_id: the result of this call.
    """

    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(TYPES)})]
    index: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    tool_call_id: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    content: str | None = None


Directives = Annotated[list[Directive], msgspec.Meta(min_length=1, max_length=MAX_EDITS)]
_directives = msgspec.json.Decoder(Directives)  # so that msgspec has looked into the type


def message_id(place: Place) -> str:
    """As a message of a session is named in directives."""
    return f"{place[0]}.{place[1]}"


def directives_of(given: Iterable[object], reuse: object) -> list[Directive]:
    """Directives, or mappings of their fields, checked. Raises RequestError."""
    if reuse not in REUSES:
        raise RequestError(f"reuse is {reuse!r}; give one of {', '.join(REUSES)}", param="reuse")
    try:
        plain = [msgspec.structs.asdict(one) if isinstance(one, Directive) else one for one in given]
        found: list[Directive] = msgspec.convert(plain, Directives)
    except (msgspec.ValidationError, TypeError) as error:
        raise RequestError(f"edits: {str(error).replace('`', '').replace('$', '')}", param="edits") from None
    for index, one in enumerate(found):
        if one.type not in TYPES:
            said = f"edits[{index}].type is {one.type[:40]!r}; give {' or '.join(TYPES)}"
            raise RequestError(said, param=f"edits[{index}].type")
        if one.type == "replace" and one.content is None:
            raise RequestError(f"edits[{index}].content is missing", param=f"edits[{index}].content")
        if one.type == "remove" and one.content is not None:
            raise RequestError(
                f"edits[{index}].content is given, but the message is to be removed", param=f"edits[{index}].content"
            )
        check_text(one.content or "", f"edits[{index}].content")
    return found


def edits_of(
    directives: Sequence[Directive], window: Window, turns: Sequence[TurnRecord], reuse: str
) -> list[MessageEdit]:
    """What the directives do. turns: all of the session.

    Only what is to be forgotten can have been removed before. Raises RequestError.
    """
    said, added = transcript(turns), [len(turn.messages) for turn in turns]
    num_before = len(window.messages) - len(said)  # of a system prompt that no turn has brought
    places, edits = list(said), dict[Place, MessageEdit]()
    for number, one in enumerate(directives):
        place = _place(one, f"edits[{number}]", said, places, added, num_before)
        if place in edits:
            raise RequestError(f"edits[{number}] names message {message_id(place)} again", param=f"edits[{number}]")
        if place not in said and (reuse != "forget" or one.type == "replace"):
            raise RequestError(f"edits[{number}] names a message that was removed", param=f"edits[{number}]")
        old = said.get(place, {})
        if old.get("role") == "system":
            raise RequestError("the system prompt stays; begin a new session for another one", param=f"edits[{number}]")
        new = None
        if one.content is not None:
            new = {name: old[name] for name in ("role", "tool_call_id") if name in old} | {"content": one.content}
        edits[place] = MessageEdit(*place, new)
    return [edits[place] for place in sorted(edits)]


def _place(
    one: Directive, param: str, said: Mapping[Place, Message], places: Sequence[Place], added: Sequence[int],
    num_before: int,
) -> Place:  # fmt: skip
    names = {"index": one.index, "id": one.id, "tool_call_id": one.tool_call_id}
    given = [name for name, value in names.items() if value is not None]
    if len(given) != 1:
        raise RequestError(f"{param} names no message, or several; give index, id or tool_call_id", param=param)
    param = f"{param}.{given[0]}"
    if one.index is not None:
        if one.index < num_before:
            raise RequestError("the system prompt stays; begin a new session for another one", param=param)
        if one.index - num_before >= len(places):
            there = f"the transcript has {num_before + len(places)} messages"
            raise RequestError(f"{param} is {one.index}, but {there}", param=param)
        return places[one.index - num_before]
    if one.id is not None:
        known = {message_id((turn, index)): (turn, index) for turn, n in enumerate(added, 1) for index in range(n)}
        found = [known[one.id]] if one.id in known else []
    else:
        found = [place for place in places if said[place].get("tool_call_id") == one.tool_call_id]
    if not found:
        raise RequestError(f"{param} is {names[given[0]]!r}, which is no message of this session", param=param)
    return found[-1]


def check_edited(before: Sequence[Message], after: Sequence[Message], template: ChatTemplate) -> None:
    """Raises RequestError for a transcript that no session could have, or that the template refuses."""
    wrong = None
    if after and after[-1]["role"] not in ("assistant", "system"):
        wrong = "the last message that is left must be an answer"
    if any(pair[1]["role"] == "tool" and pair[0]["role"] not in ("assistant", "tool") for pair in pairwise(after)):
        wrong = "a tool's result would have lost its call; remove it, too"
    open_before, stray = _calls(before)
    open_after, stray_after = _calls(after)
    if stray_after - stray:
        wrong = "a tool's result would have lost its call; remove it, too"
    if open_after - open_before:
        wrong = "a call would have lost its result; replace the result's content, or remove the answer that calls, too"
    if wrong is not None:
        raise RequestError(wrong, param="edits")
    template.prompt_ids([*after, {"role": "user", "content": "Hello"}])


def _calls(messages: Sequence[Message]) -> tuple[set[str], set[str]]:
    """Ids of calls without a result, and of results without a call in the answer before them."""
    is_open, stray, called = set[str](), set[str](), set[str]()
    for message in messages:
        if message["role"] == "assistant":
            called = {call["id"] for call in message.get("tool_calls") or ()}
            is_open |= called
        elif message["role"] == "tool":
            answered = message.get("tool_call_id", "")
            (is_open if answered in called else stray).symmetric_difference_update({answered})
    return is_open, stray


def edits_at(changed: Mapping[int, Message], window: Window, turns: Sequence[TurnRecord]) -> list[MessageEdit]:
    """What gives other messages to these places in the window."""
    places = list(transcript(turns))
    first = len(window.shown) - len(places)  # of the transcript's, in the window
    return [MessageEdit(*places[index - first], message) for index, message in changed.items()]


def edited_turn(
    before: Window, turns: Sequence[TurnRecord], edits: Sequence[MessageEdit], reuse: str, language: Language,
    client: CoreClient, tenant: str,
) -> tuple[Changed, int]:  # fmt: skip
    """The turn that these edits are, and how many tokens keep their KV behind them. turns: all of the session.

    Raises RequestError.
    """
    after, num_reencoded = _edit(before, transcript(turns), edits, reuse, language, client, tenant)
    kept, forgotten = ((), edits) if reuse == "forget" else (edits, ())
    record = after.record(len(turns) + 1, (), miss=after.miss, edits=kept, finish_reason="edited")
    return (after, record, forgotten), num_reencoded


def shortened(
    before: Window, num_turns: int, number: int, reuse: str, language: Language, client: CoreClient, tenant: str
) -> Changed | None:
    """The turn of this number, after which only the last turns are in the window; None if it has no more."""
    if (last := before.last(num_turns)) is None:
        return None
    after, spans = last
    if spans:
        after, _ = with_kv(before, after, spans, client, tenant, reuse, "truncation")
    num_tokens = max(0, len(before.token_ids) - after.num_tokens(language.chat_template()))
    record = after.record(number, (), miss=after.miss, truncated_tokens=num_tokens, finish_reason="truncated")
    return after, record, ()


def _edit(
    before: Window, said: Mapping[Place, Message], edits: Sequence[MessageEdit], reuse: str, language: Language,
    client: CoreClient, tenant: str,
) -> tuple[Window, int]:  # fmt: skip
    changed, num_before = {edit.place: edit.message for edit in edits}, len(before.messages) - len(said)
    messages, left, num_dropped = before.messages[:num_before], list[KeptMessage](), before.num_dropped
    for index, (place, old) in enumerate(said.items(), num_before - len(before.system) - num_dropped):
        message = changed.get(place, old)
        if message is not None:
            messages.append(dict(message))
            left += [KeptMessage(index, messages[-1], place in changed)] if index >= 0 else []
        elif index < 0:
            num_dropped -= 1
    check_edited(before.messages, messages, language.chat_template())
    after, parts = edited(before, messages, num_dropped, left, language)
    return with_kv(before, after, parts, client, tenant, reuse, "edit")


# -- ids ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class KeptMessage:
    """A message that stays in the window. index: where it is in the window before the edit."""

    index: int
    message: Message
    is_new: bool = False


Span = tuple[int, int]  # of the ids before
Part = Span | list[int]  # new ids


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of the window before the edit: its messages' indices, and its ids without what closes its answer."""

    indices: range
    start: int
    stop: int


def edited(
    before: Window, messages: list[Message], num_dropped: int, said: Sequence[KeptMessage], language: Language
) -> tuple[Window, list[Part]]:
    """The window with other messages, and what its ids are made of: the ids of what changed are rendered again.

    messages, num_dropped: of the window after it; said: those that are in it, without the system prompt. It has no ids
    if turn starts are unknown, or the template shows a turn in another way than alone.
    """
    bare = replace(
        before, messages=messages, num_dropped=num_dropped, token_ids=[], chain=[], lineage=before.lineage.exact,
        turn_starts=[], num_foreign=0, miss=None,
    )  # fmt: skip
    made = _parts(before, said, language) if said else None
    if made is None:
        return bare, []
    parts, starts = made
    ids = list[int]()
    for part in parts:
        ids += before.token_ids[slice(*part)] if isinstance(part, tuple) else part
    return replace(bare, token_ids=ids, turn_starts=starts), parts


def with_kv(
    before: Window, after: Window, parts: Sequence[Part], client: CoreClient, tenant: str, reuse: str, cause: str
) -> tuple[Window, int]:
    """The window after a change, with the chain of its ids and what the next turn computes anew; and how many tokens
    keep their KV behind the change.

    parts: what its ids are made of. What a splice reused may have read what is to be forgotten. cause: of a miss of
    what is computed anew.
    """
    size, lineage, num_reencoded = client.facts.block_size, before.lineage, 0
    known = common_prefix(before.token_ids, after.token_ids)
    if before.miss is not None:
        known = min(known, before.miss.token)
    is_wanted = reuse == "reencode" and _num_kept(parts, known) > 0
    spliced = _spliced(before, after, parts, client, tenant) if is_wanted else None
    if spliced is not None:
        chain, lineage = list(spliced[0]), spliced[1]
        num_reencoded = (lineage.splice_end - (lineage.splice_index or 0)) * size
        known = lineage.splice_end * size
    else:
        num_whole = known // size
        if lineage.splice_index is not None and (reuse == "forget" or num_whole < lineage.splice_end):
            num_whole = 0 if lineage.sources else min(num_whole, lineage.splice_index)  # else copies, under other ids
            known, lineage = min(known, num_whole * size), lineage.exact
        chain = before.chain[:num_whole]
    extend_chain(chain, lineage.root, after.token_ids, size)
    num_had = _num_kept(parts, known) if after.token_ids else len(before.token_ids) - known
    if before.miss is not None and spliced is None:  # nobody had what an earlier edit has brought
        num_had = min(num_had, before.miss.token + before.miss.tokens - known)
    miss = None
    if num_had > 0 or known < len(after.token_ids):
        pairs = enumerate(zip(before.shown, after.shown, strict=False))
        first = next((index for index, (old, new) in pairs if old != new), None)
        miss = Miss(cause, num_had, known, first, None if first is None else after.shown[first]["role"])
    return replace(after, chain=chain, lineage=lineage, miss=miss), num_reencoded


def _num_kept(parts: Sequence[Part], known: int) -> int:
    """How many of the ids that were there before stand behind the first `known` ones now."""
    end = found = 0
    for part in parts:
        start, end = end, end + _length(part)
        found += max(0, end - max(start, known)) if isinstance(part, tuple) else 0
    return found


def _spliced(before: Window, after: Window, parts: Sequence[Part], client: CoreClient, tenant: str) -> Spliced | None:
    """The chain of the ids after the edit, with the KV of what is kept; None if that has to be computed.

    Everything up to the last new id is computed, too, to the end of its block.
    """
    size, limit = client.facts.block_size, client.facts.max_request_tokens
    num_parts = 1 + max((index for index, part in enumerate(parts) if isinstance(part, list)), default=-1)
    num_head = sum(map(_length, parts[:num_parts]))
    skipped = -num_head % size
    spans = list[Span]()
    for part in parts[num_parts:]:
        assert isinstance(part, tuple)
        cut = min(skipped, _length(part))
        spans += [(part[0] + cut, part[1])] if cut < _length(part) else []
        skipped -= cut
    head = after.token_ids[: num_head + (-num_head % size)]
    if sum(map(_length, spans)) < size or len(head) >= limit:
        return None
    behind = None
    if head and client.facts.can_splice:
        behind = (list[BlockId](), before.lineage.exact)
        compute(client, head, tenant, behind)
        extend_chain(behind[0], before.lineage.root, head, size)
    elif head:
        return None
    return client.call(Splice(before.chain, before.token_ids, before.lineage, spans, tenant, behind))


def _parts(before: Window, said: Sequence[KeptMessage], language: Language) -> tuple[list[Part], list[int]] | None:
    """What the ids are made of, and where turns begin in them."""
    template = language.chat_template()
    shown, end = before.shown[len(before.system) :], template.end_ids(_has_head(before))
    begins = turn_begins(shown)
    if end is None or not before.turn_starts or len(begins) != len(before.turn_starts):
        return None
    stops = [start - len(end) for start in before.turn_starts[1:]] + [len(before.token_ids)]
    ranges = [range(begin, stop) for begin, stop in pairwise([*begins, len(shown)])]
    turns = [_Turn(*of) for of in zip(ranges, before.turn_starts, stops, strict=True)]
    new = [one.message for one in said]
    cuts = [*turn_begins(new), len(new)]
    parts, starts = list[Part]([(0, before.turn_starts[0])]), list[int]()
    for begin, stop in pairwise(cuts):
        made = _turn_parts(before, turns, said[begin:stop], _context(before.system, new, begin), language, end)
        if made is None:
            return None
        if begin:
            _add(parts, _closing(parts[-1], before.token_ids, end))
        starts.append(sum(map(_length, parts)))
        for part in made:
            _add(parts, part)
    return parts, starts


def _has_head(before: Window) -> bool:
    """Whether a system message stands before the first turn, as templates show tools in one."""
    return bool(before.system) or any(before.options[:16])  # of the tools, see `AnswerOptions.digest`


def _turn_parts(
    before: Window, turns: Sequence[_Turn], said: Sequence[KeptMessage], context: list[Message], language: Language,
    end: list[int],
) -> list[Part] | None:  # fmt: skip
    """What the ids of one turn are made of."""
    template, shown, last = language.chat_template(), before.shown[len(before.system) :], said[-1]
    old, thought = next(turn for turn in turns if last.index in turn.indices), (0, 0)
    if last.message | {"reasoning_content": None} == shown[last.index] | {"reasoning_content": None}:
        if last.is_new and shown[last.index].get("reasoning_content"):  # only its thinking has gone
            ids, opening = before.token_ids[old.start : old.stop], template.opens_with(_has_head(before))
            found = language.thought_in(ids, shown[last.index], opening)
            if found is None:
                return None
            thought = (old.start + found[0], old.start + found[1])
        last = replace(last, is_new=False)
    if [one.index for one in said] == list(old.indices) and not any(one.is_new for one in [*said[:-1], last]):
        return _around(thought, (old.start, old.stop))
    asked = [one.message for one in said[:-1]]
    made = template.following_ids([], context, asked) if asked else None
    if made is None or made[: len(end)] != end or last.index != old.indices[-1]:
        return None
    if last.is_new:
        opened = template.opened_ids(_has_head(before))
        if made[len(made) - len(opened) :] != opened or "tool_calls" in last.message:
            return None
        return [made[len(end) : len(made) - len(opened)] + template.encode_answer(last.message["content"])]
    was_asked = [shown[index] for index in old.indices[:-1]]
    was = template.following_ids([], _context(before.system, shown, old.indices[0]), was_asked) if was_asked else None
    if was is None or before.token_ids[old.start : old.start + len(was) - len(end)] != was[len(end) :]:
        return None  # it is shown in another way than alone
    return [made[len(end) :], *_around(thought, (old.start + len(was) - len(end), old.stop))]


def _around(cut: Span, span: Span) -> list[Part]:
    return [(span[0], cut[0]), (cut[1], span[1])] if cut[0] < cut[1] else [span]


def _context(system: list[Message], said: Sequence[Message], begin: int) -> list[Message]:
    """What a turn is rendered behind: an answer, and for results the calls of the one before."""
    first = max((start for start in turn_begins(said) if start < begin), default=0)
    return [*system, *(said[first:begin] if begin and said[begin]["role"] == "tool" else _BEFORE)]


def _closing(part: Part, ids: Sequence[int], end: list[int]) -> Part:
    """What closes an answer: as it stands there behind a kept one, if it does."""
    if isinstance(part, tuple) and ids[part[1] : part[1] + len(end)] == end:
        return part[1], part[1] + len(end)
    return end


def _add(parts: list[Part], part: Part) -> None:
    """Adjacent spans become one."""
    last = parts[-1]
    if isinstance(part, tuple) and isinstance(last, tuple) and last[1] == part[0]:
        parts[-1] = (last[0], part[1])
    elif isinstance(part, list) and isinstance(last, list):
        parts[-1] = last + part
    elif _length(part):
        parts.append(part)


def _length(part: Part) -> int:
    return part[1] - part[0] if isinstance(part, tuple) else len(part)
