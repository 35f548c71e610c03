"""Measures the built-in model's recall on held-out names, values and phrasings combined.

Needs only torch and transformers. Every question follows the history of its conversation. The answer is generated
greedily, and must contain the exact value. The history has the reference answers, or with `--own-history` those of the
model itself. `--blind` takes the second set of held-out phrasings; `--plain` two facts in the plainest words instead,
at the beginning of a conversation, and always the model's own answers.
"""

import argparse
import json
import math
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.builtin_model.batches import Encoder
from bench.builtin_model.conversations import (
    UNKNOWN,
    Asked,
    Conversation,
    make_conversation,
    plain_conversation,
)
from bench.builtin_model.report import Outcome, rows_of, table
from bench.builtin_model.values import HELD_OUT
from kvstore.engine.builtin import MODEL_DIR

WINDOW = 1024
MAX_ANSWER_TOKENS = 72


@dataclass(frozen=True, slots=True)
class Probe:
    """One question, its history as tokens, and what was asked."""

    prompt: list[int]
    asked: tuple[Asked, ...]
    distances: tuple[int, ...]  # tokens from the end of the telling to the question


def is_right(asked: Asked, answer: str) -> bool:
    """Whether the answer contains the whole value, or says that it is not known."""
    if asked.value is None:
        return f"{asked.kind.yours} is {UNKNOWN}" in answer
    return re.search(rf"(?<!\w){re.escape(asked.value)}(?!\w)", answer) is not None


def probes_of(encoder: Encoder, conversation: Conversation) -> list[Probe]:
    """The questions of a conversation, each after the reference answers to the previous ones."""
    tokens = [encoder.bos]
    if conversation.system:
        tokens += encoder.message("system", conversation.system)
    found, told_at = [], []
    for turn in conversation.turns:
        start = len(tokens)
        tokens += encoder.message("user", turn.user)
        told_at.append(len(tokens))
        if turn.asked:
            distances = tuple(start - told_at[a.told_turn] if a.value else 0 for a in turn.asked)
            found.append(Probe([*tokens, encoder.roles["assistant"]], turn.asked, distances))
        tokens += encoder.message("assistant", turn.assistant)
    return found


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompts: list[list[int]], end: int, pad: int) -> list[list[int]]:
    """Greedy answers to prompts of different lengths, padded on the left."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=MAX_ANSWER_TOKENS,
                         do_sample=False, eos_token_id=end, pad_token_id=pad)
    answers = []
    for row in out[:, longest:].tolist():
        answers.append(row[: row.index(end)] if end in row else row)
    return answers


def ask_all(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, probes: list[Probe],
            batch_size: int = 32) -> list[Outcome]:
    """Generate the answers, for questions of similar length together."""
    outcomes = []
    probes = sorted(probes, key=lambda probe: len(probe.prompt))
    for start in range(0, len(probes), batch_size):
        group = probes[start : start + batch_size]
        answers = greedy(model, [p.prompt for p in group], tokenizer.eos_token_id, tokenizer.pad_token_id)
        for probe, ids in zip(group, answers, strict=True):
            text = tokenizer.decode(ids)
            outcomes += [
                Outcome(asked, distance, text, is_right(asked, text))
                for asked, distance in zip(probe.asked, probe.distances, strict=True)
            ]
    return outcomes


@dataclass(slots=True)
class Chat:
    """A conversation in which the model's own answers are the history."""

    conversation: Conversation
    tokens: list[int]
    told_at: list[int] = field(default_factory=list)

    def hear(self, encoder: Encoder, index: int) -> tuple[int, ...]:
        """Append the user's next message. Returns the distances of the facts that it asks for."""
        turn, start = self.conversation.turns[index], len(self.tokens)
        self.tokens += encoder.message("user", turn.user)
        self.told_at.append(len(self.tokens))
        self.tokens.append(encoder.roles["assistant"])
        return tuple(start - self.told_at[a.told_turn] if a.value else 0 for a in turn.asked)


