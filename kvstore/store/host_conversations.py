"""Whose blocks a host writes and asks for: finds conversations by the host's names, by chains, and by parents.

Control plane, one thread. Knows ids, but no bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore.blocks.ids import BlockId
from kvstore.policy.conversation import Conversation
from kvstore.policy.policies import Steering
from kvstore.store.stored import DiskContents

MAX_NAMES = 1 << 16
REST_S = 30.0  # after its last write, a conversation without known requests rests


class HostConversations:
    """If the host tells it of requests, it knows exactly when conversations rest and return. Otherwise, a write behind
    the end of a resting conversation counts as its return.
    """

    def __init__(self, steering: Steering, contents: DiskContents, clock: Callable[[], float]) -> None:
        self._steering = steering
        self._contents = contents
        self._clock = clock
        self._named: OrderedDict[str, Conversation] = OrderedDict()  # in order of use
        self._open: dict[str, tuple[Conversation, list[BlockId]]] = {}  # with the chain of the request
        # Those that are known only by their writes: their ends, and when they were written to, the longest ago first.
        self._growing: dict[Conversation, tuple[BlockId, float]] = {}
        self._ends: dict[BlockId, Conversation] = {}  # of the growing conversations
        self._num_arrived = 0

    @property
    def num_open(self) -> int:
        """The number of known requests that have not ended."""
        return len(self._open)

    # -- requests ----------------------------------------------------------------------------------------------------
    def arrive(self, name: str, chain: Sequence[BlockId]) -> None:
        """A request waits or runs: until it ends, its blocks are evicted last. A second call extends its chain."""
        if name in self._open:
            conversation = self._open[name][0]
        else:
            conversation = self._begin(name, chain)
        self._open[name] = (conversation, list(chain))
        if chain:
            self._contents.claim(chain, conversation)

    def _begin(self, name: str, chain: Sequence[BlockId]) -> Conversation:
        self._rest_in(chain)
        named = self._named.get(name)
        if named is not None and chain and self._steering.conversation_of(chain) is not named:
            self._steering.move(named, chain)  # it begins differently: the client has cut or edited it
        conversation = self._steering.arrive(chain, is_stored=self._has_end(chain))
        self._name(name, conversation)
        self._num_arrived += 1
        conversation.wanted = (0, self._num_arrived)
        self._steering.refresh(conversation)
        return conversation

    def finish(self, name: str, chain: Sequence[BlockId] = ()) -> None:
        """The request has ended. chain: with its answer; if empty, the one given before. Ignores unknown names."""
        if name not in self._open:
            return
        conversation, before = self._open.pop(name)
        chain = list(chain) or before
        if all(other is not conversation for other, _ in self._open.values()):
            conversation.wanted = None
        if chain:
            self._contents.touch(chain, conversation)
        self._steering.end_request(conversation, chain)

    def _name(self, name: str, conversation: Conversation) -> None:
        self._named[name] = conversation
        self._named.move_to_end(name)
        if len(self._named) > MAX_NAMES:
            self._named.popitem(last=False)

    def _has_end(self, chain: Sequence[BlockId]) -> bool:
        return bool(chain) and self._contents.contains(chain[-1])

    def touch(self, chain: Sequence[BlockId]) -> None:
        """These blocks, head first, were used. Without known requests, that counts as one."""
        if not chain:
            return
        self._rest_in(chain)
        found = self._steering.conversation_of(chain)
        if found is not None and found.num_open:
            self._contents.touch(chain, found)
            return
        found = self._steering.arrive(chain, is_stored=self._has_end(chain))
        self._contents.touch(chain, found)
        self._steering.end_request(found, chain)

    # -- writes ------------------------------------------------------------------------------------------------------
    def owner(self, name: str | None, block_id: BlockId, parent_id: BlockId) -> Conversation:
        """Whose block is about to be written."""
        if name is not None and name in self._open:
            return self._open[name][0]
        resting = self._steering.conversation_of((parent_id,))
        conversation = self._ends.get(parent_id)
        if conversation is None and name is not None:
            conversation = self._named.get(name)
        conversation = conversation or resting or self._steering.make(block_id)
        if name is not None:
            self._name(name, conversation)
        if conversation not in self._growing:
            if conversation.num_open:
                return conversation  # one of its requests is known
            if conversation is resting:
                self._steering.arrive((parent_id,))
            else:
                self._steering.arrive((), conversation)
        self._grow(conversation, block_id)
        return conversation

    def _grow(self, conversation: Conversation, end: BlockId) -> None:
        before = self._growing.pop(conversation, None)
        if before is not None:
            self._ends.pop(before[0], None)
        self._growing[conversation] = (end, self._clock())  # make it the last in order
        self._ends[end] = conversation

    def poll(self) -> None:
        """Let conversations rest that were not written to for a while. O(1), apart from those."""
        now_s = self._clock()
        while self._growing:
            conversation, (_, written_s) = next(iter(self._growing.items()))
            if 0 <= now_s - written_s < REST_S:
                return
            self._rest(conversation)

    def _rest_in(self, chain: Sequence[BlockId]) -> None:
        """Let a growing conversation rest, if this request goes on with it."""
        end = next((block_id for block_id in reversed(chain) if block_id in self._ends), None) if self._ends else None
        if end is not None:
            self._rest(self._ends[end])

    def _rest(self, conversation: Conversation) -> None:
        end, _ = self._growing.pop(conversation)
        del self._ends[end]
        self._steering.end_request(conversation, (end,))

    # -- by hand -----------------------------------------------------------------------------------------------------
    def pin(
        self, chain: Sequence[BlockId], seconds: float | None, expires_s: float | None = None,
        tenant: str | None = None,
    ) -> None:  # fmt: skip
        """Pin the conversation of this chain; see `Steering.pin`."""
        if (conversation := self._of(chain)) is not None:
            self._steering.pin(conversation, seconds, expires_s, tenant, len(chain))

    def _of(self, chain: Sequence[BlockId]) -> Conversation | None:
        """The conversation of a chain; makes one if it has none and its end is stored."""
        self._rest_in(chain)
        found = self._steering.conversation_of(chain)
        if found is None and self._has_end(chain):
            found = self._steering.make(chain[-1])
            self._steering.adopt([(chain[-1], found)])
            self._contents.touch(chain, found)
        return found
