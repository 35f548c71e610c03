"""Our engine with all tiers, embedded in a worker process."""

import time
from pathlib import Path

from bench.peers.embedded import work
from bench.peers.load import Answer
from kvstore import Engine, SamplingParams


class Ours:
    def __init__(self, model: Path, folder: Path, threads: int) -> None:
        tiers = {"hbm": "2GiB", "cpu": "2GiB", "disk": "8GiB", "path": folder / "store"}
        self._engine = Engine(str(model), tiers, dtype="bfloat16", max_model_len=4096)

    def ask(self, prompts: list[list[int]], max_tokens: int, talk: str) -> list[Answer]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        outputs = self._engine.generate(prompts, params)
        end_s = time.perf_counter() - started
        return [Answer(one.ttft_s or end_s, end_s, one.token_ids, one.usage.cached_tokens) for one in outputs]

    def leave(self, talk: str, keep: bool) -> None:
        """Nothing to do: the tiers evict by themselves."""

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    work(Ours)
