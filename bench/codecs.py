"""What does each codec of stored KV save, what does it cost, and what would a lossy one change?

In three parts. rates: size and speed of blocks in memory, one thread, beside memcpy. quality: what the model says of
the rest of a conversation whose first part was quantised: with int8 as the store does it, and with int8 and int4 as
KIVI and KVQuant do: keys by channel in groups of 64 tokens, as they are stored or rotated; values by token and head;
each group with a minimum and a scale in 16 bits. ttft: a returning turn after a restart, from the disk, with
the page cache warm and cold, the codecs in turns.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from bench.builtin_model.batches import Encoder
from bench.builtin_model.conversations import Conversation, Turn
from bench.builtin_model.evaluate import held_out_conversations, is_right
from bench.common import Report, Row, alternate, arguments, median, run, say, spread
from bench.tiers import records_of, timed
from bench.truncation import Branch, Branches, Memory, kept_facts, losses_of
from bench.ttft import Bench, Person, Plan
from kvstore.blocks.ids import quantised_id
from kvstore.blocks.records import BlockRecord
from kvstore.config import CODEC_NAMES
from kvstore.disk import codec
from kvstore.disk.check import DATA_FILE
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import load
from kvstore.engine.model.probe import intercept
from kvstore.kernels import exact12, int8
from kvstore.memory.layout import LayerShape

GROUP = 64  # tokens that share a channel's minimum and scale
SCALE_BITS = 16  # of a minimum, and of a scale
STORED = "int8, as stored"
LOSSY = {STORED: (8, True)}
LOSSY |= {f"int{bits}, keys {where}": (bits, where == "raw") for bits in (8, 4) for where in ("raw", "rotated")}
LONGEST = 840  # tokens of a conversation; questions and answers follow
PARTS = ("rates", "quality", "ttft")
ROLES = ("user", "assistant")
EXACT = "exact"
LARGE_BYTES, NUM_LARGE = 2 << 20, 32
MOST_QUESTIONS = 3  # of a conversation
NEW_TOKENS = 64


# -- texts -----------------------------------------------------------------------------------------------------------
class Speech:
    """How conversations become token ids: by the built-in model's template, or as plain text."""

    def __init__(self, tokenizer: Any, is_builtin: bool) -> None:
        self.core = tokenizer.backend_tokenizer
        self._encoder = Encoder(tokenizer) if is_builtin else None
        begin = tokenizer.bos_token_id
        self.begin: list[int] = [] if begin is None else [begin]
        self.opening = [self._encoder.roles["assistant"]] if self._encoder else self.encode("assistant:")
        self._line_end = self.encode("\n")  # which may be no token at all: then nothing ends an answer
        self.end = self._encoder.end if self._encoder else (self._line_end or [-1])[-1]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.core.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def message(self, role: str, content: str) -> list[int]:
        if self._encoder is not None:
            return self._encoder.message(role, content)
        return self.encode(f"{role}: {content}") + self._line_end

    def conversations(self, seed: int, count: int) -> list[Conversation]:
        return held_out_conversations(self, seed, count, LONGEST)  # type: ignore[arg-type]

    def head(self, made: Conversation) -> list[int]:
        return [*self.begin, *(self.message("system", made.system) if made.system else [])]


