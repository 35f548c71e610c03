"""The part of a conversation that is in the model's window, and its next turn: the prompt, and what the turn leaves.

Truncation cuts at turn boundaries in id space: the rest keeps its exact ids, and its KV by a splice.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from msgspec import structs

from kvstore.blocks.ids import BlockId, Lineage, SpliceRun, extend_chain, is_quantised, quantised_id
from kvstore.engine.client.messages import Splice
from kvstore.engine.client.requests import CoreClient, Handle
from kvstore.engine.outputs import Earlier, Miss, counts_of
from kvstore.engine.sampling_params import SamplingParams
from kvstore.engine.sessions.misses import MadePrompt, Rendering, compare, explained, had_by_other_weights
from kvstore.engine.sessions.spans import Computing, with_spans
from kvstore.engine.text.chat_template import ChatTemplate, Message, without_marks
from kvstore.engine.text.language import answer_ids
from kvstore.errors import RequestError, StoreError
from kvstore.sessions.record import SessionState, TurnRecord
from kvstore.sessions.store import SessionStore

# Where in the ids of a turn, which its answer ends, the reasoning of that is; see `Language.thought_in`.
FindThought: TypeAlias = Callable[[Sequence[int], Message, str], tuple[int, int] | None]
_SEAMS = {("assistant", "user"), ("assistant", "tool")}  # the roles before and after the start of a turn
ANSWER_SHARE = 8  # without a max_tokens that a truncation makes room for, a turn keeps 1/8 of the window for its answer


def turn_begins(said: Sequence[Message]) -> list[int]:
    """Where a turn begins in messages that follow the system prompt: at the first one, and after each answer."""
    return [i for i in range(len(said)) if i == 0 or (said[i - 1]["role"], said[i]["role"]) in _SEAMS]


def spliced_blocks(chain: Sequence[BlockId], lineage: Lineage, *kept: Lineage) -> Sequence[BlockId]:
    """The blocks that were spliced for this chain, without those of splices that one of the lineages `kept` has, itself
    or as copies: who forgets a block forgets its copy. Copies of what was computed from the beginning are no splice.
    """
    known = {(run.first, quantised_id(run.parent)) for one in kept for run in one.splices}
    known.add((0, quantised_id(lineage.root)))
    runs = (run for run in lineage.splices if (run.first, quantised_id(run.parent)) not in known)
    first = next((run.first for run in runs), None)
    return () if first is None else chain[first:]


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A turn before its answer.

    chain: known ids of the prompt's first blocks; lineage: what they are built on. num_dropped: messages after the
    system prompt that are not in the prompt. turn_starts: where in the prompt each turn begins, as far as known.
    rebase: the prompt does not continue the previous ids. options: see `Window`. spans: the ranges of the previous ids
    that it begins with, if it leaves some out. thinking: "kept", or "dropped" where the prompt lacks reasoning that the
    template does not show; None if no answer in the window had any. reused: ranges of the prompt whose KV is to be that
    of spans; span_blocks: of their own chains; begun_s: when these were asked for, of `time.monotonic()`.
    """

    prompt: list[int]
    chain: Sequence[BlockId]
    lineage: Lineage
    num_dropped: int
    turn_starts: list[int]
    truncated_tokens: int = 0
    rebase: bool = False
    options: bytes = b""
    spans: Sequence[tuple[int, int]] = ()
    thinking: str | None = None
    reused: Sequence[tuple[int, int]] = ()
    span_blocks: Sequence[BlockId] = ()
    begun_s: float = 0.0

    def with_reuse(self, client: CoreClient, tenant: str, computing: Computing) -> NextTurn:
        """The same turn with the KV of its spans."""
        if not self.reused:
            return self
        begun_s, known = time.monotonic(), (self.chain, self.lineage)
        (chain, lineage), span_blocks = with_spans(client, self.prompt, self.reused, tenant, known, computing)
        return replace(self, chain=chain, lineage=lineage, span_blocks=span_blocks, begun_s=begun_s)

    def spliced_blocks(self, *kept: Lineage) -> Sequence[BlockId]:
        return spliced_blocks(self.chain, self.lineage, *kept)


