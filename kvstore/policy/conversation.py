"""Conversations: which requests belong together, when each was last of use, what is known of its return, and which work
for one another.

Control plane, one thread. Recognised by block ids alone: a chain that extends another's tip continues it, whether or
not the client names a session. Knows no tier and no request.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MAX_KNOWN = 1 << 20  # conversations remembered, stored or not, unless a smaller number is given
SILENT_S = 60.0  # an agent without a request for so long counts as ended; before that, it may run a tool
MOST_KEPT_S = 3600.0  # nobody may wait for it any more
MAX_FAMILIES = 1 << 12
MAX_CALLERS = 16  # some clients give one name to all that they do
ROOT_MASK = (1 << 64) - 1
QueueKey = tuple[int, int]  # the scheduler's: (priority, sequence); the smaller is served earlier


@dataclass(frozen=True, slots=True)
class Answer:
    """What the end of a request tells about the next one. calls_tool: a program will go on soon."""

    num_tokens: int
    calls_tool: bool = False


@dataclass(slots=True, eq=False)
class Conversation:
    """What eviction knows of a conversation. Times in seconds of the store's clock.

    number: in order of creation. root: a number made of the name of a block of its own, for sampling. use: counts the
    uses of all conversations, so the more recently used of two has the larger; 0 for those only found in a store, which
    are ordered by used_s. category: of the model of returns, set by the learner. turn: requests so far, 0 if unknown.
    gap_s: between the end of the request before the last and the last. answer: the last one, where known. num_open: its
    requests that wait or run. num_running: those that run, where somebody looks at the queue. wanted: the queue key of
    its first waiting request within the look-ahead window. pinned_until_s: kept longer than others until then.
    expires_s: evicted first from then on. prefix: its first prompt, or what that shares with others, if the policy
    needs it. family: the agents to which its client gives the same name, if it gives one.
    """

    number: int
    root: int
    created_s: float
    used_s: float
    use: int = 0
    category: int = 0
    turn: int = 0
    gap_s: float | None = None
    answer: Answer | None = None
    num_open: int = 0
    num_running: int = 0
    wanted: QueueKey | None = None
    pinned_until_s: float = 0.0
    expires_s: float = math.inf
    prefix: Prefix | None = None
    family: Family | None = None

    @property
    def first_block(self) -> bytes:
        """The beginning of the block id that `root` was made from."""
        return (self.root & ROOT_MASK).to_bytes(8, "little")

    def prefix_at(self, block_id: Hashable) -> Prefix | None:
        """Its prefix that ends at this block."""
        prefix = self.prefix
        while prefix is not None and prefix.end != block_id:
            prefix = prefix.parent
        return prefix

    @property
    def name(self) -> str:
        """A name that no other conversation has, in this process or another."""
        return f"{self.first_block.hex()}-{round(1000 * self.created_s):x}"


@dataclass(slots=True, eq=False)
class Prefix:
    """A beginning that several prompts share, or may share (see `kvstore.policy.prefixes`): `num_blocks` blocks, the
    last of which is `end`.

    entry: stands for it in orders and trees, beside conversations; its gap_s is the mean. parent: a shorter prefix.
    """

    entry: Conversation
    end: Hashable
    num_blocks: int
    parent: Prefix | None


@dataclass(slots=True, eq=False)
class Family:
    """Agents that work for one another: those to which their client gives one name.

    num_open: their requests that wait or run. last, used_s: whose request arrived or ended last, and when. callers:
    those that rest after a call of a tool.
    """

    num_open: int = 0
    last: Conversation | None = None
    used_s: float = -math.inf
    callers: dict[Conversation, None] = field(default_factory=dict)

    def lives_until_s(self, now_s: float) -> float:
        return (now_s if self.num_open else self.used_s) + SILENT_S

    def keeps_until_s(self, conversation: Conversation, now_s: float) -> float:
        """Until when this one is kept because another one lives, as far as is known now; -math.inf if none does."""
        if conversation not in self.callers or (self.last is conversation and not self.num_open):
            return -math.inf
        return min(self.lives_until_s(now_s), conversation.used_s + MOST_KEPT_S)


class Families:
    """An agent that has called a tool may wait for sub-agents. While another one of its family lives, it is kept."""

    def __init__(self) -> None:
        self._named: OrderedDict[bytes, Family] = OrderedDict()  # in order of use

    def __len__(self) -> int:
        return len(self._named)

    def arrive(self, conversation: Conversation, name: bytes, now_s: float) -> list[Conversation]:
        """A request of this conversation was queued; name: of its family, empty for none. Returns those that are kept
        from now on.
        """
        if conversation.num_open == 1:
            if conversation.family is not None:
                conversation.family.callers.pop(conversation, None)
            conversation.family = self._family(name) if name else None
        family = conversation.family
        if family is None:
            return []
        was_silent = family.lives_until_s(now_s) <= now_s
        family.num_open += 1
        family.last, family.used_s = conversation, now_s
        return list(family.callers) if was_silent else []

    def end_request(self, conversation: Conversation, family: Family, now_s: float) -> None:
        """A request of this member has ended or was preempted; the conversation has the answer."""
        answer = conversation.answer
        family.num_open -= 1
        family.last, family.used_s = conversation, now_s
        if answer is not None and answer.calls_tool and not conversation.num_open:
            family.callers[conversation] = None
            if len(family.callers) > MAX_CALLERS:
                del family.callers[next(iter(family.callers))]

    def _family(self, name: bytes) -> Family:
        family = self._named.setdefault(name, Family())
        self._named.move_to_end(name)
        if len(self._named) > MAX_FAMILIES:
            self._named.popitem(last=False)
        return family


class Learner(Protocol):
    """Learns when conversations return."""

    def returned(self, conversation: Conversation, gap_s: float) -> None:
        """A resting conversation has another request, this long after the last one ended. Turn and gap_s are set."""
        ...

    def rested(self, conversation: Conversation, now_s: float) -> None:
        """From now on it may return: its last request has ended, or it was found in a store (then used_s is long
        ago).
        """
        ...

    def forgotten(self, conversation: Conversation) -> None:
        """It no longer rests, and did not return: a request goes on, or nobody can recognise it again."""
        ...


BeginPrefix = Callable[[Conversation, Sequence[Hashable], Callable[[float], Conversation]], None]


class Conversations:
    """Recognises conversations by their tips: the last block of the last answer, and of the prompt before it.

    A prompt's last block that others had before is no tip: every newcomer after a shared system prompt would be taken
    for the latest one.

    Block ids may be any hashable names, such as a trace's own. Every operation is O(1), except for a chain that
    continues nothing known, which is searched from its end. begin_prefix: called with first prompts
    (`kvstore.policy.prefixes`).
    """

    def __init__(
        self, learner: Learner | None = None, max_known: int = MAX_KNOWN, begin_prefix: BeginPrefix | None = None
    ) -> None:
        self._learner, self._max_known, self._begin_prefix = learner, max_known, begin_prefix
        self._tips: dict[Hashable, Conversation] = {}
        self._tips_of: OrderedDict[Conversation, tuple[Hashable, ...]] = OrderedDict()  # in order of use
        self._open: dict[Conversation, tuple[int, bool]] = {}  # blocks of its prompt; whether the last one was stored
        self._num_uses = 0
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._tips_of)

    def conversation_of(self, chain: Sequence[Hashable]) -> Conversation | None:
        """The conversation whose latest chain this is, or that it continues."""
        return next((self._tips[block_id] for block_id in reversed(chain) if block_id in self._tips), None)

    def arrive(
        self, chain: Sequence[Hashable], now_s: float, known: Conversation | None = None, is_stored: bool = False
    ) -> Conversation:
        """A request of this chain was queued. known: the same request again, after a preemption, or another choice.

        is_stored: the last block of the chain was there before. Each call needs an `end_request`.
        """
        conversation = known or self.conversation_of(chain)
        is_new = conversation is None
        if conversation is None:
            conversation = self.make(now_s, chain[-1] if chain else None)
        if known is None:
            self._open[conversation] = (len(chain), is_stored)
            self._count_turn(conversation, now_s)
        elif not conversation.num_open and self._learner is not None:
            self._learner.forgotten(conversation)  # it had not left
        conversation.num_open += 1
        self._use(conversation, now_s)
        if is_new and chain and self._begin_prefix is not None:
            self._begin_prefix(conversation, chain, self.make)
        return conversation

    def _count_turn(self, conversation: Conversation, now_s: float) -> None:
        conversation.turn += 1
        if conversation.num_open or conversation not in self._tips_of:
            return  # it has not returned: it never left, or is new
        conversation.turn = max(conversation.turn, 2)  # an adopted one has had a request before
        if conversation.expires_s <= now_s:
            conversation.expires_s = math.inf  # it had not expired; a session with a ttl sets it again after each turn
        conversation.gap_s = max(0.0, now_s - conversation.used_s)
        if self._learner is not None:
            self._learner.returned(conversation, conversation.gap_s)

    def end_request(
        self, conversation: Conversation, chain: Sequence[Hashable], now_s: float, answer: Answer | None = None
    ) -> None:
        """The request has ended or was preempted; chain: with the blocks of its answer."""
        assert conversation.num_open > 0, f"conversation {conversation.number} was left once too often"
        conversation.num_open -= 1
        conversation.num_running = min(conversation.num_running, conversation.num_open)
        self._use(conversation, now_s)
        conversation.answer = answer
        num_prompt, is_stored = self._open.get(conversation, (0, False))
        if len(chain) > num_prompt or (chain and not is_stored):
            prompt_tip = chain[num_prompt - 1 : num_prompt] if num_prompt and not is_stored else ()
            if conversation not in self._open:  # it was preempted, which has set that
                prompt_tip = self._tips_of.get(conversation, ())[:1]
            self._set_tips(conversation, tuple(dict.fromkeys((*prompt_tip, chain[-1]))))
        if not conversation.num_open:
            self._open.pop(conversation, None)
        if not conversation.num_open and conversation in self._tips_of and self._learner is not None:
            self._learner.rested(conversation, now_s)  # without a block of its own, it could never be recognised again
        self._forget_oldest()

    def make(self, now_s: float, block_id: Hashable = None) -> Conversation:
        """Make a conversation without a known owner. block_id: one of its own blocks."""
        self._num_made += 1
        return Conversation(self._num_made, _root(block_id, self._num_made), now_s, now_s)

    def move(self, conversation: Conversation, chain: Sequence[Hashable]) -> None:
        """Continue a conversation under another chain: a splice."""
        if chain:
            self._set_tips(conversation, (*self._tips_of.get(conversation, ())[:1], chain[-1]))

    def adopt(self, found: Iterable[tuple[Hashable, Conversation]], now_s: float) -> None:
        """Add conversations after a start, of which only the last stored block and its time (used_s) are known."""
        for block_id, conversation in sorted(found, key=lambda pair: pair[1].used_s, reverse=True):
            if block_id not in self._tips:
                self._set_tips(conversation, (block_id,))
                self._tips_of.move_to_end(conversation, last=False)  # after all that were used since the start
                if self._learner is not None:
                    self._learner.rested(conversation, now_s)
        self._forget_oldest()

    def _use(self, conversation: Conversation, now_s: float) -> None:
        self._num_uses += 1
        conversation.used_s, conversation.use = now_s, self._num_uses
        if conversation in self._tips_of:
            self._tips_of.move_to_end(conversation)

    def _set_tips(self, conversation: Conversation, tips: tuple[Hashable, ...]) -> None:
        for block_id in self._tips_of.get(conversation, ()):
            if self._tips.get(block_id) is conversation:
                del self._tips[block_id]
        for block_id in tips:
            self._tips[block_id] = conversation
        self._tips_of[conversation] = tips

    def _forget_oldest(self) -> None:
        while len(self._tips_of) > self._max_known:
            self._forget(next(iter(self._tips_of)))

    def _forget(self, conversation: Conversation) -> None:
        self._set_tips(conversation, ())
        del self._tips_of[conversation]
        if self._learner is not None:
            self._learner.forgotten(conversation)

    def forget(self, block_ids: Iterable[Hashable]) -> None:
        """Forget the conversations that end at these deleted blocks."""
        for block_id in block_ids:
            if (conversation := self._tips.get(block_id)) is not None:
                self._forget(conversation)


def _root(block_id: Hashable, number: int) -> int:
    """A number that is the same in every process, unlike hash() of a string."""
    if isinstance(block_id, str):
        block_id = block_id.encode()
    if isinstance(block_id, bytes):
        return int.from_bytes(block_id[:8] if len(block_id) >= 32 else block_id, "little")
    return block_id if isinstance(block_id, int) else number
