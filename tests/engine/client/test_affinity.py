"""Tests of kvstore.engine.client.several."""

from kvstore.blocks.ids import extend_chain, lineage_root
from kvstore.engine.client.several import Whereabouts
from tests.support.engines import tokens

SYSTEM = tokens(99, 64)


def chain(token_ids: list[int], *owner: str) -> list[bytes]:
    found: list[bytes] = []
    extend_chain(found, lineage_root(b"secret", "model", *owner), token_ids, 16)
    return found


def conversation(seed: int, num_tokens: int = 40) -> list[int]:
    return [*SYSTEM, *tokens(seed, num_tokens)]


def test_a_conversation_goes_on_where_it_was():
    known = Whereabouts()
    first, second = tokens(1, 50), tokens(2, 50)
    assert known.engine_of(chain(first)) is None
    known.note(chain(first), 1)
    known.note(chain(second), 0)
    assert known.engine_of(chain([*first, *tokens(3, 500)])) == 1
    assert known.engine_of(chain([*second, *tokens(4, 30)])) == 0
    assert known.engine_of(chain(first[:40])) == 1, "a shorter prompt of it"


def test_it_moves_with_its_last_turn():
    known = Whereabouts()
    for length, engine in ((40, 0), (100, 1), (160, 1)):
        known.note(chain(tokens(1, length)), engine)
    assert known.engine_of(chain(tokens(1, 200))) == 1


def test_a_shared_beginning_says_nothing():
    known = Whereabouts()
    known.note(chain(conversation(1)), 0)
    known.note(chain(conversation(2)), 0)
    assert known.engine_of(chain(conversation(3))) is None
    assert known.engine_of(chain(conversation(1, 80))) == 0, "what follows it says where it was"
    known.note(chain(conversation(3)), 1)
    assert [known.engine_of(chain(conversation(seed, 60))) for seed in (1, 2, 3)] == [0, 0, 1]


def test_tenants_and_salts_are_apart():
    known = Whereabouts()
    known.note(chain(SYSTEM, "anna"), 1)
    assert known.engine_of(chain(SYSTEM, "anna")) == 1
    assert known.engine_of(chain(SYSTEM, "bob")) is None
    assert known.engine_of(chain(SYSTEM, "anna", "salt")) is None


def test_what_was_used_least_recently_is_forgotten_from_its_tail():
    known = Whereabouts(20)
    known.note(chain(tokens(1, 160)), 0)
    known.note(chain(tokens(2, 160)), 1)
    known.note(chain(tokens(3, 80)), 1)
    assert len(known) == 20
    assert known.engine_of(chain(tokens(1, 80))) == 0 and known.engine_of(chain(tokens(2, 160))) == 1
    for seed in range(10, 30):
        known.note(chain(tokens(seed, 160)), 1)
    assert known.engine_of(chain(tokens(1, 160))) is None and len(known) == 20
