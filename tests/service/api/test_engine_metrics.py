"""What /metrics and `stats()` name: dashboards, alerts and scripts know it, so no name, type or help text changes."""

from pathlib import Path

import pytest

from kvstore import CacheTiers, Engine
from kvstore.remote.address import PrefillAddress
from kvstore.remote.prefill import PrefillServer
from kvstore.service.api.metrics import engine_families
from tests.support.engines import ask, tokens
from tests.support.kv_reader import free_endpoint
from tests.support.redis_server import RedisServer

NAMES = Path(__file__).with_name("engine_metrics.txt")
SHARED = dict.fromkeys(("servers", "leases", "conflicts", "failures", "unreachable"), 0)  # of sessions in a Redis


@pytest.fixture(scope="module")
def stats(model, tmp_path_factory):
    """Of an engine with every tier, in a process of its own among others."""
    redis, store = RedisServer(tmp_path_factory.mktemp("redis")), tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_FLEET_SECRET", "the secret of this fleet, 32 characters")
        tiers = CacheTiers("2MiB", "2MiB", "32MiB", store, remote=redis.url)
        with Engine(model, tiers, device="cpu", kv_events=free_endpoint()) as engine:
            ask(engine, tokens(1, 40))
            stats = engine.stats()
    redis.kill()
    prefill = PrefillServer(PrefillAddress("127.0.0.1", 1), b"", "", lambda: None)
    stats["remote"]["prefill"] = {**prefill.as_dict(), "failures": {}}
    prefill.close(1.0)
    stats["process"] = {"state": "running", "pid": 1, "restarts": 0, "requests": 0}
    return {**stats, "sessions": {**stats["sessions"], **SHARED}, "replicas": [{"rank": 0, **stats}]}


def keys(stats: dict, place: str = "") -> list[str]:
    return [line for name, value in stats.items() for line in (
        keys(value, f"{place}{name}.") if isinstance(value, dict) and value else [f"{place}{name}"])]  # fmt: skip


def test_no_name_type_or_help_text_changes(stats):
    stats["disk"]["failures"] = stats["remote"]["failures"] = {"write: no space": 1, "sync": 2}
    families = list(engine_families({**stats, "model": "a/model"}))
    shown = [f"{family.type} {family.name}: {family.documentation}" for family in families]
    samples = {
        (sample.name, *(f"{label}={value}" for label, value in sample.labels.items() if label != "le"))
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_count"))
    }
    lines = [*sorted(shown), *sorted(" ".join(sample) for sample in samples), *sorted(keys(stats))]
    assert lines == NAMES.read_text().splitlines()
