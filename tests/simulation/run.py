"""A seeded simulation of days of traffic: the real scheduler, pools and store over virtual bytes, time and faults.

`python -m tests.simulation.run CONFIGURATION SEED [HOURS]` replays a run. Real is everything that decides, down to the
glue of `kvstore.store.tiered`; `simulated_parts`, `simulated_disk` and `simulated_runner` stand for what moves bytes,
`simulated_people` for who asks; `simulated_checks` says what must hold.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from kvstore.blocks.ids import BlockId, quantised_id
from kvstore.blocks.records import TransferPlan
from kvstore.config import CacheTiers
from kvstore.disk.index import DiskIndex
from kvstore.disk.opening import OpenDisk
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.request import Request, Status
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.core.state_slots import StateSlots
from kvstore.engine.core.step_loop import StepResult, Steps
from kvstore.store import assembly, history, parts, tiered
from tests.simulation import checks
from tests.simulation.configs import CONFIGS, Config
from tests.simulation.disk import (
    NUM_STATE_ROWS,
    Disk,
    InjectedError,
    Platter,
    Transfers,
    WatchedWorker,
    Weather,
)
from tests.simulation.parts import (
    PAGE_BYTES,
    START_S,
    Arena,
    Book,
    Clock,
    Condition,
    Thread,
    WatchedCpu,
    WatchedPool,
    WatchedWindows,
)
from tests.simulation.people import People
from tests.simulation.runner import Account, Runner

HOUR_S = 3600.0
IDLE_WAIT_S = 0.02
NUM_EVENTS_KEPT = 20


class Simulation:
    """One run. After `run`, `counts` says what happened in it."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.seed = config, seed
        self.rng = random.Random(f"{config.name} {seed}")
        self.clock, self.book = Clock(), Book(config.block_size, config.state_blocks, config.window_blocks > 0)
        self.weather = Weather(self.clock, f"{config.name} {seed}")
        self.platter = Platter()
        self.counts: Counter[str] = Counter()  # of the whole run
        self.counts_of_store: Counter[str] = Counter()  # since it was opened
        self.events: deque[str] = deque(maxlen=NUM_EVENTS_KEPT)
        self.orders_rng = random.Random(f"orders {seed}")
        self.accounts: dict[str, Account] = {}
        self.forgotten: set[BlockId] = set()
        self.finished: list[Request] = []  # since all were looked at
        self.survivors: set[BlockId] = set()  # on disk when the store was opened again
        self.end_s = START_S + config.hours * HOUR_S
        self._may_raise = False
        self._last_scheduled_s = START_S
        self._num_steps = 0
        self._seen_progress, self._round_at_s, self._round_s = 0, 0.0, 0.25
        self._touched_s = self._learned_s = 0.0

    # -- a store is opened and closed --------------------------------------------------------------------------------
    def _patches(self, folder: Path) -> ExitStack:
        """Virtual parts in the place of real ones, and sizes to the scale of blocks of a few bytes."""
        clock, stack = self.clock, ExitStack()
        threads = SimpleNamespace(
            RLock=nullcontext, Condition=lambda *_: Condition(clock), Thread=Thread, current_thread=lambda: None
        )
        self.directory = SimpleNamespace(path=folder, secret=b"s" * 32, close=lambda: None)
        stand_ins = {
            "Arena": self._make_arena, "CpuTier": self._make_cpu, "TierWorker": self._make_io,
            "make_transfer": self._make_transfers, "time": clock.module, "threading": threads, "STAGING_BYTES": 0,
        }  # fmt: skip
        time, threading = {"time": clock.module}, {"threading": threads}
        virtual = {
            assembly: stand_ins, parts: time | threading, history: time, tiered: time,
            "kvstore.store.write_back": {"PAGE_BYTES": PAGE_BYTES, "MAX_QUEUED_BYTES": self.config.max_queued_bytes},
            "kvstore.policy.planner": {"ASSUMED_READ_RATE": self.book.block_bytes / 0.005, "LEAST_CHUNK_TOKENS": 16},
            "os": {"urandom": lambda count: b"s" * count},
        }  # fmt: skip
        for module, those in virtual.items():
            stack.enter_context(mock.patch.multiple(module, **those))
        return stack

    def _make_arena(self, layout, num_arena_blocks, pin, is_shared) -> Arena:
        self.arena = Arena(self.book, num_arena_blocks)
        return self.arena

    def _make_cpu(self, num_arena_blocks, erase, keep, order, clock, holdings, losses) -> WatchedCpu:
        cpu = WatchedCpu(num_arena_blocks, erase, keep, order, clock, holdings, losses)
        self.cpu = cpu.watch(self.arena, self.counts_of_store, self.may_fail)
        return self.cpu

    def _open_disk(self, capacity_bytes: int) -> SimpleNamespace:
        """Stands for an `OpeningDisk`."""
        faults, counts = self.config.faults, self.counts_of_store
        disk = Disk(self.platter, capacity_bytes, self.book, self.clock, faults, self.rng, self.weather, counts)
        if self.config.quantises and self.rng.random() < self.config.quantises:
            disk.codec = "int8"
        opened = OpenDisk(disk, DiskIndex.build(disk.scan(), self.clock.module.time), [])
        return SimpleNamespace(directory=self.directory, join=lambda *_: opened, close=lambda: None)

    def _make_io(self, name, disk, on_progress, limits) -> WatchedWorker:
        return WatchedWorker(disk, on_progress, limits, self.clock, self.arena, self.config.read_s, self.rng)

    def _make_transfers(self, device, arena, on_progress) -> Transfers:
        self.transfers = Transfers(
            arena, lambda: self.cpu, lambda: self.pool, lambda: self.windows, self.clock, self.config.faults, self.rng,
            self.weather, self.counts_of_store, self.config.load_s, self.may_fail,
        )  # fmt: skip
        return self.transfers

    def _open(self) -> None:
        config = self.config
        self.finished.clear()
        self._sum_up()
        tiers = CacheTiers(
            cpu=config.cpu_blocks * self.book.block_bytes,
            disk=config.disk_blocks * self.book.stored_bytes, path="unused",
            disk_per_tenant=self.limit_bytes,
        )  # fmt: skip
        dtype = SimpleNamespace(itemsize=2)
        layout = SimpleNamespace(
            block_bytes=self.book.block_bytes, block_size=config.block_size, dtype=dtype,
            num_state_blocks=config.state_blocks, window_blocks=config.window_blocks,
            checkpoint_blocks=config.state_blocks * max(config.window_blocks, 1),
        )  # fmt: skip
        least_arena_blocks = 2 * config.seqs + -(-config.window // config.block_size)
        self.connector = assembly.open_tiered(
            tiers, layout, "model", lambda _: "ab" * 32, SimpleNamespace(type="cpu"), config.load, least_arena_blocks,
            config.hbm_blocks, config.eviction, self._open_disk(int(tiers.disk)) if config.disk_blocks else None,
        )  # fmt: skip
        self.store = self.connector.parts.store
        self.pool = WatchedPool(config.hbm_blocks, self.connector.hbm_order).watch(self.book)
        limits = SchedulerConfig(config.window, config.block_size, config.seqs, config.budget, config.policy)
        states = StateSlots(NUM_STATE_ROWS) if config.state_blocks and not config.window_blocks else None
        windows = None
        if config.window_blocks:
            windows = WatchedWindows(config.window_slots, config.hbm_blocks, config.window_blocks)
            self.windows = windows.watch(self.book)
        manager = KVCacheManager(self.pool, config.block_size, None, states, windows)
        self.scheduler = Scheduler(limits, manager, self.connector)
        self.runner = Runner(self)
        self.steps = Steps(self.scheduler, self.runner, config.runs_ahead)
        self._watch_plan()
        old_states = self.store.old_states
        delete = old_states.delete
        old_states.delete = lambda state: checks.check_replaced(self, state) or delete(state)
        self._unsettled_since_s = self.clock.now_s
        take = self.connector.update_state_after_alloc
        self.connector.update_state_after_alloc = lambda *given: self._taken(*given[3:]) or take(*given)
        self._watch_orders()

    @property
    def limit_bytes(self) -> int | None:
        blocks = self.config.limit_blocks
        return None if blocks is None else blocks * self.book.stored_bytes

    def _watch_plan(self) -> None:
        """Where arena blocks for saves are taken something may fail; elsewhere that is no place for an error."""
        plan = self.store.steps.plan

        def watched(*given: object) -> TransferPlan | None:
            self.cpu.is_planning = True
            try:
                return plan(*given)
            finally:
                self.cpu.is_planning = False

        self.store.steps.plan = watched

    def _sum_up(self) -> None:
        """What was counted since the store was opened goes to the counts of the whole run."""
        if (store := getattr(self, "store", None)) is not None:
            stats = store.stats
            self.counts_of_store += Counter({
                "preempted": self.scheduler.roster.num_preemptions, "reads cancelled": stats.cancelled_reads,
                "reads failed": sum(stats.read_failures.values()), "saves dropped": stats.dropped_saves,
                "saves of orphans": stats.orphan_saves, "splices given up": stats.given_up_splices,
                "split prefills": stats.split_prefills, "prefetched": stats.prefetched,
                "prefetch hits": stats.prefetch_hits, "prefetched for nothing": stats.prefetch_wasted,
                "writes dropped": stats.dropped_writes, "writes refused": stats.refused_writes,
                "disk evictions": stats.disk_evictions,
            })  # fmt: skip
        self.counts.update(self.counts_of_store)
        self.counts_of_store.clear()

    def _taken(self, num_tokens: int, rows: Sequence[int]) -> None:
        self.counts_of_store["loads taken"] += num_tokens // self.config.block_size
        num_states = len(rows)  # at most
        self.counts_of_store["states taken"] += num_states * self.config.state_blocks

    def _watch_orders(self) -> None:
        checks.watch_order(self, self.pool.tree, self.pool.block_id)
        checks.watch_order(self, self.cpu.pool.tree, lambda block: getattr(self.cpu.record(block), "block_id", None))
        if self.store.disk is not None:
            checks.watch_order(self, self.store.disk.contents.index.tree, lambda block_id: block_id)

    def restart(self, crash: bool) -> None:
        """The process ends, in whatever it is doing, and comes back."""
        self.note(f"{'crash' if crash else 'restart'} with {len(self.scheduler.roster.requests)} requests")
        self.counts["crashes" if crash else "restarts"] += 1
        if crash:
            if self.connector.parts.io.threads.writing is not None and self.rng.random() < 0.5:
                self.clock.advance(1.0)  # the transaction has just passed
        else:
            self.people.all_ended(self.scheduler.roster.requests)
            self.connector.step_failed()
            self.scheduler.roster.reset("abort")
            self.connector.close()
            if (disk := self.store.disk) is None or disk.health.error is None:
                is_over = self.store.is_idle or self.connector.parts.io.threads.has_hung
                assert is_over, f"closed while something is in flight: {checks.in_flight(self)}"
                assert disk is None or not disk.dirty, "closed before all was written"
        self.people.all_ended(self.scheduler.roster.requests)
        self.accounts.clear()
        self.clock.io.clear()
        self._check_platter()
        self._open()

    def _check_platter(self) -> None:
        """What a crash leaves is closed under parents, too."""
        values = self.platter.values
        for entry, _, _ in values.values():
            assert entry.parent_id in values or entry.parent_id in self.book.roots, "on disk without its parent"
        self.survivors = set(values)

    # -- what is asked of it -----------------------------------------------------------------------------------------
    def note(self, event: str) -> None:
        self.events.append(f"{self.clock.now_s - START_S:12.3f} s  {event}")

    def describe(self, block_id: BlockId) -> str:
        depth, one = 0, block_id
        while one in self.book.parents and one not in self.book.roots:
            one, depth = self.book.parents[one], depth + 1
        return f"block {block_id.hex()[:8]} at depth {depth}"

    def may_fail(self, where: str) -> None:
        """Something unforeseen, in the middle of what the engine does."""
        share = self.config.faults.failed_steps
        if share and self._may_raise and not self.weather.quiet and self.rng.random() < share / 4:
            self.note(f"injected: {where}")
            self.counts[f"injected: {where}"] += 1
            raise InjectedError(where)

    def submit(self, requests: list[Request]) -> bool:
        """A request with its choices. False when it ended in an error."""
        first = requests[0]
        first.children = requests[1:]
        for request in requests:
            self.book.story(request)
            self.accounts[request.request_id] = Account(self.clock.now_s)
        records = map(self.cpu.record, self.cpu.pool.cached_blocks())
        in_arena = {record.block_id for record in records if record is not None}
        self._may_raise = True
        try:
            self.scheduler.roster.add(first)
        except InjectedError:
            self._end_all()
            return False
        finally:
            self._may_raise = False
        tiers, num_hbm = first.cached.arrival or [], len(self.scheduler.manager.match_prefix(first))
        checks.check_arrival(self, tiers, first.chain, num_hbm, in_arena)
        found = (block_id for block_id, tier in zip(first.chain, tiers, strict=False) if tier == "disk")
        self.counts["blocks found again"] += sum(block_id in self.survivors for block_id in found)
        return True

    def abort(self, request_id: str) -> None:
        request = self.scheduler.roster.requests.get(request_id)
        if request is None:
            return
        stage = "waiting" if request.status is Status.WAITING else "decode" if request.num_output_tokens else "prefill"
        self.counts[f"aborted: {stage}"] += 1
        self.note(f"abort {request_id} ({stage})")
        self.scheduler.roster.finish(request_id, "abort")

    def forget(self, block_ids: Sequence[BlockId]) -> None:
        """As `Admin.forget` does it."""
        for _ in range(2):
            for block in [block for block in map(self.pool.lookup, block_ids) if block is not None]:
                self.pool.forget(block)
            found, is_gone = self.connector.upkeep.forget(block_ids, 2.0)
            block_ids = list(found)
        self.forgotten |= found | {one for one in map(quantised_id, block_ids) if one in self.book.blocks}
        self.counts["forgotten at once" if is_gone else "forgotten later"] += 1

    # -- steps -------------------------------------------------------------------------------------------------------
    def step(self) -> None:
        self._may_raise = True
        try:
            has_computed = self.steps.step(self._take_in)
        except InjectedError:
            self._end_all()
            return
        finally:
            self._may_raise = False
        self._num_steps += has_computed
        if has_computed and self._num_steps % 16 == 0:
            checks.check_always(self)
        self._wait_if_stuck(has_computed)

    def _take_in(self, output: SchedulerOutput, result: StepResult) -> None:
        scheduler, failed = self.scheduler, self.connector.get_finished(result.prefilled)
        known = scheduler.roster.requests
        self.counts["computed for nothing"] += sum(s.request_id not in known for s in output.scheduled)
        progress = scheduler.update(output, result.token_ids, failed)
        assert self.transfers.failed_blocks == set(failed), "a failed load was not reported"
        self.transfers.failed_blocks = set()
        self._may_raise = False
        self._roll_back(self.runner.before, output)
        for one in progress:
            self._progressed(one.request, scheduler.roster.requests.get(output.scheduled[one.scheduled].request_id))
        self._may_raise = True

    def _roll_back(self, before: dict[str, Account], output: SchedulerOutput) -> None:
        for step in output.scheduled:
            request = self.scheduler.roster.requests.get(step.request_id)
            if request is not None and request.status is Status.WAITING:
                self.accounts[step.request_id] = before[step.request_id]
                self.counts["rolled back"] += 1

    def _progressed(self, request: Request, owner: Request | None) -> None:
        self.book.story(request)
        if request.index and request.num_output_tokens == 1:
            name = request.request_id.rsplit("-", 1)[0]
            self.accounts[request.request_id] = replace(self.accounts[name])
        if request.finish_reason is not None:
            account = self.accounts[request.request_id]
            cached = request.cached.details
            assert account.covered >= request.num_prompt_tokens
            assert cached is not None and cached.total == account.cached, (
                f"{request.request_id}: usage says {cached}, seen were {account.cached} tokens"
            )
            assert cached.total < request.num_prompt_tokens
            assert not cached.quantised or not request.params.kv_exact
            for tier in ("hbm", "cpu", "disk", "reencoded", "quantised"):
                self.counts[f"hit {tier}"] += getattr(cached, tier)
            assert self.config.cpu_blocks or not cached.cpu, "hits in a CPU tier that is switched off"
            assert self.config.disk_blocks or not cached.disk
            self.counts["prompt"] += request.num_prompt_tokens
            self._check_wait(request, account)
            if not request.index or request.num_output_tokens > 1:  # else it has nothing but its prompt's KV
                self.finished.append(request)
            self.people.ended(request)

    def _check_wait(self, request: Request, account: Account) -> None:
        waited_s = self.clock.now_s - account.began_s
        self.counts["longest wait ms"] = max(self.counts["longest wait ms"], int(1000 * waited_s))
        if self.config.faults.are_none:
            assert waited_s < self.config.longest_wait_s, f"{request.request_id} took {waited_s} s"

    def _wait_if_stuck(self, has_computed: bool) -> None:
        """As the engine does when every request waits for its blocks."""
        if has_computed or not self.scheduler.has_work:
            self._last_scheduled_s = self.clock.now_s
            return
        self.counts["empty steps"] += 1
        stuck_s = self.clock.now_s - self._last_scheduled_s
        assert stuck_s < (30.0 if self.config.faults.are_none else 900.0), f"nothing was scheduled for {stuck_s} s"
        self.connector.wait_for_progress(IDLE_WAIT_S)

    def _end_all(self) -> None:
        """As the engine does after an error in the middle of a step."""
        self.counts["failed steps"] += 1
        ended = dict(self.scheduler.roster.requests)
        self.connector.step_failed()
        self.steps.drop()
        self.scheduler.roster.reset("abort")
        self.transfers.failed_blocks = set()  # their ids are gone, too
        self.runner = self.steps._runner = Runner(self)
        self.people.all_ended(ended)

    # -- days --------------------------------------------------------------------------------------------------------
    def run(self) -> Counter[str]:
        """The whole run. An AssertionError says how to replay it."""
        try:
            with tempfile.TemporaryDirectory() as folder, self._patches(Path(folder)):
                self._open()
                self.people = People(self)
                while self._go_on():
                    pass
                self._sum_up()
        except Exception as error:
            events = "\n".join(self.events)
            raise AssertionError(
                f"{type(error).__name__}: {error}\nat {self.clock.now_s - START_S:.3f} s of {self.config} "
                f"seed {self.seed}; replay: python -m tests.simulation.run {self.config.name} {self.seed} "
                f"{self.config.hours}\n{events}"
            ) from error
        return self.counts

    def _go_on(self) -> bool:
        """One step, or to the next thing that happens. False at the end."""
        clock = self.clock
        clock.people.run_due()
        if self.scheduler.has_work:
            self.step()
            return True
        if self.connector.parts.progress.num != self._seen_progress:
            self._seen_progress, self._round_s = self.connector.parts.progress.num, 0.25
            self._round_at_s = min(self._round_at_s, clock.now_s + 0.05)
        is_settled = self.store.is_idle and not self.store.prefetcher.hints
        if is_settled:
            self._unsettled_since_s = clock.now_s
        assert clock.now_s - self._unsettled_since_s < HOUR_S, f"work in flight for ever: {checks.in_flight(self)}"
        if clock.now_s >= self._round_at_s:
            self._keep_house()
        elif is_settled:
            if self.scheduler.roster.left:
                self.step()  # rows of requests that have ended
            self._keep_house()
            if not self.store.is_idle:  # it had something to delete
                return True
            self.counts["idle"] += 1
            is_last = clock.people.next_s == float("inf")
            checks.check_idle(self, is_thorough=is_last or self.counts["idle"] % 4 == 0)
            if is_last:
                return False
            clock.advance_to(clock.people.next_s)
            self._unsettled_since_s = clock.now_s
        else:
            clock.advance_to(min(clock.people.next_s, clock.io.next_s, self._round_at_s))
        self._last_scheduled_s = clock.now_s
        return True

    def _keep_house(self) -> None:
        """A round of the connector's own thread."""
        self._round_s = min(2 * self._round_s, 30.0)
        self._round_at_s = self.clock.now_s + self._round_s
        self.store.poll()
        if self.store.disk is not None and self.clock.now_s - self._touched_s > 2.0:
            self.store.disk.persist_touched()
            self._touched_s = self.clock.now_s
        if self.clock.now_s - self._learned_s > HOUR_S:
            self.connector.parts.write_learned()
            self._learned_s = self.clock.now_s


def main() -> None:
    name, seed = sys.argv[1], int(sys.argv[2])
    config = next(config for config in CONFIGS if config.name == name)
    if len(sys.argv) > 3:
        config = replace(config, hours=float(sys.argv[3]))
    for what, count in sorted(Simulation(config, seed).run().items()):
        print(f"{count:10d}  {what}")


if __name__ == "__main__":
    main()
