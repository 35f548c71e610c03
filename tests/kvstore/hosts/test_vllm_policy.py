"""Who stays in vLLM's memory tier: what vLLM's manager asks of a policy, and whether ours keeps the right ones; and the
keys of a request in their order, by vLLM's own record of them.

Needs vLLM.
"""

import importlib.util
import itertools
import random
from types import SimpleNamespace

import pytest

from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

NUMBERS = itertools.count()


@pytest.fixture
def manager():
    """vLLM's own, with our policy, over so many chunks."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    def make(num_chunks):
        return CPUOffloadingManager(num_chunks, "NotedPolicy", "tests.support.vllm_host")

    return make


def request(manager, keys):
    """One turn: what is there is loaded, the rest stored. Returns the hits and the keys that were evicted."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    context = ReqContext(f"request {next(NUMBERS)}")
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (i + 1))
    manager.on_new_request(context)
    hits = 0
    while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
        hits += 1
    manager.prepare_load(keys[:hits], context)
    manager.complete_load(keys[:hits], context)
    out = manager.prepare_store(keys[hits:], context)
    evicted = []
    if out is not None:
        evicted = out.evicted_keys
        manager.complete_store(set(out.keys_to_store), context)
    manager.on_request_finished(context)
    return hits, evicted


def chain(name, num_blocks, num_groups=1):
    from tests.support.vllm_host import keys_of

    return keys_of(name, num_blocks, num_groups)


def policy():
    """Of the manager that was made last."""
    from tests.support.vllm_host import NotedPolicy

    return NotedPolicy.made[-1]


def test_tails_go_before_heads(manager):
    held = manager(20)
    first, second = chain("first", 10), chain("second", 14)
    request(held, first)
    _, evicted = request(held, second)
    assert evicted == first[:5:-1]
    assert request(held, first)[0] == 6
    policy().check_integrity()


def test_the_least_valuable_conversation_goes_from_all_groups_of_layers(manager):
    """Not the second group's chunks of one that has just returned."""
    held = manager(20)
    returned, away = chain("returned", 5, num_groups=2), chain("away", 5, num_groups=2)
    for keys in (returned, away, returned):
        request(held, keys)
    _, evicted = request(held, chain("third", 4, num_groups=2))
    assert len(evicted) == 8 and set(evicted) <= set(away)
    policy().check_integrity()


def test_what_is_protected_or_in_use_stays_and_all_or_nothing_goes(manager):
    from vllm.v1.kv_offload.base import ReqContext

    held = manager(8)
    keys = chain("a", 8)
    request(held, keys)
    context = ReqContext("reader")
    held.prepare_load(keys[6:], context)  # the tail is being read, so nothing before it is a leaf
    assert policy().evict(7, set()) is None
    assert policy().evict(3, set(keys[:4])) is None
    assert all(policy().get(key) for key in keys)
    assert {key for key, _ in policy().evict(2, set(keys[:4]))} == set(keys[4:6])


def test_a_reset_forgets_everything(manager):
    held = manager(8)
    request(held, chain("a", 8))
    held.reset_cache()
    policy().check_integrity()
    assert request(held, chain("a", 8)) == (0, [])


def learned_state():
    """Of a process in which conversations have returned after a minute."""
    from kvstore.policy.policies import Steering

    now = [1000.0]
    steering = Steering("return", lambda: now[0], {"cpu": 100})
    for number in range(40):
        for length in (1, 2, 3):
            conversation = steering.arrive([f"{number} {i}" for i in range(length)])
            now[0] += 1
            steering.end_request(conversation, [f"{number} {i}" for i in range(length)])
            now[0] += 60
    assert steering.as_dict()["num_returns_learned"] > 0
    return steering.state()


def test_what_was_learned_is_kept_beside_the_store(manager, tmp_path):
    import json

    from vllm.config import set_current_vllm_config

    file = tmp_path / "vllm-policy.json"
    state = learned_state()
    file.write_text(json.dumps(state))
    before = file.stat().st_ino

    tiers = [{"type": "fs", "path": "elsewhere"}, {"type": "KVStoreTier", "path": str(tmp_path)}]
    transfer = SimpleNamespace(kv_connector_extra_config={"secondary_tiers": tiers})
    with set_current_vllm_config(SimpleNamespace(kv_transfer_config=transfer)):
        made = manager(20)
    request(made, chain("a", 3))
    wait_until(lambda: file.stat().st_ino != before)
    assert json.loads(file.read_text()) == state


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_keeps_its_counts(manager, seed):
    draw = random.Random(seed)
    held = manager(64)
    talks = {name: draw.randrange(1, 20) for name in range(20)}
    for _ in range(400):
        name = draw.randrange(20)
        talks[name] = min(40, talks[name] + draw.randrange(4))
        shared = chain("system", 4) if name % 2 else []
        request(held, shared + chain(f"talk {name}", talks[name]))
        policy().check_integrity()


def test_each_key_is_behind_the_one_before_it_in_its_group_while_the_request_grows():
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from kvstore.hosts.vllm_keys import RequestKeys, chain_of

    context, groups = ReqContext("request"), ([], [])
    keys = RequestKeys(context)
    for end in range(1, 13):
        for number, tokens in enumerate((16, 32)):
            if 16 * end % tokens == 0:
                groups[number].append(make_offload_key(b"%032d" % end, number))
                context.set_offload_key_position(groups[number][-1], 16 * end)
        if end % 4:
            continue
        asked = {groups[0][-1], groups[0][-3], groups[1][-1], groups[1][0]}
        found = keys.before(asked)
        assert found == {
            groups[0][-1]: groups[0][-2],
            groups[0][-3]: groups[0][-4],
            groups[1][-1]: groups[1][-2],
            groups[1][0]: None,
        }
        assert list(map(context.get_offload_key_position, found)) == sorted(
            map(context.get_offload_key_position, found)
        )
    assert [chain_of(context, number) for number in (0, 1)] == list(groups)
