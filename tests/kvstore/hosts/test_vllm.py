"""The tier under vLLM's own manager of tiers: what it stores comes back, and nothing else does. Needs vLLM."""

import importlib.util
import logging
import os

import pytest

from tests.support.page_cache import ColdFile
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


@pytest.fixture
def open_host(tmp_path):
    """Opens vLLM's manager over a store; closes what a test has not."""
    from tests.support.vllm_host import Scheduler

    opened = []

    def make(path=tmp_path / "store", **options):
        opened.append(Scheduler(path, **options))
        return opened[-1]

    yield make
    for one in opened:
        if one.manager.secondary_tiers:
            one.close()


@pytest.fixture
def caplog_vllm(caplog):
    """vLLM's loggers hand nothing to the root."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def restart(host):
    host.close()
    host.manager.secondary_tiers = []


@pytest.fixture
def chain():
    from tests.support.vllm_host import keys_of

    return keys_of


def test_the_interface_is_the_one_of_the_installed_vllm():
    import inspect

    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from kvstore.hosts.vllm import KVStoreTier
    from kvstore.hosts.vllm_policy import KVStorePolicy

    for ours, theirs in ((KVStoreTier, SecondaryTierManager), (KVStorePolicy, CachePolicy)):
        assert not ours.__abstractmethods__
        for name, method in vars(theirs).items():
            if inspect.isfunction(method) and name in vars(ours) and name != "__init__":
                given = list(inspect.signature(method).parameters)
                taken = list(inspect.signature(vars(ours)[name]).parameters)
                assert taken[: len(given)] == given, f"{ours.__name__}.{name}"


def test_what_was_stored_comes_back_from_disk_and_after_a_restart(open_host, chain):
    host, keys = open_host(), chain("a", 12)
    assert host.turn(keys[:8]) == 0
    assert host.turn(keys) == 8
    host.forget_rows()
    assert host.turn(keys) == 12
    restart(host)
    again = open_host()
    assert again.turn(keys) == 12


def test_more_blocks_than_the_primary_tier_has_rows_go_through_it(open_host, chain):
    host = open_host()
    talks = [chain(f"talk {i}", 20) for i in range(8)]
    assert [host.turn(keys) for keys in talks] == [0] * 8
    assert [host.turn(keys) for keys in talks] == [20] * 8


@pytest.mark.parametrize("other", [{"identity": "other weights"}, {"dtype": "bfloat16"}])
def test_another_model_in_the_same_store_finds_nothing(open_host, chain, other):
    host, keys = open_host(), chain("a", 4)
    host.turn(keys)
    restart(host)
    second = open_host(**other)
    assert second.turn(keys) == 0
    second.forget_rows()
    assert second.turn(keys) == 4
    restart(second)
    assert open_host().turn(keys) == 4


@pytest.mark.parametrize("is_pinned", [False, True])
def test_all_groups_of_layers_of_a_running_or_pinned_conversation_stay(open_host, chain, is_pinned):
    host, keys = open_host(disk="4MiB", num_groups=2), chain("anna", 20, 2)
    host.turn(keys, kvstore={"session": "anna", **({"pin_s": 3600} if is_pinned else {})})
    if not is_pinned:
        host.step(host.request(keys, kvstore={"session": "anna"}).req_id)
    for number in range(14):
        host.turn(chain(f"other {number}", 25, 2), kvstore={"session": f"other {number}"})
    assert host.kept(chain("other 0", 25, 2)) == 0 and host.kept(keys) == 40


def test_a_damaged_block_is_computed_again(open_host, chain, tmp_path):
    host, keys = open_host(), chain("a", 8)
    host.turn(keys)
    restart(host)
    from tests.support.vllm_host import content

    file = tmp_path / "store" / "blocks" / "data.mdb"
    data = bytearray(file.read_bytes())
    at = data.find(content(keys[5])[:64])
    assert at > 0
    data[at + 1000] ^= 1
    file.write_bytes(data)
    again = open_host()
    context = again.request(keys)
    assert again.hits(context, keys) == 5
    assert again.loaded(context, keys[:5]) == [content(key) for key in keys[:5]]
    again.store(context, keys[5:])
    again.settle()
    again.forget_rows()
    assert again.turn(keys) == 6  # what built on it was deleted with it, and vLLM had the rest in memory
    again.forget_rows()
    assert again.turn(keys) == 8


def test_a_second_vllm_is_refused_with_the_owner_and_the_way_out(open_host):
    from kvstore.errors import StoreLockedError

    open_host()
    with pytest.raises(StoreLockedError, match=r"vLLM with a-model.*\"path\" of its own"):
        open_host()


def test_what_a_request_wants_forgotten_is_gone(open_host, chain):
    host = open_host()
    mine, other = chain("mine", 6), chain("other", 6)
    host.turn(mine, kvstore={"session": "anna"})
    host.turn(other, kvstore={"session": "bert", "pin_s": 60, "ttl_s": 600})
    assert host.turn(mine, kvstore={"session": "anna", "forget": True}) == 6
    host.forget_rows()
    assert host.turn(mine) == 0
    assert host.turn(other) == 6


def test_a_session_is_read_ahead_when_its_request_arrives_also_after_a_restart(open_host, chain, tmp_path):
    from tests.support.vllm_host import content

    host, keys = open_host(), chain("a", 60)
    host.turn(keys, is_hint=True, kvstore={"session": "anna"})
    host.turn(chain("b", 3), kvstore={"session": "anna", "prefetch": True})  # no turn of hers
    restart(host)
    wanted = [content(key) for key in keys]
    file = ColdFile(tmp_path / "store" / "blocks" / "data.mdb", wanted)
    again = open_host()
    again.request([], kvstore={"session": "bert"})
    assert not all(file.resident(wanted))
    context = again.request([], is_hint=True, kvstore={"session": "anna", "prefetch": True})
    wait_until(lambda: all(file.resident(wanted)))
    again.manager.on_request_finished(context)
    assert again.turn(keys, kvstore={"session": "anna", "forget": True}) == 60
    before = again.store_stats()["prefetched"]
    again.request([], kvstore={"session": "anna"})
    assert again.store_stats()["prefetched"] == before


@pytest.mark.parametrize("is_hint", [False, True])
def test_what_is_pinned_stays_and_what_has_expired_goes_first(open_host, chain, is_hint):
    host = open_host(disk="4MiB", policy="lru")
    pinned, ordinary, expired = (chain(name, 40) for name in ("pinned", "ordinary", "expired"))
    host.turn(pinned, is_hint, kvstore={"session": "anna", "pin_s": 600})
    host.turn(ordinary, is_hint, kvstore={"session": "bert"})
    host.turn(expired, is_hint, kvstore={"session": "carl", "ttl_s": 0.001})
    for i in range(8):
        host.turn(chain(f"more {i}", 40))
    assert host.kept(expired) < 40 and host.kept(ordinary) == host.kept(pinned) == 40
    for i in range(12):  # all that the store holds
        host.turn(chain(f"yet more {i}", 40))
    assert host.kept(ordinary) < 40 and host.kept(pinned) == 40


def test_the_end_of_one_request_of_a_session_leaves_another_one_its_blocks(open_host, chain):
    host, long = open_host(disk="4MiB", policy="lru"), chain("long", 40)
    host.turn(long)
    goes_on, ends = (host.request(keys, kvstore={"session": "anna"}) for keys in (long, chain("short", 2)))
    host.step(goes_on.req_id, ends.req_id)
    host.manager.on_request_finished(ends)
    for i in range(12):  # all that the store holds
        host.turn(chain(f"more {i}", 40))
    host.manager.on_request_finished(goes_on)
    assert host.kept(long) == 40


def test_a_store_that_is_too_small_for_its_blocks_is_refused(open_host):
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match=r"1.0 MiB is too large for a capacity of 4.0 MiB; give 8.0 MiB or more"):
        open_host(disk="4MiB", block_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"give 4.0 MiB or more"):
        open_host(disk="1MiB")


def test_hashes_that_name_nothing_are_refused_and_bad_defaults_told_by_name(open_host, caplog_vllm):
    from kvstore.errors import ConfigError
    from tests.support.vllm_host import vllm_config_of

    with pytest.raises(ConfigError, match="--prefix-caching-hash-algo is xxhash_cbor"):
        open_host(vllm_config=vllm_config_of(algorithm="xxhash_cbor"))
    restart(open_host(vllm_config=vllm_config_of(policy="fail"), offload_prompt_only=True))
    assert "offload_prompt_only is true" in caplog_vllm.text and 'kv_load_failure_policy is "fail"' in caplog_vllm.text
    caplog_vllm.clear()
    restart(open_host())
    assert not caplog_vllm.text


def test_a_wrong_wish_costs_nothing(open_host, chain):
    host, keys = open_host(), chain("a", 3)
    assert host.turn(keys, kvstore={"pin": "for ever"}) == 0
    assert host.turn(keys, kvstore=7) == 3


def test_a_full_disk_refuses_and_serving_goes_on(open_host, chain, monkeypatch):
    host, keys = open_host(), chain("a", 4)
    host.turn(keys)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((4096, 4096, 100, 0, 0, 100, 10, 10, 0, 255)))
    more = chain("b", 8)
    assert host.turn(more) == 0
    host.forget_rows()
    assert host.turn(keys) == 4
    assert host.turn(more) == 0
    monkeypatch.undo()

    def is_kept_again():
        host.turn(more)
        host.forget_rows()
        return host.turn(more) == 8

    wait_until(is_kept_again)


def test_jobs_are_drained_and_stats_are_told(open_host, chain):
    from kvstore.hosts import vllm_metrics

    host, keys = open_host(), chain("a", 8)
    context = host.request(keys)
    host.step(context.req_id)
    host.store(context, keys)
    host.tier.drain_jobs()
    host.step()
    host.step()  # vLLM collects once between two ends of steps, and had done that
    assert not host.manager.has_pending_work()
    stats = host.tier.get_stats()
    assert stats is not None and stats.reduce()[vllm_metrics.BLOCKS] == 8
    assert host.tier.get_stats() is None


def test_options_that_are_wrong_are_named(open_host):
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match="load"):
        open_host(load="never")
    with pytest.raises(ConfigError, match="model_config"):
        open_host(identity=None)


def test_without_the_connector_that_shows_the_configuration_vllm_does_not_start(tmp_path):
    from kvstore.errors import ConfigError
    from kvstore.hosts.vllm_cpu import CPUTieringSpec
    from tests.support.vllm_host import config, tier_options

    with pytest.raises(ConfigError, match=r'"kv_connector": "KVStoreConnector" and "kv_connector_module_path"'):
        CPUTieringSpec(config([tier_options(tmp_path)])).get_manager()


def test_the_cpu_worker_copies_blocks_of_chunks_both_ways():
    from dataclasses import replace

    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
    from vllm.v1.kv_offload.config import OffloadingCacheConfig
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvstore.hosts.vllm_cpu import CPUTieringSpec
    from tests.support.vllm_host import BLOCK_TOKENS, config

    made = replace(config([]), cache=OffloadingCacheConfig(BLOCK_TOKENS, 2))
    tensors = [torch.randint(-128, 127, (10, 2048), dtype=torch.int8) for _ in range(2)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(one, 2048) for one in tensors],
        [[CanonicalKVCacheRef(0, 2048), CanonicalKVCacheRef(1, 2000)]],
    )
    worker = CPUTieringSpec(made).get_worker(caches)
    before = [one.clone() for one in tensors]
    worker.submit_store(1, GPULoadStoreSpec([1, 2, 3, 4], [4], [0]), CPULoadStoreSpec([7, 3]))
    # The first block of a load may lie inside a chunk.
    worker.submit_load(2, CPULoadStoreSpec([7, 3]), GPULoadStoreSpec([8, 6, 9], [3], [1]))
    assert [(one.job_id, one.transfer_size) for one in worker.get_finished()] == [(1, 4 * 4048), (2, 3 * 4048)]
    for source, target in ((2, 8), (3, 6), (4, 9)):
        assert torch.equal(tensors[0][target], before[0][source])
        assert torch.equal(tensors[1][target, :2000], before[1][source, :2000])
        assert torch.equal(tensors[1][target, 2000:], before[1][target, 2000:])
    worker.shutdown()
