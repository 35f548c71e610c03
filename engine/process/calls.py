"""Blocking calls of the front, carried out in the engine's process: one thread and one socket for each at once.

Knows the engine by its verbs. A call waits for the disk as long as it takes; the others go on beside it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import zmq

from kvstore.disk.committer import Ticket
from kvstore.engine.process.wire import error_of, failure_of
from kvstore.engine.process.wire_calls import MAX_CALLS, NOTHING, SIGNATURES, Answered, Call, decode_call, encode, raw
from kvstore.errors import EngineClosedError, KVStoreError


class CallServer:
    """endpoints: one for each socket, made here. Threads are daemons: they end with the process."""

    def __init__(self, engine: Any, endpoints: Callable[[int], str]) -> None:
        self._engine = engine
        self._context = zmq.Context()
        for number in range(MAX_CALLS):
            socket = self._context.socket(zmq.PAIR)
            socket.linger = 0
            socket.bind(endpoints(number))
            threading.Thread(target=self._serve, args=(socket,), name=f"core-call-{number}", daemon=True).start()

    def _serve(self, socket: zmq.Socket) -> None:
        while True:
            call = decode_call(socket.recv())
            socket.send(encode(self._answer(call)))

    def _answer(self, call: Call) -> Answered:
        try:
            return Answered(call.number, raw(carry_out(self._engine, call)))
        except Exception as error:
            failure = failure_of(error)
            if type(error_of(failure)) is KVStoreError:
                print(f"kvstore: {call.verb} failed: {failure.message}", file=sys.stderr, flush=True)
            return Answered(call.number, NOTHING, failure)


def carry_out(engine: Any, call: Call) -> object:
    """The verb's result, of a ticket once it is durable. Raises KVStoreError for a verb that is not in the table."""
    signature = SIGNATURES.get(call.verb)
    if signature is None:
        raise KVStoreError(f"unknown call {call.verb!r}")
    arguments = signature.decode_arguments(call.arguments)
    if engine.closed:
        raise EngineClosedError("the engine is closed")
    result = attrgetter(call.verb)(engine)(*arguments)
    return result.wait() if isinstance(result, Ticket) else result
