"""What is measured of engines side by side, in turns: prefill, decode, conversations, a restart.

Knows an engine only as a `Side`, which takes token ids. All sides get the same messages; the answers in a
conversation's history are each side's own. Prompts that must be computed are fresh ids of the same number. After a
restart, the files of all sides are in the page cache (or none is), and all have answered other returning people,
unmeasured.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from bench.common import LlamaShape, Report, alternate, drop_from_page_cache, median, random_prompts, say, spread

LEFT_BYTES = 256 << 10  # of a file may stay in the page cache


class PeerError(RuntimeError):
    """A side cannot be measured. The message says why, and where its log is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A side's answer to one prompt."""

    ttft_s: float  # from the question to the first token
    end_s: float  # and to the last
    ids: list[int]
    cached_tokens: int | None  # None: the side does not tell


class Side(Protocol):
    """One engine in processes of its own. Between questions it uses no processor."""

    @property
    def settings(self) -> list[list[str]]:
        """The command of each process."""

    def start(self) -> None:
        """Start the engine. Returns when it answers; raises PeerError."""

    def stop(self) -> None: ...

    def ask(self, prompts: Sequence[list[int]], max_tokens: int, talk: str = "") -> list[Answer]:
        """Greedy answers of exactly max_tokens, all prompts at once.

        talk: names the conversation of a single prompt, which will continue; without a name, it will not.
        """

    def leave(self, talk: str, keep: bool) -> None:
        """Nobody returns to this conversation before the restart (keep), or ever. KV that is kept by hand can go."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured of one model, in tokens."""

    shape: LlamaShape
    is_qwen: bool
    num_talks: int
    first_tokens: int  # of a conversation's first message
    prefill_tokens: int = 1024
    prompt_tokens: int = 128
    decode_tokens: int = 64
    batches: tuple[int, ...] = (1, 8)
    num_turns: int = 4
    turn_tokens: int = 128  # of each further message
    reply_tokens: int = 32

    @property
    def last_prompt_tokens(self) -> int:
        return self.first_tokens + (self.num_turns - 1) * (self.turn_tokens + self.reply_tokens)


@dataclass(frozen=True, slots=True)
class Goals:
    """Ratios of ours to the peer's: TTFT at most, tokens a second at least. None: no goal."""

    speed: float | None = None
    warm: float | None = None
    restart: float | None = None
    restart_to_recompute: float | None = None
    restart_to_own_warm: float | None = None


@dataclass(slots=True)
class Talk:
    """One conversation with one side."""

    name: str  # the same on both sides; seeds the messages
    tokens: list[int] = field(default_factory=list)
    num_turns: int = 0

    def turn(self, side: Side, sizes: Sizes) -> Answer:
        count = sizes.turn_tokens if self.num_turns else sizes.first_tokens
        rng = random.Random(f"{self.name}-{self.num_turns}")
        self.tokens += [rng.randrange(1, sizes.shape.vocab_size) for _ in range(count)]
        [answer] = side.ask([self.tokens], sizes.reply_tokens, self.name)
        self.tokens += answer.ids
        self.num_turns += 1
        return answer


Answers = dict[str, list[Answer]]  # by side


@dataclass(frozen=True, slots=True)
class Turns:
    """The answers of a round of conversations."""

    warm: list[Answers]  # by turn
    returned: Answers  # to the last turn, after a restart
    cold: Answers  # to prompts of the same length that must be computed


