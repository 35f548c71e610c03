"""The waiting order: who is read ahead, whose conversations are protected, on a clock that does not matter."""

import random

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


def test_against_a_list_sorted_anew():
    rng, look, known = random.Random(5), made(20)[0], {}
    for step in range(2000):
        name = rng.randrange(40)
        if rng.random() < 0.5:
            known[name] = (rng.randrange(3), step, rng.randrange(6))
            look.add(name, known[name][:2], conversation(name), known[name][2])
        else:
            known.pop(name, None)
            look.remove(name)
        room, expected = 20, []
        for key in sorted(known, key=lambda one: known[one][:2]):
            room -= known[key][2]
            if room < 0 and expected:
                break
            expected.append(key)
        assert names(look) == expected


def test_the_larger_window_against_one_that_is_counted_anew():
    rng, (look, _), known = random.Random(6), made(12, 8), {}
    people = [conversation(number) for number in range(12)]
    for step in range(3000):
        name = rng.randrange(40)
        if rng.random() < 0.5:
            known[name] = ((rng.randrange(3), step), rng.choice(people), rng.randrange(6))
            look.add(name, *known[name])
        else:
            known.pop(name, None)
            look.remove(name)
        room, wanted = 20, {}
        for place, (key, person, num_blocks) in enumerate(sorted(known.values(), key=lambda one: one[0])):
            room -= num_blocks
            if room < 0 and place:
                break
            wanted.setdefault(person, key)
        assert [person.wanted for person in people] == [wanted.get(person) for person in people]
