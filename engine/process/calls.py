"""Calls of the front, carried out in the engine's process: each in a thread, as it may wait for the disk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvstore.engine.process.wire import Answered, Call, encode, error_of, failure_of
from kvstore.engine.process.wire_calls import SIGNATURES
from kvstore.engine.sessions.core import Core
from kvstore.errors import KVStoreError

MAX_CALLS = 32  # at once; of more, the first wait for their turn
NOTHING = msgspec.Raw(encode(None))


class Calls:
    """send: takes what they brought, from any thread. Each thread of the front has one call on its way."""

    def __init__(self, core: Core, send: Callable[[bytes], None]) -> None:
        self._core = core
        self._send = send
        self._threads = ThreadPoolExecutor(MAX_CALLS, "core-call")

    def take_in(self, call: Call) -> None:
        self._threads.submit(self._answer, call)

    def _answer(self, call: Call) -> None:
        try:
            answered = Answered(call.number, msgspec.Raw(encode(carry_out(self._core, call))))
        except Exception as error:
            failure = failure_of(error)
            if type(error_of(failure)) is KVStoreError:
                print(f"kvstore: {call.verb} failed: {failure.message}", file=sys.stderr, flush=True)
            answered = Answered(call.number, NOTHING, failure)
        self._send(encode(answered))


def carry_out(core: Core, call: Call) -> object:
    """The verb's result. Raises KVStoreError for a verb that is not in the table."""
    signature = SIGNATURES.get(call.verb)
    if signature is None:
        raise KVStoreError(f"unknown call {call.verb!r}")
    arguments = signature.decode_arguments(call.arguments)
    core.check_open()
    return getattr(core, call.verb)(*arguments)
