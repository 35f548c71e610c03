"""Trains the built-in model on conversations made on the fly, in some four hours on two cores.

Seeded (batch k is a function of the seed and k) and resumable. The length of the conversations and the learning rate
depend only on the step, not on time, so the script makes the same model on a slow or busy machine, except for rounding.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.builtin_model.batches import Batch, Encoder, make_batch
from bench.builtin_model.evaluate import quick_recall
from kvstore.engine.builtin import MODEL_DIR

NUM_STEPS = 13767
RUN_DIR = Path(__file__).parent / "run"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, for how long, and with which rates."""

    seed: int = 0
    num_steps: int = NUM_STEPS
    tokens_per_batch: int = 8192
    # (progress of the first cycle at which the stage ends, tokens of a conversation, share of dense conversations)
    stages: tuple[tuple[float, int, float], ...] = (
        (0.08, 128, 1.0), (0.16, 256, 0.5), (0.38, 256, 0.25), (0.58, 512, 0.25), (1.0, 1024, 0.15),
    )
    # Cycles of the learning rate (SGDR, Loshchilov and Hutter, 2017): (progress at which it ends, its highest rate, the
    # part of it that has this rate, share of crowded conversations, with several facts in most messages).
    cycles: tuple[tuple[float, float, float, float], ...] = (
        (6000 / NUM_STEPS, 1.0, 0.3, 0.0), (9000 / NUM_STEPS, 0.4, 0.0, 0.5), (11595 / NUM_STEPS, 0.3, 0.25, 0.4),
        (1.0, 0.3, 0.25, 0.3),
    )
    hidden_size: int = 192
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_size: int = 448
    lr_matrices: float = 0.02
    lr_others: float = 4e-3
    warmup_steps: int = 100
    compiled: bool = True

    def stage(self, progress: float) -> tuple[int, int, int, int]:
        """At a step: tokens of a conversation, conversations of a batch, how many of them are dense and crowded."""
        within = progress / self.cycles[0][0]
        length, dense = next((stage[1:] for stage in self.stages if within < stage[0]), self.stages[-1][1:])
        rows = self.tokens_per_batch // length
        crowded = next(cycle[3] for cycle in self.cycles if progress < cycle[0])
        return length, rows, round(dense * rows), round(crowded * rows)

    def rate(self, step: int, progress: float) -> float:
        """The factor of the learning rates: warm-up, level, down to nearly zero; then again, from lower levels."""
        begin, (end, highest, level, _) = next(
            (begin, cycle)
            for begin, cycle in zip((0.0, *(one[0] for one in self.cycles)), self.cycles, strict=False)
            if progress < cycle[0]
        )
        left = (end - progress) / (end - begin)
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return highest * warm * max(0.01, min(1.0, left / (1.0 - level)))


