"""A process that writes, forgets and compacts conversations in a `BlockStore` until it is killed, and says which blocks
are stored.
"""

import itertools
import sys
from pathlib import Path

from kvstore.admin.control import ask
from tests.support.store.host import Host, chain
from tests.support.waiting import TIMEOUT_S, wait_until

NUM_BLOCKS, BLOCK_BYTES = 5, 9000
NUM_KEPT = 60  # conversations, the last ones; older ones are forgotten


def main(path: str, first: str, log: str) -> None:
    host = Host(Path(path), capacity="64MiB", owner="a child")
    names = {}
    with open(log, "a") as said:
        for number in itertools.count(int(first)):
            keys = chain(number, NUM_BLOCKS)
            for index in range(NUM_BLOCKS):
                names[host.write_one(keys, index, BLOCK_BYTES)] = (number, index)
            wait_until(lambda: host.poll() and len(host.lent) <= 4 * NUM_BLOCKS)
            for ticket, result in list(host.results.items()):
                if result.ok and ticket in names:
                    said.write("{} {}\n".format(*names.pop(ticket)))
            said.flush()
            host.store.forget(chain(number - NUM_KEPT, NUM_BLOCKS))
            if number % 8 == 0:
                ask(path, "compact", {}, TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
