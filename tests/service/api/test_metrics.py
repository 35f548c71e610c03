"""/metrics: what is counted of requests and answers, what an engine shows, and that the page can be parsed."""

import copy

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.engine.outputs import CachedTokensDetails, Choice, RequestOutput, Timings, Usage
from kvstore.service.api.metrics import VLLM_NAMES, metrics_page
from kvstore.service.http.telling import TTFT_BOUNDS_S, Metrics
from tests.support.engines import ask, evict_cpu, open_engine, save_model, settle, tokens

BLOCK_TOKENS = 16


class Page:
    """A parsed page: `page("name_total", tier="cpu")` is a sample's value, None when there is none."""

    def __init__(self, text: bytes) -> None:
        self.families = list(text_string_to_metric_families(text.decode()))
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._values.get((f"kvstore:{name}", frozenset(labels.items())))

    @property
    def labels(self) -> set[str]:
        return {label for _, labels in self._values for label, _ in labels}


def output(num_tokens: int = 5, ttft_s: float | None = 0.03, finish_reason: str | None = "stop") -> RequestOutput:
    timings = Timings() if ttft_s is None else Timings(0.01, 0.0, 0.02, ttft_s, 0.4)
    choices = [Choice("text", list(range(num_tokens)), finish_reason)]
    usage = Usage(100, num_tokens, CachedTokensDetails(hbm=48))
    return RequestOutput("request-1", list(range(100)), choices, usage, ttft_s, timings)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """With traffic that hit every tier."""
    folder = tmp_path_factory.mktemp("metrics")
    with open_engine(save_model(folder / "model"), folder / "store") as engine:
        prompt = tokens(1, 6 * BLOCK_TOKENS + 4)
        ask(engine, prompt)
        ask(engine, prompt)  # from HBM
        settle(engine)
        engine.loop.pool.evict_all()
        ask(engine, prompt)  # from CPU
        engine.loop.pool.evict_all()
        evict_cpu(engine)
        ask(engine, prompt)  # from disk
        settle(engine)
        yield engine


@pytest.fixture(scope="module")
def stats(engine) -> dict:
    return engine.stats()


# -- requests and answers --------------------------------------------------------------------------------------------
def test_an_answer_is_counted_with_its_times():
    metrics = Metrics()
    metrics.answer_ended(output(), "/chat", [0.002, 0.3])
    page = Page(metrics_page(metrics, {}))
    assert page("request_success_total", finished_reason="stop") == 1
    assert page("time_to_first_token_seconds_sum", route="/chat") == 0.03
    assert page("time_to_first_token_seconds_bucket", route="/chat", le="0.02") == 0
    assert page("time_to_first_token_seconds_bucket", route="/chat", le="0.04") == 1
    assert page("inter_token_latency_seconds_count", route="/chat") == 2
    assert page("request_time_per_output_token_seconds_sum", route="/chat") == pytest.approx(0.1)
    assert page("e2e_request_latency_seconds_sum", route="/chat") == pytest.approx(0.43)
    sums = [page(f"request_{phase}_time_seconds_sum") for phase in ("queue", "load", "prefill", "decode")]
    assert sums == [0.01, 0.0, 0.02, 0.4]
    assert [page("request_prompt_tokens_bucket", le=bound) for bound in ("50.0", "100.0")] == [0, 1]
    assert page("request_generation_tokens_sum") == 5


def test_an_answer_without_a_token_has_no_times():
    metrics = Metrics()
    metrics.answer_ended(output(0, None, None), "/chat", [])
    page = Page(metrics_page(metrics, {}))
    assert page("request_success_total", finished_reason="abort") == 1
    assert page("time_to_first_token_seconds_count", route="/chat") is None
    assert page("request_queue_time_seconds_count") == 0 and page("request_prompt_tokens_count") == 1


