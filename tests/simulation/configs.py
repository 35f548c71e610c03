"""What is simulated: engines with their tiers, their machines, their visitors, and what fails there."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.disk import Faults

NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class Config:
    """One engine with its tiers, its machine and its visitors. cpu_blocks, disk_blocks: 0 switches a tier off."""

    name: str = "plain"
    block_size: int = 4
    hbm_blocks: int = 80
    cpu_blocks: int = 160
    disk_blocks: int = 800
    seqs: int = 4
    budget: int = 48
    window: int = 200
    policy: str = "fcfs"
    eviction: str = "auto"
    load: str = "auto"
    hours: float = 10.0
    talks: int = 14
    step_s: float = 0.01
    token_s: float = 0.001  # of computing one
    read_s: float = 0.004  # of one block from disk
    load_s: float = 0.0005  # of one block into HBM
    max_queued_bytes: int = 4096
    limit_blocks: int | None = None  # on disk, of each tenant
    longest_wait_s: float = 120.0  # of a request, when nothing fails
    state_blocks: int = 0  # that a state takes; 0: the model keeps none
    window_blocks: int = 0  # behind so many a state is needed, which is what layers with a window see; 0: of requests
    window_slots: int = 48
    quantises: float = 0.0  # how often the codec is int8 when the store is opened; some requests then refuse it
    runs_ahead: bool = False  # as a device does; answers then end at some tokens, too, which are seen late
    faults: Faults = NO_FAULTS


SOME = Faults(slow_reads=0.1, failed_reads=0.01, rotten=0.01, failed_writes=0.05, failed_loads=0.03, failed_saves=0.03)
ALL = Faults(
    slow_reads=0.15, hung_reads=0.002, failed_reads=0.02, rotten=0.02, failed_writes=0.1, broken_disk=0.001,
    failed_loads=0.05, failed_saves=0.05, full_queue=0.1, failed_steps=0.004, crashes_per_day=4.0, restarts_per_day=4.0,
)  # fmt: skip
CONFIGS = (
    Config("plain"),
    Config("queue", policy="priority", talks=36, seqs=3, hbm_blocks=64, cpu_blocks=96, disk_blocks=1500),
    Config("restarts", faults=Faults(crashes_per_day=5.0, restarts_per_day=5.0)),
    Config("slow-disk", read_s=0.05, faults=Faults(slow_reads=0.2, hung_reads=0.002)),
    Config("bad-disk", faults=Faults(failed_reads=0.05, rotten=0.05, failed_writes=0.2, broken_disk=0.005)),
    Config("bad-transfers", faults=Faults(failed_loads=0.1, failed_saves=0.1, full_queue=0.2)),
    Config("bad-steps", faults=Faults(failed_steps=0.02)),
    Config("tiny-cpu", cpu_blocks=12, eviction="lru", hbm_blocks=60, faults=SOME),
    Config("tiny-disk", disk_blocks=70, eviction="return", faults=SOME),
    Config("no-disk", disk_blocks=0, cpu_blocks=90, policy="priority"),
    Config("staging", cpu_blocks=0, eviction="fifo", faults=SOME),
    Config("limit", limit_blocks=40, hbm_blocks=60, cpu_blocks=60, disk_blocks=300),
    Config("limit-faults", limit_blocks=30, cpu_blocks=60, disk_blocks=120, faults=SOME),
    Config("always", load="always", block_size=8, faults=SOME),
    Config("everything", policy="priority", cpu_blocks=100, disk_blocks=400, faults=ALL),
    Config("ahead", runs_ahead=True),
    Config("ahead-faults", runs_ahead=True, cpu_blocks=100, disk_blocks=400, faults=ALL),
    Config("int8", quantises=1.0, faults=Faults(crashes_per_day=5.0, restarts_per_day=5.0)),
    Config("int8-and-raw", quantises=0.5, cpu_blocks=60, disk_blocks=300, hbm_blocks=60, runs_ahead=True, faults=ALL),
    Config("states", state_blocks=3),
    Config("states-ahead", state_blocks=3, runs_ahead=True, cpu_blocks=0, faults=SOME),
    Config("states-faults", state_blocks=5, cpu_blocks=100, disk_blocks=400, runs_ahead=True, faults=ALL),
    Config("windows", state_blocks=2, window_blocks=5),
    Config(
        "windows-ahead", state_blocks=1, window_blocks=3, window_slots=24, runs_ahead=True, cpu_blocks=0, faults=SOME
    ),
    Config(
        "windows-faults", state_blocks=2, window_blocks=4, window_slots=32, cpu_blocks=160, runs_ahead=True, faults=ALL
    ),
)
