"""Another server that computes prompts for this one, and stores their blocks in the tier that both share.

Asked over HTTP by threads, which are polled. A prompt is its token ids and the root of its chain, so both servers give
its blocks the same names. Nobody waits for a server that has failed: it is not asked until a probe, the prefill of
nothing, has succeeded.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.blocks.ids import BlockId, ids_of
from kvstore.forks import leave_to_parent
from kvstore.remote.address import PrefillAddress
from kvstore.remote.job_thread import JobThread
from kvstore.stats import Counts
from kvstore.tiers.worker import TierHealth

PATH = "/prefill"
NUM_THREADS = 16  # prompts that are computed there at once
MOST_WAITING = 256  # that wait for a lane; who comes later computes at once
PROBE_S = 5.0
MAX_ANSWER_BYTES = 1 << 16
WRONG_PROMPT = frozenset({400, 413})  # statuses that say nothing about other prompts


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """token_ids: as bytes of whole blocks (`blocks.ids.token_bytes`). seconds: that the answer may take. turn_starts:
    as in `kvstore.store.seam.NewRequest`.
    """

    token_ids: bytes
    root: BlockId
    tenant: str
    seconds: float
    turn_starts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """num_blocks: of the prompt, from its beginning, that are in the shared tier now."""

    name: BlockId
    num_blocks: int


def connected(address: PrefillAddress) -> http.client.HTTPConnection:
    """A connection that opens itself when something is sent."""
    kind = http.client.HTTPSConnection if address.tls else http.client.HTTPConnection
    return kind(address.host, address.port)


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
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []  # of all threads
        self._done: deque[PrefillDone] = deque()
        self._was_probed = self._closing = False
        most = MOST_WAITING // NUM_THREADS
        self._threads: list[JobThread[tuple[BlockId, PrefillJob, float]]] = [
            JobThread(f"kvstore-prefill-{i}", self._run, most, self._probe if i == 0 else lambda: None)
            for i in range(NUM_THREADS)
        ]
        leave_to_parent(self, str(address))

    # -- the control plane's side ------------------------------------------------------------------------------------
    def ask(self, name: BlockId, prompt: PrefillJob) -> bool:
        """Let it compute a prompt. `PrefillDone` of this name follows, unless this returns False: not now."""
        if self.health.error is not None:
            self.counts.failed("down")
            return False
        thread = min(self._threads, key=len)
        if not thread.submit((name, prompt, time.monotonic() + prompt.seconds)):
            self.counts.failed("busy")
            return False
        return True

    def completed(self) -> list[PrefillDone]:
        """What has ended since the last call."""
        done: list[PrefillDone] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def as_dict(self) -> dict[str, object]:
        return {
            "url": str(self.address),
            "degraded": self.health.error,
            "breaks": self.health.num_failures,
            "waiting": sum(map(len, self._threads)),
            **self.counts.as_dict(),
        }

    def close(self, timeout_s: float) -> None:
        """Wait for nothing that is computed there, and at most so long for each thread."""
        self._closing = True
        for connection in list(self._connections):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
        has_ended = all([thread.close(timeout_s) for thread in self._threads])  # noqa: C419 (each of them)
        for connection in self._connections if has_ended else ():
            connection.close()

    # -- threads -----------------------------------------------------------------------------------------------------
    def _run(self, job: tuple[BlockId, PrefillJob, float]) -> None:
        name, prompt, until_s = job
        started, num_blocks = time.perf_counter(), 0
        try:
            num_blocks = self._prefill(prompt, until_s)
            self.counts.add(computed=1, blocks=num_blocks, seconds=time.perf_counter() - started)
        except Exception as error:  # the border of a thread
            why = self._counted(error)
            if not isinstance(error, _Refused) or error.status not in WRONG_PROMPT:
                self.health.failed(why)  # it was not this prompt's fault: nobody waits for the server for a while
        self._done.append(PrefillDone(name, num_blocks))
        self._on_progress()

    def _counted(self, error: Exception) -> str:
        """Count a failure. Returns what to say of it."""
        if isinstance(error, _Refused):
            self.counts.failed(error.code)
            return str(error)
        is_late = isinstance(error, TimeoutError)
        self.counts.failed("late" if is_late else "unreachable")
        return "it did not answer in time" if is_late else f"{type(error).__name__}: {error}"

    def _probe(self) -> float | None:
        """At the start, and between prompts once it has failed: whether it answers, and takes this server's prompts."""
        wait_s = self.health.retry_in_s if self._was_probed else 0.0
        if wait_s is None:
            return 0.25  # other threads find out that it has failed
        if wait_s > 0:
            return min(wait_s, 0.25)
        self._was_probed = True
        try:
            self._prefill(PrefillJob(b"", bytes(32), "", PROBE_S), time.monotonic() + PROBE_S)
        except Exception as error:  # the border of a thread
            self.health.failed(self._counted(error))
        else:
            self.health.succeeded()
        return 0.0

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
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        is_old = connection is not None and connection.sock is not None
        if connection is None:
            connection = self._local.connection = connected(self.address)
            self._connections.append(connection)
        try:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.timeout = left_s
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(left_s)
            if self._closing:  # since it was connected
                raise ConnectionAbortedError("this server is closing")
            connection.request("POST", self.address.base + PATH, body, headers)
            reply = connection.getresponse()
            status, said = reply.status, reply.read(MAX_ANSWER_BYTES)
        except (http.client.RemoteDisconnected, ConnectionError):
            connection.close()
            if is_old:  # it was closed because nothing was said for long
                return self._post(body, until_s)
            raise
        except Exception:
            connection.close()
            raise
        answer = json.loads(said)
        if status != 200:
            error = answer.get("error") or {}
            raise _Refused(status, str(error.get("code")), str(error.get("message")))
        return answer
