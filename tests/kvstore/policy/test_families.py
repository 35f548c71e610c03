"""Agents and their sub-agents: what a parent has stays while one of those lives that it waits for."""

import pytest

from kvstore.blocks.forest import EvictionTree
from kvstore.policy.conversation import MAX_CALLERS, MAX_FAMILIES, MOST_KEPT_S, SILENT_S, Answer, Conversation
from kvstore.policy.policies import Steering

PARENT, CHILD = "p0 p1 p2 parent", "p0 p1 p2 a0"


class Tier:
    """A tier whose blocks all agents fill, a second after each other."""

    def __init__(self, clock, policy: str = "return") -> None:
        self.clock, self.steering = clock, Steering(policy, clock, {"cpu": 100})
        self.tree: EvictionTree[str] = EvictionTree(self.steering.order("cpu"))

    def arrive(self, chain: str, name: bytes = b"", known: Conversation | None = None) -> Conversation:
        self.clock.now_s += 1
        keys = chain.split()
        conversation = self.steering.arrive(keys, known, is_stored=keys[-1] in self.tree, name=name)
        for parent, key in zip((None, *keys), keys, strict=False):
            if key not in self.tree:
                self.tree.add(key, parent, conversation)
        self.tree.claim(conversation, keys[-1])
        return conversation

    def run(self, conversation: Conversation) -> Conversation:
        conversation.num_running = 1  # as the look-ahead marks it when it starts
        self.steering.refresh(conversation)
        return conversation

    def end(self, conversation: Conversation, chain: str, calls_tool: bool = True) -> None:
        self.steering.end_request(conversation, chain.split(), Answer(20, calls_tool))

    def calls(self, chain: str, name: bytes = b"") -> Conversation:
        """An agent that has called a tool, and waits for what it gives."""
        conversation = self.arrive(chain, name)
        self.end(conversation, chain)
        return conversation

    def strangers(self, num_strangers: int) -> None:
        """They come later, and are of more use by any policy."""
        for number in range(num_strangers):
            self.calls(f"x{number} y{number}")

    def evict(self, num_blocks: int) -> set[str]:
        for _ in range(num_blocks):
            self.tree.remove(self.tree.next())
        self.tree.check_integrity()
        return set(self.tree.links.parents)


@pytest.mark.parametrize("policy", ["lru", "fifo", "return"])
def test_a_parent_s_own_end_stays_while_a_sub_agent_lives(clock, policy):
    tier = Tier(clock, policy)
    tier.calls(PARENT, b"ada")
    child = tier.run(tier.arrive(CHILD, b"ada"))
    tier.strangers(5)
    assert tier.evict(10) == {"p0", "p1", "p2", "parent", "a0"}, "strangers went though they came later"
    tier.end(child, CHILD)
    tier.strangers(1)
    clock.now_s += SILENT_S - 2  # the sub-agent runs a tool, too
    assert tier.evict(3) == {"p0", "p1", "p2", "parent"}, "what it has itself goes by its own worth"
    tier.strangers(1)
    clock.now_s += 2
    assert tier.evict(4) == {"x0", "y0"}, "none lives any more"


def test_what_sub_agents_share_stays_without_a_name_but_not_their_parent_s_end(clock):
    tier = Tier(clock)
    for chain in (PARENT, CHILD, "p0 p1 p2 b0"):
        tier.calls(chain)
    living = tier.run(tier.arrive(f"{CHILD} a1"))
    tier.strangers(20)
    assert tier.evict(2 + 40) == {"p0", "p1", "p2", "a0", "a1"}, "strangers went though they came later"
    tier.end(living, f"{CHILD} a1")
    tier.steering.refresh(living)
    tier.calls("z0 z1")
    assert tier.evict(5) == {"z0", "z1"}, "none lives any more"


@pytest.mark.parametrize("other", [b"eve", b""])
def test_an_agent_of_another_name_is_no_sub_agent(clock, other):
    tier = Tier(clock, "lru")
    tier.calls(PARENT, b"ada")
    tier.run(tier.arrive(CHILD, other))
    tier.strangers(1)
    assert tier.evict(1) == {"p0", "p1", "p2", "a0", "x0", "y0"}


def test_an_agent_is_kept_neither_by_its_own_request_nor_after_an_answer(clock):
    tier = Tier(clock, "lru")
    tier.calls("q0 q1", b"alone")
    answered = tier.arrive(PARENT, b"ada")
    tier.end(answered, PARENT, calls_tool=False)
    tier.run(tier.arrive(CHILD, b"ada"))
    tier.strangers(1)
    assert tier.evict(3) == {"p0", "p1", "p2", "a0", "x0", "y0"}, "an answer waits for a person"


def test_a_parent_that_was_given_up_comes_back_with_the_next_sub_agent_but_not_for_ever(clock):
    tier = Tier(clock, "lru")
    parent = tier.calls(PARENT, b"ada")
    clock.now_s += 10 * SILENT_S
    tier.run(tier.arrive(CHILD, b"ada"))
    tier.strangers(1)
    assert "parent" in tier.evict(2)
    clock.now_s = parent.used_s + MOST_KEPT_S + SILENT_S
    tier.strangers(1)
    assert "parent" not in tier.evict(1)


def test_requests_of_a_family_are_counted_through_preemptions_and_choices(clock):
    tier = Tier(clock)
    tier.calls(PARENT, b"ada")
    child = tier.arrive(CHILD, b"ada")
    assert tier.arrive(CHILD, b"ada", child) is child  # another choice
    family = child.family
    assert family.num_open == 2
    tier.steering.end_request(child, CHILD.split())  # preempted
    tier.arrive(CHILD, b"ada", child)
    for _ in range(2):
        tier.end(child, CHILD)
    assert family.num_open == 0 and len(family.callers) == 2
    tier.arrive(f"{CHILD} a1", b"eve")  # the same conversation under another name
    assert (family.num_open, child.family.num_open, len(family.callers)) == (0, 1, 1)


def test_families_and_callers_are_bounded(clock):
    tier = Tier(clock)
    for number in range(MAX_CALLERS + 3):
        last = tier.calls(f"a{number}", b"ada")
    assert len(last.family.callers) == MAX_CALLERS and last in last.family.callers
    for number in range(MAX_FAMILIES + 3):
        tier.steering.arrive([f"b{number}"], name=b"%d" % number)
    assert len(tier.steering._families) == MAX_FAMILIES