def test_one_token_has_no_time_per_further_token():
    metrics = Metrics()
    metrics.answer_ended(output(1), "/chat")
    page = Page(metrics_page(metrics, {}))
    assert page("request_time_per_output_token_seconds_count", route="/chat") is None
    assert page("e2e_request_latency_seconds_count", route="/chat") == 1


def test_the_buckets_of_ttft_are_those_that_dashboards_know():
    metrics = Metrics()
    metrics.answer_ended(output(), "/chat")
    shown = [
        sample.labels["le"]
        for family in Page(metrics_page(metrics, {})).families
        for sample in family.samples
        if sample.name == "kvstore:time_to_first_token_seconds_bucket"
    ]
    assert [float(bound) for bound in shown[:-1]] == list(TTFT_BOUNDS_S) and shown[-1] == "+Inf"
    assert (TTFT_BOUNDS_S[0], TTFT_BOUNDS_S[-1], len(TTFT_BOUNDS_S)) == (0.001, 2560, 22)


def test_requests_are_counted_by_route_and_invented_methods_are_one():
    metrics = Metrics()
    for number in range(50):
        metrics.request_ended("unknown", f"METHOD{number}", 404, 0.001)
    metrics.request_ended("/chat", "POST", 200, 0.2)
    metrics.refused("rate_limit_exceeded")
    page = Page(metrics_page(metrics, {}))
    assert page("http_requests_total", route="unknown", method="other", status="404") == 50
    assert page("http_requests_total", route="/chat", method="POST", status="200") == 1
    assert page("http_request_duration_seconds_sum", route="/chat", method="POST") == 0.2
    assert page("refused_requests_total", reason="rate_limit_exceeded") == 1


def test_two_servers_in_one_process_share_nothing():
    first, second = Metrics(), Metrics()
    first.refused("reason")
    assert Page(metrics_page(second, {}))("refused_requests_total", reason="reason") is None
    assert b"kvstore:" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)


# -- what an engine shows --------------------------------------------------------------------------------------------
def test_hits_are_shown_by_tier(stats):
    page = Page(metrics_page(Metrics(), stats))
    hit = 6 * BLOCK_TOKENS
    for tier in ("hbm", "cpu", "disk"):
        assert page("tier_hit_tokens_total", tier=tier) == hit, tier
    prompt = page("prompt_tokens_total")
    assert prompt == 4 * (hit + 4) and page("cached_prompt_tokens_total") == 3 * hit
    queries = [page("tier_query_tokens_total", tier=tier) for tier in ("hbm", "cpu", "disk")]
    assert queries == [prompt, prompt - hit, prompt - 2 * hit]
    assert page("prefix_cache_queries_total") == prompt and page("prefix_cache_hits_total") == hit
    assert page("external_prefix_cache_queries_total") == prompt - hit
    assert page("external_prefix_cache_hits_total") == 2 * hit
    assert page("generation_tokens_total") == 16 and page("requests_finished_total") == 4


def test_bytes_blocks_and_loads_are_shown_by_tier(stats):
    page = Page(metrics_page(Metrics(), stats))
    size = stats["hbm"]["block_bytes"]
    assert page("tier_read_bytes_total", tier="disk") == 6 * size
    assert page("tier_read_bytes_total", tier="cpu") == 12 * size == page("loaded_tokens_total") * size / BLOCK_TOKENS
    assert page("tier_write_bytes_total", tier="disk") == 6 * size
    assert page("tier_write_bytes_total", tier="cpu") == 12 * size
    assert page("tier_used_bytes", tier="cpu") == page("tier_used_bytes", tier="hbm") == 6 * size
    assert page("tier_used_bytes", tier="disk") > 6 * size
    assert page("tier_limit_bytes", tier="disk") == 32 << 20
    assert page("tier_load_seconds_count", tier="disk") == 6 and page("tier_load_seconds_count", tier="cpu") >= 2
    assert page("disk_write_seconds_count") >= 1
    for tier in ("hbm", "cpu"):
        assert page("tier_evicted_blocks_total", tier=tier, reason="room") >= 6, tier
        assert page("tier_evicted_blocks_total", tier=tier, reason="removed") == 0, tier


