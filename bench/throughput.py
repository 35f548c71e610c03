"""How fast is the engine beside transformers, and what does its scheduler cost? One process, alternating, medians.

Model M: a random Llama of about 110 million parameters in bf16, made at the start and removed at the end. With
--shape qwen3.5-0.8b: a model with states, in the sizes of Qwen 3.5 0.8B. With --beams: a beam search, of the built-in
model.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.common import (
    QWEN_HYBRID,
    LlamaShape,
    Report,
    alternate,
    arguments,
    median,
    random_llama,
    random_prompts,
    random_qwen_hybrid,
    run,
    spread,
)

PREFILL_TOKENS = 1024
PROMPT_TOKENS, DECODE_TOKENS = 128, 64
NUM_RUNNING = 64  # requests running at once when the scheduler's cost is measured
MODEL_M = LlamaShape(
    hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=4, intermediate_size=2400, vocab_size=16384
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A model and what is asked of it: our speed over transformers'. decode: by the size of the batch. prompt_tokens,
    decode_tokens: of each request that decodes; few where transformers takes seconds for a prompt.
    """

    shape: LlamaShape
    made: Callable[[LlamaShape], AbstractContextManager[tuple[Path, int]]]
    prefill: float
    decode: dict[int, float]
    prompt_tokens: int = PROMPT_TOKENS
    decode_tokens: int = DECODE_TOKENS


SHAPES = {
    "m": Asked(MODEL_M, random_llama, 1.1, {1: 1.3, 8: 1.5}),
    "qwen3.5-0.8b": Asked(QWEN_HYBRID, random_qwen_hybrid, 1.0, {1: 1.3, 8: 3.0}, 32, 16),
}


@dataclass(slots=True)
class Ours:
    """Our engine. Each measurement has its own salt, so nothing hits the prefix cache. vocab_size: the model's."""

    engine: Any
    vocab_size: int
    salts: Any = field(default_factory=itertools.count)

    def generate_s(self, prompts: list[list[int]], num_tokens: int, salt: str | None = None, beams: int = 0) -> float:
        from kvstore import SamplingParams

        params = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, use_beam_search=beams > 0, beam_width=beams or None
        )
        start_s = time.perf_counter()
        outputs = self.engine.generate(prompts, params, cache_salt=salt or f"bench-{next(self.salts)}")
        elapsed_s = time.perf_counter() - start_s
        assert all(len(output.token_ids) == num_tokens for output in outputs)
        return elapsed_s

    def step_totals(self) -> dict[str, float]:
        return dict(self.engine.stats()["step"])


@dataclass(slots=True)
class Peer:
    """The unmodified transformers model."""

    model: Any

    def prefill_s(self, prompt: list[int]) -> float:
        """One forward with its own cache. Computes only the logits of the last token, as an engine does."""
        import torch

        ids = torch.tensor([prompt])
        with torch.inference_mode():
            start_s = time.perf_counter()
            logits = self.model(ids, use_cache=True, logits_to_keep=1).logits
            int(logits[0, -1].argmax())
            return time.perf_counter() - start_s

    def generate_s(self, prompts: list[list[int]], num_tokens: int, beams: int = 1) -> float:
        import torch

        ids = torch.tensor(prompts)
        start_s = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=beams,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
        elapsed_s = time.perf_counter() - start_s
        assert out.shape[1] == len(prompts[0]) + num_tokens
        return elapsed_s


def compare(report: Report, name: str, num_tokens: int, times: dict[str, list[float]], target: float) -> None:
    """One row: tokens/s of both sides from their medians, and the ratio."""
    ours_s, peer_s = median(times["ours"]), median(times["transformers"])
    report.add(
        measure=name,
        ours=num_tokens / ours_s,
        transformers=num_tokens / peer_s,
        unit="tok/s",
        ratio=peer_s / ours_s,
        target=f">= {target}",
        spread_ours=spread(times["ours"]),
        spread_peer=spread(times["transformers"]),
        repeats=len(times["ours"]),
    )


def bench_prefill(ours: Ours, peer: Peer, report: Report, repeats: int, target: float) -> None:
    prompt = random_prompts(1, PREFILL_TOKENS, ours.vocab_size, seed=1)
    measures = {"ours": lambda: ours.generate_s(prompt, 1), "transformers": lambda: peer.prefill_s(prompt[0])}
    times = alternate(measures, repeats, warm_ups=2)
    compare(report, f"prefill {PREFILL_TOKENS:,}", PREFILL_TOKENS, times, target)


def bench_decode(ours: Ours, peer: Peer, report: Report, repeats: int, batch: int, asked: Asked) -> None:
    """Only decode: the time for 1 + 64 tokens, say, less the time for 1, each side with its own cache."""
    num_tokens = asked.decode_tokens
    prompts = random_prompts(batch, asked.prompt_tokens, ours.vocab_size, seed=2)
    measures = {
        "ours": lambda: ours.generate_s(prompts, 1 + num_tokens) - ours.generate_s(prompts, 1),
        "transformers": lambda: peer.generate_s(prompts, 1 + num_tokens) - peer.generate_s(prompts, 1),
    }
    times = alternate(measures, repeats)
    compare(report, f"decode, batch {batch}", batch * num_tokens, times, asked.decode[batch])


