"""What does an edit of a session cost, what a document that is moved, and does the model forget? The built-in model.

A turn in the middle is removed, or a fact in it replaced. recomputed: everything behind it is computed again.
re-encoded k: that keeps its KV, rotated for the new positions, but for its first k tokens, which are computed. naive:
it keeps its KV with the positions that it was computed for.

A document is a message of facts in the middle of another conversation. recomputed: it is read there. spliced: its KV
is computed behind the first token of a prompt alone, and moved, in whole blocks. alone: without that token. naive: as
spliced, with the positions that it was computed for.

Questions run the intercepted model directly, over held-out conversations with reference answers; "acts on the old
value" counts answers that say what was removed or replaced. Perplexity and KL are of the reference answers; KL is of
what the model predicts there with everything recomputed. Times are those of an engine.
"""

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from bench.builtin_model.batches import Encoder
from bench.builtin_model.conversations import Asked, Conversation, Maker, Turn
from bench.builtin_model.evaluate import MAX_ANSWER_TOKENS, WINDOW, held_out_conversations, is_right
from bench.builtin_model.values import HELD_OUT, make_value
from bench.common import LlamaShape, Report, alternate, arguments, median, random_llama, run, say, spread
from bench.truncation import BLOCK_SIZE, Branch, Branches, Memory, Question, Span, kept_facts
from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.blocks.records import Evict
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import load
from kvstore.engine.model.probe import intercept
from kvstore.engine.sessions.spans import LEAST_BLOCKS

RECOMPUTED, NAIVE, COMPUTED_FIRST = "recomputed", "naive", (0, 4, 16)
ARMS = (RECOMPUTED, *(f"re-encoded {count}" for count in COMPUTED_FIRST), NAIVE)
DOCUMENT_ARMS = (RECOMPUTED, "spliced", "alone", NAIVE)
QUESTION_TOKENS = 40
PLACES = ("before", "in the edited turn", "behind")
DOCUMENT_PLACES = ("before", "in the document", "behind")
AGENT = LlamaShape(64, 2, 2, 1, 128, 1024, max_position_embeddings=32768)
AGENT_WINDOWS = (8192, 32768)
AGENT_TEMPLATE = (  # its tokens are words
    "{% for m in messages %}{{ {'system': 'w1', 'user': 'w2', 'assistant': 'w3'}[m.role] }} {{ m.content }} w4 "
    "{% endfor %}{% if add_generation_prompt %}w3 {% endif %}"
)


# -- recall ------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Tally:
    """Of one kind of question in one arm: answers, and what the model thinks of the reference answers. kl: from what it
    predicts with everything recomputed, of each of their tokens.
    """

    asked: int = 0
    right: int = 0
    old: int = 0
    losses: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


Found = dict[tuple[str, str, str], Tally]  # by edit, place of the fact and arm


def append(memory: Memory, source: Memory, span: Span, rotate: bool = True) -> None:
    """Add these tokens of another memory, with their raw keys rotated for where they are now; or as they were."""
    start, count = len(memory.token_ids), span[1] - span[0]
    positions = torch.arange(start, start + count) if rotate else source.positions[slice(*span)]
    memory.token_ids = [*memory.token_ids, *source.token_ids[slice(*span)]]
    memory.positions = torch.cat([memory.positions, positions])
    added = [(key[slice(*span)], value[slice(*span)]) for key, value in source.layers]
    held = memory.layers or [(key[:0], value[:0]) for key, value in added]
    memory.layers = [
        (torch.cat([k, new_k]), torch.cat([v, new_v])) for (k, v), (new_k, new_v) in zip(held, added, strict=True)
    ]
    for (key, value), caches, rotation in zip(added, memory.caches, memory.model.rotations, strict=True):
        rotated = key if rotation is None else rotation.at(positions).apply(key)
        for cache, row in zip(caches, (rotated, value), strict=True):
            cache.view(-1, *row.shape[1:])[start : start + count] = row