# -- rates -----------------------------------------------------------------------------------------------------------
def bench_rates(report: Report, model: str | None, repeats: int) -> None:
    """Each codec as the tier uses it, with header and checksum, and exact12 alone; blocks as they are, and larger."""
    computed = blocks_of(model)
    whole = b"".join(computed)
    large = [(whole[i * 4096 :] + whole * -(-LARGE_BYTES // len(whole)))[:LARGE_BYTES] for i in range(NUM_LARGE)]
    for blocks in (computed, large):
        num_bytes = len(blocks) * len(blocks[0])
        for name, (encode, decode, check) in ways(blocks).items():
            encoded = [encode(block) for block in blocks]
            intos = [np.empty(len(block), np.uint8) for block in blocks]
            measures: dict[str, Callable[[], float]] = {
                "memcpy": partial(timed, partial(each, np.copyto, intos, [np.frombuffer(b, np.uint8) for b in blocks])),
                "encode": partial(timed, partial(each, encode, blocks)),
                "decode": partial(timed, partial(each, decode, encoded, intos)),
            }
            times = alternate(measures, repeats)
            assert not check or all(into.tobytes() == block for into, block in zip(intos, blocks, strict=True))
            sizes = {} if blocks is large else {"ratio": sum(map(len, encoded)) / num_bytes}
            report.add(part="rates", codec=name, state=f"{len(blocks[0]):,} bytes a block", **sizes,
                       **rates(times, num_bytes), repeats=repeats)  # fmt: skip


def each(work: Callable[..., object], *columns: Sequence[Any]) -> None:
    for row in zip(*columns, strict=True):
        work(*row)


Way = tuple[Callable[[bytes], Any], Callable[[Any, np.ndarray], object], bool]


def ways(blocks: Sequence[bytes]) -> dict[str, Way]:
    """By name: what encodes a block, what decodes it into memory, and whether that gives the same bits."""
    exact, found = records_of(1, seed=1)[0], dict[str, Way]()
    for name, chosen in codec.CODECS.items():
        is_exact = chosen is not codec.Codec.INT8
        record = exact if is_exact else replace(exact, block_id=quantised_id(exact.block_id))
        found[name] = (partial(codec.encode, record, codec=chosen), partial(_decode, record), is_exact)
    found["exact12 alone"] = (lambda block: exact12.encode(np.frombuffer(block, np.uint8)), exact12.decode, True)
    return found


def _decode(record: BlockRecord, value: bytes, into: np.ndarray) -> object:
    return codec.decode_into(value, record, into.data)


def rates(times: dict[str, list[float]], num_bytes: int) -> dict[str, float | None]:
    """GB/s of raw bytes, and the median of the ratios to memcpy in the same round."""
    found: dict[str, float | None] = {}
    for name in ("encode", "decode"):
        ratios = [a / b for a, b in zip(times["memcpy"], times[name], strict=True)]
        found |= {f"{name}_gb_s": num_bytes / median(times[name]) / 1e9, f"{name}_of_memcpy": median(ratios)}
    return found | {"spread": spread(times["decode"])}


def blocks_of(model: str | None) -> list[bytes]:
    """Blocks of raw keys and values in bfloat16 that a model computes for a held-out conversation."""
    from kvstore import CacheTiers, Engine, SamplingParams

    tiers = CacheTiers(hbm="256MiB", cpu="256MiB")
    with Engine(model, cache_tiers=tiers, device="cpu", dtype="bfloat16") as engine:
        speech = Speech(engine.tokenizer, model is None)
        made = speech.conversations(7, 1)[0]
        engine.generate([speech.head(made) + said_in(speech, made.turns)], SamplingParams(max_tokens=1))
        engine.check_integrity()  # waits until everything is saved
        connector: Any = engine.connector  # a benchmark may look inside
        arena_blocks = connector.parts.cpu.pool.cached_blocks()
        return [bytes(connector.parts.arena.view(arena_block)) for arena_block in arena_blocks]


# -- quality ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Quality:
    """What one way of keeping the first part of conversations gives. kl, same: of each token of the rest, beside exact
    KV; losses: - log p of the assistant's tokens there; right: answers about what the first part told.
    """

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)


def grouped(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """x as it comes back from so many bits, with a minimum and a scale for all along `dim`."""
    low = x.amin(dim, keepdim=True).half().float()
    scale = ((x.amax(dim, keepdim=True) - low) / (2**bits - 1)).half().float()
    steps = ((x - low) / scale.clamp_min(1e-8)).round().clamp(0, 2**bits - 1)
    return low + steps * scale


def by_channel(key: torch.Tensor, bits: int) -> torch.Tensor:  # [num_tokens, num_kv_heads, head_dim]
    return grouped(key.float().unflatten(0, (-1, GROUP)), bits, 1).flatten(0, 1).to(key.dtype)


def as_stored(x: torch.Tensor) -> torch.Tensor:
    """x as it comes back from `kvstore.kernels.int8`, but for the rounding to bfloat16 before."""
    groups = x.float().reshape(-1, int8.GROUP)
    step = torch.exp2(groups.abs().amax(1, keepdim=True).clamp_min(1e-30).log2().floor() - 6)
    return ((groups / step).round().clamp(-127, 127) * step).reshape(x.shape).to(x.dtype)


def as_held(whole: Memory, num_tokens: int) -> Memory:
    """A memory of the first tokens with the store's int8."""
    layers = [(as_stored(key[:num_tokens]), as_stored(value[:num_tokens])) for key, value in whole.layers]
    kept = Memory(whole.model, whole.token_ids[:num_tokens], whole.positions[:num_tokens], layers)
    return kept.keep([(0, num_tokens)], num_tokens, rotate=True)


def quantised(whole: Memory, num_tokens: int, bits: int, is_raw: bool) -> Memory:
    """A memory of the first tokens, a multiple of GROUP, with keys quantised before they are rotated or afterwards."""
    layers = [
        (by_channel(key[:num_tokens], bits) if is_raw else key[:num_tokens], grouped(value[:num_tokens], bits, -1))
        for key, value in whole.layers
    ]
    kept = Memory(whole.model, whole.token_ids[:num_tokens], whole.positions[:num_tokens], layers)
    kept = kept.keep([(0, num_tokens)], num_tokens, rotate=True)
    if not is_raw:
        for cache, _ in kept.caches:
            rotated = cache.flatten(0, 1)[:num_tokens]
            rotated.copy_(by_channel(rotated, bits))
    return kept


def said_in(speech: Speech, turns: Sequence[Turn]) -> list[int]:
    """The token ids of these turns."""
    return [one for turn in turns for role in ROLES for one in speech.message(role, getattr(turn, role))]


def measure(model: PositionFreeModel, speech: Speech, made: Conversation, seed: int, found: dict[str, Quality]) -> None:
    """Keep the first three quarters of a conversation in each way, read the rest, and ask for what was told."""
    first = 3 * len(made.turns) // 4
    history = speech.head(made) + said_in(speech, made.turns[:first])
    num_coded = len(history) // GROUP * GROUP
    rest, is_answer = history[num_coded:], [False] * (len(history) - num_coded)
    for turn in made.turns[first:]:
        user, answer = (speech.message(role, getattr(turn, role)) for role in ROLES)
        rest += user + answer
        is_answer += [False] * (len(user) + len(speech.opening)) + [True] * (len(answer) - len(speech.opening))
    whole = Memory(model)
    whole.read(history)
    arms = {EXACT: whole.keep([(0, num_coded)], num_coded, rotate=True)}
    arms |= {STORED: as_held(whole, num_coded)}
    arms |= {name: quantised(whole, num_coded, *how) for name, how in LOSSY.items() if name != STORED}
    logits = {name: memory.read(rest) for name, memory in arms.items()}
    exact = logits[EXACT].log_softmax(-1)
    for name, quality in found.items():
        other = logits[name].log_softmax(-1)
        quality.kl += (exact.exp() * (exact - other)).sum(-1).tolist()
        quality.same += (exact.argmax(-1) == other.argmax(-1)).tolist()
        losses = losses_of(logits[name][:-1], rest[1:])
        quality.losses += [loss for loss, counts in zip(losses, is_answer[1:], strict=True) if counts]
    questions = [one for one in kept_facts(made.turns, 0, random.Random(seed)) if one.asked.told_turn < first]
    for question in questions[:MOST_QUESTIONS]:
        prompt = speech.message("user", question.user) + speech.opening
        branches = {name: Branch(memory, prompt) for name, memory in arms.items()}
        Branches(list(branches.values()), speech.end).run()
        for name, branch in branches.items():
            text = speech.core.decode(branch.said, skip_special_tokens=False)
            found[name].right.append(is_right(question.asked, text))


def part_of_bfloat16(bits: int, key_dim: int, value_dim: int) -> float:
    """The bits of a token's key and value, with their part of minima and scales, of those in bfloat16."""
    key_bits = key_dim * (bits + 2 * SCALE_BITS / GROUP)
    return (key_bits + value_dim * bits + 2 * SCALE_BITS) / (16 * (key_dim + value_dim))


def bench_quality(report: Report, model_name: str | None, num_conversations: int) -> None:
    loaded = load(model_name, "cpu", "float32", None)
    model, speech = (
        intercept(loaded.model, loaded.max_model_len, pack=True),
        Speech(loaded.tokenizer, model_name is None),
    )
    found = {name: Quality() for name in (EXACT, *LOSSY)}
    try:
        for number, made in enumerate(speech.conversations(0, num_conversations)):
            measure(model, speech, made, number, found)
            say(f"{number + 1} of {num_conversations} conversations")
    finally:
        show_quality(report, found, model.spec.shapes[0])


def show_quality(report: Report, found: dict[str, Quality], shape: LayerShape) -> None:
    for name, one in found.items():
        ratio = None if name == EXACT else part_of_bfloat16(LOSSY[name][0], shape.key_dim, shape.value_dim)
        ratio = (8 + 8 / int8.GROUP) / 16 if name == STORED else ratio
        if one.losses:
            report.add(
                part="quality", codec=name, ratio=ratio, same_top=sum(one.same) / len(one.same),
                kl=sum(one.kl) / len(one.kl), kl_most=max(one.kl), tokens=len(one.kl),
                perplexity=math.exp(sum(one.losses) / len(one.losses)), recall=f"{sum(one.right)} / {len(one.right)}",
            )  # fmt: skip


# -- TTFT ------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Returns:
    """Turns that return to a history on disk: seconds to the first token, and of the processors."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def turn(self, person: Person) -> None:
        started = time.process_time()
        self.wall_s.append(person.turn_s("disk"))
        self.cpu_s.append(time.process_time() - started)


def bench_ttft(report: Report, model: str | None, names: Sequence[str], plan: Plan, folder: Path) -> None:
    """A store for each codec, with the same history. Warm: all of them open in one process, in turns; cold: each is
    opened again, in turns.
    """
    benches = {name: Bench(model, "bfloat16", folder / name, plan, report, None, name) for name in names}
    warm, cold = ({name: Returns() for name in names} for _ in range(2))
    with ExitStack() as opened:
        people = {name: bench.person(bench.tiers) for name, bench in benches.items()}
        for person in people.values():
            opened.enter_context(person.engine)
            person.hit_s("disk")  # a warm-up
        for number in range(plan.repeats):
            for name in names if number % 2 == 0 else reversed(names):
                person = people[name]
                person.keep()
                person.engine.loop.call(person.engine.loop.pool.evict_all)
                person.evict_cpu()
                warm[name].turn(person)
    for number in range(plan.restarts):
        for name in names if number % 2 == 0 else reversed(names):
            with benches[name].restarted(is_cold=True) as again:
                if again is not None:
                    cold[name].turn(again)
    for state, found in (("warm", warm), ("cold", cold)):
        for name, one in found.items():
            if one.wall_s:
                size = (folder / name / "blocks" / DATA_FILE).stat().st_size
                report.add(part="ttft", codec=name, state=f"page cache {state}", file_mb=size / 1e6,
                           **beside(one, found[names[0]]))  # fmt: skip


def beside(one: Returns, first: Returns) -> dict[str, Any]:
    """Medians, and those of the ratios of the first codec to this one in the same round."""
    found: dict[str, Any] = {"ttft_ms": 1000 * median(one.wall_s), "cpu_ms": 1000 * median(one.cpu_s)}
    for what, mine, others in (("ttft", one.wall_s, first.wall_s), ("cpu", one.cpu_s, first.cpu_s)):
        found[f"first_over_this_{what}"] = median([a / b for a, b in zip(others, mine, strict=True)])
    return found | {"spread": spread(one.wall_s), "repeats": len(one.wall_s)}


def shown(row: Row) -> Row:
    """One column for all numbers, because each part has others."""
    numbers = [f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float | int)]
    recall = [f"recall {row['recall']}"] if "recall" in row else []
    return {"codec": row["codec"], "state": row.get("state", ""), "found": ", ".join(numbers + recall)}


def body(parsed: argparse.Namespace, report: Report) -> None:
    repeats, num_conversations = parsed.repeats, parsed.conversations
    restarts, history = parsed.restarts, parsed.history
    if parsed.quick:
        repeats, num_conversations, restarts, history = 3, min(num_conversations, 2), 1, min(history, 512)
    parts = parsed.part or PARTS
    with torch.inference_mode():
        if "rates" in parts:
            bench_rates(report, parsed.model, repeats)
        if "quality" in parts:
            bench_quality(report, parsed.model, num_conversations)
    if "ttft" in parts:
        with TemporaryDirectory(prefix="kvstore-bench-", dir=parsed.dir) as folder:
            plan = Plan(history, NEW_TOKENS, repeats, restarts, 1)
            bench_ttft(report, parsed.model, parsed.codec or CODEC_NAMES, plan, Path(folder))


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("codecs", __doc__.split("\n")[0])
    parser.add_argument("--model", metavar="DIR", help="measure this model instead of the built-in one")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be repeated")
    parser.add_argument(
        "--codec", action="append", choices=CODEC_NAMES, help="TTFT of this one beside the first; repeat"
    )
    parser.add_argument("--conversations", type=int, default=100, help="held-out ones, for quality (default: 100)")
    parser.add_argument(
        "--history", type=int, default=896, metavar="N", help="tokens of a returning turn (default: 896)"
    )
    parser.add_argument("--repeats", type=int, default=15, help="measurements of each rate (default: 15)")
    parser.add_argument("--restarts", type=int, default=7, help="of each codec and page cache (default: 7)")
    parser.add_argument("--dir", metavar="DIR", help="where stores are made (default: the temporary directory)")
    title = "Codecs of stored KV: size, speed, what lossy ones change, and TTFT from the disk (CPU); medians"
    return run(body, parser.parse_args(argv), title, shown)


if __name__ == "__main__":
    sys.exit(main())