def test_the_policy_in_force_is_one_of_its_states(stats):
    page = Page(metrics_page(Metrics(), stats))
    for tier, policy in stats["policy"]["in_force"].items():
        assert page("eviction_policy", tier=tier, policy=policy) == 1
        assert sum(page("eviction_policy", tier=tier, policy=name) for name in ("fifo", "lru", "return")) == 1


def test_failures_are_shown_by_cause_from_the_start(stats):
    page = Page(metrics_page(Metrics(), stats))
    assert page("tier_read_failures_total", tier="disk", cause="corrupt") == 0 == page("recomputed_tokens_total")
    assert page("degraded") == 0 and page("engine_up") == 1
    worse = copy.deepcopy(stats)
    worse["store"] |= {"read_failures": {"corrupt": 2}, "load_failures": 3, "given_up_tokens": 32, "dropped_writes": 5}
    worse["store"] |= {"dropped_saves": 6, "orphan_saves": 7}
    worse["disk"] |= {"degraded": "no space", "failures": {"write: no space": 4, "sync": 1}}
    page = Page(metrics_page(Metrics(), worse))
    assert page("tier_read_failures_total", tier="disk", cause="corrupt") == 2
    assert page("tier_read_failures_total", tier="cpu", cause="failed") == 3
    assert page("recomputed_tokens_total") == 32 + 3 * BLOCK_TOKENS and page("dropped_writes_total") == 5
    assert page("dropped_saves_total", reason="full") == 6 and page("dropped_saves_total", reason="orphan") == 7
    assert page("disk_errors_total", operation="write", cause="no space") == 4
    assert page("disk_errors_total", operation="sync", cause="failed") == 1 and page("degraded") == 1


def test_an_engine_without_tiers_shows_what_it_has(engine, tmp_path):
    with open_engine(save_model(tmp_path)) as plain:
        ask(plain, tokens(2, 40))
        page = Page(metrics_page(Metrics(), plain.stats()))
    assert page("prompt_tokens_total") == 40 and page("tier_limit_bytes", tier="hbm") > 0 and page("degraded") == 0
    assert page("tier_limit_bytes", tier="cpu") is None and page("tier_read_bytes_total", tier="disk") is None


def test_without_an_engine_the_service_still_shows_its_own():
    metrics = Metrics()
    metrics.request_ended("/chat", "POST", 503, 0.1)
    page = Page(metrics_page(metrics, {}))
    assert page("engine_up") == 0 and page("http_requests_total", route="/chat", method="POST", status="503") == 1
    assert page("sessions") is None


def test_vllm_s_names_have_the_same_numbers_and_name_the_model(stats):
    metrics = Metrics()
    metrics.answer_ended(output(), "/chat", [0.1])
    page = Page(metrics_page(metrics, stats, "our/model"))
    named = {family.name.removeprefix("vllm:") for family in page.families if family.name.startswith("vllm:")}
    assert named == VLLM_NAMES
    for family in page.families:
        for sample in family.samples if family.name.startswith("vllm:") else ():
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels["model_name"] == "our/model"
            assert sample.value == page(sample.name.removeprefix("vllm:"), **labels)
    assert metrics_page(metrics, stats).count(b"vllm:") == 0


def test_no_label_names_a_user_and_every_metric_is_named_once(stats):
    metrics = Metrics()
    metrics.answer_ended(output(), "/chat", [0.1])
    metrics.request_ended("/chat", "POST", 200, 0.1)
    metrics.refused("busy")
    page = Page(metrics_page(metrics, stats))
    assert page.labels <= {
        "route", "method", "status", "reason", "finished_reason", "le", "tier", "policy", "cause", "operation",
        "phase", "outcome", "model",
    }  # fmt: skip
    names = [family.name for family in page.families]
    assert len(names) == len(set(names))
    assert all(name.startswith(("kvstore:", "process_")) for name in names)
    assert all(family.documentation for family in page.families)
