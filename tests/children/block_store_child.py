"""A process that writes conversations into a `BlockStore` until it is killed, and says which blocks are stored."""

import itertools
import sys
from pathlib import Path

from tests.support.store.host import Host, chain
from tests.support.waiting import wait_until

NUM_BLOCKS, BLOCK_BYTES = 5, 9000


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


if __name__ == "__main__":
    main(*sys.argv[1:])
