"""An engine that keeps its blocks in a `BlockStore`, as tests play it."""

import hashlib

from kvstore import BlockStore
from tests.support.waiting import wait_until

BLOCK = 64 << 10


def key(conversation: int, index: int) -> bytes:
    return hashlib.sha256(b"%d/%d" % (conversation, index)).digest() + b"\0\0\0\0"


def chain(conversation: int, num_blocks: int) -> list[bytes]:
    return [key(conversation, index) for index in range(num_blocks)]


def payload(name: bytes, size: int = BLOCK) -> bytes:
    """Derived from the key, so that a mix-up is seen."""
    return hashlib.shake_128(name).digest(size)


class Host:
    """What an engine would do: it keeps the memory of what is in flight, and polls."""

    def __init__(self, path, **options):
        self.store = BlockStore(path, **{"namespace": b"weights", "capacity": "16MiB", **options})
        self.lent = {}
        self.results = {}

    def write_one(self, keys, index, size=BLOCK, **options):
        """The ticket of this block of a chain; None where it is refused."""
        data = memoryview(bytearray(payload(keys[index], size)))
        parent = keys[index - 1] if index else None
        ticket = self.store.write(keys[index], parent, 16 * index, data, **options)
        self.lent[ticket] = data
        return ticket

    def write(self, keys, **options):
        return [self.write_one(keys, index, **options) for index in range(len(keys))]

    def read_all(self, names, size=BLOCK):
        """How each read ended, after comparing the bytes of those that are ok."""
        buffers = [memoryview(bytearray(size)) for _ in names]
        results = self.wait([self.store.read_into(name, into) for name, into in zip(names, buffers, strict=True)])
        for name, into, result in zip(names, buffers, results, strict=True):
            assert not result.ok or into == payload(name, size), "another block's bytes"
        return results

    def read(self, name, size=BLOCK):
        return self.read_all([name], size)[0]

    def has(self, names, size=BLOCK):
        """Whether all of these can be read."""
        return all(result.ok for result in self.read_all(names, size))

    def poll(self):
        for result in self.store.poll():
            assert result.ticket not in self.results, "told twice"
            self.results[result.ticket] = result
            self.lent.pop(result.ticket, None)
        return self.results

    def wait(self, tickets):
        wait_until(lambda: self.poll().keys() >= set(tickets))
        return [self.results[ticket] for ticket in tickets]

    def stored(self, keys, **options):
        """Write them, and wait until they are."""
        results = self.wait(self.write(keys, **options))
        assert all(result.ok for result in results), results
        return keys

    def close(self):
        self.store.close()