def edited(whole: Memory, span: Span, new: Sequence[int], arm: str) -> Memory:
    """The memory with other tokens in the place of this span."""
    start, stop, end = *span, len(whole.token_ids)
    if arm == RECOMPUTED:
        memory = Memory(whole.model)
        memory.read([*whole.token_ids[:start], *new, *whole.token_ids[stop:]])
        return memory
    memory = whole.keep([(0, start)], start, rotate=True)
    first = 0 if arm == NAIVE else min(int(arm.rpartition(" ")[2]), end - stop)
    if computed := [*new, *whole.token_ids[stop : stop + first]]:
        memory.read(computed)
    append(memory, whole, (stop + first, end), rotate=arm != NAIVE)
    return memory


def with_document(model: PositionFreeModel, ids: Sequence[int], span: Span, arm: str) -> Memory:
    """The memory of these ids, in which a span is a document."""
    memory, (begin, end) = Memory(model), span
    if arm == RECOMPUTED:
        memory.read(ids)
        return memory
    leader = [] if arm == "alone" else ids[:1]
    source, moved = Memory(model), begin - len(leader)  # by so much does a token of the source stand later
    source.read([*leader, *ids[begin:end]])
    first = -(-begin // BLOCK_SIZE) * BLOCK_SIZE
    last = (moved + len(source.token_ids) // BLOCK_SIZE * BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE
    memory.read(ids[:first])
    append(memory, source, (first - moved, last - moved), rotate=arm != NAIVE)
    memory.read(ids[last:])
    return memory


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of turn `turn`: what it says instead, None: it goes. old, new: the value that the question is for."""

    turn: int
    instead: Turn | None
    question: Question
    old: str
    new: str | None


def edits_of(turns: Sequence[Turn], rng: random.Random) -> list[Edit]:
    """The removal of a turn in the middle half that tells a fact that nobody has asked for, and another value there."""
    told = [one for one in kept_facts(turns, 0, rng) if len(turns) // 4 <= one.asked.told_turn < 3 * len(turns) // 4]
    if not told:
        return []
    question = rng.choice(told)
    turn, old = turns[question.asked.told_turn], question.asked.value or ""
    new = old
    while new == old:
        new = make_value(rng, question.asked.kind.value, HELD_OUT)
    instead = Turn(turn.user.replace(old, new), turn.assistant.replace(old, new))
    return [
        Edit(question.asked.told_turn, None, question, old, None),
        Edit(question.asked.told_turn, instead, question, old, new),
    ]


def ids_of(encoder: Encoder, turn: Turn) -> list[int]:
    return encoder.message("user", turn.user) + encoder.message("assistant", turn.assistant)


def ask(
    model: PositionFreeModel, encoder: Encoder, memories: Mapping[str, Memory],
    asked: Sequence[tuple[str, Question]], what: str, found: Found, old: Question | None = None,
) -> None:  # fmt: skip
    """asked: with the place where the fact was told. old: a question whose answer was right before."""
    rows = []
    for place, one in asked:
        prompt = [*encoder.message("user", one.user), encoder.roles["assistant"]]
        right = encoder.message("assistant", one.answer)[1:]
        rows += [(place, one, arm, Branch(memory, prompt, right)) for arm, memory in memories.items()]
    Branches([row[3] for row in rows], encoder.end).run()
    reference = rows[0][3]
    for place, one, arm, branch in rows:
        reference = branch if arm == RECOMPUTED else reference
        assert branch.predicted is not None and reference.predicted is not None
        answer = encoder.core.decode(branch.said, skip_special_tokens=False)
        tally = found.setdefault((what, place, arm), Tally())
        tally.asked += 1
        tally.right += is_right(one.asked, answer)
        tally.old += old is not None and place == PLACES[1] and is_right(old.asked, answer)
        tally.losses += branch.losses
        tally.kl += (reference.predicted.exp() * (reference.predicted - branch.predicted)).sum(-1).tolist()


def ask_after_edits(model: PositionFreeModel, encoder: Encoder, made: Conversation, name: str, found: Found) -> None:
    head = [encoder.bos, *(encoder.message("system", made.system) if made.system else [])]
    said = [ids_of(encoder, turn) for turn in made.turns]
    starts = [len(head) + sum(map(len, said[:index])) for index in range(len(said) + 1)]
    rng = random.Random(f"edits-{name}")
    maker = Maker(random.Random(f"answers-{name}"), HELD_OUT, ask_once=True)
    for edit in edits_of(made.turns, rng):
        whole = Memory(model)
        whole.read([*head, *(token_id for ids in said for token_id in ids)])
        new = [] if edit.instead is None else ids_of(encoder, edit.instead)
        memories = {arm: edited(whole, (starts[edit.turn], starts[edit.turn + 1]), new, arm) for arm in ARMS}
        others = [one for one in kept_facts(made.turns, 0, rng) if one.asked.told_turn != edit.turn]
        asked = [(PLACES[0 if one.asked.told_turn < edit.turn else 2], one) for one in others]
        now = Asked(edit.question.asked.kind, edit.new, False, False, edit.turn)
        asked.append((PLACES[1], Question(now, edit.question.user, maker.answer(now))))
        what = "removed" if edit.instead is None else "replaced"
        ask(model, encoder, memories, asked, what, found, edit.question)


def ask_about_document(
    model: PositionFreeModel, encoder: Encoder, host: Conversation, donor: Conversation, name: str, found: Found
) -> None:
    """The document is what the donor tells, in one message in the middle of the host."""
    rng, middle = random.Random(f"document-{name}"), len(host.turns) // 2
    known = {key for turn in host.turns for key, _ in turn.told}
    known |= {asked.kind.key for turn in host.turns for asked in turn.asked}
    told = [turn for turn in donor.turns if turn.told and not turn.asked and not known & {key for key, _ in turn.told}]
    if not told:
        return
    head = [encoder.bos, *(encoder.message("system", host.system) if host.system else [])]
    before = [token_id for turn in host.turns[:middle] for token_id in ids_of(encoder, turn)]
    behind = [token_id for turn in host.turns[middle:] for token_id in ids_of(encoder, turn)]
    role, *text, close = encoder.message("user", " ".join(turn.user for turn in told))
    reply = encoder.message("assistant", told[-1].assistant)
    begin = len(head) + len(before) + 1
    ids = [*head, *before, role, *text, close, *reply, *behind]
    if len(text) < LEAST_BLOCKS * BLOCK_SIZE or len(ids) + QUESTION_TOKENS + MAX_ANSWER_TOKENS > WINDOW:
        return
    span = (begin, begin + len(text))
    memories = {arm: with_document(model, ids, span, arm) for arm in DOCUMENT_ARMS}
    asked = [(DOCUMENT_PLACES[one.asked.told_turn >= middle and 2], one) for one in kept_facts(host.turns, 0, rng)]
    asked += [(DOCUMENT_PLACES[1], one) for one in kept_facts(told, 0, rng)]
    ask(model, encoder, memories, asked, "moved", found)


def measure_recall(report: Report, model: PositionFreeModel, encoder: Encoder, count: int, seed: int) -> None:
    found: Found = {}
    longest = WINDOW - MAX_ANSWER_TOKENS - QUESTION_TOKENS
    started = time.monotonic()
    for number, made in enumerate(held_out_conversations(encoder, seed + 7, count, longest)):
        ask_after_edits(model, encoder, made, f"{seed}-{number}", found)
        if number % 10 == 9:
            say(f"{number + 1} of {count} conversations, {time.monotonic() - started:.0f} s")
    hosts = held_out_conversations(encoder, seed + 8, count, WINDOW // 2)
    donors = held_out_conversations(encoder, seed + 9, count, longest)
    for number, (host, donor) in enumerate(zip(hosts, donors, strict=True)):
        ask_about_document(model, encoder, host, donor, f"{seed}-{number}", found)
    for what, places, arms in (
        ("removed", PLACES, ARMS), ("replaced", PLACES, ARMS), ("moved", DOCUMENT_PLACES, DOCUMENT_ARMS)
    ):  # fmt: skip
        for place in places:
            if by_arm := {arm: found[what, place, arm] for arm in arms if (what, place, arm) in found}:
                report_recall(report, what, place, by_arm)


def report_recall(report: Report, what: str, place: str, by_arm: Mapping[str, Tally]) -> None:
    count = by_arm[RECOMPUTED].asked
    rows = {f"right, told {place}": {arm: f"{one.right / count:.1%}" for arm, one in by_arm.items()}}
    if place == PLACES[1]:
        rows["acts on the old value"] = {arm: f"{one.old / count:.1%}" for arm, one in by_arm.items()}
    perplexities = {arm: math.exp(sum(one.losses) / len(one.losses)) for arm, one in by_arm.items()}
    rows[f"perplexity, told {place}"] = {arm: f"{one:.4f}" for arm, one in perplexities.items()}
    rows[f"KL, told {place}"] = {arm: f"{sum(one.kl) / len(one.kl):.4f}" for arm, one in by_arm.items()}
    for measure, row in rows.items():
        report.add(edit=what, measure=measure, count=count, **row)


# -- times -------------------------------------------------------------------------------------------------------------
def measure_times(report: Report, made: Conversation, repeats: int) -> None:
    """The first turn after a removal, and after another text, each in a fork of one long session."""
    tiers = CacheTiers(hbm="128MiB", cpu="256MiB")
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with Engine(cache_tiers=tiers, device="cpu", load="always") as engine:
        chat = engine.chat("times", system=made.system)
        for turn in made.turns:
            if len(chat.token_ids) > WINDOW - 3 * MAX_ANSWER_TOKENS:
                break
            chat.send(turn.user, params)
        first = len(chat.messages) // 8 * 2 + (made.system is not None)
        edits = {
            "removed": [{"type": "remove", "index": first}, {"type": "remove", "index": first + 1}],
            "replaced": [{"type": "replace", "index": first, "content": "Let us talk about the weather instead."}],
        }
        numbers, edit_s = iter(range(10**6)), dict[tuple[str, str], list[float]]()

        def next_turn(what: str, arm: str) -> float:
            fork = chat.fork(f"fork-{next(numbers)}")
            began_s = time.perf_counter()
            fork.edit(edits[what], "reencode" if arm == "re-encoded" else "exact")
            edit_s.setdefault((what, arm), []).append(time.perf_counter() - began_s)
            if arm == "all computed":
                engine.admin.evict(Evict(everything=True))
            reply = fork.send("And what else?", params)
            assert (reply.usage.cached_tokens_details.reencoded > 0) == (arm == "re-encoded"), reply.usage
            assert reply.ttft_s is not None
            engine.admin.delete_session(fork.session_id)
            chat.fork(f"back-{next(numbers)}").send("Well.", params)  # what the next round keeps is there
            return reply.ttft_s

        arms = ("all computed", "exact", "re-encoded")
        for what in edits:
            found = alternate({arm: partial(next_turn, what, arm) for arm in arms}, repeats)
            for arm in arms:
                ratio = median([one / base for one, base in zip(found[arm], found[arms[0]], strict=True)])
                report.add(
                    edit=what, measure=f"TTFT of the next turn, {arm}", count=len(found[arm]),
                    ms=1e3 * median(found[arm]), of_all_computed=ratio, spread=spread(found[arm]),
                    edit_ms=1e3 * median(edit_s[what, arm]),
                )  # fmt: skip


def measure_document_times(report: Report, repeats: int) -> None:
    """Wall time to the first token of prompts of some 600 tokens, 450 of which are a document, behind other words."""
    rng, numbers = random.Random(0), iter(range(10**6))
    words = [f"{kind} {number}" for kind in ("box", "lamp", "letter") for number in range(100)]
    params = SamplingParams(max_tokens=1, temperature=0.0)

    def text(num_words: int) -> str:
        return ", ".join(rng.choices(words, k=num_words))

    with Engine(cache_tiers=CacheTiers(hbm="128MiB", cpu="256MiB"), device="cpu", load="always") as engine:
        known = text(90)

        def first_token(arm: str) -> float:
            field = {} if arm == RECOMPUTED else {"reuse": "reencode"}
            document = {"type": "text", "text": text(90) if arm == "first use" else known, **field}
            before = {"type": "text", "text": f"{next(numbers)}: {text(30)}. Read this: "}
            began_s = time.perf_counter()
            engine.generate([[{"role": "user", "content": [before, document]}]], params)
            return time.perf_counter() - began_s

        first_token("moved")
        arms = (RECOMPUTED, "first use", "moved")
        found = alternate({arm: partial(first_token, arm) for arm in arms}, repeats)
    for arm in arms:
        ratio = median([one / base for one, base in zip(found[arm], found[arms[0]], strict=True)])
        report.add(
            edit="moved", measure=f"first token, {arm}", count=len(found[arm]), ms=1e3 * median(found[arm]),
            of_all_computed=ratio, spread=spread(found[arm]),
        )  # fmt: skip


# -- an agent ----------------------------------------------------------------------------------------------------------
def measure_agent(report: Report, num_turns: int, seed: int) -> None:
    """An agent's session that overruns its window again and again: how much of its prompts is read, how often it is
    cut. Lengths are those of `bench.traffic`'s agents, a quarter of them, with a random model of two layers; so the
    windows stand for four times as much.
    """
    with random_llama(AGENT, "float32") as (folder, _):
        opened = partial(Engine, str(folder), CacheTiers(hbm="64MiB", cpu="256MiB"), "cpu", load="always")
        for window in AGENT_WINDOWS:
            with opened(max_model_len=window, chat_template=AGENT_TEMPLATE) as engine:
                for reuse in ("reencode", "exact"):
                    run_agent(report, engine, reuse, num_turns, seed)


def run_agent(report: Report, engine: Engine, reuse: str, num_turns: int, seed: int) -> None:
    rng, cuts, counts = random.Random(seed), list[int](), Counter[str]()

    def text(num_tokens: int) -> str:
        return " ".join(f"w{rng.randrange(10, AGENT.vocab_size)}" for _ in range(num_tokens))

    chat = engine.chat(reuse, system=text(1500), truncation_reuse=reuse)
    for turn in range(num_turns):
        asked, said = (max(4, round(rng.lognormvariate(math.log(one), 1.0))) for one in (88, 20))
        params = SamplingParams(max_tokens=min(said, 256), temperature=1.0, ignore_eos=True, seed=turn)
        before, num_known = chat.truncated_tokens, len(chat.token_ids)
        usage = chat.send(text(min(asked, 2000)), params).usage
        dropped = chat.truncated_tokens - before
        cuts += [turn] if dropped else []
        counts.update(read=usage.cached_tokens, prompt=usage.prompt_tokens)
        counts.update(known=num_known - dropped if turn else 0)
    between = [second - first for first, second in pairwise(cuts)]
    report.add(
        edit=f"agent, {reuse}", measure=f"read of prompts, window {engine.facts.max_model_len:,}", count=num_turns,
        read=f"{counts['read'] / counts['prompt']:.2%}", of_known=f"{counts['read'] / counts['known']:.2%}",
        cuts=len(cuts), least_between=min(between, default=None), most_between=max(between, default=None),
        new_a_turn=(counts["prompt"] - counts["known"]) / num_turns,
    )  # fmt: skip


def body(parsed: argparse.Namespace, report: Report) -> None:
    count, repeats = (4, 2) if parsed.quick else (parsed.conversations, parsed.repeats)
    loaded = load(None, "cpu", "float32", None)
    model, encoder = intercept(loaded.model, loaded.max_model_len, pack=True), Encoder(loaded.tokenizer)
    (made,) = held_out_conversations(encoder, parsed.seed, 1, WINDOW)
    measure_times(report, made, repeats)
    measure_document_times(report, repeats)
    measure_agent(report, 20 if parsed.quick else parsed.turns, parsed.seed)
    measure_recall(report, model, encoder, count, parsed.seed)


def main(arguments_given: Sequence[str] | None = None) -> int:
    parser = arguments("edits", __doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=100, help="held-out conversations (default: 100)")
    parser.add_argument("--repeats", type=int, default=7, help="of each time (default: 7)")
    parser.add_argument("--turns", type=int, default=300, help="of the agent's session (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations (default: 0)")
    title = f"Edits of conversations with the built-in model (window {WINDOW:,})"
    return run(body, parser.parse_args(arguments_given), title)


if __name__ == "__main__":
    sys.exit(main())
