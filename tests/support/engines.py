"""Saved tiny models and the plain greedy loop that engines are compared with."""

import random
from pathlib import Path

import torch

from kvstore.blocks.ids import extend_chain, quantised_id, with_quantised
from kvstore.engine.builtin import MODEL_DIR
from tests.support.models import make_model


def save_model(folder: Path, name: str = "Llama", tokenizer: bool = False, **changes: object) -> str:
    """A tiny random model on disk; with `tokenizer`, it gets the built-in one and a vocabulary of its size."""
    if tokenizer:
        import transformers

        known = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
        known.save_pretrained(folder)
        changes = {"vocab_size": len(known) + 16, "eos_token_id": known.eos_token_id, **changes}
    make_model(name, **changes).save_pretrained(folder)
    return str(folder)


def bare_copy(path: Path, *without: str) -> Path:
    """The built-in model without these files; a template stands in a file of its own."""
    path.mkdir()
    for file in MODEL_DIR.iterdir():
        if file.name not in without:
            (path / file.name).symlink_to(file)
    return path


# -- engines with tiers ----------------------------------------------------------------------------------------------
PARAMS = {"temperature": 0.0, "ignore_eos": True}
LLAMA_BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # layers, K and V, KV heads, block size, head_dim, float32


def greedy(count: int, **changes):
    from kvstore import SamplingParams

    return SamplingParams(max_tokens=count, **{**PARAMS, **changes})


def open_engine(
    model: str, path: Path | None = None, hbm="2MiB", cpu="2MiB", disk="32MiB", codec="raw", disk_per_tenant=None,
    **options,
):  # fmt: skip
    """With a store in `path`, which loads whatever is stored; without, no tier below HBM."""
    from kvstore import CacheTiers, Engine

    tiers = CacheTiers(hbm) if path is None else CacheTiers(hbm, cpu, disk, path, codec, disk_per_tenant)
    return Engine(model, tiers, device="cpu", load="always", **options)


class Plain:
    """What an engine without a store answers: each prompt alone and computed anew."""

    def __init__(self, model: str, **options: object) -> None:
        self.engine = open_engine(model, **options)
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, token_ids, count: int) -> list[int]:
        key = (tuple(token_ids), count)
        if key not in self._answers:
            self.engine.loop.pool.evict_all()
            self._answers[key] = self.engine.generate([list(token_ids)], greedy(count))[0].token_ids
        return self._answers[key]


def ask(engine, token_ids, count: int = 4, **options):
    """One prompt's output."""
    return engine.generate([list(token_ids)], greedy(count), **options)[0]


def cached(output) -> tuple[int, int, int, int]:
    """Cached tokens by tier: HBM, CPU, disk, reencoded."""
    details = output.usage.cached_tokens_details
    of_tiers = details.hbm + details.cpu + details.disk + details.remote
    assert output.usage.cached_tokens == of_tiers + details.reencoded
    return details.hbm, details.cpu, details.disk, details.reencoded


def counters(engine) -> dict:
    """The store's counters."""
    return engine.stats()["store"]


def settle(engine) -> None:
    """Everything in flight ends, and what was finished is on disk; then nothing may be held."""
    engine.flush()
    engine.check_integrity()


def evict_hbm(engine) -> None:
    """Everything is in the tiers below, and leaves HBM."""
    settle(engine)
    engine.loop.call(engine.loop.pool.evict_all)


def evict_cpu(engine) -> None:
    """Everything that is on disk leaves the CPU tier."""
    settle(engine)
    with engine.connector.parts.lock:
        engine.connector.parts.cpu.pool.evict_all()


def evict_memory(engine) -> None:
    """Everything is where it was written to alone."""
    evict_cpu(engine)
    engine.loop.call(engine.loop.pool.evict_all)


def tokens(seed: int, count: int, vocab: int = 160) -> list[int]:
    """Token ids that no other seed gives."""
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


def chain_of(engine, token_ids: list[int], tenant: str = "", salt: str = "") -> list[bytes]:
    """Ids of the full blocks of these tokens."""
    chain: list[bytes] = []
    extend_chain(chain, engine.facts.root(tenant, salt), token_ids, engine.facts.block_size)
    return chain


def stored_kv(engine) -> dict[bytes, torch.Tensor]:
    """The blocks in the CPU tier, states too, by all tokens up to their end."""
    settle(engine)
    parts, found = engine.connector.parts, {}
    with parts.lock:
        blocks = {parts.cpu.record(one).block_id: one for one in parts.cpu.pool.cached_blocks()}
        for one in blocks.values():
            history, at = b"", one
            while at is not None:
                record = parts.cpu.record(at)
                history, at = record.tokens + history, blocks.get(record.parent_id)
            found[history] = parts.arena.tensor[one].clone()
    assert len(found) == len(blocks)
    return found


def same_kv(left: dict[bytes, torch.Tensor], right: dict[bytes, torch.Tensor]) -> bool:
    """But for rounding."""
    return left.keys() == right.keys() and all(torch.allclose(left[k], right[k], atol=1e-4) for k in left)


def stored_parents(engine) -> dict[bytes, bytes]:
    """Of every block that CPU or disk hold, its parent."""
    connector = engine.connector
    with connector.parts.lock:
        cpu = connector.parts.cpu
        found = {record.block_id: record.parent_id for record in map(cpu.record, cpu.pool.cached_blocks())}
    if connector.parts.disk is not None:
        found |= {entry.block_id: entry.parent_id for batch in connector.parts.disk.scan() for entry in batch}
    return found


def check_closed(engine, roots) -> int:
    """Invariant 8: the parent of every stored block is stored, or is one of `roots`; of an exact block, perhaps only
    its copy. Returns how many there are.
    """
    parents, known = stored_parents(engine), set(with_quantised(roots))
    known |= parents.keys()
    orphans = [one for one, parent in parents.items() if parent not in known and quantised_id(parent) not in known]
    assert not orphans, f"{len(orphans)} of {len(parents)} stored blocks have a parent that is stored nowhere"
    return len(parents)
