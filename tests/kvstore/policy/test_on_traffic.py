"""What the learned policy hits beside LRU on made-up traffic of every kind, in the classes of the engine."""

import pytest

from bench.one_tier import replay_one_tier
from bench.references import References
from bench.traffic import generate


def rates(kind: str, num_requests: int, capacity: int, seed: int) -> tuple[float, float]:
    """Shares of tokens hit: LRU, return."""
    trace = generate(num_requests, seed, 128, kind)
    lru = References(trace).replay("lru", capacity)
    return lru.token_hit_rate, replay_one_tier(trace, capacity, "return").token_hit_rate


@pytest.mark.parametrize(
    ("kind", "num_requests", "capacity", "seed", "gain"),
    [
        ("people", 3000, 96, 1, 0.005),
        ("agents", 2500, 400, 1, 0.02),
        ("documents", 2500, 600, 2, -0.01),
        ("mixed", 2500, 280, 1, 0.005),
    ],
)
def test_return_is_never_far_below_lru_and_above_it_where_something_can_be_learned(
    kind, num_requests, capacity, seed, gain
):
    lru, ours = rates(kind, num_requests, capacity, seed)
    assert ours > lru + gain, f"{kind}: {ours:.4f} beside {lru:.4f}"