def start_all(sides: Iterable[Side]) -> None:
    """Start all sides at once, as starting is mostly one thread's work."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda side: side.start(), sides))


@dataclass(slots=True)
class Match:
    """Sides on one model. `speed` and `turns` compare two, "ours" and "peer"; their rows go to the report at once."""

    sides: dict[str, Side]
    model: str
    sizes: Sizes
    goals: Goals
    report: Report
    stores: Path  # where the sides keep their files
    settle_s: float = 3.0  # before a restart, for writes that are still going on
    pause_s: float = 1.0  # between two sides, as threads spin for a while after an answer
    last: str = ""
    seeds: Counter[str] = field(default_factory=Counter)

    def fresh(self, name: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
        """Prompts that were never used with this side. The other sides get the same ones."""
        self.seeds[name] += 1
        return random_prompts(num_prompts, num_tokens, self.sizes.shape.vocab_size, 1000 + self.seeds[name])

    def side(self, name: str) -> Side:
        """The side of this name, after a pause if another one has answered last."""
        if self.last not in ("", name):
            time.sleep(self.pause_s)
        self.last = name
        return self.sides[name]

    # -- speed -------------------------------------------------------------------------------------------------------
    def speed(self, repeats: int) -> None:
        for measure, times, num_tokens in self.seconds(repeats):
            self._rate(measure, times, num_tokens)

    def seconds(self, repeats: int) -> Iterator[tuple[str, dict[str, list[float]], int]]:
        """For each measurement: its name, the seconds by side, and the number of tokens."""
        sizes = self.sizes
        say(f"prefill of {sizes.prefill_tokens:,} tokens, {repeats} rounds")
        times = self._alternate(self._prefill_s, repeats, 2)
        yield f"prefill {sizes.prefill_tokens:,}", times, sizes.prefill_tokens
        for batch in sizes.batches:
            say(f"decode at batch {batch}, {repeats} rounds")
            times = self._alternate(lambda name, batch=batch: self._decode_s(name, batch), repeats, 1)  # type: ignore[misc]
            yield f"decode, batch {batch}", times, batch * sizes.decode_tokens

    def _alternate(self, measure: Callable[[str], float], repeats: int, warm_ups: int) -> dict[str, list[float]]:
        return alternate({name: partial(measure, name) for name in self.sides}, repeats, warm_ups)

    def _prefill_s(self, name: str) -> float:
        return self.side(name).ask(self.fresh(name, 1, self.sizes.prefill_tokens), 1)[0].ttft_s

    def _decode_s(self, name: str, batch: int) -> float:
        """The seconds from the first token of all requests to the last."""
        prompts = self.fresh(name, batch, self.sizes.prompt_tokens)
        answers = self.side(name).ask(prompts, 1 + self.sizes.decode_tokens)
        return max(one.end_s for one in answers) - max(one.ttft_s for one in answers)

    # -- conversations -----------------------------------------------------------------------------------------------
    def turns(self, rounds: int, restarts: int) -> None:
        self._turn_rows(self.answers(rounds, restarts))

    def answers(self, rounds: int, restarts: int, from_disk: bool = False) -> Turns:
        """Conversations while the server runs; others, whose last turn comes after a restart; and that turn cold.

        from_disk: after the restart, nothing of the files is in the page cache; otherwise everything.
        """
        sizes = self.sizes
        warm: list[Answers] = [{name: [] for name in self.sides} for _ in range(sizes.num_turns)]
        returned: Answers = {name: [] for name in self.sides}
        cold: Answers = {name: [] for name in self.sides}
        for restart in range(restarts):
            say(f"{rounds} rounds of conversations: warm, then up to a restart ({restart + 1} of {restarts})")
            parted: dict[str, list[Talk]] = {name: [] for name in self.sides}
            for number in range(rounds):
                for name in self._order(number):
                    if number == 0:
                        self._warm_up(name, f"start-{restart}")
                    for turn, answers in enumerate(self._whole(name, f"warm-{restart}-{number}")):
                        warm[turn][name] += answers
                    parted[name] += self._parted(name, f"kept-{restart}-{number}")
            spares = {name: self._parted(name, f"spare-{restart}") for name in parted}
            self._restart(from_disk)
            if not from_disk:
                read_all(self.stores)
            for name, talks in spares.items():
                self._warm_up(name, f"again-{restart}")
                for talk in talks:
                    self._last_turn(name, talk)
            say("the last turn after the restart, and computed anew")
            for number in range(rounds * sizes.num_talks):
                for name in self._order(number):
                    if self.last == name:  # it stores what it has just computed; the others have a pause before
                        time.sleep(self.pause_s)
                    returned[name].append(self._last_turn(name, parted[name][number]))
                    cold[name] += self.side(name).ask(self.fresh(name, 1, sizes.last_prompt_tokens), 1)
        return Turns(warm, returned, cold)

    def _order(self, number: int) -> list[str]:
        return list(self.sides) if number % 2 == 0 else list(self.sides)[::-1]

    def _whole(self, name: str, prefix: str) -> list[list[Answer]]:
        """All turns of a round's conversations, which alternate. Returns the answers by turn."""
        talks = [Talk(f"{prefix}-{number}") for number in range(self.sizes.num_talks)]
        found = [[talk.turn(self.side(name), self.sizes) for talk in talks] for _ in range(self.sizes.num_turns)]
        for talk in talks:
            self.sides[name].leave(talk.name, keep=False)
        return found

    def _parted(self, name: str, prefix: str) -> list[Talk]:
        """Run conversations up to the turn before the last."""
        talks = [Talk(f"{prefix}-{number}") for number in range(self.sizes.num_talks)]
        for _ in range(self.sizes.num_turns - 1):
            for talk in talks:
                talk.turn(self.side(name), self.sizes)
        for talk in talks:
            self.sides[name].leave(talk.name, keep=True)
        return talks

    def _last_turn(self, name: str, talk: Talk) -> Answer:
        answer = talk.turn(self.side(name), self.sizes)
        self.sides[name].leave(talk.name, keep=False)
        return answer

    def _restart(self, from_disk: bool) -> None:
        say("restarting")
        time.sleep(self.settle_s)
        for side in self.sides.values():
            side.stop()
        if from_disk:
            drop_all(self.stores)
        start_all(self.sides.values())

    def _warm_up(self, name: str, prefix: str) -> None:
        """All turns of another person, because the first steps of a process are slow."""
        talk = Talk(prefix)
        for _ in range(self.sizes.num_turns):
            talk.turn(self.side(name), self.sizes)
        self.sides[name].leave(talk.name, keep=False)

    # -- rows --------------------------------------------------------------------------------------------------------
    def _turn_rows(self, turns: Turns) -> None:
        goals, last, returned, cold = self.goals, turns.warm[-1], turns.returned, turns.cold
        for turn, found in enumerate(turns.warm, 1):
            self._ttft(f"turn {turn}{', warm' if turn > 1 else ''}", found, goals.warm if turn > 1 else None)
        self._ttft("last turn, after a restart", returned, goals.restart)
        self._ttft("last turn, computed anew", cold, None)
        self._ttft(
            "last turn, after a restart / peer anew",
            {"ours": returned["ours"], "peer": cold["peer"]}, goals.restart_to_recompute,
        )  # fmt: skip
        self._ttft(
            "last turn, after a restart / ours warm", {"ours": returned["ours"], "peer": last["ours"]},
            goals.restart_to_own_warm,
        )  # fmt: skip

    def _ttft(self, measure: str, found: Answers, goal: float | None) -> None:
        times = {name: [1000 * one.ttft_s for one in answers] for name, answers in found.items()}
        ratio = median(times["ours"]) / median(times["peer"])
        cached = {f"cached_{name}": _cached(answers) for name, answers in found.items()}
        self._row(
            measure,
            "ms",
            times,
            ratio,
            None if goal is None else f"<= {goal:g}",
            goal is None or ratio <= goal,
            **cached,
        )

    def _rate(self, measure: str, seconds: dict[str, list[float]], num_tokens: int) -> None:
        rates = {name: [num_tokens / one for one in times] for name, times in seconds.items()}
        goal, ratio = self.goals.speed, median(rates["ours"]) / median(rates["peer"])
        self._row(
            measure, "tok/s", rates, ratio, None if goal is None else f">= {goal:g}", goal is None or ratio >= goal
        )

    def _row(
        self, measure: str, unit: str, found: dict[str, list[float]], ratio: float, goal: str | None, reached: bool,
        **more: float | None,
    ) -> None:  # fmt: skip
        self.report.add(
            measure=measure, model=self.model, unit=unit, ours=median(found["ours"]), peer=median(found["peer"]),
            ratio=ratio, goal=goal or "-", reached="-" if goal is None else "yes" if reached else "no",
            spread_ours=spread(found["ours"]), spread_peer=spread(found["peer"]), repeats=len(found["ours"]), **more,
            all_ours=[round(one, 2) for one in found["ours"]], all_peer=[round(one, 2) for one in found["peer"]],
        )  # fmt: skip


def read_all(folder: Path) -> None:
    """Bring all files into the page cache. Some systems page out idle files while the other side starts."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def drop_all(folder: Path) -> None:
    """Drop all files from the page cache, while nobody has them mapped. Raises PeerError."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size and drop_from_page_cache(path, LEFT_BYTES) is None:
            raise PeerError(f"{path} stays in the page cache; run as root to drop it")


def _cached(answers: list[Answer]) -> float | None:
    """The median of cached tokens; None if a side does not tell."""
    told = [one.cached_tokens for one in answers if one.cached_tokens is not None]
    return median(told) if told else None