def ask_in_own_history(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast,
                       made: list[Conversation]) -> list[Outcome]:
    """Run all conversations side by side. Each ends when its window is full."""
    encoder, outcomes = Encoder(tokenizer), []
    chats = []
    for one in made:
        system = encoder.message("system", one.system) if one.system else []
        chats.append(Chat(one, [encoder.bos, *system]))
    for index in range(max(len(one.turns) for one in made)):
        heard = [(chat, chat.hear(encoder, index)) for chat in chats if index < len(chat.conversation.turns)]
        heard = [(chat, far) for chat, far in heard if len(chat.tokens) + MAX_ANSWER_TOKENS < WINDOW]
        chats = [chat for chat, _ in heard]
        if not heard:
            break
        answers = greedy(model, [chat.tokens for chat in chats], encoder.end, encoder.pad)
        for (chat, distances), ids in zip(heard, answers, strict=True):
            chat.tokens += [*ids, encoder.end]
            text = tokenizer.decode(ids)
            outcomes += [
                Outcome(asked, distance, text, is_right(asked, text))
                for asked, distance in zip(chat.conversation.turns[index].asked, distances, strict=True)
            ]
    return outcomes


def held_out_conversations(
    encoder: Encoder, seed: int, count: int, max_tokens: int, blind: bool = False
) -> list[Conversation]:
    return [
        make_conversation(f"evaluation-{seed}-{n}", HELD_OUT, max_tokens=max_tokens,
                          count_tokens=encoder.count, ask_once=True, blind=blind)
        for n in range(count)
    ]


def quick_recall(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, max_tokens: int) -> str:
    """A small sample for the training log: recall of told facts, and of unknown ones."""
    encoder = Encoder(tokenizer)
    made = held_out_conversations(encoder, 1, max(8, 12000 // max_tokens), max_tokens)
    probes = [probe for one in made for probe in probes_of(encoder, one)][:96]
    outcomes = ask_all(model, tokenizer, probes)
    told = [o.right for o in outcomes if o.asked.value is not None]
    unknown = [o.right for o in outcomes if o.asked.value is None]
    return f"told {sum(told)}/{len(told)}, unknown {sum(unknown)}/{len(unknown)}"


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, encoder: Encoder, made: list[Conversation]) -> float:
    """The perplexity per token of the assistant's reference messages, over whole conversations."""
    total, count = 0.0, 0
    for conversation in made:
        ids, weights = encoder.conversation(conversation)
        tokens = torch.tensor([ids])
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        chosen = losses[torch.tensor(weights[1:]) > 0]
        total, count = total + chosen.sum().item(), count + chosen.numel()
    return math.exp(total / max(count, 1))


def evaluate(
    model_dir: Path, num_conversations: int, seed: int, max_tokens: int, own_history: bool, blind: bool = False,
    plain: bool = False,
) -> dict:
    """Ask all questions of so many held-out conversations. Returns the content for `--json`."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    encoder = Encoder(tokenizer)
    if plain:
        made = [plain_conversation(f"{seed}-{n}") for n in range(num_conversations)]
    else:
        made = held_out_conversations(encoder, seed, num_conversations, max_tokens, blind)
    if own_history or plain:
        outcomes = ask_in_own_history(model, tokenizer, made)
    else:
        outcomes = ask_all(model, tokenizer, [probe for one in made for probe in probes_of(encoder, one)])
    rows = rows_of(outcomes)
    wrong = [
        {"kind": o.asked.kind.key, "value": o.asked.value, "answer": o.answer, "distance": o.distance,
         "corrected": o.asked.corrected}
        for o in outcomes if not o.right
    ]
    return {
        "conversations": num_conversations, "seed": seed, "max_tokens": max_tokens, "own_history": own_history,
        "perplexity": perplexity(model, encoder, made[:100]), "table": table(rows),
        "rows": [{**asdict(row), "recall": row.recall, "interval": row.interval} for row in rows],
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=WINDOW)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--own-history", action="store_true")
    parser.add_argument("--blind", action="store_true", help="phrasings of the second held-out set")
    parser.add_argument("--plain", action="store_true", help="two facts in the plainest words")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    started = time.monotonic()
    found = evaluate(args.model, args.conversations, args.seed, args.max_tokens, args.own_history, args.blind,
                     args.plain)
    print(found["table"])
    print(f"\nperplexity of the reference answers {found['perplexity']:.3f}; {args.conversations} held-out "
          f"conversations of up to {args.max_tokens} tokens, seed {args.seed}, "
          f"{'own' if args.own_history or args.plain else 'reference'} history, {time.monotonic() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