def build_model(plan: Plan, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(plan.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=plan.hidden_size, intermediate_size=plan.mlp_size,
        num_hidden_layers=plan.num_layers, num_attention_heads=plan.num_heads,
        num_key_value_heads=plan.num_kv_heads, head_dim=32, max_position_embeddings=1024,
        rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )
    return LlamaForCausalLM(config)


def build_optimizers(plan: Plan, model: LlamaForCausalLM) -> dict[str, torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return {
        "muon": torch.optim.Muon(matrices, lr=plan.lr_matrices, weight_decay=0.01, momentum=0.95),
        "adamw": torch.optim.AdamW(others, lr=plan.lr_others, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    }


def loss_of(model: LlamaForCausalLM, body: Callable, batch: Batch) -> torch.Tensor:
    """Weighted mean cross entropy of the assistant's tokens; `body` is the model without its head."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = body(input_ids=batch.tokens, use_cache=False).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1])[batch.positions]
        logits = torch.nn.functional.linear(chosen, model.lm_head.weight)
    losses = torch.nn.functional.cross_entropy(logits.float(), batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum()


class Trainer:
    """The state of a run: model, optimizers, step and seconds spent."""

    def __init__(self, plan: Plan, run_dir: Path, tokenizer_dir: Path = MODEL_DIR):
        self.plan, self.run_dir = plan, run_dir
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        self.encoder = Encoder(self.tokenizer)
        self.model = build_model(plan, self.tokenizer)
        # Compiled beside the model, so that exporting and generating use the plain one.
        self.body = torch.compile(self.model.model, dynamic=False) if plan.compiled else self.model.model
        self.optimizers = build_optimizers(plan, self.model)
        self.step, self.spent_s, self.tokens_seen = 0, 0.0, 0
        run_dir.mkdir(parents=True, exist_ok=True)

    @property
    def progress(self) -> float:
        return self.step / self.plan.num_steps

    def train_step(self) -> float:
        """Train one batch. Returns its loss."""
        progress = self.progress
        length, rows, dense, crowded = self.plan.stage(progress)
        batch = make_batch(self.encoder, f"{self.plan.seed}-{self.step}", length, rows, dense, crowded)
        rate = self.plan.rate(self.step, progress)
        for name, optimizer in self.optimizers.items():
            base = self.plan.lr_matrices if name == "muon" else self.plan.lr_others
            for group in optimizer.param_groups:
                group["lr"] = base * rate
        loss = loss_of(self.model, self.body, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens_seen += batch.tokens.numel()
        return loss.item()

    def save(self) -> None:
        """Write the checkpoint. The last rename completes it."""
        tensors, facts = {}, {"plan": asdict(self.plan), "step": self.step, "spent_s": self.spent_s,
                              "tokens_seen": self.tokens_seen}
        for name, value in self.model.named_parameters():
            tensors[f"model/{name}"] = value.detach().clone()
        for name, optimizer in self.optimizers.items():
            for index, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensors[f"{name}/{index}/{key}"] = torch.as_tensor(value).clone()
        part = self.run_dir / "checkpoint.part"
        save_file(tensors, part, metadata={"run": json.dumps(facts)})
        part.rename(self.run_dir / "checkpoint.safetensors")
        (self.run_dir / "checkpoint.json").write_text(json.dumps(facts, indent=1))

    def load(self) -> None:
        """Continue where `save` left off."""
        tensors = load_file(self.run_dir / "checkpoint.safetensors")
        facts = json.loads((self.run_dir / "checkpoint.json").read_text())
        self.step, self.spent_s, self.tokens_seen = facts["step"], facts["spent_s"], facts["tokens_seen"]
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(tensors[f"model/{name}"])
        for name, optimizer in self.optimizers.items():
            states: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in tensors.items():
                owner, _, rest = key.partition("/")
                if owner == name:
                    index, _, field = rest.partition("/")
                    states.setdefault(int(index), {})[field] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": states})

    def export(self, out: Path) -> None:
        """Write the files that `from_pretrained` loads: config, weights, tokenizer."""
        self.model.generation_config.do_sample = False
        self.model.save_pretrained(out)
        self.tokenizer.save_pretrained(out)


def run(trainer: Trainer, out: Path, check_every_s: float) -> None:
    """Train to the end of the plan, with a line in the log now and then."""
    log = (trainer.run_dir / "train.log").open("a", buffering=1)

    def say(line: str) -> None:
        print(line, flush=True)
        log.write(line + "\n")

    say(f"plan {json.dumps(asdict(trainer.plan))} from step {trainer.step}")
    smooth, next_check_s = math.nan, trainer.spent_s + check_every_s
    began = time.monotonic() - trainer.spent_s
    while trainer.progress < 1.0:
        length, *_ = trainer.plan.stage(trainer.progress)
        loss = trainer.train_step()
        trainer.spent_s = time.monotonic() - began
        smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        if trainer.step % 100 == 0 or trainer.step in (5, 10, 20, 50):
            say(f"step {trainer.step} of {trainer.plan.num_steps} length {length} tokens "
                f"{trainer.tokens_seen / 1e6:.2f}M loss {smooth:.4f} trained {trainer.spent_s / 60:.1f} min")
        if trainer.spent_s >= next_check_s or trainer.progress >= 1.0:
            next_check_s = trainer.spent_s + check_every_s
            trainer.save()
            trainer.export(out)
            recall = quick_recall(trainer.model, trainer.tokenizer, length)
            say(f"step {trainer.step} held-out at {length} tokens: {recall}")
    say(f"done: {trainer.step} steps, {trainer.tokens_seen / 1e6:.1f}M tokens, "
        f"{(time.monotonic() - began) / 60:.1f} min of wall time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=MODEL_DIR)
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR)
    parser.add_argument("--check-every-s", type=float, default=300.0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    trainer = Trainer(Plan(seed=args.seed, num_steps=args.steps), args.run_dir)
    if args.resume:
        trainer.load()
    run(trainer, args.out, args.check_every_s)


if __name__ == "__main__":
    main()
