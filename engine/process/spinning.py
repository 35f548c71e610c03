"""How long a compute thread without work spins before it sleeps. Must be settled before torch is loaded.

GCC's OpenMP spins for milliseconds. Where another process wants the same core, a step then waits for threads that
wait: 50 times slower beside one busy process (bench/LOG.md, 2026-11-22).
"""

from collections.abc import MutableMapping

SPIN_COUNT = "10000"  # some ten microseconds: longer than the gaps between the operations of a step


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """What the user has set counts."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
