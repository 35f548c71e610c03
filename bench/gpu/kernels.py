"""The kernels by themselves, without an engine: each beside its torch twin on the device, and the speed of the bus."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from bench.common import alternate, median
from bench.gpu.case import BANDWIDTH, BLOCK_SIZE, Board, Case, Clock, timed_s
from kvstore.kernels import kv, reference
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.kv import rotate_and_write, write_kv
from kvstore.kernels.paged_batch import PagedBatch, Scoring, to_device
from kvstore.memory.layout import KVLayout, LayerShape
from kvstore.memory.transfer import Arena
from kvstore.rope.rotary import Rotation, Style

STAGING_BYTES = 1 << 25  # pinned memory for one copy to the device
NUM_CHECKED_BLOCKS, NUM_CHECKED_TOKENS, NUM_CHECKED_LAYERS = 48, 300, 3
FEW_TOKENS = 40  # a save of few tokens takes another way than one of many
ATTENTION_TOLERANCE = 0.03  # of a token's output in bf16: rounding causes 0.01, a missing page of 250 causes 0.06
CONTEXTS = ((1, 1), (1, 17), (1, 300), (1, 1000), (1, 4000), (64, 64), (100, 777), (17, 33))  # query, context tokens

Caches = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Compares our kernels with their twins, with one model's shapes and random input. Checks return what is wrong."""

    case: Case
    device: torch.device

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of a step: views of one product, as a packed projection returns them."""
        heads, kv_heads = self.case.shape.num_heads, self.case.shape.num_kv_heads
        whole = self.random(NUM_CHECKED_TOKENS, heads + 2 * kv_heads, self.case.head_dim)
        query, key, value = whole.split((heads, kv_heads, kv_heads), dim=1)
        return query, key, value

    def slots(self) -> torch.Tensor:  # [NUM_CHECKED_TOKENS] of which some are padding
        slots = torch.randperm(NUM_CHECKED_BLOCKS * BLOCK_SIZE, device=self.device)[:NUM_CHECKED_TOKENS]
        slots[::7] = -1
        return slots

    def write(self) -> str | None:
        _, key, value = self.step()
        slots = self.slots()
        ours, twins = new_caches(self.case, NUM_CHECKED_BLOCKS, self.device, 2)
        write_kv(key, value, *ours, slots)
        reference.write_kv(key, value, *twins, slots)
        return difference(ours, twins)

    def rotate(self, style: Style) -> str | None:
        query, key, value = self.step()
        slots = self.slots()
        positions = torch.randperm(self.case.window, device=self.device)[: len(slots)]
        rotation = table(self.case, self.device, style).at(positions)
        ours, twins = new_caches(self.case, NUM_CHECKED_BLOCKS, self.device, 2)
        rotated = rotate_and_write(query, key, value, *ours, slots, rotation)
        expected = (rotation.apply(query), rotation.apply(key))
        reference.write_kv(expected[1], value, *twins, slots)
        return difference((*rotated, *ours), (*expected, *twins))

    def load(self, style: Style, arm: str) -> str | None:
        count = NUM_CHECKED_BLOCKS
        rotation = table(self.case, self.device, style)
        arena_blocks, numbers = torch.randperm(2 * count)[:count], torch.randperm(2 * count)[:count]
        positions = torch.randperm(count) * BLOCK_SIZE
        with arena(self.case, self.device, 2 * count, (rotation,) * NUM_CHECKED_LAYERS) as host:
            ours = new_caches(self.case, 2 * count, self.device, NUM_CHECKED_LAYERS)
            twins = new_caches(self.case, 2 * count, self.device, NUM_CHECKED_LAYERS)
            load_all(arm, host, arena_blocks, numbers, positions, ours)
            for layer, caches in enumerate(twins):
                reference.load_blocks(host.layers[layer], arena_blocks, *caches, numbers, positions, rotation)
            return difference([t for pair in ours for t in pair], [t for pair in twins for t in pair])

    def save(self, num_tokens: int) -> str | None:
        """Check a save of every other token of a step."""
        step = [self.step()[1:] for _ in range(NUM_CHECKED_LAYERS)]
        layers = [(layer, key, value) for layer, (key, value) in enumerate(step)]
        rows = torch.arange(0, NUM_CHECKED_TOKENS, 2)[:num_tokens]
        places = torch.randperm(NUM_CHECKED_BLOCKS * BLOCK_SIZE)[: len(rows)]
        with arena(self.case, self.device, NUM_CHECKED_BLOCKS, (None,) * NUM_CHECKED_LAYERS) as host:
            before = host.tensor.clone()
            save_all(host, layers, rows, places, self.device)
            timed_s(self.device, lambda: None)  # until the device's writes have landed
            found = host.tensor.clone()
            host.tensor.copy_(before)
            for layer, key, value in layers:
                at = rows.to(self.device)
                reference.save_tokens(host.layers[layer], key[at], value[at], places)
            return difference([found], [host.tensor])

    def attend(self) -> str | None:
        """Check a mixed batch: decodes and prefills, with and without a prefix, over shuffled pages."""
        heads, scale = self.case.shape.num_heads, self.case.head_dim**-0.5
        starts = [0]
        for num_tokens, _ in CONTEXTS:
            starts.append(starts[-1] + num_tokens)
        contexts = [context_len for _, context_len in CONTEXTS]
        width = -(-max(contexts) // BLOCK_SIZE)
        block_table = torch.randperm(width * len(contexts)).view(len(contexts), width)
        places = [
            block_table[i, torch.arange(n - q, n) // BLOCK_SIZE] * BLOCK_SIZE + torch.arange(n - q, n) % BLOCK_SIZE
            for i, (q, n) in enumerate(CONTEXTS)
        ]
        slots = torch.cat(places).to(self.device)
        key_cache, value_cache = (
            self.random(width * len(contexts), BLOCK_SIZE, self.case.shape.num_kv_heads, self.case.head_dim)
            for _ in range(2)
        )
        key, value = (cache.flatten(0, 1)[slots] for cache in (key_cache, value_cache))
        query = self.random(starts[-1], heads, self.case.head_dim)
        batch = PagedBatch(starts, contexts, block_table, slots, BLOCK_SIZE)
        ours = paged_attention(query, key, value, key_cache, value_cache, batch, Scoring(scale))
        twin = reference.paged_attention(query, key_cache, value_cache, starts, contexts, block_table, scale)
        ours, twin = ours.flatten(1).float(), twin.flatten(1).float()
        error = (ours - twin).norm(dim=1) / twin.norm(dim=1)  # of a token's output
        largest = float(error.max())
        if largest <= ATTENTION_TOLERANCE:  # also false for NaN
            return None
        return f"an output differs by {largest:.3g} of its length, more than {ATTENTION_TOLERANCE}"


@torch.inference_mode()
def check_kernels(case: Case, device: torch.device, board: Board) -> None:
    """Add a row for each kernel. A kernel that raises is wrong, too."""
    one = KernelCheck(case, device)
    checks: dict[str, Callable[[], str | None]] = {"write_kv": one.write}
    for style in Style:
        checks[f"rotate_and_write, {style.value}"] = partial(one.rotate, style)
        for arm in load_arms(device):
            checks[f"load, {arm}, {style.value}"] = partial(one.load, style, arm)
    for num_tokens in (FEW_TOKENS, NUM_CHECKED_TOKENS // 2):
        checks[f"save, {num_tokens} tokens"] = partial(one.save, num_tokens)
    checks["paged attention"] = one.attend
    for name, check in checks.items():
        torch.manual_seed(1)
        note = f"within {ATTENTION_TOLERANCE} of its twin" if name == "paged attention" else "equal, bit for bit"
        try:
            wrong = check()
        except Exception as error:  # one check's failure does not keep the others from running
            wrong = f"{type(error).__name__}: {str(error).strip()[:200]}"
        board.check("check", case.name, name, wrong, note)


def difference(ours: Sequence[torch.Tensor], twins: Sequence[torch.Tensor]) -> str | None:
    """What differs, compared bit for bit."""
    assert len(ours) == len(twins)
    for number, (one, other) in enumerate(zip(ours, twins, strict=True)):
        if not torch.equal(one, other):
            count = int((one != other).sum())
            return f"{count:,} of {one.numel():,} elements differ (tensor {number + 1} of {len(ours)})"
    return None


# -- what both need --------------------------------------------------------------------------------------------------
def new_caches(case: Case, num_blocks: int, device: torch.device, num_layers: int) -> Caches:
    shape = (num_blocks, BLOCK_SIZE, case.shape.num_kv_heads, case.head_dim)
    options = {"dtype": torch.bfloat16, "device": device}
    return [(torch.zeros(shape, **options), torch.zeros(shape, **options)) for _ in range(num_layers)]


def table(case: Case, device: torch.device, style: Style) -> Rotation:
    """Cos and sin of every position in the window."""
    half = case.head_dim // 2
    angles = torch.arange(case.window, device=device)[:, None] * 10000.0 ** -(torch.arange(half, device=device) / half)
    return Rotation(angles.cos().bfloat16(), angles.sin().bfloat16(), style)


@contextmanager
def arena(
    case: Case, device: torch.device, num_arena_blocks: int, rotations: tuple[Rotation | None, ...]
) -> Iterator[Arena]:
    """The CPU tier's memory, pinned for the device, full of random numbers."""
    shapes = (LayerShape(case.shape.num_kv_heads, case.head_dim, case.head_dim),) * len(rotations)
    layout = KVLayout(shapes, BLOCK_SIZE, torch.bfloat16, rotations)
    made = Arena(layout, num_arena_blocks, pin=device.type == "cuda")
    try:
        block = torch.randn(layout.block_numbers, device=device).bfloat16().cpu()
        for arena_block in range(num_arena_blocks):
            made.tensor[arena_block] = block.roll(arena_block + 1)
        yield made
    finally:
        made.close()


