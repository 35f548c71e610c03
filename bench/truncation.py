"""What does a truncation that keeps its KV cost in quality? Recall and perplexity of the built-in model, three ways.

recomputed: the kept tokens are computed again. re-encoded: they keep their KV, with raw keys rotated at the new
positions. naive: they keep their KV, with keys rotated for the old positions. All three run the intercepted model
directly, over the same held-out conversations with reference answers. Some conversations also go through `engine.chat`,
which must answer the same.
"""

import argparse
import itertools
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.builtin_model.batches import Encoder
from bench.builtin_model.conversations import Asked, Conversation, Maker, Turn
from bench.builtin_model.evaluate import MAX_ANSWER_TOKENS, WINDOW, held_out_conversations, is_right
from bench.builtin_model.kinds import KINDS
from bench.builtin_model.report import wilson
from bench.builtin_model.values import HELD_OUT
from bench.common import Report, arguments, run, say
from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.connector import NullConnector
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import load
from kvstore.engine.model.probe import intercept
from kvstore.engine.outputs import RequestOutput
from kvstore.kernels.paged_batch import PagedBatch
from kvstore.rope.splice import plan_splice

BLOCK_SIZE = 16
NUM_BLOCKS = WINDOW // BLOCK_SIZE
NUM_CUTS = 2
AFTER_CUT_TOKENS = 320  # of a conversation after its last cut
TRUNCATING_TOKENS = 160  # asked for so many, even a short question does not fit where a longer turn did not
LONGEST = WINDOW + (NUM_CUTS - 1) * WINDOW // 2 + AFTER_CUT_TOKENS
ARMS = ("recomputed", "re-encoded", "naive")
MEASURED = {
    "answers": "right answers to these",
    "assistant": "assistant in later turns",
    "user": "user in later turns (never learnt)",
}
ENGINE_ROWS = (
    ("the same answer as computed directly", "same", "asked"),
    ("recall of kept facts", "right", "asked"),
    ("truncations that kept their KV", "spliced", "truncations"),
)
RECALL_GOAL, PERPLEXITY_GOAL = 2.0, 2.0  # points, %: at most so much worse than recomputed
Span = tuple[int, int]


