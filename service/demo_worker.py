"""The engine's process of `make demo`: reads messages as JSON lines, answers with pieces and a turn's numbers.

It can be killed at any moment; a new one on the same path goes on with the conversation.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

from kvstore.errors import KVStoreError
from service.demo import SYSTEM

MAX_ANSWER_TOKENS = 48
SESSION = "demo"


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main(path: str, model: str | None = None) -> int:
    """Serve one conversation until the end of the input."""
    try:
        from engine import CacheTiers, Engine

        tiers = CacheTiers(hbm="64MiB", cpu="256MiB", disk="1GiB", path=path)
        with Engine(model, cache_tiers=tiers) as engine:
            serve(engine)
    except KVStoreError as error:
        say(error=str(error))
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def serve(engine: Any) -> None:
    """Warm up, say that it is ready, and answer."""
    from engine import SamplingParams

    answer = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    first_token = SamplingParams(max_tokens=1, temperature=0.0)
    # The first steps of a process pay for memory and threads that later ones have: keep them out of the table.
    engine.generate(["Hello"] * 2, answer, cache_salt="warm-up")
    session = engine.chat(SESSION, system=SYSTEM)
    say(ready=True)
    for line in sys.stdin:
        truncated = session.truncated_tokens
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
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
