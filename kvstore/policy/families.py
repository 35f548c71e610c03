"""Agents that work for one another: those to which their client gives one name.

Control plane, one thread. Knows names and times alone; no tier.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.policy.conversation import Conversation, Family

MAX_FAMILIES = 1 << 12
MAX_CALLERS = 16  # some clients give one name to all that they do


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