@dataclass(slots=True)
class Window:
    """A conversation at the end of a turn. turn_starts: where in the ids each turn begins; empty if unknown.

    messages: the whole transcript; num_dropped: how many of them, after the system prompt, are not in the window.
    options: the digest of the tools and variables that its ids were rendered with; empty for none. num_foreign: of ids
    that other weights had, which were dropped. miss: what the next turn computes anew, as an edit has just moved it.
    """

    system: list[Message]
    messages: list[Message]
    num_dropped: int
    token_ids: list[int]
    chain: list[BlockId]
    lineage: Lineage
    turn_starts: list[int] = field(default_factory=list)
    options: bytes = b""
    num_foreign: int = 0
    miss: Miss | None = None

    @classmethod
    def of(cls, state: SessionState, client: CoreClient) -> Window:
        """Of a stored session. Another model's ids are dropped, so that the transcript is tokenized again."""
        head, root = state.head, client.facts.root(state.head.key.tenant)
        system, num_dropped = [dict(message) for message in head.system], state.num_dropped_messages
        if head.fingerprint != client.facts.fingerprint:
            num_foreign = len(state.token_ids)
            return cls(system, state.messages, num_dropped, [], [], Lineage(root), num_foreign=num_foreign)
        lineage = lineage_of(state, root)
        return cls(
            system, state.messages, num_dropped, state.token_ids, lineage.with_copies(state.chain), lineage,
            list(state.turn_starts), state.options, miss=None if state.miss is None else Miss(**state.miss),
        )  # fmt: skip

    def record(
        self, number: int, messages: Sequence[Message], since: Window | None = None, miss: Miss | None = None,
        **more: Any,
    ) -> TurnRecord:  # fmt: skip
        """What is stored of a turn that ends so: the ids that come after those of `since`; all of them without that."""
        num_ids, num_blocks = (0, 0) if since is None else (len(since.token_ids), len(since.chain))
        first, *others = self.lineage.splices or (SpliceRun(0, b"", 0),)
        chain = self.lineage.with_sources(self.chain)
        return TurnRecord(
            number=number, messages=messages, token_ids=self.token_ids[num_ids:], chain=chain[num_blocks:],
            base="rebase" if since is None else "append", first_reencoded=self.lineage.splice_index,
            splice_parent=first.parent, splice_end=first.end, splices=others, turn_starts=self.turn_starts,
            num_dropped_messages=self.num_dropped, created_s=time.time(), options=self.options,
            miss=None if miss is None else structs.asdict(miss), **more,
        )  # fmt: skip

    @property
    def shown(self) -> list[Message]:
        """The messages that are in the window."""
        return self.kept(self.num_dropped)

    def kept(self, num_dropped: int) -> list[Message]:
        """The messages without this many after the system prompt."""
        return self.system + self.messages[len(self.system) + num_dropped :]

    def with_history(self, history: Sequence[Message]) -> Window:
        """The window of a session without turns that begins with these messages."""
        system = list(history[:1]) if history[0]["role"] == "system" else self.system
        said = history[1:] if history[0]["role"] == "system" else history
        return Window(system, [*system, *said], 0, [], [], self.lineage)

    def num_tokens(self, template: ChatTemplate) -> int:
        """The number of its tokens; of the rendered prompt if its ids are not known yet."""
        return len(self.token_ids or (template.prompt_ids(self.shown) if self.shown else ()))

    def next_turn(
        self,
        client: CoreClient,
        template: ChatTemplate,
        said: Sequence[Message],
        params: SamplingParams,
        tenant: str,
        truncation: str,
        reuse: str,
        options: bytes = b"",
        prompt: list[int] | None = None,
        find_thought: FindThought | None = None,
    ) -> NextTurn:
        """The next prompt, truncated where that makes room for its answer. It may still be too long.

        template: for these options. said: what is new, with marks in the place of spans. prompt: its ids after a
        history, if somebody knows them, with stand-ins. find_thought: given if the reasoning that the template does not
        show is to be dropped.
        """
        if options != self.options and self.token_ids:  # other tools stand at the head of the prompt
            known = replace(self, token_ids=[], chain=[], lineage=self.lineage.exact, turn_starts=[], options=options)
            return known.next_turn(
                client, template, said, params, tenant, truncation, reuse, options, None, find_thought
            )
        thoughts = self._thoughts(template, said, find_thought) if find_thought and self.token_ids else []
        following = template.following_ids(self.token_ids, self.shown, said) if self.token_ids else None
        if thoughts != []:
            turn = self._without(template, self.num_dropped, said, options, thoughts)
        elif following is not None:
            ids, reused = without_marks(following, len(self.token_ids))
            starts = self._starts_with(template, self.turn_starts, len(self.token_ids), ids)
            turn = NextTurn(ids, self.chain, self.lineage, self.num_dropped, starts, options=options, reused=reused)
        else:
            turn = self._rendered(template, self.num_dropped, said, options, prompt)
        window, answer = client.facts.max_request_tokens, params.max_tokens
        if answer is None or answer > window // 2:  # who asks for that much must not lose the conversation for it
            answer = max(1, window // ANSWER_SHARE)
        is_first = len(self.messages) == len(self.system)  # nothing can be dropped
        if truncation != "disabled" and not is_first and len(turn.prompt) + answer > window:
            turn = self._truncated(client, template, said, turn, thoughts)
        if reuse == "reencode" and turn.spans and not params.kv_exact:
            turn = self._spliced(client, turn, tenant)
        return replace(turn, thinking=self._thinking_of(turn, template, said, find_thought is not None))

    def shared_ends(
        self, client: CoreClient, store: SessionStore, number: int | None, starts: Sequence[int]
    ) -> list[int]:
        """Where turns end, of the last sixteen, that other sessions than this one (number) have, as it was forked or is
        a fork: their states stay. starts: where turns begin. Empty for a model that keeps no states.
        """
        size = client.facts.block_size
        last = {self.chain[end // size - 1]: end for end in starts[-17:-1] if size <= end <= len(self.chain) * size}
        if number is None or client.facts.can_splice or not last:
            return []
        alone = store.unshared(number, set(last))
        return [end for block_id, end in last.items() if block_id not in alone]

    def had_of(self, turn: NextTurn, template: ChatTemplate, said: Sequence[Message], ended_s: float) -> Earlier:
        """What the session had of the next prompt. ended_s: when its last turn did."""
        moved = None if self.miss is None else Earlier(self.miss.token, ended_s, self.miss)
        if not turn.rebase:
            return moved or Earlier(max(0, len(self.token_ids) - 1), ended_s)
        shown = [*self.kept(turn.num_dropped), *said]
        new_from = (turn.turn_starts or [len(turn.prompt)])[-1] if turn.truncated_tokens or turn.spans else None
        prompt = MadePrompt(turn.prompt, shown, template, new_from, turn.truncated_tokens > 0)
        if self.num_foreign:
            return had_by_other_weights(prompt, self.num_foreign, ended_s)
        reasoned = frozenset(i for i, message in enumerate(shown) if "reasoning_content" in message)
        known = Rendering((), reasoned, self.options, ended_s=ended_s)
        had = self.token_ids if self.miss is None else self.token_ids[: self.miss.token + self.miss.tokens]
        found = compare(prompt, Rendering(options=turn.options), had, known)
        return found if moved is None or found.num_tokens < moved.num_tokens else moved

    def _rendered(
        self, template: ChatTemplate, num_dropped: int, said: Sequence[Message], options: bytes,
        prompt: list[int] | None = None,
    ) -> NextTurn:  # fmt: skip
        """Render the whole prompt, unless its ids are known; turn starts are known only for a first turn."""
        prompt, reused = without_marks(prompt or template.prompt_ids([*self.kept(num_dropped), *said]))
        starts: list[int] = []
        if len(self.kept(num_dropped)) == len(self.system):
            starts = template.first_start(self.system, prompt)
        rebase = len(self.messages) > len(self.system)
        return NextTurn(
            prompt, [], self.lineage.exact, num_dropped, starts, rebase=rebase, options=options, reused=reused
        )

    def _starts_with(self, template: ChatTemplate, starts: list[int], num_known: int, prompt: list[int]) -> list[int]:
        """`starts` and the start of the turn that begins after the first `num_known` ids; empty if that is unknown."""
        end = template.end_ids(bool(self.system))
        if not starts or end is None or prompt[num_known : num_known + len(end)] != end:
            return []
        return [*starts, num_known + len(end)]

    def _starts_of_turns(self) -> list[int]:
        return turn_begins(self.messages[len(self.system) :])

    # -- thinking ----------------------------------------------------------------------------------------------------
    def _thoughts(
        self, template: ChatTemplate, said: Sequence[Message], find: FindThought
    ) -> list[tuple[int, int]] | None:
        """Where in the ids is reasoning that the template does not show; None if that cannot be told."""
        shown = self.shown
        hidden = template.hidden_thinking([*shown, *said])
        begins = [begin for begin in self._starts_of_turns() if begin >= self.num_dropped]
        end = template.end_ids(bool(self.system))
        if not hidden:
            return []
        if end is None or len(begins) != len(self.turn_starts):
            return None
        ends = [start - len(end) for start in self.turn_starts[1:]] + [len(self.token_ids)]
        last = [begin - 1 for begin in begins[1:]] + [len(self.messages) - len(self.system) - 1]
        found = list[tuple[int, int]]()
        for start, stop, index in zip(self.turn_starts, ends, last, strict=True):
            place = len(self.system) + index - self.num_dropped
            if place in hidden:
                where = find(self.token_ids[start:stop], shown[place], template.opens_with(bool(self.system)))
                if where is None:
                    return None
                found += [(start + where[0], start + where[1])] if where[1] else []
        return found

    def _thinking_of(
        self, turn: NextTurn, template: ChatTemplate, said: Sequence[Message], is_dropped: bool
    ) -> str | None:
        shown = self.kept(turn.num_dropped)
        if not any("reasoning_content" in message for message in shown):
            return None
        is_rendered = turn.rebase and not turn.spans
        return "dropped" if (is_dropped or is_rendered) and template.hidden_thinking([*shown, *said]) else "kept"

    # -- truncation --------------------------------------------------------------------------------------------------
    def last(self, num_turns: int) -> tuple[Window, Sequence[tuple[int, int]]] | None:
        """The window with only its last turns, with the same ids, and the ranges of these that stay; None when it has
        no more turns than that. Its chain is not known.

        If turn starts are unknown, or no turn is kept, it has no ids, and the next prompt is rendered.
        """
        if not isinstance(num_turns, int) or num_turns < 0:
            raise RequestError(f"num_turns is {num_turns!r}; give how many of the last turns to keep", param="turns")
        said, begins = self.messages[len(self.system) :], self._starts_of_turns()
        while num_turns and num_turns < len(begins) and said[begins[-num_turns]]["role"] == "tool":
            num_turns += 1  # results stay with their calls
        num_dropped = len(said) if num_turns == 0 else begins[-num_turns] if num_turns <= len(begins) else 0
        if num_dropped <= self.num_dropped:
            return None
        bare = replace(
            self, num_dropped=num_dropped, token_ids=[], chain=[], lineage=self.lineage.exact, turn_starts=[], miss=None
        )
        if not self.turn_starts or num_turns == 0:
            return bare, ()
        head, cut = self.turn_starts[0], self.turn_starts[-num_turns]
        kept = self.token_ids[:head] + self.token_ids[cut:]
        starts = [start - (cut - head) for start in self.turn_starts[-num_turns:]]
        return replace(bare, token_ids=kept, turn_starts=starts), ((0, head), (cut, len(self.token_ids)))

    def _truncated(
        self, client: CoreClient, template: ChatTemplate, new: Sequence[Message], whole: NextTurn,
        thoughts: Sequence[tuple[int, int]] | None,
    ) -> NextTurn:  # fmt: skip
        """Drop whole turns, the oldest first, until at most half the window is left, or only what is new.

        new: what the turn adds. whole: the turn without a truncation. thoughts: ranges of ids to drop, too. Results of
        tools stay with their calls.
        """
        said, num_tokens = self.messages[len(self.system) :], len(whole.prompt)
        total = len(said)
        drops = [i for i in self._starts_of_turns() if i > self.num_dropped and said[i]["role"] != "tool"]
        drops += [total] if new[0]["role"] != "tool" else []
        if not drops:
            return whole

        def is_short(num_dropped: int) -> bool:
            prompt = self._without(template, num_dropped, new, whole.options, thoughts).prompt
            return len(prompt) <= client.facts.max_request_tokens // 2

        num_dropped = drops[bisect_left(drops, True, hi=len(drops) - 1, key=is_short)]
        turn = self._without(template, num_dropped, new, whole.options, thoughts)
        return replace(turn, truncated_tokens=num_tokens - len(turn.prompt))

    def _without(
        self, template: ChatTemplate, num_dropped: int, new: Sequence[Message], options: bytes,
        thoughts: Sequence[tuple[int, int]] | None,
    ) -> NextTurn:  # fmt: skip
        """The next prompt without the oldest turns, and without these ranges of ids: the same ids, or rendered again if
        turn starts or ranges are unknown.
        """
        # The first turn of the window to keep.
        first = sum(self.num_dropped <= start < num_dropped for start in self._starts_of_turns())
        if num_dropped < len(self.messages) - len(self.system) and self.turn_starts and thoughts is not None:
            left_out = [cut for cut in ((self.turn_starts[0], self.turn_starts[first]), *thoughts) if cut[0] < cut[1]]
            spans, at = list[tuple[int, int]](), 0
            for start, end in [*left_out, (len(self.token_ids), 0)]:
                spans += [(at, start)] if start > at else []
                at = max(at, end)
            kept = [token_id for start, end in spans for token_id in self.token_ids[start:end]]
            following = template.following_ids(kept, self.kept(num_dropped), new)
            prompt, reused = without_marks(following or (), len(kept))
            moved = [
                sum(min(end, old) - start for start, end in spans if start < old) for old in self.turn_starts[first:]
            ]
            starts = [] if following is None else self._starts_with(template, moved, len(kept), prompt)
            if starts:
                return NextTurn(
                    prompt, [], self.lineage.exact, num_dropped, starts, rebase=True, options=options, spans=spans,
                    reused=reused,
                )  # fmt: skip
        return self._rendered(template, num_dropped, new, options)

    def _spliced(self, client: CoreClient, turn: NextTurn, tenant: str) -> NextTurn:
        """The same turn with a splice of the KV of what is kept if that is stored; else that is computed.

        It is one splice, of all behind the first token that moves, or behind an earlier splice. Where reasoning of the
        last answer alone goes, behind an earlier splice, what follows is computed: to copy all would cost more.
        """
        (start, first), *others = turn.spans
        num_whole = 0 if start else first // client.facts.block_size
        if 0 < self.lineage.splice_end <= num_whole and all(start > self.turn_starts[-1] for start, _ in others):
            return replace(turn, chain=self.chain[:num_whole], lineage=self.lineage)
        spliced = client.call(Splice(self.chain, self.token_ids, self.lineage, turn.spans, tenant))
        return turn if spliced is None else replace(turn, chain=spliced[0], lineage=spliced[1])


def lineage_of(state: SessionState, root: BlockId) -> Lineage:
    """The lineage of a stored session's chain."""
    if state.first_reencoded is None:
        return Lineage(root)
    first = SpliceRun(state.first_reencoded, state.splice_parent, state.splice_end)
    runs = (first, *(SpliceRun(*one) for one in state.splices))
    num_copies = max((run.end for run in runs if is_quantised(run.parent)), default=0)
    return Lineage(root, runs, tuple(state.chain[:num_copies]))


@dataclass(frozen=True, slots=True)
class OneTurn:
    """A running turn.

    before: the conversation so far, with the history that a first turn may bring. said: what it adds: the user's
    message, or results of tools. next: the prompt. handle: the request's. template: which made the prompt. cleared: the
    edit that `before` is the window after, which is stored with the turn.
    """

    before: Window
    said: Sequence[Message]
    next: NextTurn
    handle: Handle
    idempotency_key: str | None = None
    template: ChatTemplate | None = None
    cleared: TurnRecord | None = None

    def explain(self, block_size: int) -> None:
        """Say in its usage what became of thinking, and why it has computed what an earlier turn had, if it has."""
        output = self.handle.output
        output.usage = replace(output.usage, thinking=self.next.thinking)
        if self.template is not None and self.handle.has_missed(block_size):
            shown = [*self.before.kept(self.next.num_dropped), *self.said]
            prompt = MadePrompt(output.prompt_token_ids, shown, self.template)
            output.usage = replace(output.usage, miss=explained(self.handle, prompt, block_size))

    @property
    def lineage(self) -> Lineage:
        """What its chain is built on. The splice was given up where reused KV was missing."""
        return self.handle.lineage or self.next.lineage

    def after(self, template: ChatTemplate, block_size: int) -> Window:
        """The conversation with this turn: text for people, ids for the next prompt."""
        output, lineage = self.handle.output, self.lineage
        said_ids = answer_ids(template, output.choices[0])
        token_ids = [*output.prompt_token_ids, *said_ids]
        known = self.next.chain if self.handle.lineage is None else self.handle.chain
        chain = list(known[: len(output.prompt_token_ids) // block_size])
        extend_chain(chain, lineage.root, token_ids, block_size)
        messages = [*self.before.messages, *self.said, output.choices[0].message]
        return Window(
            self.before.system, messages, self.next.num_dropped, token_ids, chain, lineage, self.next.turn_starts,
            self.next.options,
        )  # fmt: skip

    def record(self, number: int, after: Window) -> TurnRecord:
        """What is stored of it: the ids that it adds, or all ids if they do not continue those before."""
        output, known = self.handle.output, self.before.chain
        is_next = not self.next.rebase and after.chain[: len(known)] == known
        return after.record(
            number, after.messages if number == 1 else after.messages[-len(self.said) - 1 :],
            self.before if is_next else None, truncated_tokens=self.next.truncated_tokens,
            finish_reason=output.finish_reason or "", usage=counts_of(output),
            miss=output.usage.miss, idempotency_key=self.idempotency_key, spans=self.next.span_blocks,
        )  # fmt: skip

    def unneeded_blocks(self, is_stored: bool, is_deleted: bool, block_size: int, known: Lineage) -> Sequence[BlockId]:
        """Blocks that nothing refers to once the turn has ended. is_deleted: its session was deleted before it was
        stored. known: of the session's window, if it is not stored.
        """
        before, spliced = self.before, self.next.spliced_blocks
        if is_stored:
            return spliced(before.lineage, self.lineage)
        own = self.own_blocks(block_size) if is_deleted else ()
        return [*own, *spliced(known), *spliced_blocks(before.chain, before.lineage, known)]

    def own_blocks(self, block_size: int) -> Sequence[BlockId]:
        """Blocks that this turn has computed, without those of the system prompt."""
        first = self.next.turn_starts[0] // block_size if self.next.turn_starts else 0
        return self.handle.own_blocks(block_size, first)

    def is_found(self, store: SessionStore, number: int | None, block_size: int) -> bool:
        """Whether a deletion of its session (number; None: it is not stored) would take what this turn has computed: it
        takes what builds on blocks that no other session has.
        """
        chain, own = self.lineage.with_sources(self.handle.chain), self.own_blocks(block_size)
        before = {*chain[: len(chain) - len(own)][-1:]}
        with suppress(StoreError):
            return number is None or bool(before and store.unshared(number, before))
        return True