def load_arms(device: torch.device) -> tuple[str, ...]:
    return ("kernel", "copy engine") if device.type == "cuda" else ("as on a CPU", "gather and copy")


def load_all(
    arm: str, host: Arena, arena_blocks: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor, caches: Caches
) -> None:
    """Load all layers of these blocks, in one way or the other."""
    load = kv.BlockLoad(host.layers, arena_blocks, numbers, positions, host.layout.rotations)
    if arm == "kernel":
        load.load_by_kernel(0, caches)
    elif arm == "as on a CPU":
        load.load_layers(0, caches)
    else:
        load_by_copy(host, arena_blocks, numbers, positions, caches)


def load_by_copy(
    host: Arena, arena_blocks: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor, caches: Caches
) -> None:
    """Load by the device's copy engine, from blocks gathered in pinned memory. Keys are rotated afterwards."""
    device, [source] = caches[0][0].device, host.runs  # keys and values of each layer in turn
    numbers, rotation = to_device(numbers, device), host.layout.rotations[0]
    if rotation is not None:
        every = (positions[:, None] + torch.arange(BLOCK_SIZE)).flatten()
        rotation = rotation.at(to_device(every, device))
    size = max(1, STAGING_BYTES // source[0, :2].nbytes)
    for layer, (key_cache, value_cache) in enumerate(caches):
        for start in range(0, len(arena_blocks), size):
            some = arena_blocks[start : start + size]
            # Pinned memory comes from torch's pool, which hands it out again only after the copy has ended.
            part = source[:, 2 * layer : 2 * layer + 2]
            staging = torch.empty(len(some), *part.shape[1:], dtype=source.dtype, pin_memory=device.type == "cuda")
            torch.index_select(part, 0, some, out=staging)
            blocks = staging.to(device, non_blocking=True).view(len(some), 2, *key_cache.shape[1:])
            key = blocks[:, 0]
            if rotation is not None:
                tokens = slice(start * BLOCK_SIZE, (start + len(some)) * BLOCK_SIZE)
                own = Rotation(rotation.cos[tokens], rotation.sin[tokens], rotation.style, rotation.upcast)
                key = own.apply(key.flatten(0, 1)).view(key.shape)
            targets = numbers[start : start + size]
            key_cache.index_copy_(0, targets, key)
            value_cache.index_copy_(0, targets, blocks[:, 1])


def save_all(
    host: Arena,
    layers: Sequence[kv.RawLayer],
    rows: torch.Tensor | None,
    places: torch.Tensor,
    device: torch.device,
) -> None:
    at = None if rows is None else rows.to(device)
    kv.save_to_arena(host.layers, layers, at, places.to(device))


# -- the bus ---------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def measure_bus(case: Case, device: torch.device, board: Board, clock: Clock) -> None:
    """Loads and saves of many blocks beside plain copies of as many bytes from and to pinned memory."""
    num_layers, block_bytes = case.shape.num_layers, BLOCK_SIZE * case.kv_bytes_per_token
    count = max(case.copy_bytes // block_bytes, 4)
    size, rotation = count * block_bytes, table(case, device, Style.HALF)
    caches = new_caches(case, 2 * count, device, num_layers)
    plain = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.zeros(size, dtype=torch.uint8, device=device)
    scattered = (torch.randperm(count), torch.randperm(2 * count)[:count])
    orders = {"in order": (torch.arange(count), torch.arange(count)), "scattered": scattered}
    positions = torch.arange(count) % (case.window // BLOCK_SIZE) * BLOCK_SIZE
    with arena(case, device, count, (rotation,) * num_layers) as host:
        loads: dict[str, Callable[[], object]] = {"plain": lambda: target.copy_(plain, non_blocking=True)}
        for arm in load_arms(device):
            for order, blocks in orders.items():
                loads[f"{arm}, {order}"] = partial(load_all, arm, host, *blocks, positions, caches)
        _compare(case, device, board, clock, "load", loads, size)
        pair = target.view(torch.bfloat16).view(2, num_layers, count * BLOCK_SIZE, case.shape.num_kv_heads, -1)
        layers = [(layer, pair[0, layer], pair[1, layer]) for layer in range(num_layers)]
        places = (scattered[0][:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten().to(device)

        def save() -> None:
            for one in layers:
                save_all(host, [one], None, places, device)

        saves: dict[str, Callable[[], object]] = {
            "plain": lambda: plain.copy_(target, non_blocking=True),
            "layer by layer, scattered": save,
        }
        _compare(case, device, board, clock, "save", saves, size)


def _compare(
    case: Case,
    device: torch.device,
    board: Board,
    clock: Clock,
    what: str,
    works: dict[str, Callable[[], object]],
    size: int,
) -> None:
    measures = {name: clock.timely(partial(timed_s, device, work)) for name, work in works.items()}
    times = alternate(measures, case.repeats)
    plain_s = median(times["plain"])
    for name, seconds in times.items():
        is_plain = name == "plain"
        board.add(
            "copy",
            case.name,
            f"{what}, {'one plain copy, pinned' if is_plain else name}",
            size / median(seconds) / 1e9,
            "GB/s",
            ratio=None if is_plain else plain_s / median(seconds),
            to=None if is_plain else "plain copy",
            goal=BANDWIDTH if what == "load" and not is_plain else None,
            times=seconds,
        )
