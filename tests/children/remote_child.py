"""A server in the place of the tests, to be killed: it opens an engine with a process of its own on a store, says the
process's id and, after each acknowledged turn, its number.
"""

import sys

from kvstore import CacheTiers, Engine, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def main(model: str, path: str) -> None:
    tiers = CacheTiers(hbm="2MiB", cpu="2MiB", disk="32MiB", path=path)
    engine = Engine(model, tiers, device="cpu", process="own")
    print(engine.core.pid, flush=True)
    chat = engine.chat("killed")
    for number in range(1, 1000):
        chat.send(f"message {number}", PARAMS)
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
