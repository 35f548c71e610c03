"""Another server that computes prompts for this one, and stores their blocks in the tier that both share.

Asked over HTTP by the threads of a worker, and polled. A prompt is its token ids and the root of its chain, so both
servers give its blocks the same names. Nobody waits for a server that has failed: it is not asked until a probe, the
prefill of nothing, has succeeded.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

from kvstore.blocks.ids import BlockId, ids_of
from kvstore.forks import leave_to_parent
from kvstore.remote.address import PrefillAddress
from kvstore.stats import Counts
from kvstore.tiers.port import AS_HINT
from kvstore.tiers.queues import Task
from kvstore.tiers.worker import TierHealth, TierWorker, WorkerLimits

PATH = "/prefill"
NUM_THREADS = 16  # prompts that are computed there at once
MOST_WAITING = 256  # prompts; who comes later computes at once
PROBE_S = 5.0
MAX_ANSWER_BYTES = 1 << 16
WRONG_PROMPT = frozenset({400, 413})  # statuses that say nothing about other prompts


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """token_ids: as bytes (`blocks.ids.token_bytes`) of whole blocks and one token more, so that a state is kept behind
    the last of these. seconds: that the answer may take. turn_starts: as in `kvstore.store.seam.NewRequest`.
    """

    token_ids: bytes
    root: BlockId
    tenant: str
    seconds: float
    turn_starts: Sequence[int] = ()


class _Refused(Exception):
    """The server answered, but not with success."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code = status, code


class PrefillServer:
    """key: signs this server in there. fingerprint: of the model, in hex, which has to be the same there.

    on_progress: called in a thread after something has ended; it may only wake somebody.
    """

    def __init__(self, address: PrefillAddress, key: bytes, fingerprint: str, on_progress: Callable[[], None]) -> None:
        self.address, self.health, self.counts = address, TierHealth(), Counts(("computed", "blocks"), ("seconds",))
        self._key, self._fingerprint, self._on_progress = key.hex(), fingerprint, on_progress
        self._connections = set[http.client.HTTPConnection]()  # in use; one for each prompt, which takes seconds
        self._done: deque[tuple[BlockId, int]] = deque()
        self._num_waiting = 0  # prompts that were not polled yet
        self._is_probing = self._closing = False
        self._worker = TierWorker("prefill", None, lambda: None, WorkerLimits(num_readers=NUM_THREADS))
        self._probe()
        leave_to_parent(self, str(address))

    # -- the control plane's side ------------------------------------------------------------------------------------
    def ask(self, name: BlockId, prompt: PrefillJob) -> bool:
        """Let it compute a prompt, whose name `completed` will tell, unless this returns False: not now."""
        if self.health.error is not None:
            self.counts.failed("down")
            return False
        if self._num_waiting >= MOST_WAITING:
            self.counts.failed("busy")
            return False
        self._num_waiting += 1
        run = partial(self._run, name, prompt, time.monotonic() + prompt.seconds)
        self._worker.submit_read(Task(self._num_waiting, run), AS_HINT)
        return True

    def completed(self) -> list[tuple[BlockId, int]]:
        """The prompts that have ended since the last call, and how many of their first blocks are in the shared tier
        now.
        """
        self._worker.completed()  # each task says itself what came of it
        if self.health.retry_in_s == 0.0:
            self._probe()
        done: list[tuple[BlockId, int]] = []
        while self._done:
            done.append(self._done.popleft())
        self._num_waiting -= len(done)
        return done

    def _probe(self) -> None:
        """At the start, and once it has failed: whether it answers, and takes this server's prompts."""
        if not self._is_probing:
            self._is_probing = True
            self._worker.submit_read(Task(0, self._run_probe))

    def as_dict(self) -> dict[str, object]:
        return {
            "url": str(self.address),
            "degraded": self.health.error,
            "breaks": self.health.num_failures,
            "waiting": self._num_waiting,
            **self.counts.as_dict(),
        }

    def close(self, timeout_s: float) -> None:
        """Wait for nothing that is computed there, and at most so long for its threads."""
        self._closing = True
        for connection in list(self._connections):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        self._worker.close(timeout_s)

    # -- threads -----------------------------------------------------------------------------------------------------
    def _run(self, name: BlockId, prompt: PrefillJob, until_s: float) -> None:
        started, num_blocks = time.perf_counter(), 0
        try:
            num_blocks = self._prefill(prompt, until_s)
            self.counts.add(computed=1, blocks=num_blocks, seconds=time.perf_counter() - started)
        except Exception as error:  # the border of a thread
            why = self._counted(error)
            if not isinstance(error, _Refused) or error.status not in WRONG_PROMPT:
                self.health.failed(why)  # it was not this prompt's fault: nobody waits for the server for a while
        self._done.append((name, num_blocks))
        self._on_progress()

    def _counted(self, error: Exception) -> str:
        """Count a failure. Returns what to say of it."""
        if isinstance(error, _Refused):
            self.counts.failed(error.code)
            return str(error)
        is_late = isinstance(error, TimeoutError)
        self.counts.failed("late" if is_late else "unreachable")
        return "it did not answer in time" if is_late else f"{type(error).__name__}: {error}"

    def _run_probe(self) -> None:
        try:
            self._prefill(PrefillJob(b"", bytes(32), "", PROBE_S), time.monotonic() + PROBE_S)
        except Exception as error:  # the border of a thread
            self.health.failed(self._counted(error))
        else:
            self.health.succeeded()
        self._is_probing = False

    def _prefill(self, prompt: PrefillJob, until_s: float) -> int:
        """How many of its blocks are in the shared tier. Raises what prevents that."""
        said = {
            "token_ids": ids_of(prompt.token_ids), "root": prompt.root.hex(), "fingerprint": self._fingerprint,
            "tenant": prompt.tenant, "turn_starts": list(prompt.turn_starts),
        }  # fmt: skip
        answer = self._post(json.dumps(said).encode(), until_s)
        return int(answer["num_blocks"])

    def _post(self, body: bytes, until_s: float) -> Mapping[str, int]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        kind = http.client.HTTPSConnection if self.address.tls else http.client.HTTPConnection
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        with closing(kind(self.address.host, self.address.port, timeout=left_s)) as connection:
            connection.connect()
            self._connections.add(connection)
            try:
                if self._closing:  # since it was connected
                    raise ConnectionAbortedError("this server is closing")
                connection.request("POST", self.address.base + PATH, body, headers)
                reply = connection.getresponse()
                status, said = reply.status, reply.read(MAX_ANSWER_BYTES)
            finally:
                self._connections.discard(connection)
        answer = json.loads(said)
        if status != 200:
            error = answer.get("error") or {}
            raise _Refused(status, str(error.get("code")), str(error.get("message")))
        return answer
