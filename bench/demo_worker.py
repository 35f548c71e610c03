"""The engine's process of `make demo`: reads messages as JSON lines, answers with pieces and a turn's numbers.

It can be killed at any moment. A new one on the same path continues the conversation.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from bench.demo import BEFORE, SYSTEM
from kvstore.errors import KVStoreError

MAX_ANSWER_TOKENS = 48
SESSION, WARM_UP = "demo", "warm-up"


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main(path: str, model: str | None = None) -> int:
    """Serve one conversation until the end of the input."""
    try:
        from kvstore import CacheTiers, Engine

        tiers = CacheTiers(hbm="64MiB", cpu="256MiB", disk="1GiB", path=path)
        with Engine(model, cache_tiers=tiers) as engine:
            serve(engine)
    except KVStoreError as error:
        say(error=str(error))
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


@dataclass(frozen=True, slots=True)
class Processors:
    """A reading of the clocks of all processors."""

    clock_s: float
    idle_s: float  # of all processors together
    own_s: float  # in which this process worked

    @classmethod
    def now(cls) -> "Processors":
        times = psutil.cpu_times()
        return cls(time.perf_counter(), times.idle + getattr(times, "iowait", 0.0), time.process_time())

    def others_share(self, before: "Processors", num_processors: int | None = None) -> float:
        """The share of all processors that other programs took since then, 0 to 1."""
        available_s = (self.clock_s - before.clock_s) * (num_processors or psutil.cpu_count() or 1)
        others_s = available_s - (self.idle_s - before.idle_s) - (self.own_s - before.own_s)
        return min(max(others_s / max(available_s, 1e-9), 0.0), 1.0)


def warm_up(engine: Any, answer: Any, first_token: Any) -> None:
    """A first turn and its cold twin, of another person with whom nothing is shared.

    The first steps of a process pay for memory, threads and prompts of a new length, which is not to be in the table.
    """
    session = engine.chat(SESSION, tenant=WARM_UP, system=SYSTEM)
    for message in BEFORE[:2]:
        ids = session.send(message, answer).prompt_token_ids
        engine.generate([ids], first_token, tenant=WARM_UP, cache_salt=f"cold-{session.num_turns}")
    engine.admin.delete_session(SESSION, WARM_UP)


def serve(engine: Any) -> None:
    """Warm up, report that it is ready, and answer messages."""
    from kvstore import SamplingParams

    answer = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    first_token = SamplingParams(max_tokens=1, temperature=0.0)
    warm_up(engine, answer, first_token)
    session = engine.chat(SESSION, system=SYSTEM)
    say(ready=True)
    for line in sys.stdin:
        truncated, before = session.truncated_tokens, Processors.now()
        for piece in session.stream(json.loads(line)["message"], answer):
            say(piece=piece.text)
        warm = session.last
        cold = engine.generate([warm.prompt_token_ids], first_token, cache_salt=f"cold-{session.num_turns}")[0]
        say(
            done=True,
            usage={"prompt_tokens": warm.usage.prompt_tokens, **asdict(warm.usage.cached_tokens_details)},
            ttft_s=warm.ttft_s,
            cold_ttft_s=cold.ttft_s,
            cold_cached_tokens=cold.usage.cached_tokens,
            truncated_tokens=session.truncated_tokens - truncated,
            others_share=Processors.now().others_share(before),
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
