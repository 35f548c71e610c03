"""Takes messages back: a session's records without them, and the blocks that were computed from them.

One transaction, as a turn and a deletion are. Knows no file and no thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvstore.sessions import tables
from kvstore.sessions.record import MessageEdit, SessionHead, SessionKey, Tombstone, TurnRecord, with_turn
from kvstore.sessions.tables import DELETION, REFS, TOMBSTONES, View, be64


def forget(
    view: View, key: SessionKey, number: int, edits: Sequence[MessageEdit], after: TurnRecord, draft: SessionHead
) -> SessionHead:
    """Change messages so that nothing tells what they were, and store `after`, the session's next turn.

    number: of the session. The turns from the first changed one on lose their ids and chains: a fork that ends with one
    of them tokenizes its transcript again. A tombstone names their blocks. draft: see `tables.append`. Raises
    StoreError, then nothing is changed.
    """
    head = tables.next_of(view, draft, [after], number)
    assert head is not None
    turns = tables.read_turns(view, head, head.num_turns)
    first = min(edit.turn for edit in edits)
    kept, old = turns[: first - 1], turns[first - 1 :]
    new = [_without(turn, edits) for turn in old]
    payloads = [tables.encode_turn(turn, key) for turn in (*new, after)]
    was_named, title = _title(head, turns), _title(head, [*kept, *new])
    needed = {block_id for turn in (*kept, after) for block_id in turn.block_ids}
    gone = {block_id for turn in old for block_id in turn.block_ids} - needed
    doomed = tables.unshared(view, gone, number)
    deletion = tables.next_number(view, DELETION, TOMBSTONES)
    tables.put_tombstone(view, Tombstone(deletion, key, tuple(sorted(doomed))))
    for turn, payload in zip(new, payloads, strict=False):
        tables.put_turn(view, number, turn, payload)
    for block_id in gone:
        view.delete(REFS, block_id + be64(number))
    title = title if head.title == was_named else head.title
    return tables.append(view, draft, [after], payloads[-1:], number, title=title)


def _without(turn: TurnRecord, edits: Sequence[MessageEdit]) -> TurnRecord:
    """The turn with these messages changed, also where an earlier edit has said them."""
    changed = {edit.index: edit.message for edit in edits if edit.turn == turn.number}
    said = [changed.get(index, message) for index, message in enumerate(turn.messages)]
    places, removed = {edit.place for edit in edits}, [edit.place for edit in edits if edit.message is None]
    others = [edit for edit in turn.edits if edit.place not in places]
    moved = [sum(turn == edit.turn and index < edit.index for turn, index in removed) for edit in others]
    return replace(
        turn, messages=[message for message in said if message is not None],
        edits=[replace(edit, index=edit.index - by) for edit, by in zip(others, moved, strict=True)],
        token_ids=(), chain=(), base="rebase", first_reencoded=None, splice_parent=b"", splice_end=0, turn_starts=(),
        num_dropped_messages=0, miss=None, splices=(), spans=(),
    )  # fmt: skip


def _title(head: SessionHead, turns: Sequence[TurnRecord]) -> str:
    """As the session is called by its first words."""
    named = replace(head, title="")
    for turn in turns:
        named = with_turn(named, turn, head.updated_s)
    return named.title