def bench_beams(ours: Ours, peer: Peer, report: Report, repeats: int, beams: int) -> None:
    """As `bench_decode`: tokens of the answer, not of all beams."""
    prompts = random_prompts(1, PROMPT_TOKENS, ours.vocab_size, seed=5)
    sides = {
        "ours": lambda count: ours.generate_s(prompts, count, beams=beams),
        "transformers": lambda count: peer.generate_s(prompts, count, beams),
    }
    measures = {name: lambda side=side: side(1 + DECODE_TOKENS) - side(1) for name, side in sides.items()}
    compare(report, f"decode, {beams} beams", DECODE_TOKENS, alternate(measures, repeats), 1.0)


def bench_step(ours: Ours, report: Report, repeats: int) -> None:
    """Where the time of a decode step with 64 running requests goes, from the engine's own running totals."""
    prompts = random_prompts(NUM_RUNNING, 16, ours.vocab_size, seed=3)
    parts = ("schedule_s", "build_s", "forward_s", "sample_s", "update_s")
    found: dict[str, list[float]] = {part: [] for part in parts}
    for _ in range(repeats):
        marks = [ours.step_totals()]
        for num_tokens in (1, 1 + DECODE_TOKENS):
            ours.generate_s(prompts, num_tokens)
            marks.append(ours.step_totals())
        num_steps = marks[2]["num_steps"] - 2 * marks[1]["num_steps"] + marks[0]["num_steps"]
        for part in parts:
            found[part].append((marks[2][part] - 2 * marks[1][part] + marks[0][part]) / num_steps * 1000)
    for part in parts:
        name = f"step of {NUM_RUNNING}: {part.removesuffix('_s')}"
        report.add(measure=name, ours=median(found[part]), unit="ms", repeats=repeats)
    control = [sum(values) for values in zip(found["schedule_s"], found["build_s"], strict=True)]
    name = f"step of {NUM_RUNNING}: schedule + build"
    report.add(measure=name, ours=median(control), unit="ms", target="< 1", repeats=repeats)


def profile_decode(ours: Ours, batch: int) -> None:
    """The profiler's table of decode steps whose prompts are already in the prefix cache."""
    from torch.profiler import ProfilerActivity, profile

    prompts = random_prompts(batch, PROMPT_TOKENS, ours.vocab_size, seed=4)
    salt = f"profile-{batch}"
    ours.generate_s(prompts, 1, salt)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        elapsed_s = ours.generate_s(prompts, 1 + DECODE_TOKENS, salt)
    print(f"\nbatch {batch}: {1 + DECODE_TOKENS} steps in {elapsed_s:.2f} s under the profiler")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40))


def load_peer(folder: Path) -> Peer:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return Peer(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())


def body(parsed: argparse.Namespace, report: Report) -> None:
    from kvstore import CacheTiers, Engine

    repeats = 2 if parsed.quick else parsed.repeats
    if parsed.beams:
        from kvstore.engine.builtin import MODEL_DIR

        peer = load_peer(MODEL_DIR)
        with Engine(cache_tiers=CacheTiers(hbm="64MiB"), device="cpu", dtype="bfloat16") as engine:
            bench_beams(Ours(engine, engine.facts.vocab_size), peer, report, repeats, parsed.beams)
        return
    asked = SHAPES[parsed.shape]
    if parsed.layers:
        asked = replace(asked, shape=asked.shape.with_layers(parsed.layers))
    with asked.made(asked.shape) as (folder, num_parameters):
        print(f"{parsed.shape}: {num_parameters / 1e6:.1f} million parameters, bf16", file=sys.stderr, flush=True)
        peer = load_peer(folder)
        tiers = CacheTiers(hbm="1GiB")
        with Engine(str(folder), cache_tiers=tiers, device="cpu", dtype="bfloat16", max_model_len=2048) as engine:
            ours = Ours(engine, asked.shape.vocab_size)
            if parsed.profile:
                for batch in (1, 8):
                    profile_decode(ours, batch)
                return
            bench_prefill(ours, peer, report, repeats, asked.prefill)
            for batch in asked.decode:
                bench_decode(ours, peer, report, repeats, batch, asked)
            if parsed.shape == "m":
                bench_step(ours, report, repeats)


def main() -> int:
    parser = arguments("throughput", __doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each kind (default: 7)")
    parser.add_argument("--profile", action="store_true", help="print where decode steps spend their time instead")
    parser.add_argument("--beams", type=int, help="so many, of the built-in model, instead")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="m", help="the model's (default: m)")
    parser.add_argument("--layers", type=int, help="so many of them, and as large a part of the vocabulary: in a hurry")
    return run(body, parser.parse_args(), "Engine beside transformers, random weights, bf16, CPU; medians")


if __name__ == "__main__":
    sys.exit(main())
