"""The waiting order: who is read ahead, whose conversations are protected, on a clock that does not matter."""

import random

import pytest

from kvstore.policy.conversation import Conversation, Conversations
from kvstore.policy.lookahead import LookAhead


def conversation(number: int) -> Conversation:
    return Conversation(number, number, 0.0, 0.0)


def made(num_cpu: int, num_disk: int = 0) -> tuple[LookAhead, list[Conversation]]:
    refreshed: list[Conversation] = []
    return LookAhead(num_cpu, num_disk, refreshed.append), refreshed


def names(look: LookAhead) -> list[str]:
    return [waiting.request_id for waiting in look.to_prefetch()]


def test_what_runs_is_marked_until_its_conversation_is_left():
    look, refreshed = made(100)
    registry = Conversations()
    person = registry.arrive(["a"], 0.0)
    look.add("a", (0, 1), person, 1)
    look.start("a")
    look.start("nobody")
    assert (person.wanted, person.num_running, len(look)) == (None, 1, 0) and refreshed[-1] is person
    registry.end_request(person, ["a"], 1.0)
    assert person.num_running == 0


@pytest.mark.parametrize(("num_cpu", "num_disk"), [(20, 0), (12, 8)])
def test_both_windows_against_a_list_sorted_anew(num_cpu, num_disk):
    """As many as fit into the CPU tier are read ahead; those that fit into both are wanted."""
    rng, (look, _), known = random.Random(6), made(num_cpu, num_disk), {}
    people = [conversation(number) for number in range(12)]

    def in_window(room: int) -> list[int]:
        found = []
        for name in sorted(known, key=lambda one: known[one][0]):
            room -= known[name][2]
            if room < 0 and found:
                break
            found.append(name)
        return found

    for step in range(3000):
        name = rng.randrange(40)
        if rng.random() < 0.5:
            known[name] = ((rng.randrange(3), step), rng.choice(people), rng.randrange(6))
            look.add(name, *known[name])
        else:
            known.pop(name, None)
            look.remove(name)
        assert names(look) == in_window(num_cpu)
        wanted = {}
        for name in in_window(num_cpu + num_disk):
            wanted.setdefault(known[name][1], known[name][0])
        assert [person.wanted for person in people] == [wanted.get(person) for person in people]
