"""The computing threads of a process: binds two of them to its two processors, and uses one beside other work. Another
thread touches the arena's memory a little ahead of its use, as the system may take long to provide a page.

After a pause, the system may wake the helper on the processor of the thread that waits for it, and leave it there for a
whole prefill: such a turn took up to twice as long (bench/LOG.md). More than two threads are not bound: OpenMP ends
threads if a smaller team is requested, and new threads would all inherit the caller's processor. Nor does one of more
than two decode alone: it would read weights more slowly than all of them, even if one of these has to wait.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from kvstore.kernels.cpu import native

FEW_ROWS = 16  # up to so many rows, reading weights dominates a step, and one thread is nearly as fast as two
LOOK_S = 0.05  # of computing between two checks how long threads have waited
CROWDED_SHARE = 0.25  # of that time, if both threads together wait so much for a processor, there is other work
PATIENCE_S = (1.0, 8.0)  # after which all threads are tried again: at first, and at most
TEAM = 2  # threads, of which one may decode alone
_USERS_OWN = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
AHEAD_BYTES = 256 << 20  # touched but not used yet, at most
_PIECE_BYTES = 4 << 20
LEAST_BYTES = 32 << 20  # a smaller tensor is not worth a thread
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; keeps the contents


@dataclass(slots=True)
class _Bound:
    """A thread that `bind_threads` has bound."""

    own: set[int]  # its processor
    before: set[int]  # where it could run until then
    roams: bool = False


class _Here(threading.local):
    """What belongs to the calling thread."""

    bound: _Bound | None = None
    num_own = 0  # threads of its own team; 0: OpenMP's threads compute


_here = _Here()


def num_threads() -> int:
    """How many threads run the C code that the calling thread calls."""
    return _here.num_own or torch.get_num_threads()


def bind_threads(environment: Mapping[str, str] = os.environ) -> bool:
    """Bind the calling thread and its helper, if there are two processors for them. Returns whether it did.

    Threads that the caller starts later inherit its processor. Settings of the user in the environment take precedence.
    """
    library = native.library()
    if library is None or not hasattr(os, "sched_getaffinity") or any(name in environment for name in _USERS_OWN):
        return False
    bound = _here.bound
    cpus = sorted(os.sched_getaffinity(0) if bound is None else bound.before)
    if len(cpus) != 2 or torch.get_num_threads() != 2:
        return False
    if library.kv_bind_threads((ctypes.c_int * 2)(*cpus), 2) != 0:
        return False
    _here.bound = _Bound(set(cpus[:1]), set(cpus))
    return True


def let_helpers_go() -> None:
    """End the threads that help the calling one, until it computes again.

    Sleeping helpers matter: if a process has more threads than processors, OpenMP lets all of them sleep in every wait,
    and a prompt takes nearly twice as long (bench/LOG.md).
    """
    library = native.library()
    if library is not None:
        library.kv_let_helpers_go()


class Team:
    """Both computing threads for a step, or one for a step of few rows while others want the processors, too.

    Threads of a team wait for one another. If one of them shares its processor, all take twice as long. A thread alone
    does not, if it may run where there is room (bench/LOG.md).

    is_own: C code computes all products with a team of its own (`threads.c`). From the first step until `rest`, torch's
    operations run in the calling thread, those between steps, too: helpers of two kinds would compete for a processor,
    and each operation would take as long as the system lets one of them have it (bench/LOG.md).
    """

    def __init__(
        self, is_own: bool = False, threads: Threads | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threads, self._clock = threads or Threads(is_own), clock
        self._seen_s: float | None = None
        self._computed_s = 0.0  # with all threads, since the last check
        self._patience_s = PATIENCE_S[0]
        self._alone_until: float | None = None
        self._is_gathered = False

    def gather(self) -> None:
        """Get ready to compute, as a step does by itself. What is moved before it needs bound helpers, too: a thread
        that OpenMP starts meanwhile would inherit the caller's processor.
        """
        if not self._is_gathered:
            self._is_gathered = True
            self._threads.gather()

    def rest(self) -> None:
        """Note that there is nothing to compute for a while. The computing thread calls it."""
        if self._is_gathered:
            self._is_gathered = False
            self._threads.rest()

    @property
    def is_crowded(self) -> bool:
        """Whether others wanted the processors at the last check."""
        return self._alone_until is not None

    @contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """In this context, the calling thread and its helpers compute a step of so many rows."""
        self.gather()
        began, count = self._clock(), num_threads()
        is_waiting = self._alone_until is not None and began < self._alone_until
        is_alone = is_waiting and count == TEAM and num_rows <= FEW_ROWS
        looks = not is_waiting and count == TEAM
        if looks and self._computed_s == 0.0:
            self._seen_s = self._threads.waited_s()
        self._threads.roam(is_alone)
        with self._threads.use(1 if is_alone else count):
            yield
        if looks:
            self._look(self._clock() - began)

    def _look(self, computed_s: float) -> None:
        self._computed_s += computed_s
        if self._computed_s < LOOK_S:
            return
        waited_s = self._threads.waited_s()
        share = 0.0 if waited_s is None or self._seen_s is None else (waited_s - self._seen_s) / self._computed_s
        if share <= CROWDED_SHARE:
            self._alone_until, self._patience_s = None, PATIENCE_S[0]
        else:
            if self._alone_until is not None:
                self._patience_s = min(2 * self._patience_s, PATIENCE_S[1])
            self._alone_until = self._clock() + self._patience_s
        self._computed_s = 0.0


class Threads:
    """The team of the calling thread: how long it waits for processors, how many compute, where the caller runs."""

    def __init__(self, is_own: bool = False) -> None:
        self._is_own = is_own
        self._caller: int | None = None
        self._ids: list[int] = []

    def waited_s(self) -> float | None:
        """Seconds for which the team's threads were ready but had no processor, as Linux counts them.

        None if the system does not count them, and at the first call of a thread.
        """
        library = native.library()
        if library is None:
            return None
        if self._caller != threading.get_ident():
            self._caller, count = threading.get_ident(), num_threads()
            ids = (ctypes.c_int * count)()
            library.kv_team(ids, count, self._is_own)
            self._ids = list(ids)
            return None
        try:
            files = [Path(f"/proc/self/task/{one}/schedstat") for one in self._ids]
            return sum(int(file.read_text().split()[1]) for file in files) / 1e9
        except (OSError, IndexError, ValueError):
            self._caller = None  # a thread has ended, or this system does not count
            return None

    def gather(self) -> None:
        """Gather the team. The caller will compute, and starts no threads of another kind until it rests."""
        bind_threads()
        library = native.library()
        if self._is_own and library is not None:
            _here.num_own = torch.get_num_threads()
            library.kv_use_threads(1, True)

    def rest(self) -> None:
        self._caller = None
        library = native.library()
        if _here.num_own and library is not None:
            library.kv_use_threads(_here.num_own, False)
            _here.num_own = 0
        let_helpers_go()

    @contextmanager
    def use(self, count: int) -> Iterator[None]:
        """So many threads compute in this context."""
        library, before = native.library(), num_threads()
        if library is None or count == before:
            yield
            return
        self._use(library, count)
        try:
            yield
        finally:
            self._use(library, before)

    def _use(self, library: ctypes.CDLL, count: int) -> None:
        if self._is_own:
            _here.num_own = count
        else:
            library.kv_use_threads(count, False)

    def roam(self, may_roam: bool) -> None:
        """Let the caller run wherever its team runs, or only on its own processor again.

        Only for a thread that `bind_threads` has bound: where other threads run is up to their owners.
        """
        bound = _here.bound
        if bound is None or bound.roams == may_roam:
            return
        places = (bound.before, bound.own) if bound.roams else (bound.own, bound.before)
        if os.sched_getaffinity(0) != places[0]:  # the user has moved it since then; leave it there
            _here.bound = None
            return
        bound.roams = may_roam
        with suppress(OSError):  # these processors were taken from the process
            os.sched_setaffinity(0, places[1])


class FirstTouch:
    """Touches the rows of a tensor on a CPU, from the first on, in a thread of its own.

    Rows are expected to be used roughly in order. The thread ends when this object is dropped. Nothing happens if the
    system cannot touch pages, or if the tensor has fewer than least_bytes. ahead_bytes: AHEAD_BYTES unless given.
    """

    def __init__(self, tensor: torch.Tensor, ahead_bytes: int | None = None, least_bytes: int = LEAST_BYTES) -> None:
        row_bytes = tensor.stride(0) * tensor.element_size()
        self._num_rows = len(tensor)
        self._ahead = max(1, (AHEAD_BYTES if ahead_bytes is None else ahead_bytes) // row_bytes)
        self._piece = max(1, min(_PIECE_BYTES // row_bytes, self._ahead // 2))
        self._target = 0
        self._wanted: SimpleQueue[int] = SimpleQueue()  # how many rows to touch in all; 0: end
        if self._num_rows * row_bytes < least_bytes:
            self._target = self._num_rows
            return
        ended = threading.Event()
        # The thread holds no tensor, because it must not be the one that frees it.
        arguments = (tensor.data_ptr(), row_bytes, self._wanted, ended)
        thread = threading.Thread(target=_touch, args=arguments, name="kvstore-touch", daemon=True)
        weakref.finalize(self, _end, thread, self._wanted, ended, tensor)
        thread.start()
        self.reach(0)

    def reach(self, row: int) -> None:
        """Note that this row is about to be used, and the following rows soon. Cheap; call it each time.

        What was used is made good at once, in small pieces: many at a time take a processor from the model for long.
        """
        if self._target < self._num_rows and row + self._ahead - self._piece >= self._target:
            self._target = min(self._num_rows, row + self._ahead)
            self._wanted.put(self._target)


def _end(thread: threading.Thread, wanted: SimpleQueue[int], ended: threading.Event, tensor: torch.Tensor) -> None:
    """End touching. `tensor` keeps the memory alive until then."""
    ended.set()
    wanted.put(0)
    if thread is not threading.current_thread():
        thread.join()


def _touch(address: int, row_bytes: int, wanted: SimpleQueue[int], ended: threading.Event) -> None:
    libc, first = ctypes.CDLL(None, use_errno=True), address // mmap.PAGESIZE * mmap.PAGESIZE
    while rows := wanted.get():
        last = address + rows * row_bytes
        for start in range(first, last, _PIECE_BYTES):
            size = ctypes.c_size_t(min(_PIECE_BYTES, last - start))
            if ended.is_set() or libc.madvise(ctypes.c_void_p(start), size, _MADV_POPULATE_WRITE):
                return
        first = last // mmap.PAGESIZE * mmap.PAGESIZE
