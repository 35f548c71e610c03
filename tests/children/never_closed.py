"""Ends while two engines compute that nobody has closed: one that is asked through asyncio, one from a thread."""

import asyncio
import sys
import threading
import time

from kvstore import AsyncEngine, Engine, SamplingParams

engine, served = Engine(sys.argv[1]), AsyncEngine(Engine(sys.argv[1]))
long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


async def leave() -> None:
    globals()["task"] = asyncio.ensure_future(served.generate([1, 2, 3], long))
    await asyncio.sleep(0.05)


def work() -> None:
    while True:
        engine.generate([[1, 2, 3]], long)


asyncio.run(leave())
threading.Thread(target=lambda: asyncio.run(served.generate([5] * 50, long)), daemon=True).start()
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
