"""Categories of resting conversations and prefixes: members of one category are expected to return alike.

A category is a number; estimates are pooled over its group, and over groups of the same kind.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import product

from kvstore.policy.conversation import Conversation, Prefix

# Of conversations: how the last answer ended (unknown, in a call of a tool, six lengths in tokens), how long the last
# gap was (none yet, tool loop, quick, slow, absent), and how many requests there were (unknown, 1, 2, 3-4, 5-8, more).
_ANSWER_TOKENS = (32, 100, 250, 500, 1000)
_GAPS_S = (4.0, 30.0, 300.0)
_TURNS = (1, 2, 3, 5, 9)
_TALKS = (len(_ANSWER_TOKENS) + 3, len(_GAPS_S) + 2, len(_TURNS) + 1)
# Of prefixes that nobody came back to yet: whether others had the beginning of them, and how many blocks are new.
_NUM_BLOCKS = (4, 16, 64)
_FRESH = (2, len(_NUM_BLOCKS) + 1)
# Of those that are shared: the mean gap, and how often they were used.
_MEAN_GAPS_S = (4.0, 15.0, 60.0, 240.0, 1000.0, 4000.0, 16000.0)
_USES = (3, 5, 9)
_SHARED = (len(_MEAN_GAPS_S) + 1, len(_USES) + 1)

_FIRST_FRESH = _TALKS[0] * _TALKS[1] * _TALKS[2]
_FIRST_SHARED = _FIRST_FRESH + _FRESH[0] * _FRESH[1]
NUM_CATEGORIES = _FIRST_SHARED + _SHARED[0] * _SHARED[1]

# Of each category its group: a kind, and what distinguishes it there.
GROUPS: tuple[tuple[str, int], ...] = (
    *((f"answer {answer}", gap) for answer, gap, _ in product(*map(range, _TALKS))),
    *(("fresh", below) for below, _ in product(*map(range, _FRESH))),
    *(("shared", gap) for gap, _ in product(*map(range, _SHARED))),
)


def category_of(conversation: Conversation) -> int:
    """Its category now; an entry that stands for a prefix has categories of its own."""
    prefix = conversation.prefix
    if prefix is not None and prefix.entry is conversation:
        return _of_prefix(prefix)
    answer, gap_s = conversation.answer, conversation.gap_s
    ending = 0 if answer is None else 1 if answer.calls_tool else 2 + bisect_right(_ANSWER_TOKENS, answer.num_tokens)
    gap = 0 if gap_s is None else 1 + bisect_right(_GAPS_S, gap_s)
    return (ending * _TALKS[1] + gap) * _TALKS[2] + bisect_right(_TURNS, conversation.turn)


def _of_prefix(prefix: Prefix) -> int:
    num_before = 0 if prefix.parent is None else prefix.parent.num_blocks
    if prefix.entry.gap_s is None:
        return _FIRST_FRESH + (num_before > 0) * _FRESH[1] + bisect_right(_NUM_BLOCKS, prefix.num_blocks - num_before)
    gap, uses = bisect_right(_MEAN_GAPS_S, prefix.entry.gap_s), bisect_right(_USES, prefix.entry.turn)
    return _FIRST_SHARED + gap * _SHARED[1] + uses
