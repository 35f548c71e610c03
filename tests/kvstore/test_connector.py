"""The seam: the connector of no store keeps every verb and does nothing; and what the scheduler makes of the answers
of one that has a store."""

import dataclasses
import inspect

import pytest

from kvstore.blocks.ids import BLOCK_ID_BYTES, Lineage, lineage_root
from kvstore.blocks.records import TransferPlan
from kvstore.connector import KVConnector, NullConnector
from kvstore.engine.core.request import Request, Status
from kvstore.engine.sampling_params import SamplingParams
from kvstore.store.seam import Lookup, Match, NewRequest, StepSpan
from tests.support.house import ROOT, FakeStore, House, history_keys, steps_of

VERBS = [name for name, value in vars(KVConnector).items() if callable(value) and not name.startswith("_")]


def parameters(owner: type, verb: str) -> list[tuple[str, object]]:
    return [(p.name, p.kind) for p in inspect.signature(getattr(owner, verb)).parameters.values()]


@pytest.mark.parametrize("verb", VERBS)
def test_the_null_connector_has_every_verb_with_the_same_arguments(verb):
    assert parameters(NullConnector, verb) == parameters(KVConnector, verb)


def test_every_lookup_is_a_miss():
    connector = NullConnector()
    new = NewRequest("r", (b"id",), tuple(range(16)), Lineage(ROOT), "", 0, (0, 0))
    assert connector.on_new_request(new).tiers == ()
    assert connector.get_num_new_matched_tokens("r", 0, 63) == Match(Lookup.MISS, 0)
    assert connector.build_connector_meta([StepSpan("r", 0, 16)]) is None
    assert connector.get_finished() == ()
    assert connector.splice([b"id"], list(range(16)), Lineage(ROOT), [(0, 16)], "") is None
    assert set(connector.upkeep.stats()) == {"policy"}


def root_of(connector, *owner: str) -> bytes:
    return lineage_root(connector.root_secret, connector.fingerprint.hex(), *owner)


def test_roots_are_one_per_owner_and_another_in_every_store():
    connector, other = NullConnector(), NullConnector()
    owners = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", "")]
    roots = [root_of(connector, *owner) for owner in owners]
    assert len({*roots, *(root_of(other, *owner) for owner in owners)}) == 2 * len(owners)
    assert roots == [root_of(connector, *owner) for owner in owners]
    assert {len(root) for root in roots} == {BLOCK_ID_BYTES}


def test_what_crosses_the_seam_is_frozen():
    for value in (Match(Lookup.HIT, 16), TransferPlan(())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)
        assert not hasattr(value, "__dict__")


# -- the connector's scheduler side ----------------------------------------------------------------------------------
def stored(prompt: list[int], num_blocks: int, block_size: int = 4) -> dict[bytes, list[int]]:
    request = Request("stored", prompt, SamplingParams(), 1, Lineage(ROOT), block_size, seed=0)
    keys = history_keys(prompt)
    return {request.chain[i]: keys[i * block_size : (i + 1) * block_size] for i in range(num_blocks)}


def test_a_request_whose_blocks_are_on_their_way_does_not_hold_up_those_behind():
    store = FakeStore()
    house, prompt = House(store=store, seqs=2), list(range(13))
    blocks = stored(prompt, 2)
    store.pending = set(blocks)
    house.add("slow", prompt, 3)
    house.add("b", list(range(40, 50)), 3)
    house.add("c", list(range(60, 70)), 3)
    assert list(steps_of(house.step())) == ["b", "c"]
    assert house.scheduler.num_waiting == 1
    house.add("d", list(range(80, 84)), 3)
    for _ in range(3):
        house.step()
    assert house.requests["slow"].status is Status.WAITING
    store.pending, store.loadable = set(), blocks
    assert steps_of(house.step())["slow"] == (8, 5, 1)
    house.run()
    for name, tokens in (("slow", prompt), ("b", list(range(40, 50))), ("c", list(range(60, 70)))):
        house.check_answer(name, tokens)
