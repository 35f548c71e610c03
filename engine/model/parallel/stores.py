"""Where ranks find each other: torch's stores of keys, in a file of one machine, or behind a port."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore

WAIT = timedelta(minutes=10)  # for a key, and for a host that is there


def tcp_store(host: str, port: int, is_host: bool) -> Any:
    """The store at this address. It lives as long as the object of the process that hosts it. Raises RuntimeError."""
    return TCPStore(host, port, None, is_host, WAIT, wait_for_workers=False, multi_tenant=True)


def store_at(rendezvous: str, name: str, size: int) -> Any:
    """The store for one group of ranks. rendezvous: a path, or `tcp://host:port/prefix`."""
    if not rendezvous.startswith("tcp://"):
        return FileStore(f"{rendezvous}-{name}", size)
    address, _, prefix = rendezvous.removeprefix("tcp://").rpartition("/")
    host, _, port = address.rpartition(":")
    return PrefixStore(f"{prefix}-{name}", tcp_store(host, int(port), is_host=False))
