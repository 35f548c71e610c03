"""What the parts of one store share, and what all blocks of its engine have in common. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from kvstore.memory.tier import CpuTier
from kvstore.policy.policies import Steering
from kvstore.stats import StoreStats

Stage = Callable[[], Iterable[Hashable]]  # names what is in flight at one point: see `kvstore.store.parts.Fence`


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What the parts of one store share. view: the bytes of an arena block."""

    cpu: CpuTier
    view: Callable[[int], memoryview]
    steering: Steering
    stats: StoreStats
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Identity:
    """What every block of this engine has in common. num_state_blocks: that a state takes; 0: the model keeps none.
    window_blocks: behind so many blocks before it a border needs one, which is KV of layers with a window; 0: it needs
    one, of a request.
    """

    fingerprint: bytes
    model: str
    block_size: int
    num_state_blocks: int = 0
    window_blocks: int = 0