# -- the model with a cache whose keys can be moved ------------------------------------------------------------------
class Recorder(NullConnector):
    """Keeps the raw keys and values of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save_kv_layer(self, layer: int, raw_key: torch.Tensor, value: torch.Tensor) -> None:
        assert layer == len(self.layers)
        self.layers.append((raw_key.clone(), value.clone()))


@dataclass(slots=True)
class Memory:
    """What a model remembers of `token_ids`: raw keys and values per layer, [num_tokens, num_kv_heads, head_dim].

    positions: [num_tokens], for which the keys are rotated. The caches hold the rotated keys, in order.
    """

    model: PositionFreeModel
    token_ids: list[int] = field(default_factory=list)
    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    layers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.caches = self.model.new_caches(NUM_BLOCKS, BLOCK_SIZE)

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int]) -> torch.Tensor:  # [num_tokens, vocab_size]
        """Compute these tokens after those that are remembered, and remember them. Returns the logits of each."""
        recorder = Recorder()
        start, end = len(self.token_ids), len(self.token_ids) + len(token_ids)
        assert end <= WINDOW
        positions, every = torch.arange(start, end), torch.arange(end - start)
        batch = PagedBatch([0, end - start], [end], torch.arange(NUM_BLOCKS)[None], positions, BLOCK_SIZE)
        logits = self.model.forward(torch.tensor(token_ids), positions, batch, self.caches, recorder, every)
        self.token_ids = [*self.token_ids, *token_ids]
        self.positions = torch.cat([self.positions, positions])
        held = self.layers or [(key[:0], value[:0]) for key, value in recorder.layers]
        pairs = zip(held, recorder.layers, strict=True)
        self.layers = [(torch.cat([k, new_k]), torch.cat([v, new_v])) for (k, v), (new_k, new_v) in pairs]
        return logits

    @torch.inference_mode()
    def keep(self, spans: Sequence[Span], num_tokens: int, rotate: bool) -> "Memory":
        """A memory of the first `num_tokens` tokens of these spans, with their raw keys and values.

        rotate: rotate keys for their new positions, else for the old ones.
        """
        rows = torch.cat([torch.arange(*span) for span in spans])[:num_tokens]
        kept = Memory(self.model, [self.token_ids[row] for row in rows.tolist()])
        kept.positions = torch.arange(num_tokens) if rotate else self.positions[rows]
        kept.layers = [(key[rows], value[rows]) for key, value in self.layers]
        for (key, value), (key_cache, value_cache), rotation in zip(
            kept.layers, kept.caches, self.model.rotations, strict=True
        ):
            rotated = key if rotation is None else rotation.at(kept.positions).apply(key)
            key_cache.view(-1, *key.shape[1:])[:num_tokens] = rotated
            value_cache.view(-1, *value.shape[1:])[:num_tokens] = value
        return kept

    def truncated(self, spans: Sequence[Span], arm: str) -> "Memory":
        """The memory after a cut, in one of the three ways. Kept tokens that a splice does not cover are computed."""
        kept = [token_id for start, end in spans for token_id in self.token_ids[start:end]]
        plan = plan_splice(spans, BLOCK_SIZE, len(self.token_ids) // BLOCK_SIZE)
        reused = 0 if arm == "recomputed" else plan.num_tokens
        memory = self.keep(spans, reused, rotate=arm != "naive") if reused else Memory(self.model)
        if kept[reused:]:
            memory.read(kept[reused:])
        return memory


def losses_of(logits: torch.Tensor, targets: Sequence[int]) -> list[float]:
    """- log p of each target."""
    found: list[float] = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none").tolist()
    return found


@dataclass(slots=True)
class Branch:
    """A prompt that follows a memory, and the right answer. Neither is remembered."""

    memory: Memory
    prompt: Sequence[int]
    right: Sequence[int] = ()
    losses: list[float] = field(default_factory=list)  # - log p of each token of the right answer
    predicted: torch.Tensor | None = None  # [len(right), vocab_size]: log p of every token in its place
    said: list[int] = field(default_factory=list)  # the greedy answer


class Branches:
    """Several branches of one model side by side, each with a copy of its memory's caches."""

    @torch.inference_mode()
    def __init__(self, branches: Sequence[Branch], end: int) -> None:
        self.branches = branches
        self.end = end
        self.model = branches[0].memory.model
        answers = (max(len(branch.right), MAX_ANSWER_TOKENS) for branch in branches)
        longest = max(len(b.memory.token_ids) + len(b.prompt) + n for b, n in zip(branches, answers, strict=True))
        assert longest <= WINDOW
        self.width = -(-longest // BLOCK_SIZE)
        self.caches = self.model.new_caches(len(branches) * self.width, BLOCK_SIZE)
        for row, branch in enumerate(branches):
            count, start = len(branch.memory.token_ids), row * self.width * BLOCK_SIZE
            for pair, held in zip(self.caches, branch.memory.caches, strict=True):
                for cache, source in zip(pair, held, strict=True):
                    cache.flatten(0, 1)[start : start + count] = source.flatten(0, 1)[:count]

    @torch.inference_mode()
    def run(self) -> None:
        """Fill in losses and answers."""
        every = list(range(len(self.branches)))
        starts = [len(branch.memory.token_ids) for branch in self.branches]
        logits = self._forward(every, starts, [[*branch.prompt, *branch.right] for branch in self.branches])
        first = 0
        nexts = [0] * len(self.branches)
        for row, branch in enumerate(self.branches):
            last = first + len(branch.prompt) - 1
            branch.predicted = logits[last : last + len(branch.right)].log_softmax(-1)
            branch.losses = [-float(row[token]) for row, token in zip(branch.predicted, branch.right, strict=True)]
            nexts[row] = int(logits[last].argmax())
            first = last + 1 + len(branch.right)
        while running := [row for row in every if self._say(row, nexts[row])]:
            ends = [starts[row] + len(self.branches[row].prompt) + len(self.branches[row].said) - 1 for row in running]
            logits = self._forward(running, ends, [[nexts[row]] for row in running])
            for row, token_id in zip(running, logits.argmax(-1).tolist(), strict=True):
                nexts[row] = token_id
            every = running

    def _say(self, row: int, token_id: int) -> bool:
        """Add a token to the answer. Returns False when the answer is complete."""
        said = self.branches[row].said
        if token_id == self.end:
            return False
        said.append(token_id)
        return len(said) < MAX_ANSWER_TOKENS

    def _forward(self, rows: list[int], starts: list[int], tokens: list[list[int]]) -> torch.Tensor:
        """The logits of all tokens of these rows, whose positions begin at `starts`."""
        spans = [torch.arange(start, start + len(ids)) for start, ids in zip(starts, tokens, strict=True)]
        first_slot = self.width * BLOCK_SIZE
        table = torch.arange(len(self.branches) * self.width).view(-1, self.width)[rows]
        batch = PagedBatch(
            [0, *itertools.accumulate(map(len, tokens))],
            [start + len(ids) for start, ids in zip(starts, tokens, strict=True)],
            table,
            torch.cat([row * first_slot + span for row, span in zip(rows, spans, strict=True)]),
            BLOCK_SIZE,
        )
        ids = torch.tensor([token_id for part in tokens for token_id in part])
        positions, every = torch.cat(spans), torch.arange(len(ids))
        return self.model.forward(ids, positions, batch, self.caches, NullConnector(), every)


# -- conversations ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Question:
    """A fact that was told in a kept turn and not asked for since, and how to ask for it now."""

    asked: Asked
    user: str
    answer: str


def kept_facts(turns: Sequence[Turn], first_kept: int, rng: random.Random) -> list[Question]:
    """One question for each fact whose last telling is kept and whose value no later answer repeats."""
    told: dict[str, tuple[int, str]] = {}
    for index, turn in enumerate(turns):
        for key, value in turn.told:
            told[key] = (index, value)
        for asked in turn.asked:
            told.pop(asked.kind.key, None)
    maker, kinds = Maker(rng, HELD_OUT, ask_once=True), {kind.key: kind for kind in KINDS}
    found = []
    for key, (index, value) in told.items():
        if index >= first_kept:
            asked = Asked(kinds[key], value, False, value in turns[index].assistant, index)
            found.append(Question(asked, maker.question(asked.kind), maker.answer(asked)))
    return found


@dataclass(slots=True)
class Scores:
    """The results of one arm after the n-th cut."""

    right: list[bool] = field(default_factory=list)
    # - log p of tokens, by the role that wrote them.
    losses: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def perplexity(self, what: str) -> float:
        found = self.losses[what]
        return math.exp(sum(found) / len(found)) if found else math.nan


class Trial:
    """One conversation, read turn by turn in all arms, which separate at the first cut."""

    def __init__(self, model: PositionFreeModel, encoder: Encoder, made: Conversation, name: str) -> None:
        self.encoder = encoder
        self.turns = made.turns
        self.rng = random.Random(f"truncation-{name}")
        self.head = [encoder.bos, *(encoder.message("system", made.system) if made.system else [])]
        self.said = [encoder.message("user", t.user) + encoder.message("assistant", t.assistant) for t in made.turns]
        self.first_kept = 0
        self.num_cuts = 0
        whole = Memory(model)
        whole.read(self.head)
        self.arms = dict.fromkeys(ARMS, whole)

    def run(self, scores: dict[tuple[int, str], Scores]) -> None:
        """scores: by number of cuts and arm."""
        start = 0
        while True:
            end = next((i for i in range(start, len(self.turns)) if self._is_full(i)), len(self.turns))
            self._read(start, end, scores)
            if end == len(self.turns) or self.num_cuts == NUM_CUTS:
                return
            self._cut(end)
            self._ask(end, scores)
            start = end

    def _length(self, end: int) -> int:
        return len(self.head) + sum(map(len, self.said[self.first_kept : end]))

    def _user(self, index: int) -> list[int]:
        return [*self.encoder.message("user", self.turns[index].user), self.encoder.roles["assistant"]]

    def _is_full(self, index: int) -> bool:
        """Whether this turn would cause a truncation."""
        answer = max(MAX_ANSWER_TOKENS, len(self.said[index]) - len(self._user(index)))
        return self._length(index) + len(self._user(index)) + answer > WINDOW

    def _cut(self, end: int) -> None:
        """Cut as the engine does: drop whole turns until at most half the window is kept."""
        old, head, length = self.first_kept, len(self.head), self._length(end)
        while self.first_kept < end and self._length(end) + len(self._user(end)) > WINDOW // 2:
            self.first_kept += 1
        cut = head + sum(map(len, self.said[old : self.first_kept]))
        self.arms = {arm: memory.truncated([(0, head), (cut, length)], arm) for arm, memory in self.arms.items()}
        self.num_cuts += 1

    def _ask(self, end: int, scores: dict[tuple[int, str], Scores]) -> None:
        encoder, asked = self.encoder, []
        for question in kept_facts(self.turns[:end], self.first_kept, self.rng):
            prompt = [*encoder.message("user", question.user), encoder.roles["assistant"]]
            right = encoder.message("assistant", question.answer)[1:]
            asked += [(question, arm, Branch(memory, prompt, right)) for arm, memory in self.arms.items()]
        if not asked:
            return
        Branches([branch for _, _, branch in asked], encoder.end).run()
        for question, arm, branch in asked:
            score = scores[self.num_cuts, arm]
            score.right.append(is_right(question.asked, encoder.core.decode(branch.said, skip_special_tokens=False)))
            score.losses["answers"] += branch.losses

    def _read(self, start: int, end: int, scores: dict[tuple[int, str], Scores]) -> None:
        """Read these turns as they were made. After a cut their tokens count, except answers about dropped turns."""
        ids = [token_id for said in self.said[start:end] for token_id in said]
        if not ids:
            return
        if not self.num_cuts:  # one memory for all arms before the first cut
            next(iter(self.arms.values())).read(ids)
            return
        for arm, memory in self.arms.items():
            losses = [math.nan, *losses_of(memory.read(ids)[:-1], ids[1:])]
            first = 0
            for index in range(start, end):
                answer, last = first + len(self._user(index)), first + len(self.said[index])
                score = scores[self.num_cuts, arm]
                score.losses["user"] += losses[first + 1 : answer - 1]  # without the tokens of the roles
                lost = (a.value is not None and a.told_turn < self.first_kept for a in self.turns[index].asked)
                if not any(lost):
                    score.losses["assistant"] += losses[answer:last]
                first = last


# -- through the engine ----------------------------------------------------------------------------------------------
def chat_until_full(engine: Engine, name: str, made: Conversation, encoder: Encoder) -> tuple[Any, int]:
    """A session with the conversation's user messages, and how many of its turns the window takes untruncated."""
    chat = engine.chat(name, system=made.system)
    params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    for index, turn in enumerate(made.turns):
        if len(chat.token_ids) + len(encoder.message("user", turn.user)) + 2 + MAX_ANSWER_TOKENS > WINDOW:
            return chat, index
        chat.send(turn.user, params)
        assert chat.truncated_tokens == 0
    return chat, len(made.turns)


def compare_with_engine(
    engine: Engine, model: PositionFreeModel, encoder: Encoder, made: Conversation, name: str, most: int
) -> dict[str, Counter[str]]:
    """Ask for kept facts in forks of one session, so that each question causes the truncation.

    Counts, by arm: truncations, those that kept their KV (spliced), answers (asked), answers that are the same as
    computed directly, and right ones. In the re-encoded arm, only truncations that kept their KV are compared.
    """
    found: dict[str, Counter[str]] = {arm: Counter() for arm in ARMS[:2]}
    chat, end = chat_until_full(engine, name, made, encoder)
    whole = Memory(model)
    whole.read(chat.token_ids)
    params = SamplingParams(max_tokens=TRUNCATING_TOKENS, temperature=0.0)
    # The facts of the last quarter survive any cut to half the window.
    questions = kept_facts(made.turns[:end], end - end // 4, random.Random(name))[:most]
    for number, question in enumerate(questions):
        for arm, reuse in zip(ARMS, ("exact", "reencode"), strict=False):
            key = f"{name}-{number}-{reuse}"
            chat.fork(key)
            fork = engine.chat(key, truncation_reuse=reuse)
            starts = fork.window.turn_starts
            reply = fork.send(question.user, params)
            assert fork.truncated_tokens or end == len(made.turns)
            if fork.truncated_tokens:
                _compare(found[arm], arm, question, reply, whole, starts, encoder.end)
    return found


def _compare(
    found: Counter[str], arm: str, question: Question, reply: RequestOutput, whole: Memory, starts: list[int], end: int
) -> None:
    """Compare the engine's answer to a turn that truncated with the same turn computed directly."""
    reencoded = reply.usage.cached_tokens_details.reencoded
    if arm == "recomputed" and reencoded:
        raise RuntimeError(f"{reencoded} tokens were re-encoded where everything was to be computed")
    found.update(truncations=1, spliced=reencoded > 0, reencoded=reencoded)
    if arm == "re-encoded" and not reencoded:
        return
    memory = whole.truncated(spans_of(whole.token_ids, reply.prompt_token_ids, starts), arm)
    branch = Branch(memory, reply.prompt_token_ids[len(memory.token_ids) :])
    Branches([branch], end).run()
    said = [token_id for token_id in reply.token_ids if token_id != end][:MAX_ANSWER_TOKENS]
    found.update(asked=1, same=said == branch.said, right=is_right(question.asked, reply.text))


def spans_of(old: Sequence[int], prompt: Sequence[int], starts: Sequence[int]) -> list[Span]:
    """The spans of the old ids with which a truncated prompt begins. starts: where turns begin, if known."""
    for head in starts[:1] or range(len(old)):
        if list(prompt[:head]) != list(old[:head]):
            break
        for cut in starts or range(head, len(old)):
            if list(prompt[head : head + len(old) - cut]) == list(old[cut:]):
                return [(0, head), (cut, len(old))]
    raise RuntimeError("the truncated prompt does not begin with kept ids")


# -- the benchmark ---------------------------------------------------------------------------------------------------
def measure(report: Report, model: PositionFreeModel, encoder: Encoder, num_conversations: int, seed: int) -> None:
    scores = {(cuts, arm): Scores() for cuts in range(1, NUM_CUTS + 1) for arm in ARMS}
    started = time.monotonic()
    made = held_out_conversations(encoder, seed, num_conversations, LONGEST)
    try:
        for number, conversation in enumerate(made):
            Trial(model, encoder, conversation, f"{seed}-{number}").run(scores)
            if (number + 1) % 5 == 0:
                seconds = time.monotonic() - started
                say(f"{number + 1} of {len(made)} conversations, {seconds:.0f} s")
    finally:
        show(report, scores)


def show(report: Report, scores: dict[tuple[int, str], Scores]) -> None:
    """Show the results after the first cut, after the second, and of both together."""
    for cuts in (*range(1, NUM_CUTS + 1), None):
        by_arm = {arm: Scores() for arm in ARMS}
        for (number, arm), one in scores.items():
            if cuts in (number, None):
                by_arm[arm].right += one.right
                for what, losses in one.losses.items():
                    by_arm[arm].losses[what] += losses
        if by_arm[ARMS[0]].right:
            show_cuts(report, str(cuts or "all"), by_arm)


def show_cuts(report: Report, cuts: str, by_arm: dict[str, Scores]) -> None:
    exact, reused = by_arm[ARMS[0]], by_arm[ARMS[1]]
    right, count = {arm: sum(one.right) for arm, one in by_arm.items()}, len(exact.right)
    lost = sum(a and not b for a, b in zip(exact.right, reused.right, strict=False))  # Ctrl-C
    gained = sum(b and not a for a, b in zip(exact.right, reused.right, strict=False))
    half = 1.96 * math.sqrt(lost + gained - (gained - lost) ** 2 / count)  # of a difference of pairs
    ends = tuple(100 * (gained - lost + sign * half) / count for sign in (-1, 1))
    report.add(
        cuts=cuts,
        measure="recall of kept facts, %",
        count=count,
        **{arm: 100 * right[arm] / count for arm in ARMS},
        difference=f"{100 * (gained - lost) / count:+.1f} points ({ends[0]:+.1f} to {ends[1]:+.1f})",
        goal=f">= -{RECALL_GOAL:g} points",
        intervals=", ".join("{:.1%} - {:.1%}".format(*wilson(right[arm], count)) for arm in ARMS),
    )
    for what, text in MEASURED.items():
        if exact.losses[what]:
            report.add(
                cuts=cuts,
                measure=f"perplexity, {text}",
                count=len(exact.losses[what]),
                **{arm: one.perplexity(what) for arm, one in by_arm.items()},
                difference=f"{100 * (reused.perplexity(what) / exact.perplexity(what) - 1):+.2f} %",
                goal="-" if what == "user" else f"<= +{PERPLEXITY_GOAL:g} %",
            )


def check_engine(
    report: Report, model: PositionFreeModel, encoder: Encoder, num_conversations: int, seed: int, questions: int
) -> None:
    total: dict[str, Counter[str]] = {arm: Counter() for arm in ARMS[:2]}
    made = held_out_conversations(encoder, seed + 1, num_conversations, WINDOW + 200)
    tiers = CacheTiers(hbm="128MiB", cpu="256MiB")
    with Engine(cache_tiers=tiers, device="cpu", load="always") as engine:
        for number, conversation in enumerate(made):
            name = f"engine-{seed}-{number}"
            for arm, one in compare_with_engine(engine, model, encoder, conversation, name, questions).items():
                total[arm] += one
            say(f"engine.chat: {number + 1} of {len(made)} conversations")
    for measure, what, of in ENGINE_ROWS:
        cells = {arm: f"{one[what]} / {one[of]}" for arm, one in total.items() if of == "asked" or arm == "re-encoded"}
        report.add(cuts="1", measure=f"engine.chat: {measure}", **cells, goal="-" if what == "right" else "all")


def body(parsed: argparse.Namespace, report: Report) -> None:
    num_conversations, num_chats, questions = parsed.conversations, parsed.chats, 3
    if parsed.quick:
        num_conversations, num_chats, questions = min(num_conversations, 6), min(num_chats, 2), 2
    loaded = load(None, "cpu", "float32", None)
    model, encoder = intercept(loaded.model, loaded.max_model_len, pack=True), Encoder(loaded.tokenizer)
    measure(report, model, encoder, num_conversations, parsed.seed)
    check_engine(report, model, encoder, num_chats, parsed.seed, questions)


def main() -> int:
    parser = arguments("truncation", __doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=200, help="held-out conversations (default: 200)")
    parser.add_argument("--chats", type=int, default=12, help="conversations through engine.chat (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations (default: 0)")
    title = f"Truncation of the built-in model (window {WINDOW:,}), by what becomes of the KV that is kept"
    return run(body, parser.parse_args(), title)


if __name__ == "__main__":
    sys.exit(main())
