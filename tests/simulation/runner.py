"""The model of a simulation: a clock, and KV that follows from the tokens. What it samples stays with it until it is
read, as on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.engine.core.request import Request
from kvstore.engine.core.scheduler import SchedulerOutput
from kvstore.engine.core.step_loop import StepResult, StepTimes
from kvstore.store.seam import Prefilled
from tests.simulation.parts import (
    GARBAGE,
    TOKEN_BYTES,
    WatchedPool,
    WatchedWindows,
    key_after,
    next_key,
    next_token,
    quantised,
)

if TYPE_CHECKING:
    from tests.simulation.run import Simulation


@dataclass(slots=True)
class Account:
    """What was seen of one request. covered: prompt tokens before are computed or were cached."""

    began_s: float
    covered: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Launched:
    """before: accounts of its requests as they were."""

    sampled: list[Sequence[int]]
    before: dict[str, Account]


def copy(memory: WatchedPool | WatchedWindows, copies: Sequence[tuple[int, int]]) -> None:
    """Copies of a step, (source, destination), of which all are read before anything is written."""
    read = [bytes(memory.contents[source]) for source, _ in copies]
    memory.spoil()
    for (_, destination), content in zip(copies, read, strict=True):
        memory.contents[destination][:] = content


class Runner:
    """The model: a clock, and KV that follows from the tokens. Checks all that a step reads and writes."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.rows: dict[str, list[int]] = {}
        self.times = StepTimes()
        self.unread: dict[str, int] = {}  # tokens of the last step
        self.last: Launched | None = None
        self.before: dict[str, Account] = {}  # of the step that was read last
        self.prefilled: list[Prefilled] = []

    def read(self, launched: Launched) -> StepResult:
        self.sim.may_fail("executed")
        if launched is self.last:
            self.unread.clear()
        self.before = launched.before
        prefilled, self.prefilled = self.prefilled, []
        return StepResult(launched.sampled, {}, prefilled=prefilled)

    def launch(self, output: SchedulerOutput) -> Launched:
        sim = self.sim
        sim.may_fail("scheduled")
        before = {step.request_id: replace(sim.accounts[step.request_id]) for step in output.scheduled}
        self._account(output)
        sim.counts["ran ahead"] += bool(self.unread)
        sampled = self._execute(output)
        self.unread = {s.request_id: ids[0] for s, ids in zip(output.scheduled, sampled, strict=False) if ids}
        self.last = Launched(sampled, before)
        return self.last

    def _account(self, output: SchedulerOutput) -> None:
        """Tokens that a request did not have before the step and does not compute in it were cached."""
        size = self.sim.config.block_size
        for step in output.scheduled:
            account = self.sim.accounts[step.request_id]
            account.cached += size * max(0, step.num_computed_tokens // size - -(-account.covered // size))
            account.covered = max(account.covered, step.num_computed_tokens + step.num_tokens)

    def _execute(self, output: SchedulerOutput) -> list[Sequence[int]]:
        sim, size = self.sim, self.sim.config.block_size
        for request_id in output.left:
            del self.rows[request_id]
        for request in output.joined:
            assert request.request_id not in self.rows
            self.rows[request.request_id] = list(request.block_numbers)
        self._apply_allocations(output)
        states, plan = sim.transfers.states, output.states
        for source, row in plan.before if plan is not None else ():
            states[row] = states[source]
        if not output.scheduled:
            return []
        starts, num_tokens = [], 0
        for step in output.scheduled:
            starts.append(num_tokens)
            num_tokens += step.num_tokens
        assert num_tokens <= sim.config.budget and len(self.rows) <= sim.config.seqs
        if output.plan is not None:
            sim.connector.start_load_kv(output.plan, starts)
            sim.may_fail("began")
            sim.connector.wait_for_layer_load(0)
        began_s = sim.clock.now_s
        parts, sampled = [], []
        for step in output.scheduled:
            request = sim.scheduler.roster.requests[step.request_id]
            part = self._compute(request, step.num_computed_tokens, step.num_tokens, size)
            parts.append(part)
            if plan is not None:
                row, before = plan.slots[step.request_id], self._key_before(request, step.num_computed_tokens)
                is_sound = before in (None, states[row]) or part.startswith(GARBAGE)
                assert is_sound, f"{request.request_id} goes on from another state"
                states[row] = key_after(part)
            key = int.from_bytes(part[-TOKEN_BYTES:], "little")
            sampled.append([next_token(key, choice) for choice in range(step.num_samples)])
        for source, row in plan.after if plan is not None else ():
            states[row] = states[source]
        sim.clock.advance(sim.config.step_s + num_tokens * sim.config.token_s)
        sim.may_fail("computed")
        sim.connector.save_kv_layer(0, b"".join(parts), None)
        sim.connector.wait_for_save()
        num_prefill = sum(step.num_tokens for step in output.scheduled if step.num_tokens > 1)
        if 2 * num_prefill > num_tokens and not (output.plan and output.plan.loads):
            self.prefilled.append(Prefilled(num_prefill, sim.clock.now_s - began_s))
        return sampled

    def _key_before(self, request: Request, first: int) -> int | None:
        """What the state has seen last before this token; None: there is no state."""
        return key_after(self.sim.book.story(request)[: first * TOKEN_BYTES]) if first else None

    def _check_windows(self, request: Request, first: int, story: bytes) -> None:
        """Layers with a window see these of the tokens before the first one."""
        size, table = self.sim.config.block_size, self.rows[request.request_id]
        for position in range(max(0, first - self.sim.config.window_blocks * size + 3), first):
            slot, offset = self.sim.windows.of[table[position // size]], position % size * TOKEN_BYTES
            seen = self.sim.windows.contents[slot][offset : offset + TOKEN_BYTES]
            expected = story[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES]
            assert seen == expected, f"{request.request_id} sees another window at {position}"

    def _apply_allocations(self, output: SchedulerOutput) -> None:
        copies, window_copies = [], []
        for step in output.scheduled:
            allocation, table = step.allocation, self.rows[step.request_id]
            if allocation.block_numbers:
                assert allocation.first_index <= len(table)
                table[allocation.first_index :] = allocation.block_numbers
                copies += [allocation.copy] if allocation.copy else []
                window_copies += [allocation.window_copy] if allocation.window_copy else []
            request = self.sim.scheduler.roster.requests[step.request_id]
            assert table == request.block_numbers, "rows and requests disagree"
        assert all(self.sim.pool.ref_count(destination) == 1 for _, destination in copies), "a copy into a shared block"
        copy(self.sim.pool, copies)
        if self.sim.config.window_blocks:
            copy(self.sim.windows, window_copies)

    def _compute(self, request: Request, first: int, num_tokens: int, size: int) -> bytes:
        """KV of the tokens, written to HBM. Garbage, where what it is computed from has not come."""
        sim, table, story = self.sim, self.rows[request.request_id], self.sim.book.story(request)
        if first + num_tokens > len(request.token_ids):
            key = next_key(int.from_bytes(story[-TOKEN_BYTES:], "little"), self.unread[request.request_id])
            story = story + key.to_bytes(TOKEN_BYTES, "little")
        contents, width = sim.pool.contents, size * TOKEN_BYTES
        failed = sim.transfers.failed_blocks
        if failed and not failed.isdisjoint(table):
            part = GARBAGE * num_tokens
        else:
            for index in range(-(-first // size)):
                expected = story[index * width : min((index + 1) * width, first * TOKEN_BYTES)]
                assert contents[table[index]][: len(expected)] == expected, (
                    f"{request.request_id} reads another history at block {index}"
                )
            self._check_windows(request, first, story)
            part = bytes(story[first * TOKEN_BYTES : (first + num_tokens) * TOKEN_BYTES])
        for position in range(first, first + num_tokens):
            block, offset = table[position // size], position % size
            if offset == 0 or position == first:
                assert sim.pool.ref_count(block) == 1, "a shared block is written"
            start = (position - first) * TOKEN_BYTES
            written = slice(offset * TOKEN_BYTES, (offset + 1) * TOKEN_BYTES)
            contents[block][written] = part[start : start + TOKEN_BYTES]
            if sim.config.window_blocks:
                slot = sim.windows.of[block]
                assert slot and sim.windows._ref_counts[slot] == 1, "a window slot is written that others see"
                sim.windows.contents[slot][written] = part[start : start + TOKEN_BYTES]
        if sim.forgotten:  # the last block may have no id yet
            touched = range(first // size, (first + num_tokens - 1) // size + 1)
            anew = {bytes(story[index * width : (index + 1) * width]) for index in touched}
            anew |= set(map(quantised, anew))
            states = range(sim.book.num_state_blocks)
            anew |= {sim.book.state_part(one, index) for one in anew for index in states if len(one) == width}
            sim.forgotten.difference_update(*(sim.book.names.get(content, ()) for content in anew))
        return part
