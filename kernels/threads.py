"""Binds the two computing threads of a process of ours to its two processors.

The helper, which slept while nobody asked, may be woken on the processor of the thread that waits for it, and stay
there for the whole of a prefill: a turn after a pause took up to twice as long (bench/LOG.md). Not for more than two:
OpenMP ends threads when a smaller team is asked for, and new ones would all inherit the processor of the caller.
"""

import ctypes
import os
from collections.abc import Mapping

import torch

from kernels import native

_USERS_OWN = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def bind_threads(environment: Mapping[str, str] = os.environ) -> bool:
    """Bind the calling thread and its helper, if there are two processors for them. Whether it did.

    Threads that the caller starts later inherit its processor. What the user has set in the environment counts.
    """
    library = native.library()
    if library is None or not hasattr(os, "sched_getaffinity") or any(name in environment for name in _USERS_OWN):
        return False
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) != 2 or torch.get_num_threads() != 2:
        return False
    return library.kv_bind_threads((ctypes.c_int * 2)(*cpus), 2) == 0
