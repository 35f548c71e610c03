"""A scheduler with a runner that has no model: its KV of a token is a key of everything before that token.

Every step is checked: a slot that holds another history, a shared block that is written, a token computed twice or a
budget that is passed shows in the step in which it happens.
"""

from collections import Counter

from kvstore.blocks.ids import Lineage, lineage_root
from kvstore.blocks.pool import BlockPool
from kvstore.blocks.records import Load, TransferPlan
from kvstore.connector import NullConnector
from kvstore.engine.config import SchedulerConfig
from kvstore.engine.core.input_batch import InputBatch
from kvstore.engine.core.kv_cache_manager import KVCacheManager
from kvstore.engine.core.request import Request, Status
from kvstore.engine.core.scheduler import Scheduler, SchedulerOutput
from kvstore.engine.sampling_params import SamplingParams
from kvstore.store.seam import Arrival, Lookup, Match

ROOT = lineage_root(b"secret", "model")
EMPTY = -1


def history_keys(tokens: list[int]) -> list[int]:
    """The key of each token: of itself and everything before it."""
    keys, key = [], 17
    for token in tokens:
        key = (key * 1_000_003 + token + 1) % (2**61 - 1)
        keys.append(key)
    return keys


def next_token(key: int, choice: int = 0) -> int:
    return (key // 7 + choice * 31) % 97


def expected_answer(prompt: list[int], num_tokens: int, choice: int = 0) -> list[int]:
    """The plain loop."""
    tokens = list(prompt)
    for i in range(num_tokens):
        tokens.append(next_token(history_keys(tokens)[-1], choice if i == 0 else 0))
    return tokens[len(prompt) :]


class FakeStore(NullConnector):
    """A connector whose blocks are told: `loadable` can be loaded at once, `pending` ids are still on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.loadable: dict[bytes, list[int]] = {}  # block id -> the keys of its tokens
        self.pending: set[bytes] = set()
        self.block_size = 0
        self._matches: dict[str, list[bytes]] = {}
        self._chains: dict[str, tuple[bytes, ...]] = {}
        self._may_load: dict[str, bool] = {}
        self._loads: list[Load] = []

    def on_new_request(self, request):
        found = super().on_new_request(request)
        self._chains[request.request_id] = request.chain
        self._may_load[request.request_id] = request.may_load
        missing = request.chain[request.num_hbm_tokens // self.block_size :]
        return Arrival(tuple("cpu" for block_id in missing if block_id in self.loadable), found.conversation)

    def get_num_new_matched_tokens(self, request_id, num_computed_tokens, max_tokens):
        found, chain = [], self._chains[request_id]
        if not self._may_load[request_id]:
            return Match(Lookup.MISS)
        for block_id in chain[num_computed_tokens // self.block_size :][: max_tokens // self.block_size]:
            if block_id in self.pending:
                return Match(Lookup.PENDING)
            if block_id not in self.loadable:
                break
            found.append(block_id)
        self._matches[request_id] = found
        return Match(Lookup.HIT, len(found) * self.block_size) if found else Match(Lookup.MISS)

    def update_state_after_alloc(self, request_id, block_numbers, num_computed_tokens, num_external_tokens, rows=()):
        found = self._matches.pop(request_id)
        assert num_external_tokens == len(found) * self.block_size
        assert len(block_numbers) == len(found)
        self._loads += [Load(b, 0, 0, i) for b, i in zip(block_numbers, found, strict=True)]

    def build_connector_meta(self, spans):
        super().build_connector_meta(spans)
        loads, self._loads = self._loads, []
        return TransferPlan(tuple(loads)) if loads else None


class House:
    """Scheduler, batch and the keys of every slot; `step` runs one step and checks all of it."""

    def __init__(self, num_blocks=64, block_size=4, seqs=8, budget=64, window=200, policy="fcfs", store=None) -> None:
        self.config = SchedulerConfig(window, block_size, seqs, budget, policy)
        connector = store or NullConnector(num_blocks)
        self.pool = BlockPool(num_blocks, connector.hbm_order)
        self.store = store
        if store is not None:
            store.block_size = block_size
        self.scheduler = Scheduler(self.config, KVCacheManager(self.pool, block_size), connector)
        self.batch = InputBatch(seqs, window, block_size)
        self.keys = [EMPTY] * (num_blocks * block_size)
        self.computed: Counter[str] = Counter()  # tokens computed, by the request's name before "/"
        self.answers: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.copies: list[tuple[int, int]] = []
        self.outputs: list[SchedulerOutput] = []

    def add(
        self, name: str, prompt: list[int], num_output: int = 3, n: int = 1, priority: int = 0, tenant: str = "",
        **params,
    ) -> Request:  # fmt: skip
        sampling = SamplingParams(n=n, max_tokens=num_output, temperature=0, **params)
        choices = [
            Request(
                f"{name}/{i}" if i else name, prompt, sampling, num_output,
                Lineage(lineage_root(b"secret", "model", tenant)), self.config.block_size,
                seed=i, priority=priority, index=i, tenant=tenant,
            )
            for i in range(n)
        ]  # fmt: skip
        choices[0].children = choices[1:]
        self.requests |= {choice.request_id: choice for choice in choices}
        self.scheduler.roster.add(choices[0])
        return choices[0]

    @property
    def has_one_tenant(self) -> bool:
        return len({request.tenant for request in self.requests.values()}) < 2

    def step(self) -> SchedulerOutput:
        before = [request.request_id for request in self.scheduler.roster.tenants.running()]
        preemptions = self.scheduler.roster.num_preemptions
        output = self.scheduler.schedule()
        if self.has_one_tenant:
            preempted = self.scheduler.roster.num_preemptions - preemptions
            assert not (output.joined and preempted), "admitted beside a preemption"
        self.outputs.append(output)
        self._check_limits(output, before)
        for request_id in output.left:
            self.batch.remove(request_id)
        for request in output.joined:
            self.batch.join(request)
        copies = self.batch.apply_allocations(output.scheduled)
        self.copies += copies
        sampled = self._execute(output, copies) if output.scheduled else []
        for progress in self.scheduler.update(output, sampled):
            self.answers.setdefault(progress.request.request_id, []).append(progress.token_id)
        self.check()
        return output

    def _check_limits(self, output: SchedulerOutput, before: list[str]) -> None:
        running = [request.request_id for request in self.scheduler.roster.tenants.running()]
        scheduled = [s.request_id for s in output.scheduled]
        new = [request.request_id for request in output.joined]
        assert output.num_tokens <= self.config.max_num_batched_tokens
        assert len(running) <= self.config.max_num_seqs
        assert all(s.num_tokens > 0 for s in output.scheduled)
        assert len(set(scheduled)) == len(scheduled)
        assert scheduled[len(scheduled) - len(new) :] == new, "running requests before waiting ones"
        old = scheduled[: len(scheduled) - len(new)]
        assert set(old) <= set(before)
        if not self.has_one_tenant:
            return
        assert old == before[: len(old)], "in order, none left out"
        if output.num_tokens < self.config.max_num_batched_tokens:
            assert set(running) == set(scheduled), "budget is left, but a running request stands still"

    def _execute(self, output: SchedulerOutput, copies: list[tuple[int, int]]) -> list[list[int]]:
        size = self.config.block_size
        read = [self.keys[source * size : (source + 1) * size] for source, _ in copies]
        for (_, destination), keys in zip(copies, read, strict=True):
            assert self.pool.ref_count(destination) == 1
            self.keys[destination * size : (destination + 1) * size] = keys
        for load in output.plan.loads if output.plan else ():
            block = load.block_number
            self.keys[block * size : (block + 1) * size] = self.store.loadable[load.block_id]
        inputs = self.batch.build(output.scheduled)
        assert len(set(inputs.slots.tolist())) == len(inputs.slots), "two tokens in one slot"
        histories = {s.request_id: history_keys(self.requests[s.request_id].token_ids) for s in output.scheduled}
        spans = {}
        for place, index in enumerate(inputs.order.tolist()):
            step = output.scheduled[index]
            span = range(inputs.query_start[place], inputs.query_start[place + 1])
            spans[step.request_id] = span
            assert len(span) == step.num_tokens
            for token in span:
                position, slot = int(inputs.positions[token]), int(inputs.slots[token])
                assert inputs.token_ids[token] == self.requests[step.request_id].token_ids[position]
                assert self.pool.ref_count(slot // size) == 1, "a shared block is written"
                self.keys[slot] = histories[step.request_id][position]
            self.computed[step.request_id.split("/")[0]] += step.num_tokens
        for step in output.scheduled:
            self._check_context(step, histories[step.request_id])
        return self._sample(output, inputs, histories)

    def _check_context(self, step, history: list[int]) -> None:
        """Everything that this request's attention reads is its own history."""
        size, table = self.config.block_size, self.batch.block_table[self.batch.row(step.request_id)]
        for position in range(step.num_computed_tokens + step.num_tokens):
            slot = int(table[position // size]) * size + position % size
            assert self.keys[slot] == history[position], f"{step.request_id}, position {position}"

    def _sample(self, output: SchedulerOutput, inputs, histories: dict[str, list[int]]) -> list[list[int]]:
        sampled, firsts = [], {}
        for step in output.scheduled:
            key = histories[step.request_id][step.num_computed_tokens + step.num_tokens - 1]
            sampled.append([next_token(key, choice) for choice in range(step.num_samples)])
            if step.num_samples:
                assert step.num_computed_tokens + step.num_tokens == len(histories[step.request_id])
                firsts[self.batch.row(step.request_id)] = sampled[-1][0]
        self.batch.append(inputs.sample_rows, [firsts[row] for row in inputs.sample_rows.tolist()])
        return sampled

    def check(self) -> None:
        self.scheduler.roster.check_integrity()
        held = Counter(block for r in self.requests.values() for block in r.block_numbers)
        assert {b: self.pool.ref_count(b) for b in range(self.pool.num_blocks) if self.pool.ref_count(b)} == held
        waiting = [r for r in self.scheduler.roster.requests.values() if r.status is Status.WAITING]
        unborn = [r for r in waiting if r.index and not r.num_output_tokens]
        assert self.scheduler.num_waiting == len(waiting) - len(unborn)

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return self.check_idle()
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def check_idle(self) -> None:
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.roster.requests) == (0, 0, {})
        assert self.pool.num_free == self.pool.num_blocks
        assert self.batch.num_rows == len(self.scheduler.roster.left)  # they leave with the next step, whenever that is
        assert self.step().scheduled == ()
        assert self.batch.num_rows == 0
        self.pool.check_integrity(idle=True)

    def check_answer(self, name: str, prompt: list[int], num_output: int = 3, n: int = 1) -> None:
        for i in range(n):
            request_id = f"{name}/{i}" if i else name
            assert self.answers[request_id] == expected_answer(prompt, num_output, i), request_id
            assert self.requests[request_id].finish_reason == "length"


def steps_of(output: SchedulerOutput) -> dict[str, tuple[int, int, int]]:
    return {s.request_id: (s.num_computed_tokens, s.num_tokens, s.num_samples) for s in output.scheduled}
