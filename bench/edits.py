"""What does an edit of a session cost, and does the model forget? Recall and TTFT of the built-in model.

A turn in the middle is removed, or a fact in it replaced. recomputed: everything behind it is computed again.
re-encoded k: that keeps its KV, rotated for the new positions, but for its first k tokens, which are computed.
Questions run the intercepted model directly, over held-out conversations with reference answers; "acts on the old
value" counts answers that say what was removed or replaced. Times are those of `engine.chat`.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.builtin_model.batches import Encoder
from bench.builtin_model.conversations import Asked, Conversation, Turn
from bench.builtin_model.evaluate import MAX_ANSWER_TOKENS, WINDOW, held_out_conversations, is_right
from bench.builtin_model.values import HELD_OUT, make_value
from bench.common import Report, alternate, arguments, median, run, say, spread
from bench.truncation import Branch, Branches, Memory, Question, Span, kept_facts
from kvstore import CacheTiers, Engine, SamplingParams
from kvstore.blocks.records import Evict
from kvstore.engine.model.interception import PositionFreeModel
from kvstore.engine.model.loading import load
from kvstore.engine.model.probe import intercept

RECOMPUTED, COMPUTED_FIRST = "recomputed", (0, 4, 16)
ARMS = (RECOMPUTED, *(f"re-encoded {count}" for count in COMPUTED_FIRST))
QUESTION_TOKENS = 40
PLACES = ("before", "in the edited turn", "behind")


# -- recall ------------------------------------------------------------------------------------------------------------
def append(memory: Memory, source: Memory, span: Span) -> None:
    """Add these tokens of another memory, with their raw keys rotated for where they are now."""
    start, count = len(memory.token_ids), span[1] - span[0]
    positions = torch.arange(start, start + count)
    memory.token_ids = [*memory.token_ids, *source.token_ids[slice(*span)]]
    memory.positions = torch.cat([memory.positions, positions])
    added = [(key[slice(*span)], value[slice(*span)]) for key, value in source.layers]
    memory.layers = [
        (torch.cat([k, new_k]), torch.cat([v, new_v]))
        for (k, v), (new_k, new_v) in zip(memory.layers, added, strict=True)
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
    first = min(int(arm.rpartition(" ")[2]), end - stop)
    if computed := [*new, *whole.token_ids[stop : stop + first]]:
        memory.read(computed)
    append(memory, whole, (stop + first, end))
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
    model: PositionFreeModel,
    encoder: Encoder,
    made: Conversation,
    name: str,
    found: dict[tuple[str, str, str], Counter],
) -> None:
    """found: by edit, place of the fact and arm: how many were asked for, how many answers are right or say the old
    value.
    """
    head = [encoder.bos, *(encoder.message("system", made.system) if made.system else [])]
    said = [ids_of(encoder, turn) for turn in made.turns]
    starts = [len(head) + sum(map(len, said[:index])) for index in range(len(said) + 1)]
    rng = random.Random(f"edits-{name}")
    for edit in edits_of(made.turns, rng):
        whole = Memory(model)
        whole.read([*head, *(token_id for ids in said for token_id in ids)])
        new = [] if edit.instead is None else ids_of(encoder, edit.instead)
        memories = {arm: edited(whole, (starts[edit.turn], starts[edit.turn + 1]), new, arm) for arm in ARMS}
        others = [one for one in kept_facts(made.turns, 0, rng) if one.asked.told_turn != edit.turn]
        asked: list[tuple[str, Asked, str]] = [
            (PLACES[0 if one.asked.told_turn < edit.turn else 2], one.asked, one.user) for one in others
        ]
        kind = edit.question.asked.kind
        asked.append((PLACES[1], Asked(kind, edit.new, False, False, edit.turn), edit.question.user))
        rows = [
            (place, one, arm, Branch(memory, [*encoder.message("user", user), encoder.roles["assistant"]]))
            for place, one, user in asked
            for arm, memory in memories.items()
        ]
        Branches([row[3] for row in rows], encoder.end).run()
        what = "removed" if edit.instead is None else "replaced"
        for place, one, arm, branch in rows:
            answer = encoder.core.decode(branch.said, skip_special_tokens=False)
            is_old = place == PLACES[1] and is_right(Asked(kind, edit.old, False, False, edit.turn), answer)
            found.setdefault((what, place, arm), Counter()).update(asked=1, right=is_right(one, answer), old=is_old)


def measure_recall(report: Report, model: PositionFreeModel, encoder: Encoder, count: int, seed: int) -> None:
    found: dict[tuple[str, str, str], Counter[str]] = {}
    longest = WINDOW - MAX_ANSWER_TOKENS - QUESTION_TOKENS
    started = time.monotonic()
    for number, made in enumerate(held_out_conversations(encoder, seed + 7, count, longest)):
        ask(model, encoder, made, f"{seed}-{number}", found)
        if number % 10 == 9:
            say(f"{number + 1} of {count} conversations, {time.monotonic() - started:.0f} s")
    for what in ("removed", "replaced"):
        for place in PLACES:
            by_arm = {arm: found.get((what, place, arm), Counter()) for arm in ARMS}
            num_asked = by_arm[RECOMPUTED]["asked"]
            if num_asked:
                right = {arm: f"{one['right'] / num_asked:.1%}" for arm, one in by_arm.items()}
                report.add(edit=what, measure=f"right, told {place}", count=num_asked, **right)
            if num_asked and place == PLACES[1]:
                old = {arm: f"{one['old'] / num_asked:.1%}" for arm, one in by_arm.items()}
                report.add(edit=what, measure="acts on the old value", count=num_asked, **old)


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


def body(parsed: argparse.Namespace, report: Report) -> None:
    count, repeats = (4, 2) if parsed.quick else (parsed.conversations, parsed.repeats)
    loaded = load(None, "cpu", "float32", None)
    model, encoder = intercept(loaded.model, loaded.max_model_len, pack=True), Encoder(loaded.tokenizer)
    (made,) = held_out_conversations(encoder, parsed.seed, 1, WINDOW)
    measure_times(report, made, repeats)
    measure_recall(report, model, encoder, count, parsed.seed)


def main(arguments_given: Sequence[str] | None = None) -> int:
    parser = arguments("edits", __doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=100, help="held-out conversations (default: 100)")
    parser.add_argument("--repeats", type=int, default=7, help="of each time (default: 7)")
    parser.add_argument("--seed", type=int, default=0, help="of the conversations (default: 0)")
    title = f"Edits of conversations with the built-in model (window {WINDOW:,})"
    return run(body, parser.parse_args(arguments_given), title)


if __name__ == "__main__":
    sys.exit(main())
